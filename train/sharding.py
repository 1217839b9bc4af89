"""The mesh of a run, and how parameters are cut over its axes."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

import jax_moe
from train.config import MeshConfig

AXES = ("data", "fsdp", "node", "rank")
_SMALL = 2**14  # elements; a smaller array, as a norm's scale, is not worth a gather


def axis_sizes(config: MeshConfig, devices: int) -> tuple[int, ...]:
    """Returns the size of every axis on so many devices, -1 filled in.

    Raises:
      ValueError: the sizes do not multiply to the number of devices.
    """
    sizes = [getattr(config, axis) for axis in AXES]
    text = ", ".join(f"{axis}={size}" for axis, size in zip(AXES, sizes, strict=True))
    if sizes.count(-1) > 1 or any(size < 1 and size != -1 for size in sizes):
        raise ValueError(f"mesh {text}: sizes are >= 1, and at most one is -1 (what is left).")
    given = math.prod(size for size in sizes if size != -1)
    if -1 in sizes and devices and devices % given == 0:
        sizes[sizes.index(-1)] = devices // given
    if math.prod(sizes) != devices:
        raise ValueError(
            f"mesh {text}: the sizes given multiply to {given}, which does not fit {devices} "
            "devices; set one axis to -1, or other sizes (--mesh.data, --mesh.fsdp, --mesh.node, "
            "--mesh.rank)."
        )
    return tuple(sizes)


def make_group(config: MeshConfig, num_devices: int | None = None) -> jax_moe.ExpertGroup:
    """Makes the mesh and the expert-parallel group over its node and rank axes.

    Args:
      config: sizes of the axes.
      num_devices: for a mesh of so many devices that need not exist, to be lowered for only; None
        for the devices that JAX has.
    """
    types = (AxisType.Auto,) * len(AXES)
    if num_devices is None:
        devices = np.asarray(jax.devices())
        mesh = Mesh(devices.reshape(axis_sizes(config, devices.size)), AXES, axis_types=types)
    else:
        mesh = AbstractMesh(axis_sizes(config, num_devices), AXES, axis_types=types)
    return jax_moe.ExpertGroup(mesh, virtual_ranks=config.virtual_ranks, num_nodes=config.num_nodes)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where parameters lie between their uses, and how they come together for one.

    Experts lie on their ranks. What is left is whole on every device, unless it is cut: over the
    `fsdp` axis, and with `shard_dense` what is not an expert's over node and rank too. A block's
    parameters are gathered when it runs, again in its backward pass under remat, and each device
    keeps the optimizer's state of its own part only.
    """

    mesh: Mesh | AbstractMesh
    shard_dense: bool

    def cut(self, shape: tuple[int, ...], whole: PartitionSpec) -> PartitionSpec:
        """Returns the spec of an array between its uses; each axis takes the longest dimension.

        Args:
          shape: of the array, without the axis of stacked layers.
          whole: its spec while it is used; () or the experts'.
        """
        names = [_axes(entry) for entry in (*whole, *(None,) * (len(shape) - len(whole)))]
        taken = {axis for axes in names for axis in axes}
        wanted = ("fsdp", *(("node", "rank") if self.shard_dense else ()))
        if math.prod(shape) < _SMALL:
            return whole
        for axis in wanted:
            size = self.mesh.shape.get(axis, 1)
            if size == 1 or axis in taken:
                continue
            lengths = [d // self._parts(axes) for d, axes in zip(shape, names, strict=True)]
            fits = [i for i, length in enumerate(lengths) if length % size == 0]
            if fits:
                names[max(fits, key=lengths.__getitem__)] += (axis,)
        return PartitionSpec(*names) if any(names) else whole

    def _parts(self, axes: tuple[str, ...]) -> int:
        return math.prod(self.mesh.shape[axis] for axis in axes)

    def specs(self, state: nnx.State) -> dict[str, PartitionSpec]:
        """Returns by path how each variable of a model lies between its uses."""
        found = {}
        for path, leaf in nnx.to_flat_state(state):
            shape, whole = leaf.get_value().shape, _whole_spec(leaf)
            # Stacked layers have a leading axis, which a scan takes apart: "moe_blocks/mlp/down".
            if path[0] == "moe_blocks" and not isinstance(path[1], int):
                spec = self.cut(shape[1:], whole)
                spec = PartitionSpec(None, *spec) if len(spec) else spec
            else:
                spec = self.cut(shape, whole)
            found["/".join(map(str, path))] = spec
        return found

    def gather(self, state: nnx.State) -> nnx.State:
        """Puts together the parameters of one block, or of another part of the model."""
        return nnx.from_flat_state(
            [(path, leaf.replace(self._gathered(leaf))) for path, leaf in nnx.to_flat_state(state)]
        )

    def _gathered(self, leaf: nnx.Variable) -> Array:
        value, whole = leaf.get_value(), _whole_spec(leaf)
        cut = self.cut(value.shape, whole)
        if cut == whole:
            return value
        return _gather(NamedSharding(self.mesh, whole), NamedSharding(self.mesh, cut), value)


def _axes(entry) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def _whole_spec(leaf: nnx.Variable) -> PartitionSpec:
    """How a variable lies while it is used; the expert layer names the axes of its weights."""
    return PartitionSpec(*(leaf.get_metadata("out_sharding", None) or ()))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gather(whole: NamedSharding, cut: NamedSharding, x: Array) -> Array:
    """The array, whole; its gradient is cut, so that XLA may reduce and scatter it at once."""
    return lax.with_sharding_constraint(x, whole)


def _gather_forward(whole, cut, x):
    return _gather(whole, cut, x), None


def _gather_backward(whole, cut, _, gradient):
    return (lax.with_sharding_constraint(gradient, cut),)


_gather.defvjp(_gather_forward, _gather_backward)
