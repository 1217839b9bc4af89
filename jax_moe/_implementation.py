"""Which code carries out an operation, and the checks that all implementations share."""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Sequence
from types import ModuleType
from typing import Literal

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import Mesh

from jax_moe import _cuda
from jax_moe._group import ExpertGroup

Name = Literal["ptx", "cpu", "xla", "reference"]
_MODULES = {
    "ptx": "jax_moe._ptx",
    "cpu": "jax_moe._cpu",
    "xla": "jax_moe._xla",
    "reference": "jax_moe._gathered",
}
NAMES = tuple(_MODULES)

_log = logging.getLogger("jax_moe")


def module(name: str) -> ModuleType:
    """The module with `plan`, `dispatch` and `combine` of an implementation."""
    # Imported late: the implementations take the plan's types, which take this module.
    return importlib.import_module(_MODULES[name])


def check_name(name: str | None) -> None:
    """Refuses what names no implementation.

    Raises:
      ValueError: unknown name.
    """
    if name is not None and name not in NAMES:
        raise ValueError(f"implementation={name!r}: must be one of {NAMES} or None.")


def resolve(name: str | None, group: ExpertGroup) -> str:
    """Chooses where `name` is None, and refuses a name that cannot serve the group.

    Raises:
      ValueError: unknown name.
      NotImplementedError: the named implementation does not run on the group's devices.
    """
    check_name(name)
    if name in ("xla", "reference"):
        return name
    obstacles = {"cpu": _cpu_obstacle(group), "ptx": _cuda.obstacle(group)}
    if name is not None:
        if obstacles[name]:
            raise NotImplementedError(
                f'implementation="{name}" cannot serve {group}: {obstacles[name]}; use '
                'implementation="xla".'
            )
        return name
    # On the platform at hand, the one made for it; an abstract mesh counts as CPU devices.
    fast = "ptx" if any(_cuda.is_cuda(device) for device in group.devices) else "cpu"
    choice = "xla" if obstacles[fast] else fast
    _announce(group, choice, obstacles[fast])
    return choice


def _cpu_obstacle(group: ExpertGroup) -> str | None:
    """Why the CPU custom calls cannot serve the group, if so."""
    if not isinstance(group.mesh, Mesh):
        return None  # An abstract mesh is only lowered.
    platforms = sorted({device.platform for device in group.devices})
    if platforms != ["cpu"]:
        return f"its devices are of platform {', '.join(platforms)}, not cpu"
    processes = {device.process_index for device in group.devices}
    if len(processes) > 1:
        return f"it spans {len(processes)} processes, and CPU custom calls meet within one"
    return None


@functools.cache
def _announce(group: ExpertGroup, choice: str, obstacle: str | None) -> None:
    """Says once a group what was chosen."""
    reason = f", since {obstacle}" if obstacle else ""
    _log.info('%s: implementation "%s"%s', group, choice, reason)


def check_context(group: ExpertGroup, operation: str) -> None:
    """Refuses a call outside a `jax.shard_map` over the group's mesh.

    Raises:
      ValueError: not inside such a shard_map, or another mesh, or an axis that is not manual.
    """
    here = jax.sharding.get_abstract_mesh()
    if here.empty or not set(group.axes) <= set(here.manual_axes):
        raise ValueError(
            f"jax_moe.{operation} was called where the manual mesh axes are "
            f"{here.manual_axes if not here.empty else ()}, but {group} needs {group.axes}: call "
            "it inside jax.shard_map(..., mesh=group.mesh)."
        )
    if dict(here.shape) != dict(group.mesh.shape):
        raise ValueError(
            f"jax_moe.{operation} runs in a shard_map over the mesh {dict(here.shape)}, but the "
            f"group was built on {dict(group.mesh.shape)}: use one mesh for both."
        )
    partial = [axis for axis in here.axis_names if axis not in here.manual_axes]
    if any(here.shape[axis] > 1 for axis in partial):
        raise ValueError(
            f"jax_moe.{operation}: the mesh axes {partial} are not manual in this shard_map, so "
            "the copies of the group along them could not be told apart; leave axis_names out of "
            "jax.shard_map so that every axis is manual."
        )


def vary_alike(*trees, also: Sequence[str] = ()):
    """Types all arrays as varying over the mesh axes of any of them, and over some more.

    The transpose of the cast adds up the gradient of what did not vary, such as a weight.
    """
    leaves, structure = jax.tree.flatten(trees)
    axes = set(also).union(*map(varying_axes, leaves))
    return jax.tree.unflatten(structure, [cast_varying(leaf, axes) for leaf in leaves])


def varying_axes(array: jax.Array) -> frozenset[str]:
    """The manual mesh axes over which the array is typed as varying."""
    return jax.typeof(array).manual_axis_type.varying


def cast_varying(array: jax.Array, axes) -> jax.Array:
    """The array, typed as varying over `axes` too."""
    missing = tuple(sorted(set(axes) - varying_axes(array)))
    return jax.lax.pcast(array, missing, to="varying") if missing else array


def check_later(operation: str, group: ExpertGroup, *trees):
    """The trees themselves; refuses what is known only once they are transformed or lowered.

    Raises:
      NotImplementedError: any of their arrays is batched by `jax.vmap`.
      ValueError: (when lowered) the shard_map's mesh has other devices than the group's.
    """
    bind = functools.partial(_check_later_p.bind, operation=operation, group=group)
    return jax.tree.map(bind, trees)


_check_later_p = Primitive("jax_moe_check_later")
_check_later_p.def_impl(lambda x, *, operation, group: x)
_check_later_p.def_abstract_eval(lambda x, *, operation, group: x)


def _lowered(ctx, x, *, operation, group):
    mesh = getattr(ctx.module_context.axis_context, "mesh", None)
    if isinstance(mesh, Mesh) and group.devices and tuple(mesh.devices.flat) != group.devices:
        raise ValueError(
            f"jax_moe.{operation} runs in a shard_map over {_ids(mesh.devices.flat)}, but the "
            f"group's mesh has {_ids(group.devices)}, in that order: use one mesh for both."
        )
    return [x]


def _ids(devices) -> str:
    return f"devices {[device.id for device in devices]}"


mlir.register_lowering(_check_later_p, _lowered)


def _batched(args, dims, *, operation, group):
    raise NotImplementedError(
        f"jax_moe.{operation} cannot be vmapped: an exchange is one event on all ranks. Fold the "
        "batch into the tokens, or loop over it with jax.lax.scan."
    )


batching.primitive_batchers[_check_later_p] = _batched
