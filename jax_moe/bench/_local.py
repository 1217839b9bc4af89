"""No exchange: every token goes to experts of its own device. Shows what the rest costs."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from jax_moe.bench._plain import PlainWay, inverse, stable_order, sum_over_k, take


@dataclasses.dataclass(frozen=True)
class Local(PlainWay):
    """Expert e becomes expert e mod E/R of the token's own rank.

    A rank has T*K rows, the mean of what it has with an exchange, and no unused ones. Tokens of
    several virtual ranks lie end to end, as everywhere.
    """

    virtual_ranks: int = 1

    def _keys(self, ids):
        """The device's expert of each (token, k)."""
        per_rank = self.sizes.experts_per_rank
        own = ids.reshape(self.virtual_ranks, -1) % per_rank
        first = per_rank * jnp.arange(self.virtual_ranks, dtype=jnp.int32)
        return (own + first[:, None]).reshape(-1)

    def prepare(self, ids):
        """(row -> (token, k), its inverse)."""
        order = stable_order(self._keys(ids), self.virtual_ranks * self.sizes.experts_per_rank)
        return order, inverse(order).reshape(ids.shape)

    def group_sizes(self, ids, state):
        """See `PlainWay.group_sizes`."""
        del state
        count = self.virtual_ranks * self.sizes.experts_per_rank
        return jnp.zeros(count, jnp.int32).at[self._keys(ids)].add(1)

    def send(self, x, s, state):
        """See `PlainWay.send`."""
        order, _ = state
        return take(x, order // self.sizes.top_k), take(s.reshape(-1), order)

    def receive(self, rows, row_s, state):
        """See `PlainWay.receive`."""
        _, position = state
        return sum_over_k(rows, position), take(row_s, position)
