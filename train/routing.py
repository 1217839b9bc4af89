"""Routing that the routers have no part in, to look at speed and numerics apart from learning."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

import jax_moe
from train.config import Config, ModelConfig


def router_config(model: ModelConfig) -> jax_moe.RouterConfig:
    """Returns the settings of the model's routers."""
    return jax_moe.RouterConfig(
        num_experts=model.num_experts,
        top_k=model.top_k,
        num_groups=model.num_groups,
        top_groups=model.top_groups,
        scale=model.routed_scale,
    )


def forced_routing(config: Config) -> Callable[[Int[Array, "batch length"]], Array] | None:
    """Returns tokens -> experts, int32 [layers, batch, length, K]; None where routers choose.

    Raises:
      ValueError: the recorded routing is of another model.
    """
    model, mode = config.model, config.routing.mode
    if mode == "balanced":
        return lambda tokens: _balanced(tokens, model)
    if mode == "random":
        return lambda tokens: _random(tokens, model, config.seed)
    if mode == "replay":
        assert config.routing.file is not None
        return _Replay(config.routing.file, config)
    return None


def _balanced(tokens: Array, model: ModelConfig) -> Array:
    """Deals the experts out in turn: K neighbours a token."""
    first = jnp.arange(tokens.size, dtype=jnp.int32).reshape(tokens.shape) * model.top_k
    ids = (first[..., None] + jnp.arange(model.top_k, dtype=jnp.int32)) % model.num_experts
    return jnp.broadcast_to(ids, (model.num_moe_layers, *ids.shape))


def _random(tokens: Array, model: ModelConfig, seed: int) -> Array:
    """Draws other scores for each layer and batch, and chooses by them as the routers do."""
    key = jax.random.fold_in(jax.random.key(seed), tokens.sum())
    shape = (model.num_moe_layers, *tokens.shape, model.num_experts)
    return jax_moe.route(jax.random.normal(key, shape), None, router_config(model)).expert_ids


class _Replay:
    """Gives what was recorded, to any number of sequences in turn."""

    def __init__(self, file: str, config: Config):
        self._ids = np.load(file)
        model, length = config.model, config.data.sequence
        wanted = (model.num_moe_layers, length, model.top_k)
        found = (*self._ids.shape[:1], *self._ids.shape[2:])
        if found != wanted or self._ids.dtype != np.int32:
            raise ValueError(
                f"{file} holds {self._ids.dtype}{list(self._ids.shape)}, but this run needs int32 "
                f"[{wanted[0]} layers, sequences, {length} tokens, top_k={model.top_k}]: record it "
                "with python -m train.record_routing from a run of these sizes."
            )
        if self._ids.size and not -1 <= self._ids.min() <= self._ids.max() < model.num_experts:
            raise ValueError(
                f"{file} holds expert ids from {self._ids.min()} to {self._ids.max()}, but the "
                f"experts of this run are 0 to {model.num_experts - 1} (-1 for none): record it "
                "from a run of as many experts."
            )

    def __call__(self, tokens: Array) -> Array:
        rows = np.arange(tokens.shape[0]) % self._ids.shape[1]
        return jnp.asarray(self._ids[:, rows])
