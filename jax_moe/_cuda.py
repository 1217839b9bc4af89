"""Groups on GPUs: their set-up, their memory, and what their kernels report.

The Python half of `xla_ffi/cuda_*`. Everything here is eager: it runs when a group is built, when a
program is lowered, or when the user asks, never while a program runs.
"""

from __future__ import annotations

import atexit
import logging
import os
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jax_moe import _ffi

if TYPE_CHECKING:
    from jax_moe._group import ExpertGroup

OPERATIONS = ("plan", "dispatch", "combine")
MAX_FLIGHT_TIMEOUT_S = 10.0
OLDEST_CAPABILITY = (9, 0)

_log = logging.getLogger("jax_moe")
_native = _ffi.cuda
_refusals: dict[int, str] = {}  # by group key: why the runtime could not be set up
_watched = False


def obstacle(group: ExpertGroup) -> str | None:
    """Why the PTX kernels cannot serve the group, if so."""
    return _wrong_devices(group) or _refusals.get(group.key)


def _wrong_devices(group: ExpertGroup) -> str | None:
    if not isinstance(group.mesh, Mesh):
        return None  # An abstract mesh is only lowered.
    others = sorted({device.platform for device in group.devices if not is_cuda(device)})
    if others:
        return f"its devices are of platform {', '.join(others)}, not cuda"
    old = {device.compute_capability for device in group.devices}
    old = sorted(c for c in old if tuple(map(int, c.split("."))) < OLDEST_CAPABILITY)
    if old:
        return f"its GPUs have compute capability {', '.join(old)}, and 9.0 (Hopper) is the least"
    processes = {device.process_index for device in group.devices}
    if len(processes) > 1:
        return f"it spans {len(processes)} processes, and the ptx kernels meet within one as yet"
    most = _native.limits()["ranks"]
    if group.num_ranks > most:
        return f"it has {group.num_ranks} ranks, and {most} is the most"
    return None


def is_cuda(device: jax.Device) -> bool:  # pyright: ignore[reportInvalidTypeForm]
    """Whether it is an NVIDIA GPU."""
    return device.platform == "gpu" and "rocm" not in device.client.platform_version.lower()


def serves(group: ExpertGroup) -> bool:
    """Whether the group is set up on GPUs."""
    return isinstance(group.mesh, Mesh) and obstacle(group) is None


def set_up(group: ExpertGroup) -> None:
    """Loads the kernels and registers the group, or notes why that cannot be done.

    A group that is known already gets the timeout; if it is closed or broken it is rebuilt.
    """
    if not isinstance(group.mesh, Mesh) or _wrong_devices(group):
        return
    try:
        register(group)
    except NotImplementedError as error:
        _refusals[group.key] = str(error)
    else:
        _refusals.pop(group.key, None)


def register(group: ExpertGroup) -> None:
    """Registers the group natively.

    Raises:
      NotImplementedError: driver, GPU or peer access do not suffice; the message says what.
    """
    global _watched
    _native.register_group(
        group.key,
        str(group),
        group.num_ranks,
        group.virtual_ranks,
        _ordinals(group),
        *_timeouts(group.timeout_s, None),
    )
    if not _watched:
        # The watching thread must end before the driver does.
        atexit.register(_native.stop_monitor)
        _watched = True


def _ordinals(group: ExpertGroup) -> list[list[int]]:
    """CUDA ordinals of each group instance, in group order."""
    names = (*group.other_axes, *group.axes)
    order = [group.mesh.axis_names.index(name) for name in names]
    assert isinstance(group.mesh, Mesh)
    devices = group.mesh.devices.transpose(order).reshape(-1, group.num_devices)
    return [[device.local_hardware_id for device in instance] for instance in devices]


def _timeouts(timeout_s: float, flight_timeout_s: float | None) -> tuple[float, float]:
    if flight_timeout_s is None:
        flight_timeout_s = min(timeout_s, MAX_FLIGHT_TIMEOUT_S)
    return float(timeout_s), float(flight_timeout_s)


def set_timeouts(group: ExpertGroup, timeout_s: float, flight_timeout_s: float | None) -> None:
    """Sets the deadlines of calls from now on, those that wait at present included."""
    _native.set_timeouts(group.key, *_timeouts(timeout_s, flight_timeout_s))


def close(group: ExpertGroup) -> None:
    """Ends all calls and frees the pools."""
    _native.close_group(group.key)


def rebuild(group: ExpertGroup) -> None:
    """Zeroes the pools, allocating them again if need be."""
    _native.rebuild_group(group.key)


def check(group: ExpertGroup) -> None:
    """Raises what the kernels reported."""
    faults = _native.faults(group.key)
    if faults:
        raise RuntimeError(
            "\n".join(faults) + "\nResults since then are NaN. Go back to a checkpoint and call "
            "group.rebuild()."
        )


def waits(group: ExpertGroup) -> dict[str, np.ndarray]:
    """Nanoseconds waited, int64 [instances, waiting rank, rank waited for] by operation."""
    ranks = group.num_ranks
    instances = group.mesh.size // group.num_devices
    shape = (instances, len(OPERATIONS), ranks, ranks)
    if serves(group):
        total = np.array(_native.waited_ns(group.key), np.int64).reshape(shape)
    else:
        total = np.zeros(shape, np.int64)
    return {name: total[:, i] for i, name in enumerate(OPERATIONS)}


def pool_bytes(
    *,
    num_ranks: int,
    tokens: int,
    top_k: int,
    num_experts: int,
    hidden: int,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
) -> int:
    """Bytes of GPU memory that the pool of one rank takes under implementation="ptx".

    A device holds one pool for each rank it hosts, beside XLA's preallocation.

    Args:
      num_ranks: ranks R of the group.
      tokens: tokens T of one rank in the largest call.
      top_k: experts K of one token.
      num_experts: experts E.
      hidden: elements H of one token.
      dtype: type of the tokens, float32 or bfloat16.

    Returns:
      A number of bytes.

    Source: `PoolLayout` in ptx/params.h.
    """
    return _native.pool_bytes(num_ranks, tokens, top_k, num_experts, payload_bytes(hidden, dtype))


def payload_bytes(hidden: int, dtype: jax.typing.DTypeLike) -> int:
    """Bytes of one token."""
    return hidden * jnp.dtype(dtype).itemsize


def reserve(
    group: ExpertGroup, *, tokens: int, top_k: int, num_experts: int, payload_bytes: int
) -> None:
    """Makes sure that the group has a pool for such calls; says what it allocates.

    Raises:
      MemoryError: the pool does not fit beside XLA's preallocation.
    """
    sizes = (tokens, top_k, num_experts, payload_bytes)
    missing = _native.missing_bytes(group.key, *sizes)
    if missing == 0:
        return
    _warn_of_late_allocations()
    _log.info(
        "%s: allocating %.2f MiB a GPU, the pools of %d rank(s) for tokens=%d, top_k=%d, "
        "num_experts=%d and %d bytes a token",
        group,
        missing / 2**20,
        group.virtual_ranks,
        *sizes,
    )
    _native.reserve(group.key, *sizes)


def _warn_of_late_allocations() -> None:
    preallocates = os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "true").lower()
    allocator = os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "default").lower()
    if preallocates in ("false", "0") or allocator == "platform":
        _log.warning(
            "XLA's preallocation is off (XLA_PYTHON_CLIENT_PREALLOCATE=%s, "
            "XLA_PYTHON_CLIENT_ALLOCATOR=%s): an allocation may then wait for a kernel that waits "
            "for another GPU; leave it on with more than one GPU",
            preallocates,
            allocator,
        )
