"""Other libraries' grouped matmuls, for `jax_moe.bench.matmul`; none is a dependency."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

NAMES = ("tokamax", "tokamax_tuned", "jax_mosaic", "torch")
EAGER = "torch"  # a function of the host, which JAX cannot compile
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
    make = {"jax_mosaic": _jax_mosaic, "torch": _torch}.get(peer, functools.partial(_tokamax, peer))
    try:
        multiply = make(name)
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


def _torch(name: str) -> Callable:
    import torch  # type: ignore[import]

    if not torch.cuda.is_available():
        raise NotImplementedError("torch finds no GPU")

    def multiply(left, right, sizes):
        # Shared, not copied; torch's stream waits until JAX has written them.
        left, right, sizes = map(torch.from_dlpack, (left, right, sizes))
        left = left.mT if name == "weights' gradient" else left
        right = right.mT if name == "rows' gradient" else right
        ends = sizes.cumsum(0, dtype=torch.int32)
        return _Queued(torch._grouped_mm(left, right, offs=ends), torch.cuda.synchronize)

    return multiply


@dataclasses.dataclass(frozen=True)
class _Queued:
    """A tensor that torch's stream has yet to write; JAX knows nothing of that stream."""

    tensor: Any
    wait: Callable[[], None]

    def block_until_ready(self) -> _Queued:
        """What `jax.block_until_ready` calls."""
        self.wait()
        return self

    def __jax_array__(self) -> jax.Array:
        return jnp.from_dlpack(self.block_until_ready().tensor)


def from_product(name: str, multiply: Callable) -> Callable:
    """The same of `multiply(rows, weights, group sizes)`, by differentiating it."""

    def apply(x, w, dy, sizes):
        if name == "product":
            return multiply(x, w, sizes)
        if name == "rows' gradient":
            return jax.vjp(lambda x: multiply(x, w, sizes), x)[1](dy)[0]
        return jax.vjp(lambda w: multiply(x, w, sizes), w)[1](dy)[0]

    return apply
