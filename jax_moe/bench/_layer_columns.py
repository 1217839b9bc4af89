"""The columns of the layer's bench: jax_moe.MoE, and the same layer with every other exchange."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jax_moe
from jax_moe.bench import _columns, _shapes
from jax_moe.bench._gshard import gshard
from jax_moe.bench._layer_pieces import route, swiglu
from jax_moe.bench._local import Local
from jax_moe.bench._plain import Sizes

TITLES = {
    "moe": "jax_moe.MoE: router, exchange, experts, shared experts, auxiliary loss, statistics",
    "local": "no exchange: every token to experts of its own device",
    "gshard": "dense: one-hot einsums into a buffer of fixed capacity per (device, expert)",
    "maxtext": "ragged_all_to_all with one update a peer, worst-case buffers, lax.ragged_dot",
}
NAMES = (*dict.fromkeys(("moe", *_columns.OURS[:-1], *TITLES, *_columns.PLAIN)),)


@dataclasses.dataclass(frozen=True)
class Layer:
    """A `jax_moe.MoE` and its pieces; `params` has the weights, in the form of nnx's state."""

    shape: _shapes.Shape
    group: jax_moe.ExpertGroup
    dtype: str
    graph: Any
    params: Any
    rest: Any
    config: jax_moe.RouterConfig
    x: jax.Array  # [R*T, H]
    dy: jax.Array

    @property
    def weights(self) -> dict[str, jax.Array]:
        """The parameters by name: router, gate_up, down, shared_gate_up, shared_down."""
        return nnx.to_pure_dict(self.params)

    @property
    def bias(self) -> jax.Array:
        """The router's bias f32 [E]."""
        return nnx.to_pure_dict(self.rest)["bias"]

    @property
    def flops(self) -> int:
        """Of the experts' matmuls on one device, forward and backward; the mean over devices."""
        per_token = self.shape.top_k + self.shape.num_shared
        tokens = self.shape.tokens * self.group.virtual_ranks
        return 3 * 2 * 3 * tokens * per_token * self.shape.hidden * self.shape.width


def title(name: str) -> str:
    """What a column is, in words."""
    return TITLES[name] if name in TITLES else _columns.title(name)


def make_layer(
    shape: _shapes.Shape, group: jax_moe.ExpertGroup, dtype: str, routing: _shapes.Routing
) -> Layer:
    """A layer with random weights and tokens; a bias of the router loads the experts unevenly."""
    config = jax_moe.RouterConfig(num_experts=shape.experts, top_k=shape.top_k, num_groups=1)
    init = nnx.initializers.normal(shape.hidden**-0.5)
    layer = nnx.jit(
        lambda: jax_moe.MoE(
            shape.hidden, shape.width, config, group, num_shared=shape.num_shared,
            param_dtype=jnp.dtype(dtype), kernel_init=init, rngs=nnx.Rngs(0),
        )
    )()  # fmt: skip
    tokens = jax.NamedSharding(group.mesh, jax.P(group.axes))
    size = (group.num_ranks * shape.tokens, shape.hidden)
    draw = jax.jit(lambda key: jax.random.normal(key, size, dtype), out_shardings=tokens)
    x, dy = (draw(jax.random.key(i)) for i in (1, 2))
    if routing == "skewed":
        layer.bias[...] = _skewed_bias(config, x @ layer.router[...].astype(x.dtype))
    graph, params, rest = nnx.split(layer, nnx.Param, ...)
    return Layer(shape, group, dtype, graph, params, rest, layer.config, x, dy)


def _skewed_bias(config: jax_moe.RouterConfig, logits) -> jax.Array:
    """Random bias whose spread is tuned to a MaxVio of 1."""
    direction = np.random.default_rng(0).standard_normal(config.num_experts).astype(np.float32)
    choose = jax.jit(lambda logits, bias: jax_moe.route(logits, bias, config).expert_ids)
    logits = logits[: _shapes.SKEW_SAMPLE].astype(jnp.float32)

    def skew(spread: float) -> float:
        ids = np.asarray(choose(logits, spread * direction))
        return _shapes.max_violation(ids, config.num_experts)

    return jnp.asarray(_shapes.tuned_spread(skew, high=1.0) * direction)


def routed_ids(layer: Layer) -> np.ndarray:
    """The expert ids that the router chooses, int32 [R, T, K]."""

    def choose(x, router, bias):
        return route(layer.config, x, router, bias).expert_ids

    mapped = jax.shard_map(
        choose, mesh=layer.group.mesh, in_specs=(jax.P(layer.group.axes), jax.P(), jax.P()),
        out_specs=jax.P(layer.group.axes),
    )  # fmt: skip
    ids = jax.jit(mapped)(layer.x, layer.weights["router"], layer.bias)
    return np.asarray(ids).reshape(layer.group.num_ranks, layer.shape.tokens, -1)


def make(name: str, layer: Layer, ids: np.ndarray) -> Callable[[Any, jax.Array], jax.Array]:
    """The column's function of (params, x [R*T, H]); tokens and rows have the capacity they need.

    Raises:
      NotImplementedError: it cannot run here; the message says why.
    """
    if name == "moe":
        capacity = _shapes.tight_capacity(ids, layer.shape.experts)
        settings = dataclasses.replace(layer_settings(layer), capacity=capacity)
        return functools.partial(_apply_module, layer, settings)
    if name == "gshard":
        load = [np.bincount(a.reshape(-1), minlength=layer.shape.experts).max() for a in ids]
        return functools.partial(gshard, layer, int(max(load)))
    return functools.partial(apply, layer, *make_way(name, layer, ids))


def make_way(name: str, layer: Layer, ids: np.ndarray) -> tuple[Any, str | None]:
    """The way that a column exchanges tokens, and the engine of its grouped matmul."""
    shape, group = layer.shape, layer.group
    sizes = Sizes(
        axis=group.axes[0],
        num_ranks=group.num_ranks,
        num_experts=shape.experts,
        tokens=shape.tokens,
        top_k=shape.top_k,
        capacity=_shapes.tight_capacity(ids, shape.experts),
    )
    if name == "local":
        return Local(sizes, virtual_ranks=group.virtual_ranks), None
    if name == "maxtext":
        worst = group.num_ranks * shape.tokens * shape.top_k
        sizes = dataclasses.replace(sizes, capacity=worst)
        column = _columns.make("ragged_all_to_all", group, sizes, None)
        return dataclasses.replace(column.way, updates=1), "ragged_dot"
    return _columns.make(name, group, sizes, None).way, None


def layer_settings(layer: Layer) -> Any:
    """What the module's compiled calls depend on."""
    return nnx.merge(layer.graph, layer.params, layer.rest).settings


def _apply_module(layer: Layer, settings: Any, params, x):
    module = nnx.merge(layer.graph, params, layer.rest)
    module.settings = settings
    return module(x)[0]


def apply(layer: Layer, way: Any, engine: str | None, params, x):
    """The layer with a way of exchanging tokens."""
    weights, tokens, replicated = nnx.to_pure_dict(params), jax.P(layer.group.axes), jax.P()

    def routed(x, router, bias, gate_up, down):
        routing = route(layer.config, x, router, bias)
        state = way.prepare(routing.expert_ids)
        rows, row_s = way.dispatch(x, routing.weights, state)
        sizes = way.group_sizes(routing.expert_ids, state)
        rows = experts(layer, engine, rows, row_s, gate_up, down, sizes)
        return way.combine(rows, row_s, state)[0]

    y = jax.shard_map(
        routed, mesh=layer.group.mesh, in_specs=(tokens, replicated, replicated, tokens, tokens),
        out_specs=tokens,
    )(x, weights["router"], layer.bias, weights["gate_up"], weights["down"])  # fmt: skip
    return y + shared(weights, x) if layer.shape.num_shared else y


def experts(layer: Layer, engine, rows, row_s, gate_up, down, sizes):
    """The routed experts on one device."""
    return jax_moe.grouped_swiglu(
        rows, row_s, gate_up, down, sizes, virtual_ranks=layer.group.virtual_ranks, engine=engine
    )


def shared(weights, x):
    """The shared experts."""
    return swiglu(x, weights["shared_gate_up"], weights["shared_down"])
