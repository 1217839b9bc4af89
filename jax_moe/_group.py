"""Expert-parallel groups: which devices exchange tokens, and in which topology."""

from __future__ import annotations

import dataclasses
import hashlib
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from jax_moe import _cuda, _ffi
from jax_moe._arguments import instance, integer

AXIS_NAMES = ("data", "node", "rank")


def make_mesh(
    *,
    data: int = 1,
    node: int = 1,
    rank: int = -1,
    devices=None,
    axis_types: tuple[AxisType, ...] | None = None,
) -> Mesh:
    """Makes the mesh with axes (data, node, rank) that the package's defaults expect.

    Args:
      data: number of replicas of the expert-parallel group.
      node: number of nodes (NVLink domains) that one group spans.
      rank: devices per node. At most one of the three may be -1: it takes what is left.
      devices: the devices to use, in order; all of `jax.devices()` by default.
      axis_types: one `jax.sharding.AxisType` an axis; all Auto by default.

    Returns:
      A `jax.sharding.Mesh` of shape (data, node, rank).

    Raises:
      ValueError: the sizes do not multiply to the number of devices.
      TypeError: a size is no integer, or `devices` holds something else.
    """
    devices = np.asarray(jax.devices() if devices is None else devices).reshape(-1)
    for device in devices:
        instance("an element of devices", device, jax.Device, "a jax.Device")
    sizes = [integer(*size) for size in (("data", data), ("node", node), ("rank", rank))]
    text = f"make_mesh(data={data}, node={node}, rank={rank}) on {devices.size} devices"
    if sizes.count(-1) > 1 or any(size < 1 and size != -1 for size in sizes):
        raise ValueError(f"{text}: sizes must be >= 1, and at most one may be -1 (fill).")
    if -1 in sizes:
        rest = math.prod(size for size in sizes if size != -1)
        if devices.size % rest or not devices.size:
            raise ValueError(
                f"{text}: the given sizes multiply to {rest}, not a divisor.{_more(devices, rest)}"
            )
        sizes[sizes.index(-1)] = devices.size // rest
    if math.prod(sizes) != devices.size:
        raise ValueError(
            f"{text}: the sizes multiply to {math.prod(sizes)}; set one of them to -1 to fill, "
            f"or pass devices=jax.devices()[:{math.prod(sizes)}].{_more(devices, math.prod(sizes))}"
        )
    types = (AxisType.Auto,) * 3 if axis_types is None else axis_types
    return Mesh(devices.reshape(sizes), AXIS_NAMES, axis_types=types)


def _more(devices: np.ndarray, wanted: int) -> str:
    """How to get more devices, where that is easy."""
    if devices.size >= wanted or any(device.platform != "cpu" for device in devices):
        return ""
    return (
        f' More CPU devices: jax.config.update("jax_num_cpu_devices", {wanted}) before the first '
        "use of JAX."
    )


@dataclasses.dataclass(frozen=True)
class ExpertGroup:
    """The ranks among which experts are spread, built once and before any tracing.

    Every setting of the mesh axes that are not in `axes` has a group of its own. The group rank
    of virtual rank v of a device is (the device's index over `axes`, row-major) * virtual_ranks
    + v, and node n holds the ranks n * ranks_per_node to (n + 1) * ranks_per_node - 1.

    On GPUs of several processes all of these build it, and wait for each other for `timeout_s`. So
    they do in `close`, `rebuild` and `reserve`, and where a program is lowered that needs a pool.

    Args:
      mesh: the mesh over which the caller's `jax.shard_map` runs. An `AbstractMesh` serves for
        lowering only.
      axes: the mesh axes of the group, the node axis first: (node, rank), or a single axis.
      virtual_ranks: ranks that each device hosts; 1 in production, more to run a larger topology
        on few devices.
      num_nodes: nodes in the group's topology; by default the size of axes[0] where there are
        two axes, else 1. It sets the order of summation of `combine`.
      timeout_s: seconds that a call waits for the other ranks before it fails by name; below 1e9.
      num_sms: SMs of a GPU that one call may use (implementation="ptx"); None for all.
      link_sms: SMs of these that send to other GPUs; None for a good number.

    Raises:
      ValueError: an axis is not in the mesh, or the ranks do not divide into the nodes.
      TypeError: an argument is of the wrong type.
      RuntimeError: another process did not build the group in time.

    Source: docs/design.md, "Groups, ranks and virtual ranks".
    """

    mesh: Mesh | AbstractMesh
    axes: tuple[str, ...] = ("node", "rank")
    virtual_ranks: int = 1
    num_nodes: int | None = None
    timeout_s: float = dataclasses.field(default=60.0, compare=False)
    num_sms: int | None = None
    link_sms: int | None = None

    def __post_init__(self):
        instance("mesh", self.mesh, (Mesh, AbstractMesh), "a mesh, as jax_moe.make_mesh makes")
        axes = tuple(self.axes) if isinstance(self.axes, list | tuple) else (self.axes,)
        object.__setattr__(self, "axes", axes)
        missing = [axis for axis in axes if axis not in self.mesh.axis_names]
        if missing or not axes or len(set(axes)) != len(axes):
            raise ValueError(
                f"ExpertGroup axes {axes}: each must be a different axis of the mesh, whose axes "
                f"are {self.mesh.axis_names}; name them with axes=(node axis, rank axis)."
            )
        for name in ("virtual_ranks", "num_nodes", "num_sms", "link_sms"):
            if name == "virtual_ranks" or getattr(self, name) is not None:
                object.__setattr__(self, name, integer(name, getattr(self, name), 1))
        if self.num_nodes is None:
            nodes = self.mesh.shape[axes[0]] if len(axes) == 2 else 1
            object.__setattr__(self, "num_nodes", nodes)
        if self.num_ranks % self.nodes:
            raise ValueError(
                f"num_nodes={self.num_nodes}: must divide the group's {self.num_ranks} ranks "
                f"({self.num_devices} devices x {self.virtual_ranks} virtual ranks)."
            )
        _ffi.register_group(self.key, self.timeout_s, str(self))
        _cuda.set_up(self)

    @property
    def nodes(self) -> int:
        """Number of nodes N."""
        assert self.num_nodes is not None
        return self.num_nodes

    @property
    def num_devices(self) -> int:
        """Devices in one group."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes)

    @property
    def num_ranks(self) -> int:
        """Ranks R in one group, virtual ones counted."""
        return self.num_devices * self.virtual_ranks

    @property
    def ranks_per_node(self) -> int:
        """Ranks of one node."""
        return self.num_ranks // self.nodes

    @property
    def other_axes(self) -> tuple[str, ...]:
        """Mesh axes that are not the group's; each setting of them has its own group."""
        return tuple(axis for axis in self.mesh.axis_names if axis not in self.axes)

    @property
    def devices(self) -> tuple[jax.Device, ...]:  # pyright: ignore[reportInvalidTypeForm]
        """Devices of the mesh; empty on an AbstractMesh."""
        return tuple(self.mesh.devices.flat) if isinstance(self.mesh, Mesh) else ()

    @property
    def key(self) -> int:
        """Stable 63-bit hash of mesh, axes and sizes: the group's name in compiled programs."""
        parts = (
            tuple(self.mesh.shape.items()),
            tuple((device.platform, device.id) for device in self.devices),
            self.axes,
            self.virtual_ranks,
            self.num_nodes,
        )
        return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "little") >> 1

    def __str__(self) -> str:
        sizes = " x ".join(f"{axis}={self.mesh.shape[axis]}" for axis in self.axes)
        virtual = f", {self.virtual_ranks} virtual ranks a device" if self.virtual_ranks > 1 else ""
        return f"ExpertGroup({sizes}{virtual}: {self.num_ranks} ranks on {self.nodes} nodes)"

    def __reduce__(self):
        raise TypeError(
            f"{self} cannot be pickled: it stands for what this process has set up on its devices. "
            "Pickle what it is made of, and make it anew from its arguments where it is needed."
        )

    def __copy__(self) -> ExpertGroup:
        return self

    def __deepcopy__(self, memo) -> ExpertGroup:
        return self

    def set_timeout(self, timeout_s: float, *, flight_timeout_s: float | None = None) -> None:
        """Sets how long calls of this group, and of equal ones, wait for missing ranks from now on.

        Building an equal group later sets it to that one's `timeout_s`. Of several processes each
        sets its own. A closed group stays closed.

        Args:
          timeout_s: seconds until a rank that has not come to a call counts as missing.
          flight_timeout_s: seconds for data on its way once all have come, on GPUs; None for
            `timeout_s`, but at most 10.

        Raises:
          ValueError: a number is not positive, or 1e9 or more.
          TypeError: one is no number.
        """
        timeout_s = _ffi.check_timeout("timeout_s", timeout_s)
        if flight_timeout_s is not None:
            flight_timeout_s = _ffi.check_timeout("flight_timeout_s", flight_timeout_s)
        _ffi.set_timeout(self.key, timeout_s)
        if _cuda.serves(self):
            _cuda.set_timeouts(self, timeout_s, flight_timeout_s)

    def close(self) -> None:
        """Tears the group down: calls of it, compiled ones too, fail by name until `rebuild`.

        Equal groups are one group: this closes them all, and building one opens them again. On GPUs
        it waits for the calls that run and frees the pools; a CUDA graph that holds a call gives
        NaN from then on. On CPU devices calls that wait fail, and those whose ranks have all come
        finish.

        Raises:
          RuntimeError: another process did not close it in time; it is closed here, but the memory
            is kept.
        """
        _ffi.close_group(self.key)
        if _cuda.serves(self):
            _cuda.close(self)

    def rebuild(self) -> None:
        """Sets the group up again after `close` or a fault; compiled programs stay valid.

        The deadline is the constructor's `timeout_s` again. On GPUs it ends the calls that run,
        which then give NaN.

        Raises:
          RuntimeError: another process did not rebuild it in time; it stays closed here.
        """
        _ffi.register_group(self.key, self.timeout_s, str(self))
        if _cuda.serves(self):
            _cuda.rebuild(self)

    def reserve(
        self,
        *,
        tokens: int,
        top_k: int,
        num_experts: int,
        hidden: int,
        dtype: jax.typing.DTypeLike = jnp.bfloat16,
    ) -> None:
        """Allocates, on GPUs, a pool for calls of at most these sizes; elsewhere does nothing.

        Not needed: lowering a program makes a pool for its calls where none has room. But one
        large pool takes less memory than several, and fails early. Before the call nothing of
        this process should be running on the group's GPUs.

        Args:
          tokens: tokens T of one rank.
          top_k: experts K of one token.
          num_experts: experts E.
          hidden: elements H of one token.
          dtype: type of the tokens.

        Raises:
          ValueError: implementation="ptx" has no such calls.
          TypeError: a size is no integer, or the dtype none of floating point.
          MemoryError: no room beside XLA's preallocation.
          RuntimeError: another process did not make the same call in time.
        """
        if _cuda.serves(self):
            sizes = _cuda.pool_sizes(self.num_ranks, tokens, top_k, num_experts, hidden, dtype)
            _cuda.reserve(self, *sizes)

    def check(self) -> None:
        """Raises the faults that calls on GPUs left; to be called every step.

        A call that gives up on its peers there has long returned to JAX: it finishes with NaN, and
        the group stays broken until `rebuild`. On CPU devices a failed call raises by itself.

        Raises:
          RuntimeError: operation, phase, waiting and missing rank of each fault.
        """
        if _cuda.serves(self):
            _cuda.check(self)

    def waits(self) -> dict[str, np.ndarray]:
        """How long ranks have waited for each other since the group was built, on GPUs.

        Each call adds, for every peer, its longest wait for that peer. A process knows what its own
        ranks waited; the others' rows are zero.

        Returns:
          By operation ("plan", "dispatch", "combine"): nanoseconds, int64 [instances, waiting
          rank, rank waited for]. Zeros on CPU devices.
        """
        return _cuda.waits(self)

    def location(self) -> jax.Array:
        """This device's place, inside `jax.shard_map`: int32[2] = (group instance, index in it)."""
        zero = jnp.int32(0)
        number = jax.lax.axis_index(self.other_axes) if self.other_axes else zero
        return jnp.stack([number, jax.lax.axis_index(self.axes)]).astype(jnp.int32)


def check_group(group: ExpertGroup) -> None:
    """Refuses what is no group."""
    instance("group", group, ExpertGroup, "a jax_moe.ExpertGroup, which is made from a mesh")
