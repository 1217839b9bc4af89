"""Writes tests/golden/*.npz: what Hugging Face transformers' DeepseekV3 computes in fp32.

The tests read the files and need neither torch nor transformers. To make them again, with
Python 3.11 or later:

    python -m venv /tmp/venv_golden
    /tmp/venv_golden/bin/pip install torch==2.13.0 "transformers==5.24.*" numpy
    /tmp/venv_golden/bin/python tools/make_golden.py

The keys of the files are described in tests/golden/README.md.
"""
# pyright: reportMissingImports=false

import json
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek

GOLDEN = Path(__file__).resolve().parent.parent / "tests" / "golden"

# A token whose k-th and (k+1)-th choice (of experts or of groups) are closer than this could be
# routed differently by another order of additions: the script refuses such inputs.
SMALLEST_MARGIN = 1e-4

MODEL = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    moe_intermediate_size=16,
    num_hidden_layers=3,
    first_k_dense_replace=1,
    num_attention_heads=4,
    num_key_value_heads=4,
    kv_lora_rank=16,
    q_lora_rank=None,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=12,
    n_routed_experts=8,
    num_experts_per_tok=2,
    n_group=4,
    topk_group=2,
    n_shared_experts=1,
    routed_scaling_factor=1.0,
    norm_topk_prob=True,
    rms_norm_eps=1e-6,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    rope_interleave=True,
    max_position_embeddings=64,
    num_nextn_predict_layers=0,
    tie_word_embeddings=False,
)


def make_config(**changes):
    """The Hugging Face configuration of MODEL with `changes`, on the plain (eager) code paths."""
    config = transformers.DeepseekV3Config(**(MODEL | changes))
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    return config


def fill(module, seed):
    """Sets every weight: matrices at 1/sqrt(fan-in), norms around 1, routing biases around 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, weight in sorted(module.named_parameters()):
            noise = torch.randn(weight.shape, generator=generator)
            is_vector = weight.ndim == 1
            weight.copy_(1 + 0.2 * noise if is_vector else noise / weight.shape[-1] ** 0.5)
        for name, buffer in sorted(module.named_buffers()):
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))


def routing_margin(gate, logits):
    """The smallest gap between chosen and not chosen, over tokens, experts and groups."""
    scores = torch.sigmoid(logits) + gate.e_score_correction_bias
    groups = scores.view(len(scores), gate.num_group, -1)
    sums = groups.topk(2).values.sum(-1).sort(descending=True).values
    kept = groups.topk(2).values.sum(-1).topk(gate.topk_group).indices
    open_scores = torch.full_like(groups, -torch.inf)
    index = kept[..., None].expand(-1, -1, groups.shape[-1])
    open_scores.scatter_(1, index, groups.gather(1, index))
    ordered = open_scores.flatten(1).sort(descending=True).values
    margin = (ordered[:, gate.top_k - 1] - ordered[:, gate.top_k]).min()
    if gate.topk_group < gate.num_group:
        margin = min(margin, (sums[:, gate.topk_group - 1] - sums[:, gate.topk_group]).min())
    return float(margin)


def watch_gates(module):
    """Collects (gate, logits, expert ids, weights) of every router call in `module`."""
    calls = []
    for name, part in module.named_modules():
        if isinstance(part, deepseek.DeepseekV3TopkRouter):
            part.register_forward_hook(
                lambda gate, _, out, name=name: calls.append((name, gate, *out))
            )
    return calls


def routing_arrays(calls):
    """What each router chose, experts in ascending order per token; refuses close calls."""
    arrays = {}
    for name, gate, logits, weights, expert_ids in calls:
        margin = routing_margin(gate, logits.detach())
        if margin < SMALLEST_MARGIN:
            raise SystemExit(
                f"{name}: a margin of {margin:.1e} is below {SMALLEST_MARGIN}: take another seed"
            )
        expert_ids, order = expert_ids.sort(dim=-1)
        arrays[f"routing/{name}/logits"] = logits
        arrays[f"routing/{name}/expert_ids"] = expert_ids.to(torch.int32)
        arrays[f"routing/{name}/weights"] = weights.gather(1, order)
    return arrays


def state_arrays(module):
    """`weights/NAME` (routing biases too) and `gradients/NAME`, by Hugging Face's names."""
    arrays = {f"weights/{name}": weight for name, weight in module.named_parameters()}
    arrays |= {
        f"weights/{n}": b
        for n, b in module.named_buffers()
        if n.endswith("e_score_correction_bias")
    }
    return arrays | {f"gradients/{name}": weight.grad for name, weight in module.named_parameters()}


def save(name, config, arrays):
    """Writes one file and prints its size."""
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    header = json.dumps({"config": config, "versions": versions}, sort_keys=True)
    plain = {key: value.detach().numpy() for key, value in arrays.items()}
    path = GOLDEN / f"{name}.npz"
    np.savez_compressed(path, header=np.array(header), **plain)
    print(f"{path.name}: {path.stat().st_size} bytes, {len(plain)} arrays")


def make_moe_block(name, seed, **changes):
    """One DeepseekV3MoE block on 2 x 24 tokens: y, and the gradients of sum(y * dy)."""
    config = make_config(**changes)
    block = deepseek.DeepseekV3MoE(config)
    fill(block, seed)
    calls = watch_gates(block)
    generator = torch.Generator().manual_seed(seed + 1)
    x = torch.randn(2, 24, config.hidden_size, generator=generator, requires_grad=True)
    dy = torch.randn(2, 24, config.hidden_size, generator=generator)
    y = block(x)
    y.backward(dy)
    arrays = {"x": x, "dy": dy, "y": y, "gradients/x": x.grad}
    save(name, MODEL | changes, arrays | routing_arrays(calls) | state_arrays(block))


def make_model(name, seed, **changes):
    """The causal model on 2 x 16 tokens: logits, hidden states, next-token loss, gradients."""
    config = make_config(**changes)
    model = transformers.DeepseekV3ForCausalLM(config).train()
    fill(model, seed)
    calls = watch_gates(model)
    generator = torch.Generator().manual_seed(seed + 1)
    tokens = torch.randint(0, config.vocab_size, (2, 16), generator=generator)
    out = model(input_ids=tokens, output_hidden_states=True, use_cache=False)
    flat = out.logits[:, :-1].reshape(-1, config.vocab_size)
    loss = torch.nn.functional.cross_entropy(flat, tokens[:, 1:].reshape(-1))
    loss.backward()
    arrays = {"tokens": tokens.to(torch.int32), "logits": out.logits, "loss": loss}
    arrays |= {f"hidden/{i}": h for i, h in enumerate(out.hidden_states)}
    save(name, MODEL | changes, arrays | routing_arrays(calls) | state_arrays(model))


def main():
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    GOLDEN.mkdir(parents=True, exist_ok=True)
    make_moe_block("moe_block", seed=1)
    many = dict(
        n_routed_experts=16,
        num_experts_per_tok=4,
        n_group=8,
        topk_group=4,
        routed_scaling_factor=2.5,
    )
    make_moe_block("moe_block_scaled", seed=3, n_shared_experts=2, **many)
    make_model("model", seed=5)
    make_model("model_q_lora", seed=7, q_lora_rank=24)


if __name__ == "__main__":
    main()
