"""Matmul over rows sorted by expert, at the cost of the real rows only.

Row buffers are sized for a capacity that is seldom filled. The product and its gradients walk over
the rows that are there: what lies past the last group costs nothing but a zero fill, and whatever
it holds (NaN, say) reaches no result.

`jax.lax.ragged_dot` multiplies every row with every expert, on CPU and, in effect, on GPUs. The
engine "pallas" is a pair of kernels for Hopper GPUs. The others hold, in a loop over the experts, a
loop over blocks of rows, with a trip count taken from the group's size, which on GPUs the host
follows. docs/layer.md has a CPU's times, docs/results.md an H200's. Compile time does not depend on
the number of experts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jax_moe import _pallas_operands, _row_blocks
from jax_moe._arguments import arrays, integer
from jax_moe._implementation import vary_alike
from jax_moe._rounding import sum_dtype

Engine = Literal["blocks", "large_blocks", "pallas", "ragged_dot"]
Engines = tuple[Engine, Engine]  # that on CPU devices, and that on others
# Fewer rows leave the matmul short of work per weight read, more are wasted on small groups.
BLOCK_ROWS: dict[Engine, int] = {"blocks": 64, "large_blocks": 1024}
# Rows to a multiple of which groups are best padded, for engines that care.
ROW_ALIGNMENT: dict[Engine, int] = {"pallas": _pallas_operands.ALIGNMENT}


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
      group_sizes: int32 [V*E], rows of each expert, none negative; a virtual rank's sum is at most
        C. Sizes that break this are not noticed: the result is then not defined.
      virtual_ranks: V.
      engine: "blocks" (a loop over blocks of 64 rows), "large_blocks" (of 1024), "pallas" (bfloat16
        on a Hopper GPU; K and N multiples of 128, V*C of 8) or "ragged_dot". None takes "blocks"
        on CPU devices, else "pallas" where it fits, else "large_blocks".

    Returns:
      [V*C, N] of the same dtype; zero past the last group.

    Raises:
      TypeError: an operand is no array, or virtual_ranks no integer.
      ValueError: the shapes or dtypes do not fit each other, or the engine.
    """
    rows, weights, group_sizes = arrays(rows=rows, weights=weights, group_sizes=group_sizes)
    virtual_ranks = integer("virtual_ranks", virtual_ranks, 1)
    check_operands(rows, weights, group_sizes, virtual_ranks)
    engines = resolve_engines(engine, rows, weights)
    rows, weights, group_sizes = vary_alike(rows, weights, group_sizes)
    return _matmul((engines, virtual_ranks, False), rows, weights, group_sizes)


def resolve_engines(engine: Engine | None, rows: Array, *weights: Array) -> Engines:
    """The engine itself, or the choice where it is None.

    Raises:
      ValueError: no such engine, or it does not take these operands.
    """
    if engine is None:
        return "blocks", choose_engine(_pallas_operands.local_gpu(), rows, *weights)
    if engine not in get_args(Engine):
        raise ValueError(f"engine={engine!r}: must be one of {get_args(Engine)} or None.")
    obstacle = _pallas_operands.obstacle(rows, *weights) if engine == "pallas" else None
    if obstacle:
        raise ValueError(f'engine="pallas" with {obstacle}; None takes an engine that fits.')
    return engine, engine


def choose_engine(device: Any, rows: Any, *weights: Any) -> Engine:
    """The fastest engine for such shapes and dtypes on a device, or on a Hopper GPU for None."""
    if device is not None and device.platform == "cpu":
        return "blocks"
    is_hopper = device is None or getattr(device, "compute_capability", "").startswith("9.")
    fits = is_hopper and not _pallas_operands.obstacle(rows, *weights)
    return "pallas" if fits else "large_blocks"


def with_engine(engines: Engines, function: Callable, settings: Any, *operands: Array) -> Any:
    """Calls function(engine, settings, *operands) with the engine of the platform that runs it."""
    if engines[0] == engines[1]:
        return function(engines[0], settings, *operands)
    return _with_engine_of_platform(engines, function, settings, *operands)


# The jit is for calls outside of any: the platform is then the operands', not JAX's default one.
@functools.partial(jax.jit, static_argnums=(0, 1, 2), inline=True)
def _with_engine_of_platform(engines, function, settings, *operands):
    on_cpu, elsewhere = (functools.partial(function, engine, settings) for engine in engines)
    return lax.platform_dependent(*operands, cpu=on_cpu, default=elsewhere)


def check_operands(rows: Array, weights: Array, group_sizes: Array, virtual_ranks: int) -> None:
    """Refuses operands of a grouped matmul that do not fit each other."""
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
    if rows.shape[0] % virtual_ranks or weights.shape[0] % virtual_ranks:
        raise ValueError(f"{text}: virtual_ranks must divide both the rows and the experts.")


# The product and its weight gradient are each other's derivatives (with the product of the
# transposed weights for the rows), so that two functions close the set and any order of
# derivative exists. The engine is chosen inside of them: a derivative of the choice would keep what
# either engine's backward pass needs.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(static: tuple[Engines, int, bool], rows: Array, weights: Array, sizes: Array) -> Array:
    """Rows [V*C, K] x [V*E, K, N]; with `transposed` rows [V*C, N] x the transposes."""
    return with_engine(static[0], _matmul_by, static[1:], rows, weights, sizes)


def _matmul_by(engine: Engine, settings: tuple[int, bool], rows, weights, sizes) -> Array:
    virtual_ranks, transposed = settings
    if engine == "ragged_dot":
        return _matmul_ragged(rows, weights, sizes, virtual_ranks, transposed)
    if engine == "pallas":
        return _pallas_operands.kernels().product(
            rows,
            weights,
            _row_blocks.group_starts(sizes, virtual_ranks, len(rows)),
            sizes,
            transposed=transposed,
            virtual_ranks=virtual_ranks,
            zero_tail=True,
        )
    return _matmul_blocks(BLOCK_ROWS[engine], rows, weights, sizes, virtual_ranks, transposed)


def _matmul_fwd(static, rows, weights, sizes):
    return _matmul(static, rows, weights, sizes), (rows, weights, sizes)


def _matmul_bwd(static, saved, cotangent):
    engines, virtual_ranks, transposed = static
    rows, weights, sizes = saved
    d_rows = _matmul((engines, virtual_ranks, not transposed), cotangent, weights, sizes)
    left, right = (cotangent, rows) if transposed else (rows, cotangent)
    return d_rows, _outer((engines, virtual_ranks), left, right, sizes), None


_matmul.defvjp(_matmul_fwd, _matmul_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _outer(static: tuple[Engines, int], left: Array, right: Array, sizes: Array) -> Array:
    """Per expert left^T right over its rows: [V*C, K], [V*C, N] -> [V*E, K, N]."""
    return with_engine(static[0], _outer_by, static[1], left, right, sizes)


def _outer_by(engine: Engine, virtual_ranks: int, left, right, sizes) -> Array:
    if engine == "ragged_dot":
        return _outer_ragged(left, right, sizes, virtual_ranks)
    if engine == "pallas":
        starts = _row_blocks.group_starts(sizes, virtual_ranks, len(left))
        return _pallas_operands.kernels().outer(left, right, starts, sizes)
    return _outer_blocks(BLOCK_ROWS[engine], left, right, sizes, virtual_ranks)


def _outer_fwd(static, left, right, sizes):
    return _outer(static, left, right, sizes), (left, right, sizes)


def _outer_bwd(static, saved, cotangent):
    left, right, sizes = saved
    engines, virtual_ranks = static
    d_left = _matmul((engines, virtual_ranks, True), right, cotangent, sizes)
    d_right = _matmul((engines, virtual_ranks, False), left, cotangent, sizes)
    return d_left, d_right, None


_outer.defvjp(_outer_fwd, _outer_bwd)


# Engines "blocks" and "large_blocks".


def _matmul_blocks(block, rows, weights, sizes, virtual_ranks, transposed):
    num_rows = rows.shape[0]
    starts = _row_blocks.group_starts(sizes, virtual_ranks, num_rows)
    contracted = 1 if transposed else 0

    def expert(e, out):
        matrix = lax.dynamic_index_in_dim(weights, e, keepdims=False)

        def step(first, counts, out):
            product = lax.dot_general(
                _row_blocks.read(rows, first, len(counts)),
                matrix,
                (((1,), (contracted,)), ((), ())),
                preferred_element_type=sum_dtype(rows.dtype),
            )
            return _row_blocks.write(out, first, counts, product)

        return _row_blocks.fold_rows(block, starts[e], sizes[e], num_rows, step, out)

    width = weights.shape[1 if transposed else 2]
    out = _row_blocks.zeros((num_rows, width), rows.dtype, rows)
    return lax.fori_loop(0, weights.shape[0], expert, out)


def _outer_blocks(block, left, right, sizes, virtual_ranks):
    num_rows, num_experts = left.shape[0], sizes.shape[0]
    starts = _row_blocks.group_starts(sizes, virtual_ranks, num_rows)
    wide = sum_dtype(left.dtype)

    def expert(e, out):
        def step(first, counts, total):
            # Both sides: what lies past the group may be NaN on either.
            a, b = (_row_blocks.read_counting(side, first, counts) for side in (left, right))
            dims = (((0,), (0,)), ((), ()))
            return total + lax.dot_general(a, b, dims, preferred_element_type=wide)

        total = _row_blocks.zeros((left.shape[1], right.shape[1]), wide, left)
        total = _row_blocks.fold_rows(block, starts[e], sizes[e], num_rows, step, total)
        return lax.dynamic_update_index_in_dim(out, total.astype(out.dtype), e, axis=0)

    out = _row_blocks.zeros((num_experts, left.shape[1], right.shape[1]), left.dtype, left)
    return lax.fori_loop(0, num_experts, expert, out)


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
