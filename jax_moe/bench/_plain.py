"""What the plain-JAX ways share: sizes, sorting, and that dispatch and combine are transposes."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

State = Any  # a pytree of arrays, every one with a leading axis per device


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Static sizes that a way needs, inside `jax.shard_map` over `axis`."""

    axis: str
    num_ranks: int
    num_experts: int
    tokens: int  # per rank
    top_k: int
    capacity: int  # rows per rank

    @property
    def experts_per_rank(self) -> int:
        """Experts of one rank."""
        return self.num_experts // self.num_ranks


@dataclasses.dataclass(frozen=True)
class PlainWay:
    """A way to exchange tokens with JAX's collectives; subclasses say how.

    Autodiff of a gather is a scatter-add, which is slow; as an expert would, the gradients of
    the two exchanges are each other.
    """

    sizes: Sizes

    def prepare(self, ids: jax.Array) -> State:
        """All that depends on the expert ids int32 [T, K] alone."""
        raise NotImplementedError

    def send(self, x: jax.Array, s: jax.Array, state: State) -> tuple[jax.Array, jax.Array]:
        """Tokens [T, H] and scalars [T, K] to (rows [C, H], row_s [C]) by expert."""
        raise NotImplementedError

    def receive(
        self, rows: jax.Array, row_s: jax.Array, state: State
    ) -> tuple[jax.Array, jax.Array]:
        """Rows and their scalars back to (the tokens' sums [T, H], scalars [T, K])."""
        raise NotImplementedError

    def group_sizes(self, ids: jax.Array, state: State) -> jax.Array:
        """Rows of each of this rank's experts, int32 [E/R]."""
        del state
        sizes = self.sizes
        counts = jnp.zeros(sizes.num_experts, jnp.int32).at[ids.reshape(-1)].add(1)
        first = jax.lax.axis_index(sizes.axis) * sizes.experts_per_rank
        return jax.lax.dynamic_slice_in_dim(
            jax.lax.psum(counts, sizes.axis), first, sizes.experts_per_rank
        )

    def dispatch(self, x, s, state):
        """`send`, with `receive` as its gradient."""
        return _dispatch(self, x, s, state)

    def combine(self, rows, row_s, state):
        """`receive`, with `send` as its gradient."""
        return _combine(self, rows, row_s, state)


_dispatch = jax.custom_vjp(lambda way, *operands: way.send(*operands), nondiff_argnums=(0,))
_combine = jax.custom_vjp(lambda way, *operands: way.receive(*operands), nondiff_argnums=(0,))
_dispatch.defvjp(
    lambda way, x, s, state: (way.send(x, s, state), state),
    lambda way, state, cotangents: (*way.receive(*cotangents, state), None),
)
_combine.defvjp(
    lambda way, rows, row_s, state: (way.receive(rows, row_s, state), state),
    lambda way, state, cotangents: (*way.send(*cotangents, state), None),
)


def bits(x: jax.Array) -> jax.Array:
    """The payload as integers, for pure moves: XLA's CPU collectives widen bfloat16 to float32."""
    return x if x.dtype == jnp.float32 else jax.lax.bitcast_convert_type(x, jnp.uint16)


def from_bits(x: jax.Array, dtype) -> jax.Array:
    """The inverse of `bits`."""
    return x if x.dtype == dtype else jax.lax.bitcast_convert_type(x, dtype)


def take(array: jax.Array, index: jax.Array) -> jax.Array:
    """Rows of `array`; every index must be within it."""
    return array.at[index].get(mode="promise_in_bounds")


def stable_order(keys: jax.Array, num_keys: int) -> jax.Array:
    """What sorts int32 keys in 0..num_keys-1, stably.

    Key and place in one word, where they fit, sort faster than a pair does.
    """
    count = keys.size
    if num_keys * count >= 2**31:
        return jnp.argsort(keys, stable=True)
    place = jnp.arange(count, dtype=jnp.int32)
    return jnp.sort(keys * count + place) % count


def inverse(order: jax.Array) -> jax.Array:
    """The inverse of a permutation."""
    place = jnp.arange(order.size, dtype=jnp.int32)
    return jnp.zeros_like(order).at[order].set(place, mode="promise_in_bounds", unique_indices=True)


def starts(counts: jax.Array) -> jax.Array:
    """Where each of the blocks of these sizes begins, along the last axis."""
    return jnp.cumsum(counts, -1, dtype=jnp.int32) - counts


def sum_over_k(rows: jax.Array, position: jax.Array) -> jax.Array:
    """Adds each token's rows in float32.

    Args:
      rows: [N, H].
      position: int32 [T, K], the rows of each token.

    Returns:
      [T, H] of rows' dtype.
    """
    terms = [take(rows, position[:, k]).astype(jnp.float32) for k in range(position.shape[1])]
    total = terms[0]
    for term in terms[1:]:
        total += term
    return total.astype(rows.dtype)
