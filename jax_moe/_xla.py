"""implementation="xla": the same results from JAX's own collectives, on any devices and processes.

Between plan and exchange every rank works for itself: `plan` exchanges counts and then ids,
`dispatch` gathers all tokens and picks, `combine` sums its rows of every source's token and
sends the sums back with one all-to-all.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_moe import _reference, _rounding
from jax_moe._gathered import own, stack
from jax_moe._group import ExpertGroup
from jax_moe._plan import Plan, PlanSpec


def plan(expert_ids: jax.Array, spec: PlanSpec) -> _reference.PlanArrays:
    """See `jax_moe.plan`."""
    group, per_rank = spec.group, spec.experts_per_rank
    num_ranks, virtual = group.num_ranks, group.virtual_ranks
    ids, invalid = _reference.sanitize(expert_ids, spec.num_experts)
    ids, top_k = ids.reshape(virtual, -1), expert_ids.shape[1]
    # [V, T*K] index among the rank's own entries of that expert, [V, E] entries of each expert.
    index, counts = jax.vmap(lambda a: _reference.index_in_expert(a, spec.num_experts))(ids)
    all_counts = stack(counts.reshape(-1), group)  # [R, E]
    before = own(jnp.cumsum(all_counts, 0, dtype=jnp.int32) - all_counts, group)
    index = index + jnp.take_along_axis(before.reshape(virtual, -1), jnp.maximum(ids, 0), 1)
    totals = all_counts.sum(0, dtype=jnp.int32).reshape(num_ranks, per_rank)
    sizes, padded, starts = _reference.group_layout(
        totals, capacity=spec.capacity, alignment=spec.alignment
    )
    kept = (ids >= 0) & (index < sizes.reshape(-1)[ids])
    positions = jnp.where(kept, starts.reshape(-1)[ids] + index, -1).reshape(expert_ids.shape)
    ids = ids.reshape(expert_ids.shape)
    return _reference.PlanArrays(
        expert_ids=ids,
        positions=positions,
        sources=_sources(ids, positions, spec),
        group_sizes=own(sizes, group),
        padded_group_sizes=own(padded, group),
        dropped=own(totals - sizes, group),
        invalid=invalid.reshape(virtual, -1, top_k).sum((1, 2), dtype=jnp.int32),
    )


def _sources(ids: jax.Array, positions: jax.Array, spec: PlanSpec) -> jax.Array:
    """The receiver's map [V*C]: which (token, k) of the group owns each row of this device."""
    virtual = spec.group.virtual_ranks
    rank = jnp.where(positions >= 0, ids // spec.experts_per_rank, -1)
    rank, positions = stack(rank, spec.group).reshape(-1), stack(positions, spec.group).reshape(-1)
    local = rank - jax.lax.axis_index(spec.group.axes) * virtual
    # Everything that is not this device's goes past the end and is left out.
    local = jnp.where((rank >= 0) & (local >= 0) & (local < virtual), local, virtual)
    sources = jnp.full((virtual, spec.capacity), -1, jnp.int32)
    owner = jnp.arange(rank.size, dtype=jnp.int32)
    return sources.at[local, positions].set(owner, mode="drop").reshape(-1)


def dispatch(x: jax.Array, s: jax.Array, plan: Plan) -> tuple[jax.Array, jax.Array]:
    """See `jax_moe.dispatch`."""
    group = plan.spec.group
    sources = plan.sources.reshape(group.virtual_ranks, -1)
    rows, row_s = _reference.dispatch(stack(x, group), stack(s, group), sources)
    return rows.reshape(-1, x.shape[1]), row_s.reshape(-1)


def combine(rows: jax.Array, row_s: jax.Array, plan: Plan) -> tuple[jax.Array, jax.Array]:
    """See `jax_moe.combine`."""
    group, hidden = plan.spec.group, rows.shape[1]
    virtual, num_ranks = group.virtual_ranks, group.num_ranks
    partial, part_s = _partial_sums(rows, row_s, plan)
    # [V here, R there, T, ...] -> [R here, V there, T, ...]: one block for every pair of ranks.
    partial, part_s = (_swap(a, group) for a in (partial, part_s))
    positions = plan.positions.reshape(virtual, -1, plan.positions.shape[1])
    rank = plan.expert_ids.reshape(positions.shape) // plan.spec.experts_per_rank
    present = positions >= 0
    pick = jnp.where(present, rank, 0)
    by_token = jnp.moveaxis(part_s, 0, 2)  # [V, T, R, K]
    s = jnp.take_along_axis(by_token, pick[:, :, None, :], axis=2)[:, :, 0]
    s = jnp.where(present, s, jnp.zeros((), s.dtype))
    has = (present[..., None] & (rank[..., None] == jnp.arange(num_ranks))).any(2)  # [V, T, R]
    y = _sum_over_ranks(partial, has, group.nodes)
    return y.reshape(-1, hidden), s.reshape(plan.positions.shape)


def _partial_sums(rows: jax.Array, row_s: jax.Array, plan: Plan) -> tuple[jax.Array, jax.Array]:
    """Sums this device's rows of every token of the group.

    Returns:
      (partial [V, R, T, H] of the payload type, part_s [V, R, T, K]).
    """
    group, top_k = plan.spec.group, plan.expert_ids.shape[1]
    virtual, num_ranks = group.virtual_ranks, group.num_ranks
    tokens = plan.expert_ids.shape[0] // virtual
    count = num_ranks * tokens * top_k
    sources = plan.sources.reshape(virtual, -1)
    place = jnp.full((virtual, count), -1, jnp.int32)
    line = jnp.arange(virtual, dtype=jnp.int32)[:, None]
    row = jnp.broadcast_to(jnp.arange(sources.shape[1], dtype=jnp.int32), sources.shape)
    place = place.at[line, jnp.where(sources < 0, count, sources)].set(row, mode="drop")
    place = place.reshape(virtual, num_ranks * tokens, top_k)
    present, place = place >= 0, jnp.maximum(place, 0)
    rows = rows.reshape(virtual, -1, rows.shape[1])
    total = _rounding.widen(jnp.zeros((*place.shape[:2], rows.shape[2]), rows.dtype))
    started = jnp.zeros(place.shape[:2], bool)
    for k in range(top_k):
        term = _rounding.widen(rows[line, place[..., k]])
        total, started = _rounding.add_term(total, started, term, present[..., k])
    part_s = row_s.reshape(virtual, -1)[line[..., None], place]
    shape = (virtual, num_ranks, tokens)
    return (
        _rounding.narrow(total, rows.dtype).reshape(*shape, -1),
        part_s.reshape(*shape, top_k),
    )


def _swap(blocks: jax.Array, group: ExpertGroup) -> jax.Array:
    """Exchanges [V, R, ...] blocks, own rank first, to [R, V, ...], other rank first."""
    virtual = group.virtual_ranks
    blocks = blocks.reshape(virtual, group.num_devices, virtual, *blocks.shape[2:])
    blocks = jax.lax.all_to_all(jnp.swapaxes(blocks, 0, 1), group.axes, 0, 0)
    return blocks.reshape(group.num_ranks, virtual, *blocks.shape[3:])


def _sum_over_ranks(partial: jax.Array, has: jax.Array, nodes: int) -> jax.Array:
    """Adds the ranks' sums [R, V, T, H] in ascending order, per node first where there are some."""
    num_ranks, dtype = partial.shape[0], partial.dtype
    per_node = num_ranks // nodes if nodes > 1 else 1
    zero = jnp.zeros_like(_rounding.widen(partial[0]))
    none = jnp.zeros(partial.shape[1:3], bool)
    total, started = zero, none
    for first in range(0, num_ranks, per_node):
        node, node_started = zero, none
        for rank in range(first, first + per_node):
            term = _rounding.widen(partial[rank])
            node, node_started = _rounding.add_term(node, node_started, term, has[..., rank])
        node = _rounding.widen(_rounding.narrow(node, dtype))
        total, started = _rounding.add_term(total, started, node, node_started)
    return _rounding.narrow(total, dtype)
