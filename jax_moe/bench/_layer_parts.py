"""The parts of a layer, each a program of its own, forward and backward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from jax_moe.bench import _layer_columns, _layer_pieces
from jax_moe.bench._layer_columns import Layer

# What is inside the timed region of each part.
PARTS = {
    "router": "logits, top-k and weights; gradients of tokens and router",
    "plan": "all that depends on the expert ids alone",
    "dispatch": "tokens to expert rows; and back, their gradients",
    "experts": "grouped SwiGLU; gradients of rows and weights",
    "combine": "expert rows to summed tokens; and back, their gradients",
    "shared": "shared experts; gradients of tokens and weights",
}


def _forward_backward(function: Callable, num_inputs: int) -> Callable:
    """The function and its gradients by the first inputs; cotangents go last."""

    def program(*operands):
        inputs, (*others, cotangents) = operands[:num_inputs], operands[num_inputs:]
        results, pull = jax.vjp(lambda *a: function(*a, *others), *inputs)
        results, cotangents = jax.lax.optimization_barrier((results, cotangents))
        return results, pull(cotangents)

    return program


def make_parts(layer: Layer, way: Any, engine) -> dict[str, Callable[[], Any]]:
    """Each part as a compiled program on operands that it has in the layer."""
    tokens, copied = jax.P(layer.group.axes), jax.P()
    weights, config = layer.weights, layer.config

    def compiled(function, specs, *operands, outs: Any = tokens):
        mapped = jax.shard_map(function, mesh=layer.group.mesh, in_specs=specs, out_specs=outs)
        program = jax.jit(mapped).lower(*operands).compile()
        return functools.partial(program, *operands)

    def route(x, router, bias):
        routing = _layer_pieces.route(config, x, router, bias)
        return routing.weights, routing.expert_ids

    def router_part(x, router, bias, d_weights):
        gate, pull, ids = jax.vjp(lambda x, w: route(x, w, bias), x, router, has_aux=True)
        return gate, ids, pull(d_weights)

    def plan(ids):
        state = way.prepare(ids)
        return state, way.group_sizes(ids, state)

    x, dy, bias = layer.x, layer.dy, layer.bias
    by_router = (tokens, copied, copied)
    s, ids = compiled(route, by_router, x, weights["router"], bias)()
    parts = {
        "router": compiled(
            router_part, (*by_router, tokens), x, weights["router"], bias, s,
            outs=(tokens, tokens, (tokens, copied)),
        ),
        "plan": compiled(plan, tokens, ids),
    }  # fmt: skip
    state, sizes = parts["plan"]()
    rows = compiled(way.dispatch, tokens, x, s, state)()
    parts["dispatch"] = compiled(_forward_backward(way.dispatch, 2), tokens, x, s, state, rows)
    parts["combine"] = compiled(_forward_backward(way.combine, 2), tokens, *rows, state, (dy, s))

    def grouped(rows, row_s, gate_up, down, sizes):
        return _layer_columns.experts(layer, engine, rows, row_s, gate_up, down, sizes)

    parts["experts"] = compiled(
        _forward_backward(grouped, 4), tokens, *rows, weights["gate_up"], weights["down"], sizes,
        rows[0],
    )  # fmt: skip
    if layer.shape.num_shared:
        names = ("shared_gate_up", "shared_down")
        function = _forward_backward(lambda x, w: _layer_columns.shared(w, x), 2)
        operands = x, {name: weights[name] for name in names}, dy
        parts["shared"] = functools.partial(jax.jit(function).lower(*operands).compile(), *operands)
    return {name: parts[name] for name in PARTS if name in parts}
