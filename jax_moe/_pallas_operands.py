"""What the kernels of `_pallas_matmul` take; here, because importing those takes a second."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

TILE = 128  # of which both widths of the weights are multiples
ALIGNMENT = 8  # of the row at which a copy begins


def kernels() -> ModuleType:
    """The kernels, imported when they are first needed: on a GPU."""
    from jax_moe import _pallas_matmul

    return _pallas_matmul


def local_gpu() -> Any:
    """This process's first GPU, whatever JAX's default backend is; its first device without any."""
    try:
        return jax.local_devices(backend="gpu")[0]
    except RuntimeError:
        return jax.local_devices()[0]


def obstacle(rows: Any, *weights: Any) -> str | None:
    """Why the kernels do not take these operands, or None if they do."""
    odd = [n for w in weights for n in w.shape[1:] if n % TILE]
    if rows.dtype != jnp.bfloat16:
        return f"{rows.dtype} operands: they must be bfloat16"
    if rows.shape[0] % ALIGNMENT or not rows.shape[0]:
        return f"{rows.shape[0]} rows: they must be a multiple of {ALIGNMENT}"
    if odd:
        return f"weights of width {odd[0]}: both of their widths must be multiples of {TILE}"
    return None
