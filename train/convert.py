"""Weights of Hugging Face's DeepseekV3 models in this model's layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from train.config import ModelConfig

# This model's part: Hugging Face's. Their matrices are [out, in], ours [in, out].
_ATTENTION = {
    "q_down": "q_a_proj",
    "q_norm": "q_a_layernorm",
    "kv_down": "kv_a_proj_with_mqa",
    "kv_norm": "kv_a_layernorm",
    "kv": "kv_b_proj",
    "out": "o_proj",
}


def model_config(values: Mapping[str, Any]) -> ModelConfig:
    """Returns the sizes that a DeepseekV3 configuration (its config.json) describes.

    Raises:
      ValueError: it asks for what this model lacks.
    """
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    expected = {"norm_topk_prob": True, "rope_interleave": True, "tie_word_embeddings": False}
    for key, value in expected.items():
        if values.get(key, value) != value:
            raise ValueError(f"{key}={values[key]}: this model has {value} only.")
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise ValueError(f"rope {rope}: this model has unscaled rotary embeddings only.")
    return ModelConfig(
        vocab_size=values["vocab_size"],
        hidden=values["hidden_size"],
        num_layers=values["num_hidden_layers"],
        num_dense_layers=values["first_k_dense_replace"],
        dense_width=values["intermediate_size"],
        num_heads=values["num_attention_heads"],
        q_rank=values["q_lora_rank"],
        kv_rank=values["kv_lora_rank"],
        nope_dim=values["qk_nope_head_dim"],
        rope_dim=values["qk_rope_head_dim"],
        value_dim=values["v_head_dim"],
        num_experts=values["n_routed_experts"],
        expert_width=values["moe_intermediate_size"],
        top_k=values["num_experts_per_tok"],
        num_groups=values["n_group"],
        top_groups=values["topk_group"],
        num_shared=values["n_shared_experts"],
        routed_scale=values["routed_scaling_factor"],
        rope_theta=rope.get("rope_theta", values.get("rope_theta", 10_000.0)),
        norm_eps=values["rms_norm_eps"],
    )


def from_hugging_face(
    weights: Mapping[str, np.ndarray], config: ModelConfig
) -> dict[str, np.ndarray]:
    """Renames and transposes weights, or their gradients.

    Args:
      weights: by Hugging Face's names.
      config: the sizes, with scan_layers=False.

    Returns:
      Arrays by this model's paths, as "moe_blocks/0/mlp/down"; a routing bias is in it where
      `weights` has it.
    """
    found = {
        "embedding/embedding": weights["model.embed_tokens.weight"],
        "norm/scale": weights["model.norm.weight"],
        "head/kernel": weights["lm_head.weight"].T,
    }
    for layer in range(config.num_layers):
        is_dense = layer < config.num_dense_layers
        number = layer if is_dense else layer - config.num_dense_layers
        kind = "dense_blocks" if is_dense else "moe_blocks"
        prefix = f"model.layers.{layer}."
        names = {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}
        block = _attention(names, config) | (_dense if is_dense else _experts)(names)
        found |= {f"{kind}/{number}/{path}": array for path, array in block.items()}
    return found


def _attention(names: dict[str, np.ndarray], config: ModelConfig) -> dict[str, np.ndarray]:
    found = {
        "attention_norm/scale": names["input_layernorm.weight"],
        "mlp_norm/scale": names["post_attention_layernorm.weight"],
    }
    query = {"q": "q_proj" if config.q_rank is None else "q_b_proj"}
    for ours, theirs in (_ATTENTION | query).items():
        weight = names.get(f"self_attn.{theirs}.weight")
        if weight is not None:
            leaf = "scale" if weight.ndim == 1 else "kernel"
            found[f"attention/{ours}/{leaf}"] = weight.T
    return found


def _dense(names: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {
        f"mlp/{part}/kernel": names[f"mlp.{part}_proj.weight"].T for part in ("gate", "up", "down")
    }


def _experts(names: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    gate, up, down = (
        names[f"mlp.shared_experts.{part}_proj.weight"].T for part in ("gate", "up", "down")
    )
    found = {
        "mlp/router": names["mlp.gate.weight"].T,
        "mlp/gate_up": names["mlp.experts.gate_up_proj"].swapaxes(1, 2),
        "mlp/down": names["mlp.experts.down_proj"].swapaxes(1, 2),
        "mlp/shared_gate_up": np.concatenate([gate, up], axis=1),
        "mlp/shared_down": down,
    }
    if "mlp.gate.e_score_correction_bias" in names:
        found["mlp/bias"] = names["mlp.gate.e_score_correction_bias"]
    return found
