"""Lowers a run's step for devices that need not exist, and says what one of them would hold.

python -m train.lower DEVICES CONFIG [--key value ...]
"""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from typing import Any

import jax

import jax_moe
from train.__main__ import parse
from train.config import Config
from train.sharding import make_group
from train.step import Trainer

_GIB = 2**30


def shard_bytes(tree: Any) -> int:
    """Returns the bytes of one device's part of some arrays."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)


def held_bytes(trainer: Trainer) -> dict[str, int]:
    """Returns what a device holds from step to step, in bytes, by name."""
    state, model = trainer.abstract_state, trainer.config.model
    held = {
        "parameters, float32": shard_bytes(state.params),
        "optimizer": shard_bytes(state.optimizer),
        "gradients, float32": shard_bytes(state.params),
    }
    if trainer.config.implementation == "ptx" and model.num_moe_layers:
        pool = jax_moe.pool_bytes(
            num_ranks=trainer.group.num_ranks,
            tokens=trainer.tokens_per_rank,
            top_k=model.top_k,
            num_experts=model.num_experts,
            hidden=model.hidden,
            dtype=model.dtype,
        )
        held["pools of the exchange"] = pool * trainer.group.virtual_ranks
    return held


def passing_bytes(trainer: Trainer) -> dict[str, int]:
    """Returns the largest arrays that come and go within a step, in bytes on a device, by name.

    From shapes alone; what XLA really needs, only a compilation for the device can tell.
    """
    model, ranks = trainer.config.model, trainer.group.virtual_ranks
    tokens, size = trainer.tokens_per_rank * ranks, 2 if model.dtype == "bfloat16" else 4
    rows = jax_moe.row_capacity(
        tokens=trainer.tokens_per_rank,
        top_k=model.top_k,
        num_experts=model.num_experts,
        num_ranks=trainer.group.num_ranks,
        capacity_factor=model.capacity_factor,
    )
    found = {
        "residual stream at each layer": model.num_layers * tokens * model.hidden * size,
        "expert rows of one layer": ranks * rows * model.hidden * size,
        "logits, float32": tokens * model.vocab_size * 4,
    }
    if trainer.config.attention == "xla":
        scores = tokens * trainer.config.data.sequence * model.num_heads * 4
        found["attention scores of one layer, float32"] = scores
    return found


def report(config: Config, num_devices: int) -> str:
    """Lowers the step on an abstract mesh; returns what there is to say of it."""
    # On a mesh without devices None would mean CPU devices.
    config = dataclasses.replace(config, implementation=config.implementation or "ptx")
    group = make_group(config.mesh, num_devices)
    trainer = Trainer(config, group)
    begin = time.perf_counter()
    lowered = trainer.lower_step("cuda" if config.implementation == "ptx" else "cpu")
    seconds = time.perf_counter() - begin
    sizes = " x ".join(f"{axis}={size}" for axis, size in group.mesh.shape.items())
    lines = [
        f"{config.name}: {trainer.num_params / 1e9:.3f} B parameters on {num_devices} devices, "
        f"{sizes}, {group}",
        f"lowered in {seconds:.1f} s: {len(lowered.as_text()) / 2**20:.2f} MiB of StableHLO, "
        f'implementation "{config.implementation}"',
    ]
    held = held_bytes(trainer)
    lines += ["held on each device:", *_table(held | {"together": sum(held.values())})]
    lines += ["the largest that come and go:", *_table(passing_bytes(trainer))]
    return "\n".join(lines)


def _table(sizes: dict[str, int]) -> list[str]:
    return [f"  {name:<40}{size / _GIB:10.3f} GiB" for name, size in sizes.items()]


def main() -> int:
    """Runs the command line; returns its exit status."""
    if len(sys.argv) < 3 or not sys.argv[1].isdecimal():
        print(__doc__, file=sys.stderr)
        return 2
    try:
        print(report(parse(sys.argv[2:]), int(sys.argv[1])))
    except (ValueError, RuntimeError) as error:  # such as want of cuDNN
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
