"""Baseline: all_gather + sort + gather to dispatch, scatter-add + psum_scatter to combine.

Every rank sees every token and keeps what its experts want (a "ring of experts").
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jax_moe.bench._plain import PlainWay, bits, from_bits, stable_order, take


@dataclasses.dataclass(frozen=True)
class AllGather(PlainWay):
    """See the module."""

    def prepare(self, ids):
        """The group's (token, k) of each row, once within bounds and once past them if unused."""
        sizes = self.sizes
        every = jax.lax.all_gather(ids.reshape(-1), sizes.axis, tiled=True)
        local = every - jax.lax.axis_index(sizes.axis) * sizes.experts_per_rank
        mine = (local >= 0) & (local < sizes.experts_per_rank)
        local = jnp.where(mine, local, sizes.experts_per_rank)
        order = stable_order(local, sizes.experts_per_rank + 1)[: sizes.capacity]
        used = jnp.arange(sizes.capacity, dtype=jnp.int32) < mine.sum(dtype=jnp.int32)
        return order, jnp.where(used, order, every.size)

    def send(self, x, s, state):
        """See `PlainWay.send`."""
        order, _ = state
        axis = self.sizes.axis
        every = jax.lax.all_gather(bits(x), axis, tiled=True)
        rows = from_bits(take(every, order // self.sizes.top_k), x.dtype)
        return rows, take(jax.lax.all_gather(s, axis, tiled=True).reshape(-1), order)

    def receive(self, rows, row_s, state):
        """See `PlainWay.receive`."""
        _, owner = state
        sizes = self.sizes
        count = sizes.num_ranks * sizes.tokens
        # Sums in the payload's type: float32 sums are slower and twice as large.
        total = jnp.zeros((count, rows.shape[1]), rows.dtype)
        total = total.at[owner // sizes.top_k].add(rows, mode="drop")
        y = jax.lax.psum_scatter(total, sizes.axis, tiled=True)
        back = jnp.zeros(count * sizes.top_k, row_s.dtype).at[owner].set(row_s, mode="drop")
        s = jax.lax.psum_scatter(back, sizes.axis, tiled=True)
        return y, s.reshape(sizes.tokens, sizes.top_k)
