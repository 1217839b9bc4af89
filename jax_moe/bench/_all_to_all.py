"""Baseline: rows sorted into a buffer of fixed capacity for each destination, and all_to_all."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jax_moe.bench._plain import (
    PlainWay,
    bits,
    from_bits,
    inverse,
    stable_order,
    starts,
    sum_over_k,
    take,
)


@dataclasses.dataclass(frozen=True)
class AllToAll(PlainWay):
    """See the module. A destination's buffer holds C/R rows, so that C rows arrive."""

    @property
    def _block(self) -> int:
        return self.sizes.capacity // self.sizes.num_ranks

    def prepare(self, ids):
        """(slot -> (token, k), (token, k) -> slot; row -> slot, slot -> row at the receiver)."""
        sizes, block = self.sizes, self._block
        flat = ids.reshape(-1)
        order = stable_order(flat, sizes.num_experts)
        rank = take(flat, order) // sizes.experts_per_rank
        counts = jnp.zeros(sizes.num_ranks, jnp.int32).at[rank].add(1)
        first = starts(counts)
        within = jnp.arange(block, dtype=jnp.int32)
        pair = take(order, jnp.minimum(first[:, None] + within, flat.size - 1))
        local = jnp.where(
            within < counts[:, None], take(flat, pair) % sizes.experts_per_rank,
            sizes.experts_per_rank,
        )  # fmt: skip
        arrived = jax.lax.all_to_all(local, sizes.axis, 0, 0, tiled=True)
        by_expert = stable_order(arrived.reshape(-1), sizes.experts_per_rank + 1)
        slot = rank * block + jnp.arange(flat.size, dtype=jnp.int32) - take(first, rank)
        # Only ids that overflow the buffers would go past the end.
        slot = jnp.minimum(take(slot, inverse(order)), sizes.num_ranks * block - 1)
        return pair.reshape(-1), slot.reshape(ids.shape), by_expert, inverse(by_expert)

    def _swap(self, buffer):
        swapped = jax.lax.all_to_all(bits(buffer), self.sizes.axis, 0, 0, tiled=True)
        # Else XLA's CPU backend fuses the blocks' concatenation into every read of an element.
        return from_bits(jax.lax.optimization_barrier(swapped), buffer.dtype)

    def send(self, x, s, state):
        """See `PlainWay.send`."""
        pair, _, by_expert, _ = state
        rows = self._swap(take(x, pair // self.sizes.top_k))
        row_s = self._swap(take(s.reshape(-1), pair))
        return take(rows, by_expert), take(row_s, by_expert)

    def receive(self, rows, row_s, state):
        """See `PlainWay.receive`."""
        _, slot, _, row = state
        rows, row_s = self._swap(take(rows, row)), self._swap(take(row_s, row))
        return sum_over_k(rows, slot), take(row_s, slot)
