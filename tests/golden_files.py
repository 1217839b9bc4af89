"""Reads tests/golden/*.npz and maps Hugging Face's MoE weights to the layer's."""

import dataclasses
import functools
import json
from pathlib import Path

import numpy as np

import jax_moe

FOLDER = Path(__file__).parent / "golden"


@dataclasses.dataclass(frozen=True)
class Golden:
    """One file: Hugging Face's configuration and all arrays by key (see golden/README.md)."""

    config: dict
    arrays: dict[str, np.ndarray]

    def router_config(self) -> jax_moe.RouterConfig:
        config = self.config
        return jax_moe.RouterConfig(
            num_experts=config["n_routed_experts"],
            top_k=config["num_experts_per_tok"],
            num_groups=config["n_group"],
            top_groups=config["topk_group"],
            normalize=config["norm_topk_prob"],
            scale=config["routed_scaling_factor"],
        )

    def moe(self, kind: str, module: str = "") -> dict[str, np.ndarray]:
        """Arrays of one MoE block in the layer's names and layouts.

        `kind` is "weights" or "gradients"; `module` the block's name with a final dot. "bias" is
        among the weights only.
        """

        def get(name: str) -> np.ndarray:
            return self.arrays[f"{kind}/{module}{name}"]

        shared = [get(f"shared_experts.{part}_proj.weight") for part in ("gate", "up")]
        out = {
            "router": get("gate.weight").T,
            "gate_up": np.swapaxes(get("experts.gate_up_proj"), 1, 2),
            "down": np.swapaxes(get("experts.down_proj"), 1, 2),
            "shared_gate_up": np.concatenate(shared).T,
            "shared_down": get("shared_experts.down_proj.weight").T,
        }
        if kind == "weights":
            out["bias"] = get("gate.e_score_correction_bias")
        return out


@functools.cache
def load(name: str) -> Golden:
    with np.load(FOLDER / f"{name}.npz") as file:
        arrays = {key: file[key] for key in file.files}
    header = json.loads(str(arrays.pop("header")))
    return Golden(header["config"], arrays)
