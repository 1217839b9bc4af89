"""The SwiGLU experts over rows sorted by expert, at the cost of the real rows only.

With the engines of blocks both directions are one loop over blocks of rows, which takes a block
through both matmuls (on CPU while it is in the cache). With "pallas" and "ragged_dot" they are
grouped matmuls with elementwise passes between them. Between forward and backward gate and up of
every row are kept.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jax_moe import _pallas_operands
from jax_moe._arguments import arrays, integer
from jax_moe._grouped_matmul import (
    BLOCK_ROWS,
    Engine,
    Engines,
    check_operands,
    grouped_matmul,
    resolve_engines,
    with_engine,
)
from jax_moe._implementation import vary_alike
from jax_moe._plan import Tail, check_tail
from jax_moe._rounding import sum_dtype
from jax_moe._row_blocks import (
    fold_rows,
    group_starts,
    read,
    read_counting,
    write,
    zeros,
)


def grouped_swiglu(
    rows: Float[Array, "rows hidden"],
    row_s: Float[Array, " rows"],
    gate_up: Float[Array, "experts hidden twice_width"],
    down: Float[Array, "experts width hidden"],
    group_sizes: Int[Array, " experts"],
    *,
    virtual_ranks: int = 1,
    tail: Tail = "zero",
    engine: Engine | None = None,
) -> Float[Array, "rows hidden"]:
    """Takes each expert's rows x through (silu(x gate) * (x up) * s) down.

    The gradients of an expert without rows are exact zeros. Rows past the last group reach no
    result, whatever they hold.

    Args:
      rows: floating point [V*C, H], sorted by expert within each virtual rank.
      row_s: floating point [V*C], a factor per row: the gate weight of its (token, k). It goes in
        before the down projection, where a row is narrowest.
      gate_up: the rows' dtype [V*E, H, 2*W], the gate in the first W columns.
      down: the same [V*E, W, H].
      group_sizes: as in `grouped_matmul`.
      virtual_ranks: V.
      tail: "zero", or "undefined" where nothing reads the result or the rows' gradient past the
        last group: with "pallas" those rows are then not written.
      engine: as in `grouped_matmul`; only "ragged_dot" can be differentiated twice.

    Returns:
      [V*C, H] of the rows' dtype; zero past the last group.

    Raises:
      TypeError: an operand is no array, or virtual_ranks no integer.
      ValueError: the shapes or dtypes do not fit each other, or the engine.
    """
    rows, row_s, gate_up, down, group_sizes = arrays(
        rows=rows, row_s=row_s, gate_up=gate_up, down=down, group_sizes=group_sizes
    )
    virtual_ranks = integer("virtual_ranks", virtual_ranks, 1)
    check_operands(rows, gate_up, group_sizes, virtual_ranks)
    wanted = (gate_up.shape[0], gate_up.shape[2] // 2, rows.shape[1])
    if gate_up.shape[2] % 2 or down.shape != wanted or down.dtype != rows.dtype:
        raise ValueError(
            f"grouped_swiglu with gate_up {gate_up.dtype}{list(gate_up.shape)} and down "
            f"{down.dtype}{list(down.shape)}: gate_up must be [V*E, H, 2*W], and down [V*E, W, H] "
            "of the rows' dtype."
        )
    if row_s.shape != rows.shape[:1]:
        raise ValueError(f"row_s has shape {row_s.shape}: it must be ({len(rows)},), one a row.")
    check_tail(tail)
    engines = resolve_engines(engine, rows, gate_up, down)
    if engine != "ragged_dot":
        operands = vary_alike(rows, row_s, gate_up, down, group_sizes)
        return _swiglu((engines, virtual_ranks, tail == "zero"), *operands)
    matmul = functools.partial(
        grouped_matmul, group_sizes=group_sizes, virtual_ranks=virtual_ranks, engine=engine
    )
    return matmul(gate(matmul(rows, gate_up), row_s), down)


def gate(gate_up: Float[Array, "rows twice_width"], row_s: Float[Array, " rows"]) -> Array:
    """silu(gate) * up * row_s in float32, rounded once to gate_up's dtype: [C, 2*W] -> [C, W]."""
    wide = sum_dtype(gate_up.dtype)
    gate, up = jnp.split(gate_up.astype(wide), 2, axis=1)
    return (jax.nn.silu(gate) * up * row_s.astype(wide)[:, None]).astype(gate_up.dtype)


def _matmul(a: Array, b: Array, contract: tuple[int, int], dtype=None) -> Array:
    """A product of two matrices, added in float32 and returned in `dtype` (a's by default)."""
    dims = (((contract[0],), (contract[1],)), ((), ()))
    product = lax.dot_general(a, b, dims, preferred_element_type=sum_dtype(a.dtype))
    return product.astype(dtype or a.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _swiglu(static: tuple[Engines, int, bool], rows, row_s, gate_up, down, sizes):
    engines, *settings = static
    operands = rows, row_s, gate_up, down, sizes
    return with_engine(engines, _forward, (*settings, False), *operands)[0]


def _swiglu_fwd(static, rows, row_s, gate_up, down, sizes):
    engines, *settings = static
    operands = rows, row_s, gate_up, down, sizes
    out, inner = with_engine(engines, _forward, (*settings, True), *operands)
    return out, (*operands, inner)


def _swiglu_bwd(static, saved, cotangent):
    return *with_engine(static[0], _backward, static[1:], *saved, cotangent), None


_swiglu.defvjp(_swiglu_fwd, _swiglu_bwd)


def _forward(engine: Engine, settings: tuple[int, bool, bool], *operands):
    """The result, and with the last of the settings gate and up of every row, [V*C, 2*W]."""
    virtual_ranks, zero_tail, keep = settings
    if engine == "pallas":
        return _forward_pallas((virtual_ranks, zero_tail), *operands)[: 1 + keep]
    return _forward_blocks((BLOCK_ROWS[engine], virtual_ranks), keep, *operands)


def _backward(engine: Engine, settings: tuple[int, bool], *saved_and_cotangent):
    if engine == "pallas":
        return _backward_pallas(settings, *saved_and_cotangent)
    return _backward_blocks((BLOCK_ROWS[engine], settings[0]), *saved_and_cotangent)


# Engines "blocks" and "large_blocks".


def _forward_blocks(static, keep, rows, row_s, gate_up, down, sizes):
    (block, virtual_ranks), num_rows = static, rows.shape[0]
    starts = group_starts(sizes, virtual_ranks, num_rows)

    def expert(e, outs):
        w_in, w_out = (lax.dynamic_index_in_dim(w, e, keepdims=False) for w in (gate_up, down))

        def step(first, counts, outs):
            x, s = (read(a, first, len(counts)) for a in (rows, row_s))
            inner = _matmul(x, w_in, (1, 0))
            out = _matmul(gate(inner, s), w_out, (1, 0))
            blocks = (out, inner)[: len(outs)]
            return tuple(write(o, first, counts, b) for o, b in zip(outs, blocks, strict=True))

        return fold_rows(block, starts[e], sizes[e], num_rows, step, outs)

    widths = (rows.shape[1], gate_up.shape[2]) if keep else (rows.shape[1],)
    outs = tuple(zeros((num_rows, width), rows.dtype, rows) for width in widths)
    return lax.fori_loop(0, gate_up.shape[0], expert, outs)


def _backward_blocks(static, rows, row_s, gate_up, down, sizes, inner, cotangent):
    (block, virtual_ranks), num_rows = static, rows.shape[0]
    wide = sum_dtype(rows.dtype)
    starts = group_starts(sizes, virtual_ranks, num_rows)

    def expert(e, grads):
        w_in, w_out = (lax.dynamic_index_in_dim(w, e, keepdims=False) for w in (gate_up, down))
        totals = tuple(zeros(w.shape, wide, rows) for w in (w_in, w_out))
        step = functools.partial(_backward_step, (rows, row_s, inner, cotangent), w_in, w_out)
        carry = fold_rows(block, starts[e], sizes[e], num_rows, step, (*grads[:2], *totals))
        d_weights = (
            lax.dynamic_update_index_in_dim(d_w, total.astype(d_w.dtype), e, axis=0)
            for d_w, total in zip(grads[2:], carry[2:], strict=True)
        )
        return *carry[:2], *d_weights

    grads = tuple(zeros(a.shape, a.dtype, rows) for a in (rows, row_s, gate_up, down))
    return lax.fori_loop(0, gate_up.shape[0], expert, grads)


def _backward_step(operands, w_in, w_out, first, counts, carry):
    """One block: adds to the weights' gradients and writes the rows' ones."""
    d_rows, d_row_s, d_in, d_out = carry
    wide = d_in.dtype
    # All zero in the rows that do not count, so that they add nothing to the weights' gradients.
    x, inner, d_y = (read_counting(operands[i], first, counts) for i in (0, 2, 3))
    s = read_counting(operands[1], first, counts[:, 0])
    hidden, pull = jax.vjp(gate, inner, s)
    d_inner, d_s = pull(_matmul(d_y, w_out, (1, 1)))
    d_in += _matmul(x, d_inner, (0, 0), wide)
    d_out += _matmul(hidden, d_y, (0, 0), wide)
    d_rows = write(d_rows, first, counts, _matmul(d_inner, w_in, (1, 1)))
    return d_rows, write(d_row_s, first, counts[:, 0], d_s), d_in, d_out


# Engine "pallas".


def _forward_pallas(static, rows, row_s, gate_up, down, sizes):
    product, _ = _products(static, sizes, len(rows))
    inner = product(rows, gate_up, transposed=False, zero_tail=False)
    return product(gate(inner, row_s), down, transposed=False), inner


def _backward_pallas(static, rows, row_s, gate_up, down, sizes, inner, cotangent):
    product, starts = _products(static, sizes, len(rows))
    hidden, pull = jax.vjp(gate, inner, row_s)
    d_inner, d_s = pull(product(cotangent, down, transposed=True, zero_tail=False))
    d_rows = product(d_inner, gate_up, transposed=True)
    outer = _pallas_operands.kernels().outer
    d_in, d_out = (outer(*pair, starts, sizes) for pair in ((rows, d_inner), (hidden, cotangent)))
    # Past the last group it was computed from rows that hold anything.
    virtual_ranks = static[0]
    row = lax.iota(jnp.int32, len(rows)).reshape(virtual_ranks, -1)
    end = (starts + sizes).reshape(virtual_ranks, -1)[:, -1:]
    return d_rows, jnp.where((row < end).reshape(-1), d_s, 0), d_in, d_out


def _products(static, sizes, num_rows):
    """The grouped product with this call's groups, and the groups' first rows."""
    virtual_ranks, zero_tail = static
    starts = group_starts(sizes, virtual_ranks, num_rows)
    product = functools.partial(
        _pallas_operands.kernels().product,
        starts=starts,
        sizes=sizes,
        virtual_ranks=virtual_ranks,
        zero_tail=zero_tail,
    )
    return product, starts
