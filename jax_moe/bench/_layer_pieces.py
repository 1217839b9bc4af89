"""The pieces of a layer that the columns of its bench share."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import jax_moe


def route(config, x, router, bias) -> jax_moe.Routing:
    """The router on one device, in float32."""
    logits = jnp.matmul(x.astype(jnp.float32), router, precision=jax.lax.Precision.HIGHEST)
    return jax_moe.route(logits, bias, config)


def swiglu(x, gate_up, down):
    """(silu(x gate) * (x up)) down, with any leading axes; the gate is gate_up's first half."""
    gate, up = jnp.split(x @ gate_up, 2, axis=-1)
    return (jax.nn.silu(gate) * up) @ down
