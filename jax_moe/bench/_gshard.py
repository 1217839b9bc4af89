"""A dense capacity layer in GShard's style, whose exchanges the partitioner makes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from jax_moe.bench._layer_pieces import route, swiglu

if TYPE_CHECKING:
    from jax_moe.bench._layer_columns import Layer


def gshard(layer: Layer, capacity: int, params, x):
    """Applies the layer to x [R*T, H] with buffers of `capacity` rows per (device, expert)."""
    weights, mesh = nnx.to_pure_dict(params), layer.group.mesh
    devices, experts = layer.group.num_devices, layer.shape.experts
    x = x.reshape(devices, -1, x.shape[-1])

    def by(axis, array):
        spec = [None] * array.ndim
        spec[axis] = layer.group.axes
        return jax.lax.with_sharding_constraint(array, jax.NamedSharding(mesh, jax.P(*spec)))

    send, receive = _masks(layer, weights["router"], x, capacity)
    rows = by(0, jnp.einsum("gsec,gsh->egch", send, x))
    rows = rows.reshape(experts, -1, x.shape[-1])
    rows = swiglu(rows, weights["gate_up"], weights["down"])
    rows = by(1, rows.reshape(experts, devices, capacity, -1))
    y = jnp.einsum("gsec,egch->gsh", receive, rows)
    if layer.shape.num_shared:
        y = y + swiglu(x, weights["shared_gate_up"], weights["shared_down"])
    return y.reshape(-1, x.shape[-1])


def _masks(layer: Layer, router, x, capacity: int):
    """One-hot [G, S, E, C] of every chosen (token, expert), and the same times its gate weight."""
    routing = route(layer.config, x, router, layer.bias)
    one_hot = jax.nn.one_hot(routing.expert_ids, layer.shape.experts, dtype=jnp.float32)
    chosen = one_hot.sum(2)
    gates = (one_hot * routing.weights[..., None]).sum(2)
    place = (jnp.cumsum(chosen, axis=1) - chosen).astype(jnp.int32)
    send = chosen[..., None] * jax.nn.one_hot(place, capacity, dtype=jnp.float32)
    return send.astype(x.dtype), (gates[..., None] * send).astype(x.dtype)
