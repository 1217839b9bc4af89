"""Other libraries' grouped matmuls, for `jax_moe.bench.matmul`; none is a dependency."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

NAMES = ("tokamax", "tokamax_tuned", "jax_mosaic")
# The best of a few tries at 32 experts of 1024 rows, K x N = 7168 x 4096.
TOKAMAX = {"block_m": 128, "block_n": 64, "block_k": 128, "num_stages": 4, "grid_tile_width": 8}
JAX_MOSAIC = {"block_m": 128, "block_n": 128, "block_k": 64, "max_concurrent_steps": 4}


def operation(peer: str, name: str) -> Callable:
    """One of the bench's operations as a function of (rows, weights, cotangent, group sizes).

    Raises:
      NotImplementedError: the library is not there; the message says why.
    """
    try:
        return _jax_mosaic(name) if peer == "jax_mosaic" else _tokamax(name, peer)
    except ImportError as error:
        raise NotImplementedError(f"{peer} cannot be imported: {error}") from error


def _jax_mosaic(name: str) -> Callable:
    from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu, transposed_ragged_dot_mgpu

    dot = functools.partial(ragged_dot_mgpu.ragged_dot, grid_block_n=8, **JAX_MOSAIC)
    outer = functools.partial(
        transposed_ragged_dot_mgpu.transposed_ragged_dot, grid_block_n=8, **JAX_MOSAIC
    )
    return {
        "product": lambda x, w, dy, sizes: dot(x, w, group_sizes=sizes),
        "rows' gradient": lambda x, w, dy, sizes: dot(dy, w, group_sizes=sizes, transpose_rhs=True),
        "weights' gradient": lambda x, w, dy, sizes: outer(x, dy, group_sizes=sizes),
    }[name]


def _tokamax(name: str, peer: str) -> Callable:
    from tokamax._src.ops.ragged_dot import base, pallas_mosaic_gpu  # type: ignore[import]

    make: Any = pallas_mosaic_gpu.PallasMosaicGpuRaggedDot
    op = make()
    if peer == "tokamax_tuned":
        config = pallas_mosaic_gpu.Config(split_k=1, persistent=True, grid_minor_dim=0, **TOKAMAX)
        one = make(config=config)
        op = make(
            config=config,
            vjp=functools.partial(base.vjp, dlhs_ragged_dot=one, drhs_ragged_dot=one),
        )

    return from_product(name, lambda x, w, sizes: op(x, w, group_sizes=sizes))


def from_product(name: str, multiply: Callable) -> Callable:
    """The same of `multiply(rows, weights, group sizes)`, by differentiating it."""

    def apply(x, w, dy, sizes):
        if name == "product":
            return multiply(x, w, sizes)
        if name == "rows' gradient":
            return jax.vjp(lambda x: multiply(x, w, sizes), x)[1](dy)[0]
        return jax.vjp(lambda w: multiply(x, w, sizes), w)[1](dy)[0]

    return apply
