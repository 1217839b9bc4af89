"""Records which experts a run's last checkpoint chooses: python -m train.record_routing --help."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx
from jaxtyping import Array, Int

import jax_moe
from train import source
from train.data import Packed
from train.model import Block, LanguageModel, find_places
from train.sample import load_run


@dataclasses.dataclass(frozen=True)
class Options:
    """What to record."""

    run: Annotated[Path, tyro.conf.Positional] = Path("runs/tiny")
    """The run's folder."""
    file: Annotated[Path, tyro.conf.Positional] = Path("routing.npy")
    """Where to: int32 [layers, sequences, tokens, K], for --routing.file."""
    sequences: int = 8
    """How many of the validation windows."""


def chosen_experts(model: LanguageModel, tokens: Int[Array, "batch length"]) -> Array:
    """Returns the experts that the routers choose, int32 [layers, batch, length, K]."""
    places = find_places(tokens.shape[1], None)
    x, found = model.embedding(tokens), []
    for block in model.dense_blocks:
        x, _ = block(x, places)
    for block in _unstacked(model):
        seen = block.mlp_norm(x + block.attention(block.attention_norm(x), places))
        seen, router = seen.astype(jnp.float32), block.mlp.router[...]
        logits = jnp.matmul(seen, router, precision=jax.lax.Precision.HIGHEST)
        found.append(jax_moe.route(logits, block.mlp.bias[...], block.mlp.config).expert_ids)
        x, _ = block(x, places)
    return jnp.stack(found)


def _unstacked(model: LanguageModel) -> list[Block]:
    if not isinstance(model.moe_blocks, Block):
        return list(model.moe_blocks)
    graph, state = nnx.split(model.moe_blocks)
    layers = range(model.config.num_moe_layers)
    return [nnx.merge(graph, jax.tree.map(lambda leaf: leaf[i], state)) for i in layers]  # noqa: B023


def record(options: Options) -> np.ndarray:
    """Writes the file; returns what is in it.

    Raises:
      ValueError: no run, no checkpoint, or no sequences.
      RuntimeError: its text could not be downloaded.
    """
    if options.sequences < 1:
        raise ValueError(f"sequences={options.sequences}: must be at least 1.")
    trainer, state = load_run(options.run)
    windows = source.open_source(trainer.config).validation
    windows = windows.tokens if isinstance(windows, Packed) else windows
    tokens = jnp.asarray(windows[: options.sequences, :-1], jnp.int32)
    choose = jax.jit(lambda s, tokens: chosen_experts(trainer.model(s.params, s.biases), tokens))
    ids = np.asarray(choose(state, tokens))
    np.save(options.file, ids)
    return ids


def main() -> int:
    """Runs the command line; returns its exit status."""
    options = tyro.cli(Options, prog="python -m train.record_routing", description=__doc__)
    try:
        ids = record(options)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{options.file}: {ids.shape[0]} layers, {ids.shape[1]} sequences of {ids.shape[2]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
