"""implementation="reference": gathers every rank's arrays and calls the specification.

Every device computes the whole group's result and keeps its own ranks' part: slow and simple.
"""

from __future__ import annotations

import jax

from jax_moe import _reference
from jax_moe._group import ExpertGroup
from jax_moe._plan import Plan, PlanSpec


def stack(array: jax.Array, group: ExpertGroup) -> jax.Array:
    """Gathers [V*N, ...] of every device into [R, N, ...]."""
    full = jax.lax.all_gather(array, group.axes, tiled=True)
    return full.reshape(group.num_ranks, -1, *array.shape[1:])


def own(array: jax.Array, group: ExpertGroup) -> jax.Array:
    """This device's [V*N, ...] of a stacked [R, N, ...]."""
    first = jax.lax.axis_index(group.axes) * group.virtual_ranks
    block = jax.lax.dynamic_slice_in_dim(array, first, group.virtual_ranks)
    return block.reshape(-1, *array.shape[2:])


def plan(expert_ids: jax.Array, spec: PlanSpec) -> _reference.PlanArrays:
    """See `jax_moe.plan`."""
    arrays = _reference.plan(
        stack(expert_ids, spec.group),
        num_experts=spec.num_experts,
        capacity=spec.capacity,
        alignment=spec.alignment,
    )
    return jax.tree.map(lambda array: own(array, spec.group), arrays)


def dispatch(x: jax.Array, s: jax.Array, plan: Plan) -> tuple[jax.Array, jax.Array]:
    """See `jax_moe.dispatch`."""
    group = plan.spec.group
    rows, row_s = _reference.dispatch(*(stack(a, group) for a in (x, s, plan.sources)))
    return own(rows, group), own(row_s, group)


def combine(rows: jax.Array, row_s: jax.Array, plan: Plan) -> tuple[jax.Array, jax.Array]:
    """See `jax_moe.combine`."""
    group = plan.spec.group
    y, s = _reference.combine(
        *(stack(a, group) for a in (rows, row_s, plan.expert_ids, plan.positions)),
        num_experts=plan.spec.num_experts,
        num_nodes=group.nodes,
    )
    return own(y, group), own(s, group)
