"""What a layer keeps between forward and backward under `jax.checkpoint`, and how many bytes."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from jax_moe import _implementation
from jax_moe._arguments import integers, payload_dtype
from jax_moe._exchange import ROWS_NAME
from jax_moe._plan import PLAN_NAME, check_experts

save_plan = jax.checkpoint_policies.save_only_these_names(PLAN_NAME)
"""Policy of `jax.checkpoint`: keeps plans; tokens travel again and experts are recomputed."""

save_rows = jax.checkpoint_policies.save_only_these_names(PLAN_NAME, ROWS_NAME)
"""Policy of `jax.checkpoint`: keeps plans and expert rows; experts alone are recomputed."""


def saved_bytes(
    policy: Literal["save_plan", "save_rows"],
    *,
    tokens: int,
    top_k: int,
    num_experts: int,
    num_ranks: int,
    capacity: int,
    hidden: int,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    implementation: Literal["ptx", "cpu", "xla", "reference"] = "ptx",
) -> int:
    """Bytes that one exchange of a layer keeps on each rank from forward to backward.

    To them come the layer's own input (T * H elements, which `jax.checkpoint` keeps in any case)
    and what the caller's policy names besides. Under remat nothing else of the routed experts
    lives until the backward pass, which then needs what one layer without remat needs.

    Args:
      policy: the policy given to `jax.checkpoint`, by its name in this package.
      tokens: tokens T of one rank.
      top_k: experts K of one token.
      num_experts: experts E of the group.
      num_ranks: ranks R of the group.
      capacity: rows C of capacity of one rank, the padding of groups included; see
        `row_capacity`, and docs/layer.md for where `MoE` pads.
      hidden: elements H of one token.
      dtype: type of the rows.
      implementation: "ptx" keeps the arrivals too, int32 [R*T, K].

    Raises:
      ValueError: no such policy or implementation, or sizes that contradict each other.
      TypeError: a size is no integer.
    """
    if policy not in ("save_plan", "save_rows"):
        raise ValueError(f'policy={policy!r}: must be "save_plan" or "save_rows".')
    _implementation.check_name(implementation)
    tokens, top_k, num_experts, num_ranks, capacity, hidden = integers(
        tokens=tokens,
        top_k=top_k,
        num_experts=num_experts,
        num_ranks=num_ranks,
        capacity=capacity,
        hidden=hidden,
    )
    check_experts(num_experts, num_ranks)
    row_bytes = hidden * payload_dtype("dtype", dtype, implementation).itemsize
    pairs = tokens * top_k
    words = 2 * pairs + capacity + num_experts // num_ranks  # ids, positions; sources; group sizes
    if implementation == "ptx":
        words += num_ranks * pairs
    if policy == "save_rows":
        words += capacity  # row_s
        return 4 * words + capacity * row_bytes
    return 4 * words
