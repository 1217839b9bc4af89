"""The specification of plan, dispatch and combine, in plain jnp on stacked arrays.

Arrays carry a leading axis of the group's R ranks. This file says what the operations mean; the
other implementations must give the same bits.

Axis sizes: R ranks, T tokens a rank, K experts a token, E experts, C rows of capacity a rank,
H hidden.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_moe import _rounding


class PlanArrays(NamedTuple):
    """What a plan knows; every array int32, the leading axis that of the ranks."""

    expert_ids: jax.Array  # [R, T, K] the ids, -1 for those outside 0..E-1
    positions: jax.Array  # [R, T, K] row at the expert's rank, -1 for none
    sources: jax.Array  # [R, C] (source rank * T + token) * K + k, -1 for padding and tail
    group_sizes: jax.Array  # [R, E/R] real rows of each local expert
    padded_group_sizes: jax.Array  # [R, E/R] the same rounded up to the alignment
    dropped: jax.Array  # [R, E/R] rows dropped past the capacity
    invalid: jax.Array  # [R] ids other than -1 outside 0..E-1


def align_up(sizes, alignment: int):
    """Rounds up to a multiple of `alignment`."""
    return (sizes + (alignment - 1)) // alignment * alignment


def sanitize(expert_ids: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array]:
    """Replaces ids outside 0..E-1 by -1, and tells which ones (-1 itself apart) those were."""
    valid = (expert_ids >= 0) & (expert_ids < num_experts)
    return jnp.where(valid, expert_ids, -1), ~valid & (expert_ids != -1)


def group_layout(counts: jax.Array, *, capacity: int, alignment: int):
    """Fits the rows of each rank's experts into its capacity.

    Where they overflow, the largest cap c >= 0 on every expert of the rank is used for which
    sum(align_up(min(counts, c))) <= capacity; the sum grows with c, so bits are tried from the top.

    Args:
      counts: int32 [R, E/R] rows that want to go to each expert.

    Returns:
      (group_sizes, padded_group_sizes, starts), each int32 [R, E/R].
    """

    # A loop, since 31 unrolled steps cost seconds of compile time on the CPU.
    def try_bit(i: jax.Array, cap: jax.Array) -> jax.Array:
        trial = cap + (jnp.int32(1 << 30) >> i)
        rows = align_up(jnp.minimum(counts, trial), alignment).sum(-1, keepdims=True)
        return jnp.where(rows <= capacity, trial, cap)

    cap = jax.lax.fori_loop(0, 31, try_bit, 0 * counts[..., :1])
    sizes = jnp.minimum(counts, cap)
    padded = align_up(sizes, alignment)
    return sizes, padded, jnp.cumsum(padded, axis=-1, dtype=jnp.int32) - padded


def index_in_expert(ids: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array]:
    """Numbers the entries of each expert in order.

    Args:
      ids: int32 [M], -1 for none.

    Returns:
      (index int32 [M], the count of equal ids before this one; counts int32 [E]).
    """
    bucket = jnp.where(ids < 0, num_experts, ids)
    order = jnp.argsort(bucket, stable=True)
    counts = jnp.zeros(num_experts + 1, jnp.int32).at[bucket].add(1)
    starts = jnp.cumsum(counts, dtype=jnp.int32) - counts
    place = jnp.arange(ids.size, dtype=jnp.int32) - starts[bucket[order]]
    return jnp.zeros(ids.size, jnp.int32).at[order].set(place), counts[:num_experts]


def plan(expert_ids: jax.Array, *, num_experts: int, capacity: int, alignment: int) -> PlanArrays:
    """Places every (token, k) in the row order (expert, source rank, token, k).

    Args:
      expert_ids: int32 [R, T, K].
      num_experts: E, a multiple of R.
      capacity: rows C of each rank.
      alignment: rows to a multiple of which each expert's group is padded.
    """
    num_ranks = expert_ids.shape[0]
    per_rank = num_experts // num_ranks
    ids, invalid = sanitize(expert_ids, num_experts)
    index, counts = index_in_expert(ids.reshape(-1), num_experts)
    index = index.reshape(ids.shape)
    counts = counts.reshape(num_ranks, per_rank)
    sizes, padded, starts = group_layout(counts, capacity=capacity, alignment=alignment)
    kept = (ids >= 0) & (index < sizes.reshape(-1)[ids])
    positions = jnp.where(kept, starts.reshape(-1)[ids] + index, -1)
    owner = jnp.arange(ids.size, dtype=jnp.int32).reshape(ids.shape)
    rank = jnp.where(kept, ids // per_rank, num_ranks)
    sources = jnp.full((num_ranks, capacity), -1, jnp.int32)
    sources = sources.at[rank, positions].set(owner, mode="drop")
    return PlanArrays(
        expert_ids=ids,
        positions=positions,
        sources=sources,
        group_sizes=sizes,
        padded_group_sizes=padded,
        dropped=counts - sizes,
        invalid=invalid.sum((1, 2), dtype=jnp.int32),
    )


def dispatch(x: jax.Array, s: jax.Array, sources: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Copies tokens to their expert rows; padding and tail are zero.

    Args:
      x: [R, T, H]. s: f32 [R, T, K]. sources: int32 [R, C].

    Returns:
      (rows [R, C, H], row_s f32 [R, C]).
    """
    top_k = s.shape[-1]
    real = sources >= 0
    owner = jnp.where(real, sources, 0)
    rows = x.reshape(-1, x.shape[-1])[owner // top_k]
    return (
        jnp.where(real[..., None], rows, jnp.zeros((), x.dtype)),
        jnp.where(real, s.reshape(-1)[owner], jnp.zeros((), s.dtype)),
    )


def combine(
    rows: jax.Array,
    row_s: jax.Array,
    expert_ids: jax.Array,
    positions: jax.Array,
    *,
    num_experts: int,
    num_nodes: int,
) -> tuple[jax.Array, jax.Array]:
    """Sums each token's rows: per rank in ascending k, then per node, then over the nodes.

    Args:
      rows: [R, C, H]. row_s: f32 [R, C]. expert_ids, positions: int32 [R, T, K].

    Returns:
      (y [R, T, H], s f32 [R, T, K]).
    """
    num_ranks, top_k = rows.shape[0], expert_ids.shape[-1]
    rank = expert_ids // (num_experts // num_ranks)
    present = positions >= 0
    rank, place = jnp.where(present, rank, 0), jnp.where(present, positions, 0)
    s = jnp.where(present, row_s[rank, place], jnp.zeros((), row_s.dtype))
    # Terms in the order of summation: (rank, k); absent ones last.
    order = jnp.argsort(jnp.where(present, rank, num_ranks), axis=-1, stable=True)
    rank, place, present = (
        jnp.take_along_axis(value, order, -1) for value in (rank, place, present)
    )
    sums = _TokenSums(rows.shape[-1], expert_ids.shape[:2], rows.dtype, num_nodes > 1)
    for k in range(top_k):
        term = rows[rank[..., k], place[..., k]]
        node = rank[..., k] // (num_ranks // num_nodes)
        sums.add(term, present[..., k], rank[..., k], node)
    return sums.finish(), s


class _TokenSums:
    """Running sums of each token at three levels: rank, node, token."""

    def __init__(self, hidden: int, tokens: tuple[int, ...], dtype, has_nodes: bool):
        zero = _rounding.widen(jnp.zeros((*tokens, hidden), dtype))
        none = jnp.zeros(tokens, bool)
        self.dtype = dtype
        # (sum, whether it has a term, what it belongs to), inner levels first.
        owner = jnp.full(tokens, -1, jnp.int32)
        self.levels = [(zero, none, owner)] * (2 if has_nodes else 1)
        self.total = (zero, none)

    def add(self, term: jax.Array, present: jax.Array, rank: jax.Array, node: jax.Array) -> None:
        """Adds a term [R, T, H]; terms come in ascending rank."""
        owners = (rank, node)
        closing = [
            present & (owner != level[2]) for level, owner in zip(self.levels, owners, strict=False)
        ]
        self._close(closing)
        total, started, owner = self.levels[0]
        total, started = _rounding.add_term(total, started, _rounding.widen(term), present)
        self.levels[0] = (total, started, owner)
        for i, (total, started, owner) in enumerate(self.levels):
            self.levels[i] = (total, started, jnp.where(present, owners[i], owner))

    def _close(self, closing: list[jax.Array]) -> None:
        """Rounds the sums that end and adds them to the next level out."""
        for i, ends in enumerate(closing):
            total, started, owner = self.levels[i]
            term = _rounding.widen(_rounding.narrow(total, self.dtype))
            if i + 1 < len(self.levels):
                outer, outer_started, outer_owner = self.levels[i + 1]
                outer, outer_started = _rounding.add_term(
                    outer, outer_started, term, ends & started
                )
                self.levels[i + 1] = (outer, outer_started, outer_owner)
            else:
                self.total = _rounding.add_term(*self.total, term, ends & started)
            self.levels[i] = (total, started & ~ends, owner)

    def finish(self) -> jax.Array:
        """The tokens' sums, +0 where there was no term."""
        self._close([jnp.ones_like(self.total[1])] * len(self.levels))
        total, _ = self.total
        return _rounding.narrow(total, self.dtype)
