"""Matmuls and the SwiGLU gate over rows sorted by expert, at the cost of the real rows only.

Row buffers are sized for a capacity that is seldom filled. Everything here walks over the rows
that are there: what lies past the last group costs nothing but a zero fill, and whatever it holds
(NaN, say) reaches no result.

On CPU `jax.lax.ragged_dot` multiplies every row with every expert. Here a loop over the experts
holds a loop over blocks of BLOCK_ROWS rows with a trip count taken from the group's size: 1.3 to 2
times a dense matmul of the real rows, where `ragged_dot` took 3 times with 1 expert and 300 times
with 32; its compile time does not depend on the number of experts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jax_moe._implementation import cast_varying, varying_axes

Engine = Literal["blocks", "ragged_dot"]

# Fewer rows leave the matmul short of work per weight read, more are wasted on small groups.
BLOCK_ROWS = 64


def grouped_matmul(
    rows: Float[Array, "rows inner"],
    weights: Float[Array, "experts inner outer"],
    group_sizes: Int[Array, " experts"],
    *,
    virtual_ranks: int = 1,
    engine: Engine | None = None,
) -> Float[Array, "rows outer"]:
    """Multiplies each expert's rows with that expert's matrix.

    With several virtual ranks the rows and the experts of each lie end to end: rank v holds rows
    [v*C, (v+1)*C), and its groups begin at its first row. The gradients of an expert without rows
    are exact zeros. Both gradients skip what the product skips.

    Args:
      rows: floating point [V*C, K], sorted by expert within each virtual rank.
      weights: the same dtype [V*E, K, N]; products are added in float32 (float64 for float64).
      group_sizes: int32 [V*E], rows of each expert; a virtual rank's sum is at most C.
      virtual_ranks: V.
      engine: "blocks" (a loop over blocks of rows) or "ragged_dot"; None takes "blocks" where
        JAX's default backend is the CPU.

    Returns:
      [V*C, N] of the same dtype; zero past the last group.

    Raises:
      ValueError: the shapes or dtypes do not fit each other.
    """
    _check_operands(rows, weights, group_sizes, virtual_ranks)
    engine = _resolve(engine)
    rows, weights, group_sizes = _vary_alike(rows, weights, group_sizes)
    return _matmul((engine, virtual_ranks, False), rows, weights, group_sizes)


def grouped_swiglu(
    gate_up: Float[Array, "rows twice_width"],
    row_s: Float[Array, " rows"],
    group_sizes: Int[Array, " experts"],
    *,
    virtual_ranks: int = 1,
    engine: Engine | None = None,
) -> Float[Array, "rows width"]:
    """Gates each row and scales it: silu(gate) * up * row_s, in float32, rounded once.

    Args:
      gate_up: floating point [V*C, 2*W], the gate in the first W columns.
      row_s: floating point [V*C], a factor per row: the gate weight of its (token, k).
      group_sizes: int32 [V*E], as in `grouped_matmul`.
      virtual_ranks: V.
      engine: as in `grouped_matmul`; "ragged_dot" makes it one elementwise pass over all rows.

    Returns:
      [V*C, W] of gate_up's dtype; zero or undefined past the last group.
    """
    engine = _resolve(engine)
    if engine == "ragged_dot":
        return _swiglu_block(gate_up, row_s)
    gate_up, row_s, group_sizes = _vary_alike(gate_up, row_s, group_sizes)
    return _swiglu(virtual_ranks, gate_up, row_s, group_sizes)


def _resolve(engine: Engine | None) -> Engine:
    if engine is None:
        return "blocks" if jax.default_backend() == "cpu" else "ragged_dot"
    if engine not in ("blocks", "ragged_dot"):
        raise ValueError(f'engine={engine!r}: must be "blocks", "ragged_dot" or None.')
    return engine


def _check_operands(rows: Array, weights: Array, group_sizes: Array, virtual_ranks: int) -> None:
    text = (
        f"grouped_matmul(rows {rows.dtype}{list(rows.shape)}, weights {weights.dtype}"
        f"{list(weights.shape)}, group_sizes {group_sizes.dtype}{list(group_sizes.shape)}, "
        f"virtual_ranks={virtual_ranks})"
    )
    if rows.ndim != 2 or weights.ndim != 3 or rows.shape[1] != weights.shape[1]:
        raise ValueError(f"{text}: rows must be [V*C, K] and weights [V*E, K, N] with one K.")
    if rows.dtype != weights.dtype or not jnp.issubdtype(rows.dtype, jnp.floating):
        raise ValueError(f"{text}: rows and weights must have one floating-point dtype; cast one.")
    if group_sizes.shape != weights.shape[:1] or group_sizes.dtype != jnp.int32:
        raise ValueError(f"{text}: group_sizes must be int32, one for each of the weights.")
    if virtual_ranks < 1 or rows.shape[0] % virtual_ranks or weights.shape[0] % virtual_ranks:
        raise ValueError(f"{text}: virtual_ranks must divide both the rows and the experts.")


def _vary_alike(*arrays: Array) -> list[Array]:
    """Types the operands alike inside shard_map; the cast's transpose sums a weight's gradient."""
    axes = frozenset().union(*map(varying_axes, arrays))
    return [cast_varying(array, axes) for array in arrays]


def _zeros(shape: tuple[int, ...], dtype: Any, like: Array) -> Array:
    return cast_varying(jnp.zeros(shape, dtype), varying_axes(like))


def sum_dtype(dtype: Any) -> Any:
    """The dtype in which values of `dtype` are added: float32, or float64 for float64."""
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


# The product and its weight gradient are each other's derivatives (with the product of the
# transposed weights for the rows), so that two functions close the set and any order of
# derivative exists.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(static: tuple[Engine, int, bool], rows: Array, weights: Array, sizes: Array) -> Array:
    """Rows [V*C, K] x [V*E, K, N]; with `transposed` rows [V*C, N] x the transposes."""
    engine, virtual_ranks, transposed = static
    multiply = _matmul_blocks if engine == "blocks" else _matmul_ragged
    return multiply(rows, weights, sizes, virtual_ranks, transposed)


def _matmul_fwd(static, rows, weights, sizes):
    return _matmul(static, rows, weights, sizes), (rows, weights, sizes)


def _matmul_bwd(static, saved, cotangent):
    engine, virtual_ranks, transposed = static
    rows, weights, sizes = saved
    d_rows = _matmul((engine, virtual_ranks, not transposed), cotangent, weights, sizes)
    left, right = (cotangent, rows) if transposed else (rows, cotangent)
    return d_rows, _outer((engine, virtual_ranks), left, right, sizes), None


_matmul.defvjp(_matmul_fwd, _matmul_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _outer(static: tuple[Engine, int], left: Array, right: Array, sizes: Array) -> Array:
    """Per expert left^T right over its rows: [V*C, K], [V*C, N] -> [V*E, K, N]."""
    engine, virtual_ranks = static
    return (_outer_blocks if engine == "blocks" else _outer_ragged)(
        left, right, sizes, virtual_ranks
    )


def _outer_fwd(static, left, right, sizes):
    return _outer(static, left, right, sizes), (left, right, sizes)


def _outer_bwd(static, saved, cotangent):
    left, right, sizes = saved
    engine, virtual_ranks = static
    d_left = _matmul((engine, virtual_ranks, True), right, cotangent, sizes)
    d_right = _matmul((engine, virtual_ranks, False), left, cotangent, sizes)
    return d_left, d_right, None


_outer.defvjp(_outer_fwd, _outer_bwd)


# Engine "blocks".


def _group_starts(sizes: Array, virtual_ranks: int, num_rows: int) -> Array:
    """First row of every group, int32 [V*E]."""
    by_rank = sizes.reshape(virtual_ranks, -1)
    first = jnp.arange(virtual_ranks, dtype=jnp.int32)[:, None] * (num_rows // virtual_ranks)
    return (first + jnp.cumsum(by_rank, axis=1, dtype=jnp.int32) - by_rank).reshape(-1)


def _fold_rows(
    start: Array, size: Array, num_rows: int, step: Callable[[Array, Array, Any], Any], carry: Any
) -> Any:
    """Folds `step(first row, [B, 1] bool of the rows that count, carry)` over one group's rows."""
    block = min(BLOCK_ROWS, num_rows)

    def body(i, carry):
        wanted = start + i * block
        first = jnp.minimum(wanted, num_rows - block)
        row = first + lax.iota(jnp.int32, block)
        counts = (row >= wanted) & (row < start + size)
        return step(first, counts[:, None], carry)

    return lax.fori_loop(0, (size + block - 1) // block, body, carry)


def _read(array: Array, first: Array) -> Array:
    block = lax.dynamic_slice_in_dim(array, first, min(BLOCK_ROWS, array.shape[0]))
    # XLA's CPU backend does not vectorise a loop into which a dynamic slice was fused: the gate
    # took 5 times as long without the barrier.
    return lax.optimization_barrier(block)


def _write(array: Array, first: Array, counts: Array, block: Array) -> Array:
    block = jnp.where(counts, block.astype(array.dtype), _read(array, first))
    return lax.dynamic_update_slice_in_dim(array, block, first, axis=0)


def _matmul_blocks(rows, weights, sizes, virtual_ranks, transposed):
    num_rows = rows.shape[0]
    starts = _group_starts(sizes, virtual_ranks, num_rows)
    contracted = 1 if transposed else 0

    def expert(e, out):
        matrix = lax.dynamic_index_in_dim(weights, e, keepdims=False)

        def step(first, counts, out):
            product = lax.dot_general(
                _read(rows, first),
                matrix,
                (((1,), (contracted,)), ((), ())),
                preferred_element_type=sum_dtype(rows.dtype),
            )
            return _write(out, first, counts, product)

        return _fold_rows(starts[e], sizes[e], num_rows, step, out)

    width = weights.shape[1 if transposed else 2]
    out = _zeros((num_rows, width), rows.dtype, rows)
    return lax.fori_loop(0, weights.shape[0], expert, out)


def _outer_blocks(left, right, sizes, virtual_ranks):
    num_rows, num_experts = left.shape[0], sizes.shape[0]
    starts = _group_starts(sizes, virtual_ranks, num_rows)
    wide = sum_dtype(left.dtype)

    def expert(e, out):
        def step(first, counts, total):
            # Both sides: what lies past the group may be NaN on either.
            a, b = (jnp.where(counts, _read(side, first), 0) for side in (left, right))
            dims = (((0,), (0,)), ((), ()))
            return total + lax.dot_general(a, b, dims, preferred_element_type=wide)

        total = _zeros((left.shape[1], right.shape[1]), wide, left)
        total = _fold_rows(starts[e], sizes[e], num_rows, step, total)
        return lax.dynamic_update_index_in_dim(out, total.astype(out.dtype), e, axis=0)

    out = _zeros((num_experts, left.shape[1], right.shape[1]), left.dtype, left)
    return lax.fori_loop(0, num_experts, expert, out)


def _swiglu_block(gate_up: Array, row_s: Array) -> Array:
    """silu(gate) * up * row_s in float32, rounded to gate_up's dtype."""
    wide = sum_dtype(gate_up.dtype)
    gate, up = jnp.split(gate_up.astype(wide), 2, axis=1)
    return (jax.nn.silu(gate) * up * row_s.astype(wide)[:, None]).astype(gate_up.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _swiglu(virtual_ranks: int, gate_up: Array, row_s: Array, sizes: Array) -> Array:
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2

    def step(first, counts, out):
        return _write(out, first, counts, _swiglu_block(_read(gate_up, first), _read(row_s, first)))

    out = _zeros((num_rows, width), gate_up.dtype, gate_up)
    return _fold_ranks(sizes, virtual_ranks, num_rows, step, out)


def _swiglu_fwd(virtual_ranks, gate_up, row_s, sizes):
    return _swiglu(virtual_ranks, gate_up, row_s, sizes), (gate_up, row_s, sizes)


def _swiglu_bwd(virtual_ranks, saved, cotangent):
    gate_up, row_s, sizes = saved

    def step(first, counts, grads):
        _, pull = jax.vjp(_swiglu_block, _read(gate_up, first), _read(row_s, first))
        d_gate_up, d_row_s = pull(_read(cotangent, first))
        return (
            _write(grads[0], first, counts, d_gate_up),
            _write(grads[1], first, counts[:, 0], d_row_s),
        )

    zeros = tuple(_zeros(array.shape, array.dtype, array) for array in (gate_up, row_s))
    d_gate_up, d_row_s = _fold_ranks(sizes, virtual_ranks, gate_up.shape[0], step, zeros)
    return d_gate_up, d_row_s, None


_swiglu.defvjp(_swiglu_fwd, _swiglu_bwd)


def _fold_ranks(sizes, virtual_ranks, num_rows, step, carry):
    """Folds `step` over the real rows of every virtual rank, whichever expert they belong to."""
    filled = jnp.sum(sizes.reshape(virtual_ranks, -1), axis=1, dtype=jnp.int32)

    def one(v, carry):
        start = v * (num_rows // virtual_ranks)
        return _fold_rows(start, filled[v], num_rows, step, carry)

    return lax.fori_loop(0, virtual_ranks, one, carry)


# Engine "ragged_dot".


def _real(array: Array, sizes: Array) -> Array:
    """Zeroes what lies past the last group: ragged_dot's lowerings may multiply it with zero."""
    row = lax.iota(jnp.int32, array.shape[0])[:, None]
    return jnp.where(row < jnp.sum(sizes), array, 0)


def _matmul_ragged(rows, weights, sizes, virtual_ranks, transposed):
    if transposed:
        weights = jnp.swapaxes(weights, 1, 2)
    parts = [
        lax.ragged_dot(_real(r, s), w, s, preferred_element_type=sum_dtype(rows.dtype))
        for r, w, s in zip(*_split(virtual_ranks, rows, weights, sizes), strict=True)
    ]
    return jnp.concatenate(parts).astype(rows.dtype)


def _outer_ragged(left, right, sizes, virtual_ranks):
    numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[],
    )
    parts = [
        lax.ragged_dot_general(
            _real(a, s), _real(b, s), s, numbers, preferred_element_type=sum_dtype(left.dtype)
        )
        for a, b, s in zip(*_split(virtual_ranks, left, right, sizes), strict=True)
    ]
    return jnp.concatenate(parts).astype(left.dtype)


def _split(virtual_ranks: int, *arrays: Array) -> list[list[Array]]:
    return [jnp.split(array, virtual_ranks) for array in arrays]
