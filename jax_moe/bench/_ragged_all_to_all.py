"""Baseline: rows sorted by expert, jax.lax.ragged_all_to_all, and sorted again at the receiver."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jax_moe.bench._plain import PlainWay, inverse, stable_order, starts, sum_over_k, take


@dataclasses.dataclass(frozen=True)
class RaggedAllToAll(PlainWay):
    """See the module. The rows for a peer go as `updates` slices, which XLA sends much faster."""

    updates: int = 128

    def prepare(self, ids):
        """(order, its inverse; row -> place of arrival, the inverse; offsets and sizes)."""
        sizes = self.sizes
        per_rank, me = sizes.experts_per_rank, jax.lax.axis_index(sizes.axis)
        flat = ids.reshape(-1)
        order = stable_order(flat, sizes.num_experts)
        counts = jnp.zeros(sizes.num_experts, jnp.int32).at[flat].add(1)
        every = jax.lax.all_gather(counts, sizes.axis)  # [source, expert]
        pairs = every.reshape(sizes.num_ranks, sizes.num_ranks, per_rank).sum(2, dtype=jnp.int32)
        sent, arrived = pairs[me], pairs[:, me]
        there = starts(pairs.T).T[me]  # where my rows begin at each receiver
        # What arrives, in order of (source, expert), each block's experts known from the counts.
        blocks = jax.lax.dynamic_slice_in_dim(every, me * per_rank, per_rank, 1).reshape(-1)
        expert = jnp.tile(jnp.arange(per_rank, dtype=jnp.int32), sizes.num_ranks)
        spare = sizes.capacity - blocks.sum(dtype=jnp.int32)
        arrived_expert = jnp.repeat(
            jnp.append(expert, jnp.int32(per_rank)),
            jnp.append(blocks, spare),
            total_repeat_length=sizes.capacity,
        )
        by_expert = stable_order(arrived_expert, per_rank + 1)
        moves = (*self._slices(starts(sent), sent, there), *self._slices(starts(arrived), arrived,
                 starts(pairs)[:, me]))  # fmt: skip
        position = inverse(order).reshape(ids.shape)
        return order, position, by_expert, inverse(by_expert), moves

    def _slices(self, first, size, there):
        """Cuts each peer's run into `updates` slices: (from, sizes, to), each [R * updates]."""
        edges = jnp.arange(self.updates + 1, dtype=jnp.int32)
        edges = edges * (size[:, None] // self.updates) + jnp.minimum(
            edges, size[:, None] % self.updates
        )
        begin, length = edges[:, :-1], jnp.diff(edges, axis=1)
        return (
            (first[:, None] + begin).reshape(-1),
            length.reshape(-1),
            (there[:, None] + begin).reshape(-1),
        )

    def _move(self, rows, length, forth, back_size):
        begin, size, there = forth
        into = jax.lax.pcast(
            jnp.zeros((length, *rows.shape[1:]), rows.dtype), self.sizes.axis, to="varying"
        )
        return jax.lax.ragged_all_to_all(
            rows, into, begin, size, there, back_size, axis_name=self.sizes.axis
        )

    def send(self, x, s, state):
        """See `PlainWay.send`."""
        order, _, by_expert, _, moves = state
        forth, arriving = moves[:3], moves[4]
        rows = take(x, order // self.sizes.top_k)
        rows = self._move(rows, self.sizes.capacity, forth, arriving)
        row_s = self._move(take(s.reshape(-1), order), self.sizes.capacity, forth, arriving)
        return take(rows, by_expert), take(row_s, by_expert)

    def receive(self, rows, row_s, state):
        """See `PlainWay.receive`."""
        order, position, _, arrival, moves = state
        back, arriving = moves[3:], moves[1]
        rows = self._move(take(rows, arrival), order.size, back, arriving)
        row_s = self._move(take(row_s, arrival), order.size, back, arriving)
        return sum_over_k(rows, position), take(row_s, position)
