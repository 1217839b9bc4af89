"""Writes text from a run's last checkpoint: python -m train.sample [RUN_FOLDER] [--help]."""

from __future__ import annotations

import dataclasses
import sys
from contextlib import closing
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jaxtyping import Array, Int

import jax_moe
from train import config as configs
from train.__main__ import use_devices
from train.checkpoint import Checkpoints
from train.step import Trainer, TrainState


@dataclasses.dataclass(frozen=True)
class Options:
    """What to write."""

    run: Annotated[Path, tyro.conf.Positional] = Path("runs/tiny")
    """The run's folder."""
    prompt: str = "In the beginning "
    """Text to go on from."""
    length: int = 400
    """Bytes to write."""
    temperature: float = 0.8
    """Flattens (above 1) or sharpens (below 1) the distribution; 0 takes the likeliest byte."""
    seed: int = 0
    """Of the random draws."""


def make_writer(trainer: Trainer, length: int, temperature: float):
    """Makes the jitted (state, tokens [total], start, key) -> tokens, filled from `start` on."""
    window = trainer.config.data.sequence

    def write(state, tokens: Int[Array, " total"], start, key) -> Array:
        model = trainer.model(state.params, state.biases)

        def add(place, tokens):
            # The window slides; positions past `place` are not seen by causal attention.
            first = jnp.maximum(0, place - window)
            seen = jax.lax.dynamic_slice(tokens, (first,), (window,))
            logits = model(seen[None])[0][0, place - first - 1]
            if temperature == 0:
                token = jnp.argmax(logits)
            else:
                token = jax.random.categorical(jax.random.fold_in(key, place), logits / temperature)
            return tokens.at[place].set(token.astype(tokens.dtype))

        return jax.lax.fori_loop(start, start + length, add, tokens)

    return jax.jit(write)


def load_run(folder: Path) -> tuple[Trainer, TrainState]:
    """Returns a run's last checkpoint on one device of any kind, where the experts live as well.

    Raises:
      ValueError: no run, or no checkpoint.
    """
    path = folder / "config.json"
    if not path.exists():
        raise ValueError(f"{folder} holds no run (no config.json): train first (make train).")
    config = configs.load(path)
    config = dataclasses.replace(
        config, routing=configs.RoutingConfig(), implementation=None, attention="xla"
    )
    use_devices(int(config.mesh.cpu_devices > 0))
    group = jax_moe.ExpertGroup(jax_moe.make_mesh(rank=1, devices=jax.devices()[:1]))
    trainer = Trainer(config, group)
    with closing(Checkpoints(folder)) as checkpoints:
        state, _ = checkpoints.restore(trainer.abstract_state)
    return trainer, state


def sample(options: Options) -> str:
    """Returns the prompt and what the model writes after it.

    Raises:
      ValueError: no run, no checkpoint, a model of more than bytes, an empty prompt, or no length.
    """
    prompt = np.frombuffer(options.prompt.encode("utf-8"), np.uint8).astype(np.int32)
    if not len(prompt):
        raise ValueError("prompt is empty: give at least one byte to go on from.")
    if options.length < 1:
        raise ValueError(f"length={options.length}: must be at least 1 byte.")
    trainer, state = load_run(options.run)
    if (size := trainer.config.model.vocab_size) > 256:
        raise ValueError(f"{options.run} has model.vocab_size={size}: only bytes can be written.")
    total = max(len(prompt) + options.length, trainer.config.data.sequence)
    tokens = np.zeros(total, np.int32)
    tokens[: len(prompt)] = prompt
    write = make_writer(trainer, options.length, options.temperature)
    written = write(state, tokens, len(prompt), jax.random.key(options.seed))
    text = np.asarray(written)[: len(prompt) + options.length].astype(np.uint8)
    return text.tobytes().decode("utf-8", errors="replace")


def main() -> int:
    """Runs the command line; returns its exit status."""
    try:
        print(sample(tyro.cli(Options, prog="python -m train.sample", description=__doc__)))
    except (ValueError, RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
