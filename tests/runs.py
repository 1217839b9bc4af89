"""One compiled program a case and implementation, whose results several test files check.

The program plans, dispatches and combines, and takes the VJPs of both, on inputs that are
independent of each other: what combine gets is not what dispatch gave. Buffers full of NaN are
donated to it, so that a row that nobody wrote shows.
"""

import dataclasses
import functools

import cases
import jax
import numpy as np
import oracle
import origin
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jax_moe

PLAN_FIELDS = (
    "expert_ids",
    "positions",
    "sources",
    "group_sizes",
    "padded_group_sizes",
    "dropped",
    "invalid",
)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What goes in, [groups, R, ...]; rows past the real ones are NaN."""

    ids: np.ndarray
    x: np.ndarray
    s: np.ndarray
    rows: np.ndarray
    row_s: np.ndarray
    dy: np.ndarray
    ds: np.ndarray
    d_rows: np.ndarray
    d_row_s: np.ndarray


@dataclasses.dataclass(frozen=True)
class Setting:
    """A case with its mesh and group."""

    case: cases.Case
    group: jax_moe.ExpertGroup
    capacity: int

    @property
    def spec(self) -> PartitionSpec:
        """How every global array lies: the group instances, then the group's devices."""
        return PartitionSpec((*self.group.other_axes, *self.group.axes))

    def place(self, stacked: np.ndarray) -> jax.Array:
        """[groups, R, N, ...] as a global array, every device its own ranks' blocks."""
        flat = stacked.reshape(-1, *stacked.shape[3:])
        return jax.device_put(flat, NamedSharding(self.group.mesh, self.spec))

    def stacked(self, flat: jax.Array) -> np.ndarray:
        """The inverse of `place`."""
        host = np.asarray(flat)
        return host.reshape(self.case.groups, self.case.ranks, -1, *host.shape[1:])

    def plan(self, ids: jax.Array, implementation: str | None, **changes) -> jax_moe.Plan:
        """The case's plan, inside shard_map."""
        case = self.case
        arguments = {
            "group": self.group,
            "num_experts": case.experts,
            "capacity": case.capacity,
            "capacity_factor": case.capacity_factor,
            "alignment": case.alignment,
            "tail": case.tail,
            "implementation": implementation,
        }
        return jax_moe.plan(ids, **(arguments | changes))

    def shard_map(self, function, *, check_vma: bool = True):
        return jax.shard_map(
            function,
            mesh=self.group.mesh,
            in_specs=self.spec,
            out_specs=self.spec,
            check_vma=check_vma,
        )


def mesh_of(case: cases.Case, platform: str = "cpu", **changes) -> jax.sharding.Mesh:
    devices = jax.devices(platform)[: case.devices]
    return jax_moe.make_mesh(**case.mesh_shape, devices=devices, **changes)


@functools.cache
def setting(case: cases.Case, platform: str = "cpu", axis_types=None) -> Setting:
    group = jax_moe.ExpertGroup(
        mesh_of(case, platform, axis_types=axis_types),
        axes=case.axes,
        virtual_ranks=case.virtual_ranks,
        num_nodes=case.num_nodes,
    )
    capacity = case.capacity
    if capacity is None:
        capacity = jax_moe.row_capacity(
            tokens=case.tokens,
            top_k=case.topk,
            num_experts=case.experts,
            num_ranks=case.ranks,
            capacity_factor=case.capacity_factor,
            alignment=case.alignment,
        )
    return Setting(case, group, capacity)


def setting_for(case: cases.Case, implementation: str) -> Setting:
    """Where an implementation runs a case: GPUs take as many ranks each as they must."""
    if implementation != "ptx":
        return setting(case)
    found = len(jax.devices("cuda"))
    most = max(n for n in range(1, found + 1) if case.ranks % n == 0)
    return setting(case.on_devices(most), "cuda")


def pairs() -> list:
    """Parameters (case, implementation) on CPU devices; tests/gpu takes the cases on GPUs."""
    every = [(case, name) for case in cases.CASES for name in cases.IMPLEMENTATIONS]
    models = [(case, "cpu") for case in cases.SMALL_MODELS]
    return [pytest.param(case, name, id=f"{case}-{name}") for case, name in every + models]


@functools.cache
def plans(case: cases.Case) -> tuple[oracle.Plan, ...]:
    """What the plan of every group instance must be."""
    return tuple(
        oracle.plan(
            ids,
            num_experts=case.experts,
            capacity=setting(case).capacity,
            alignment=case.alignment,
        )
        for ids in cases.expert_ids(case)
    )


def real(case: cases.Case) -> np.ndarray:
    """Which rows [groups, R, C] belong to a token."""
    return np.stack([p.sources >= 0 for p in plans(case)])


def specified(case: cases.Case) -> np.ndarray:
    """Which rows [groups, R, C] of dispatch's result have a specified value."""
    if case.tail == "zero":
        return np.ones_like(real(case))
    number = np.arange(setting(case).capacity)
    return np.stack([number < p.padded_group_sizes.sum(1)[:, None] for p in plans(case)])


@functools.cache
def inputs(case: cases.Case) -> Inputs:
    shape = (case.groups, case.ranks)
    owned, hidden = (*shape, case.tokens), (case.hidden,)
    payload, f32 = case.payload, np.dtype(np.float32)

    def row_terms(purpose: str, trailing: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        values = cases.terms(case, purpose, real(case).shape + trailing, dtype)
        values[~real(case)] = np.nan
        return values

    if case.special:
        x = cases.terms(case, "x", owned + hidden, payload)
        s = cases.terms(case, "s", (*owned, case.topk), f32)
    else:
        x = origin.payload(*owned, case.hidden, payload)
        s = origin.weights(*owned, case.topk)
    return Inputs(
        ids=cases.expert_ids(case),
        x=x,
        s=s,
        rows=row_terms("rows", hidden, payload),
        row_s=row_terms("row_s", (), f32),
        dy=cases.terms(case, "dy", owned + hidden, payload),
        ds=cases.terms(case, "ds", (*owned, case.topk), f32),
        d_rows=row_terms("d_rows", hidden, payload),
        d_row_s=row_terms("d_row_s", (), f32),
    )


def everything(at: Setting, implementation: str | None, *, vjps: bool = True):
    """Per device: the plan, both operations and their VJPs, as a dict."""

    def program(ids, x, s, rows, row_s, dy, ds, d_rows, d_row_s):
        plan = at.plan(ids, implementation)
        dispatched, dispatch_vjp = jax.vjp(lambda x, s: jax_moe.dispatch(x, s, plan), x, s)
        combined, combine_vjp = jax.vjp(lambda r, rs: jax_moe.combine(r, rs, plan), rows, row_s)
        out = {field: getattr(plan, field) for field in PLAN_FIELDS}
        out |= {"dispatch": dispatched, "combine": combined}
        if vjps:
            out["dispatch_vjp"] = dispatch_vjp((d_rows, d_row_s))
            out["combine_vjp"] = combine_vjp((dy, ds))
        return out

    return program


def poisoned(program):
    """The program with one more operand, to be donated: the memory that its rows come to use."""

    def with_poison(poison, *operands):
        del poison
        return program(*operands)

    return jax.jit(with_poison, donate_argnums=0, keep_unused=True)


def poison(at: Setting, copies: int = 1) -> tuple[jax.Array, ...]:
    """Rows and row_s full of NaN."""
    shape = (at.case.groups, at.case.ranks, at.capacity)
    payload = at.place(np.full((*shape, at.case.hidden), np.nan, at.case.payload))
    scalar = at.place(np.full(shape, np.nan, np.float32))
    return (payload, scalar) + tuple(map(jax.numpy.copy, (payload, scalar) * (copies - 1)))


# Compiling the collectives of the two slow implementations is most of the suite's time: they show
# their VJPs on these cases only, and elsewhere compile with less optimisation by LLVM.
VJP_CASES = frozenset(
    {
        "ep2_uneven",
        "virtual2_data2",
        "overflow_skewed",
        "undefined_uneven",
        "special_nodes",
    }
)
_QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def shows_vjps(case: cases.Case, implementation: str) -> bool:
    return implementation not in ("reference", "xla") or case.name in VJP_CASES


@functools.cache
def _compiled(case: cases.Case, implementation: str, vjps: bool):
    """The program of every case of these sizes."""
    at = setting_for(case, implementation)
    operands = [at.place(getattr(inputs(case), f.name)) for f in dataclasses.fields(Inputs)]
    function = poisoned(at.shard_map(everything(at, implementation, vjps=vjps)))
    lowered = function.lower(poison(at, 1 + vjps), *operands)
    return lowered.compile(compiler_options={} if vjps else _QUICK)


@functools.cache
def run(case: cases.Case, implementation: str) -> dict[str, np.ndarray | tuple[np.ndarray, ...]]:
    """Results of `everything`, [groups, R, ...], run once and kept."""
    at, vjps = setting_for(case, implementation), shows_vjps(case, implementation)
    sizes = dataclasses.replace(case, name="sizes", routing="none", special=False)
    operands = [at.place(getattr(inputs(case), f.name)) for f in dataclasses.fields(Inputs)]
    out = _compiled(sizes, implementation, vjps)(poison(at, 1 + vjps), *operands)
    return jax.tree.map(at.stacked, jax.block_until_ready(out))
