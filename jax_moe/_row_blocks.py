"""Loops over the real rows of a buffer, in blocks of a static number of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jax_moe._implementation import cast_varying, varying_axes


def zeros(shape: tuple[int, ...], dtype: Any, like: Array) -> Array:
    """Zeros typed as varying as `like` is."""
    return cast_varying(jnp.zeros(shape, dtype), varying_axes(like))


def group_starts(sizes: Array, virtual_ranks: int, num_rows: int) -> Array:
    """First row of every group, int32 [V*E], for sizes [V*E] and V*C = num_rows rows."""
    by_rank = sizes.reshape(virtual_ranks, -1)
    first = jnp.arange(virtual_ranks, dtype=jnp.int32)[:, None] * (num_rows // virtual_ranks)
    return (first + jnp.cumsum(by_rank, axis=1, dtype=jnp.int32) - by_rank).reshape(-1)


def fold_rows(
    block: int,
    start: Array,
    size: Array,
    num_rows: int,
    step: Callable[[Array, Array, Any], Any],
    carry: Any,
) -> Any:
    """Folds `step(first row, [B, 1] bool of the rows that count, carry)` over one group's rows.

    B is `block`, or `num_rows` where that is less.

    A block reaches past its group's end, or begins before its own first row at the buffer's end:
    the rows that count are then fewer than B.
    """
    block = min(block, num_rows)

    def body(i, carry):
        wanted = start + i * block
        first = jnp.minimum(wanted, num_rows - block)
        row = first + lax.iota(jnp.int32, block)
        counts = (row >= wanted) & (row < start + size)
        return step(first, counts[:, None], carry)

    return lax.fori_loop(0, (size + block - 1) // block, body, carry)


def read(array: Array, first: Array, rows: int) -> Array:
    """The block of rows that begins at `first`."""
    block = lax.dynamic_slice_in_dim(array, first, rows)
    # XLA's CPU backend does not vectorise a loop into which a dynamic slice was fused: the gate
    # took 5 times as long without the barrier.
    return lax.optimization_barrier(block)


def read_counting(array: Array, first: Array, counts: Array) -> Array:
    """The same with zeros in the rows that do not count: sums over rows may not see their NaN."""
    return jnp.where(counts, read(array, first, len(counts)), 0)


def write(array: Array, first: Array, counts: Array, block: Array) -> Array:
    """The array with the counting rows of the block that begins at `first` replaced."""
    block = jnp.where(counts, block.astype(array.dtype), read(array, first, len(counts)))
    return lax.dynamic_update_slice_in_dim(array, block, first, axis=0)
