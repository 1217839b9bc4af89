"""Groups on GPUs: their set-up, their memory, and what their kernels report.

The Python half of `xla_ffi/cuda_*`. Everything here is eager: it runs when a group is built, when a
program is lowered, or when the user asks, never while a program runs.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import logging
import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jax_moe import _ffi, _preflight
from jax_moe._arguments import instance, integers, payload_dtype
from jax_moe._meeting import Meeting
from jax_moe._preflight import Preflight

if TYPE_CHECKING:
    from jax_moe._group import ExpertGroup

OPERATIONS = ("plan", "dispatch", "combine")
MAX_FLIGHT_TIMEOUT_S = 10.0
OLDEST_CAPABILITY = (9, 0)

_log = logging.getLogger("jax_moe")
_native = _ffi.cuda
# By group key.
_refusals: dict[int, str] = {}  # why the runtime could not be set up
_preflights: dict[int, Preflight] = {}  # of groups of several processes
_timeouts_s: dict[int, float] = {}  # of calls, and of what processes do together
_closed: set[int] = set()
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
    if not _spans_processes(group):  # else each process looks at its own, and tells the others
        old = {device.compute_capability for device in group.devices}
        old = sorted(c for c in old if tuple(map(int, c.split("."))) < OLDEST_CAPABILITY)
        if old:
            return (
                f"its GPUs have compute capability {', '.join(old)}, and 9.0 (Hopper) is the least"
            )
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

    A group that is known already gets the timeout; if it is closed it is rebuilt, and if it is
    broken too, unless it is of several processes, which do not all know of that.
    """
    if not isinstance(group.mesh, Mesh) or _wrong_devices(group):
        return
    if _spans_processes(group):
        _set_up_together(group)
        return
    try:
        register(group)
    except NotImplementedError as error:
        _refusals[group.key] = str(error)
    else:
        _refusals.pop(group.key, None)


def _spans_processes(group: ExpertGroup) -> bool:
    return len({device.process_index for device in group.devices}) > 1


def _set_up_together(group: ExpertGroup) -> None:
    """As `set_up`, in all processes of the mesh, which come to the same result."""
    if jax.process_index() not in {device.process_index for device in group.devices}:
        _refusals[group.key] = "no device of this process is in its mesh"
        return
    if group.key not in _preflights:
        found = _preflight.examine(
            _instances(group), place=_place(group), what=f"building {group}",
            timeout_s=group.timeout_s,
        )  # fmt: skip
        _preflights[group.key] = found
        if found.obstacle:
            _refusals[group.key] = found.obstacle
    if group.key not in _refusals:
        register(group)
        if group.key in _closed:
            rebuild(group)


def _place(group: ExpertGroup) -> str:
    return f"group/{group.key:x}"


def preflight(
    target: ExpertGroup | Iterable[jax.Device] | None = None,  # pyright: ignore[reportInvalidTypeForm]
) -> Preflight:
    """Which GPUs reach each other's memory, over which link, and what stands in the way.

    For the devices of several processes, all of these must call it; not for an `ExpertGroup`,
    which was looked at when it was built. `print(jax_moe.preflight())` shows a table.

    Args:
      target: an `ExpertGroup`, or devices; by default all of `jax.devices()`.

    Returns:
      The links of every pair of GPUs, and the obstacle to implementation="ptx", if any.

    Raises:
      NotImplementedError: there are devices other than NVIDIA GPUs.
      ValueError: there are no devices.
      TypeError: the target is something else.
      RuntimeError: another process did not call it within 60 seconds, or the group's `timeout_s`.
    """
    from jax_moe._group import ExpertGroup  # which takes this module

    target = jax.devices() if target is None else target
    if not isinstance(target, ExpertGroup):
        instance("target", target, Iterable, "a jax_moe.ExpertGroup, or some of jax.devices()")
        instances = [tuple(target)]
    elif target.key in _preflights:
        return _preflights[target.key]
    else:
        instances = _instances(target) if target.devices else []
    devices = [device for each in instances for device in each]
    if not devices:
        raise ValueError("preflight of no devices: give some, or a group on a mesh that is there.")
    for device in devices:
        instance("an element of target", device, jax.Device, "a jax.Device")
    others = sorted({device.platform for device in devices if not is_cuda(device)})
    if others:
        raise NotImplementedError(
            f"preflight looks at NVIDIA GPUs, and got devices of platform {', '.join(others)}, on "
            "which implementation=None needs no GPU to reach another: leave it out there. If there "
            'are GPUs, give jax.devices("gpu"); if JAX sees none, install jax[cuda13].'
        )
    ids = hashlib.sha256(repr([device.id for device in devices]).encode()).hexdigest()[:16]
    return _preflight.examine(instances, place=f"preflight/{ids}", what="preflight", timeout_s=60.0)


def register(group: ExpertGroup) -> None:
    """Registers the group natively.

    Raises:
      NotImplementedError: driver, GPU or peer access do not suffice; the message says what.
    """
    global _watched
    _timeouts_s[group.key] = group.timeout_s
    _native.register_group(
        group.key,
        str(group),
        group.num_ranks,
        group.virtual_ranks,
        _ordinals(group),
        *_timeouts(group.timeout_s, None),
        *_elsewhere(group),
    )
    if not _watched:
        # The watching thread must end before the driver does.
        atexit.register(_native.stop_monitor)
        _watched = True


def _instances(group: ExpertGroup) -> list[tuple]:
    """Devices of each group instance, in group order."""
    names = (*group.other_axes, *group.axes)
    order = [group.mesh.axis_names.index(name) for name in names]
    assert isinstance(group.mesh, Mesh)
    return [*map(tuple, group.mesh.devices.transpose(order).reshape(-1, group.num_devices))]


def _ordinals(group: ExpertGroup) -> list[list[int]]:
    """CUDA ordinals of each instance's devices, each as its own process counts."""
    if _spans_processes(group):
        known = _preflights[group.key].ordinals
        # Instances that this process has no part in were not looked at.
        return [[known.get(device.id, -1) for device in x] for x in _instances(group)]
    return [[device.local_hardware_id for device in x] for x in _instances(group)]


def _elsewhere(group: ExpertGroup) -> tuple:
    """Process of each instance's devices, this process, its members, how many share a GPU."""
    if not _spans_processes(group):
        return ()
    processes = [[device.process_index for device in x] for x in _instances(group)]
    sharing = _preflights[group.key].processes_per_gpu
    return processes, jax.process_index(), _members(group), sharing


def _members(group: ExpertGroup) -> list[int]:
    """The processes that share group instances with this one, itself included."""
    return sorted(_preflight.connected(_instances(group), jax.process_index()))


@contextlib.contextmanager
def _together(group: ExpertGroup, what: str) -> Iterator:
    """What the native side calls to meet the group's other processes; None if there are none."""
    if not _spans_processes(group):
        yield None
        return
    members = _members(group)
    with Meeting(
        f"{_place(group)}/{members[0]}/pools", f"{what} of {group}", members,
        _timeouts_s[group.key], process=jax.process_index(),
    ) as meeting:  # fmt: skip
        yield meeting.gather_bytes


def _timeouts(timeout_s: float, flight_timeout_s: float | None) -> tuple[float, float]:
    if flight_timeout_s is None:
        flight_timeout_s = min(timeout_s, MAX_FLIGHT_TIMEOUT_S)
    return float(timeout_s), float(flight_timeout_s)


def set_timeouts(group: ExpertGroup, timeout_s: float, flight_timeout_s: float | None) -> None:
    """Sets the deadlines of calls from now on, those that wait at present included."""
    _timeouts_s[group.key] = timeout_s
    _native.set_timeouts(group.key, *_timeouts(timeout_s, flight_timeout_s))


def close(group: ExpertGroup) -> None:
    """Ends all calls and frees the pools."""
    _closed.add(group.key)
    with _together(group, "close") as gather:
        _native.close_group(group.key, gather)


def rebuild(group: ExpertGroup) -> None:
    """Zeroes the pools, allocating them again if need be."""
    with _together(group, "rebuild") as gather:
        _native.rebuild_group(group.key, gather)
    _closed.discard(group.key)


def check(group: ExpertGroup) -> None:
    """Raises what the kernels reported."""
    faults = _native.faults(group.key)
    if faults:
        raise RuntimeError(
            "\n".join(faults) + "\nResults since then are NaN. Go back to a checkpoint and call "
            f"group.rebuild(){' in every process' if _spans_processes(group) else ''}."
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

    Raises:
      ValueError: implementation="ptx" has no such calls; the message says why.
      TypeError: a size is no integer.

    Source: `PoolLayout` in ptx/params.h.
    """
    sizes = pool_sizes(num_ranks, tokens, top_k, num_experts, hidden, dtype)
    return _native.pool_bytes(num_ranks, *sizes)


def pool_sizes(
    num_ranks: int, tokens: int, top_k: int, num_experts: int, hidden: int, dtype
) -> tuple[int, int, int, int]:
    """Checked sizes of a call: tokens of a rank, experts of a token, experts, bytes of a token.

    Raises:
      ValueError: implementation="ptx" has no such calls; the message says why.
      TypeError: a size is no integer, or the dtype none of floating point.
    """
    num_ranks, tokens, top_k, num_experts, hidden = integers(
        num_ranks=num_ranks, tokens=tokens, top_k=top_k, num_experts=num_experts, hidden=hidden
    )
    size = payload_bytes(hidden, payload_dtype("dtype", dtype, "ptx"))
    dispatch, nodes, capacity, alignment = OPERATIONS.index("dispatch") + 1, 1, 0, 1
    _native.check_limits(
        num_ranks, dispatch, nodes, tokens, top_k, num_experts, capacity, alignment, size
    )
    return tokens, top_k, num_experts, size


def payload_bytes(hidden: int, dtype: jax.typing.DTypeLike) -> int:
    """Bytes of one token."""
    return hidden * jnp.dtype(dtype).itemsize


def reserve(
    group: ExpertGroup,
    tokens: int,
    top_k: int,
    num_experts: int,
    payload_bytes: int,
    lowering: int = 0,
) -> None:
    """Makes sure that the group has a pool for such calls; says what it allocates.

    `lowering` numbers the program that is being lowered.

    Raises:
      MemoryError: the pool does not fit beside XLA's preallocation.
      RuntimeError: another process of the group does not do the same within the timeout.
    """
    sizes = (tokens, top_k, num_experts, payload_bytes)
    missing = _native.missing_bytes(group.key, *sizes, lowering)
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
    what = "making a pool for tokens={}, top_k={}, num_experts={} and {} bytes a token"
    with _together(group, what.format(*sizes)) as gather:
        _native.reserve(group.key, *sizes, lowering, gather)


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
