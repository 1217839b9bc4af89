"""Other libraries' grouped matmuls, for `jax_moe.bench.matmul`; none is a dependency."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

NAMES = ("tokamax", "tokamax_tuned", "jax_mosaic")
# The best of a few tries at 32 experts of 1024 rows, K x N = 7168 x 4096.
TOKAMAX = {"block_m": 128, "block_n": 64, "block_k": 128, "num_stages": 4, "grid_tile_width": 8}
JAX_MOSAIC: dict[str, Any] = {
    "block_m": 128,
    "block_n": 128,
    "block_k": 64,
    "max_concurrent_steps": 4,
    "grid_block_n": 8,
}


def operation(peer: str, name: str) -> Callable:
    """One of the bench's operations as a function of (rows, weights, cotangent, group sizes).

    Raises:
      NotImplementedError: the library is not there; the message says why.
    """
    try:
        multiply = _jax_mosaic(name) if peer == "jax_mosaic" else _tokamax(peer, name)
    except ImportError as error:
        raise NotImplementedError(f"{peer} cannot be imported: {error}") from error

    def apply(x, w, dy, sizes):
        factors = {"product": (x, w), "rows' gradient": (dy, w), "weights' gradient": (x, dy)}
        return multiply(*factors[name], sizes)

    return apply


def _jax_mosaic(name: str) -> Callable:
    from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu, transposed_ragged_dot_mgpu

    if name == "weights' gradient":
        dot = transposed_ragged_dot_mgpu.transposed_ragged_dot
    else:
        transposed = name == "rows' gradient"
        dot = functools.partial(ragged_dot_mgpu.ragged_dot, transpose_rhs=transposed)
    return lambda left, right, sizes: dot(left, right, group_sizes=sizes, **JAX_MOSAIC)


def _tokamax(peer: str, name: str) -> Callable:
    from tokamax._src.ops.ragged_dot import base, pallas_mosaic_gpu  # type: ignore[import]

    config: Any = None
    if peer == "tokamax_tuned":
        config = pallas_mosaic_gpu.Config(split_k=1, persistent=True, grid_minor_dim=0, **TOKAMAX)
    dot = pallas_mosaic_gpu.PallasMosaicGpuRaggedDot(config=config)
    numbers = {
        "product": base.DEFAULT_RAGGED_DOT_DIM_NUMS,
        "rows' gradient": base.TRANS_RHS_RAGGED_DOT_DIM_NUMS,
        "weights' gradient": base.RAGGED_CONTRACTING_DOT_DIM_NUMS,
    }[name]
    return lambda left, right, sizes: dot(
        left, right, group_sizes=sizes, ragged_dot_dimension_numbers=numbers
    )


def from_product(name: str, multiply: Callable) -> Callable:
    """The same of `multiply(rows, weights, group sizes)`, by differentiating it."""

    def apply(x, w, dy, sizes):
        if name == "product":
            return multiply(x, w, sizes)
        if name == "rows' gradient":
            return jax.vjp(lambda x: multiply(x, w, sizes), x)[1](dy)[0]
        return jax.vjp(lambda w: multiply(x, w, sizes), w)[1](dy)[0]

    return apply
