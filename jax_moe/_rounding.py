"""The arithmetic of combine, spelled out in bits so that every backend gives the same ones.

A sum widens its terms to float32, flushes subnormal operands and results to signed zero (as
`add.ftz.f32` does) and is rounded to the payload type to nearest, ties to even. A value that is
never added to anything passes through unchanged. float64 payloads, used by the gradient checks
only, are summed as they are.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_SIGN = np.uint32(0x80000000)
_EXPONENT = np.uint32(0x7F800000)


def sum_dtype(dtype) -> Any:
    """The dtype in which values of `dtype` are added: float32, or float64 for float64."""
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


def _bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.uint32)


def _float(bits: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _flush(x: jax.Array) -> jax.Array:
    bits = _bits(x)
    return _float(jnp.where(bits & _EXPONENT == 0, bits & _SIGN, bits))


def widen(x: jax.Array) -> jax.Array:
    """Payload to accumulator, exactly: bfloat16 -> float32, others unchanged."""
    if x.dtype != jnp.bfloat16:
        return x
    bits = jax.lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32)
    return _float(bits << 16)


def narrow(x: jax.Array, dtype) -> jax.Array:
    """Accumulator to payload: rounds float32 to bfloat16 to nearest even, others unchanged."""
    if jnp.dtype(dtype) != jnp.bfloat16:
        return x
    bits = _bits(x)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet_nan = (bits >> 16) | 0x40
    half = jnp.where(bits & ~_SIGN > _EXPONENT, quiet_nan, rounded)
    return jax.lax.bitcast_convert_type(half.astype(jnp.uint16), jnp.bfloat16)


def add(a: jax.Array, b: jax.Array) -> jax.Array:
    """One addition of the specification."""
    if a.dtype != jnp.float32:
        return a + b
    return _flush(_flush(a) + _flush(b))


def add_term(total: jax.Array, started: jax.Array, term: jax.Array, present: jax.Array):
    """Adds `term` where `present`; where nothing was added yet it starts the sum as a copy.

    Args:
      total: running sums, [..., H]. started: bool [...], which sums have a term already.
      term: [..., H]. present: bool [...], where there is a term.

    Returns:
      The new (total, started).
    """
    summed = jnp.where(started[..., None], add(total, term), term)
    return jnp.where(present[..., None], summed, total), started | present
