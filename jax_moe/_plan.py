"""The plan: everything that is derived from the expert ids, once, for all exchanges of a layer."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_moe import _implementation
from jax_moe._arguments import array, integer, integers, number
from jax_moe._group import ExpertGroup, check_group
from jax_moe._reference import align_up

Tail = Literal["zero", "undefined"]
PLAN_NAME = "jax_moe_plan"  # for policies of jax.checkpoint


@dataclasses.dataclass(frozen=True)
class PlanSpec:
    """The static half of a plan; capacity and alignment are in rows."""

    group: ExpertGroup
    num_experts: int
    capacity: int
    alignment: int
    tail: Tail
    implementation: str

    @property
    def experts_per_rank(self) -> int:
        """Experts that each rank holds, E/R."""
        return self.num_experts // self.group.num_ranks


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
    """Where every (token, k) goes and where every row comes from; a pytree of int32 arrays.

    Shapes are those of one device with V virtual ranks, whose blocks lie end to end. T tokens a
    rank, K experts a token, C rows a rank, E experts on R ranks.

    Attributes:
      expert_ids: [V*T, K] the given ids, -1 in place of those outside 0..E-1.
      positions: [V*T, K] the row at the expert's rank, -1 for no expert or a dropped row.
      sources: [V*C] (source rank * T + token) * K + k of each row, -1 for padding and tail.
      group_sizes: [V*E/R] real rows of each local expert.
      padded_group_sizes: [V*E/R] the same rounded up to the alignment; expert e's rows start at
        the sum of the padded sizes before it (within its rank's block).
      dropped: [V*E/R] rows of each local expert that were dropped past the capacity.
      invalid: [V] how many of the rank's ids were neither -1 nor in 0..E-1.
      arrivals: [V*R*T, K], with implementation="ptx" only: at each virtual rank, its own row of
        every (source rank, token, k), -1 for none.
      spec: static settings.
    """

    expert_ids: jax.Array
    positions: jax.Array
    sources: jax.Array
    group_sizes: jax.Array
    padded_group_sizes: jax.Array
    dropped: jax.Array
    invalid: jax.Array
    arrivals: jax.Array | None = None
    spec: PlanSpec = dataclasses.field(metadata={"static": True}, kw_only=True)


def check_tail(tail: str) -> None:
    """Refuses what is no `Tail`."""
    if tail not in get_args(Tail):
        raise ValueError(f'tail={tail!r}: must be "zero" or "undefined".')


def row_capacity(
    *,
    tokens: int,
    top_k: int,
    num_experts: int,
    num_ranks: int,
    capacity_factor: float | None = None,
    alignment: int = 1,
) -> int:
    """Rows of capacity that one rank needs.

    Args:
      tokens: tokens T of one rank.
      top_k: experts K of one token.
      num_experts: experts E of the group.
      num_ranks: ranks R of the group.
      capacity_factor: multiple of the balanced load T*K; None for the worst case, in which every
        rank's tokens all go here, each to min(K, E/R) different experts.
      alignment: rows to which each expert's group is padded; up to alignment - 1 rows an expert
        come on top of the load.

    Returns:
      A number of rows, a multiple of `alignment`.

    Raises:
      ValueError: a number is below 1, or the ranks do not divide the experts.
      TypeError: a number is no integer.
    """
    sizes = dict(tokens=tokens, top_k=top_k, num_experts=num_experts, num_ranks=num_ranks)
    tokens, top_k, num_experts, num_ranks, alignment = integers(**sizes, alignment=alignment)
    _, capacity_factor = check_capacity(None, capacity_factor)
    check_experts(num_experts, num_ranks)
    per_rank = num_experts // num_ranks
    if capacity_factor is None:
        rows = num_ranks * tokens * min(top_k, per_rank)
    else:
        # Past int32 in any case: `plan` refuses that by name.
        rows = max(1, math.ceil(min(capacity_factor * tokens * top_k, 2.0**31)))
    return with_padding(rows, per_rank, alignment)


def check_experts(num_experts: int, num_ranks: int) -> None:
    """Refuses experts of which the ranks cannot all hold the same number."""
    if num_experts < 1 or num_experts % num_ranks:
        raise ValueError(
            f"num_experts={num_experts}: must be a positive multiple of the group's "
            f"{num_ranks} ranks; add experts or use a smaller group."
        )


def check_capacity(capacity: Any, capacity_factor: Any) -> tuple[int | None, float | None]:
    """The two as numbers; refuses both at once, and what can be no capacity.

    Raises:
      ValueError: both are given, or one is out of range.
      TypeError: one is no number.
    """
    if capacity is not None and capacity_factor is not None:
        raise ValueError(
            f"capacity={capacity} and capacity_factor={capacity_factor}: give one of them."
        )
    if capacity_factor is not None:
        capacity_factor = number("capacity_factor", capacity_factor)
        if not 0 < capacity_factor < math.inf:
            raise ValueError(f"capacity_factor={capacity_factor}: must be a finite number > 0.")
    return None if capacity is None else integer("capacity", capacity, 1), capacity_factor


def with_padding(rows: int, experts_per_rank: int, alignment: int) -> int:
    """The capacity that holds so many rows of one rank when its groups are padded."""
    # Every non-empty group may waste up to alignment - 1 rows.
    return align_up(rows + min(experts_per_rank, rows) * (alignment - 1), alignment)


def plan(
    expert_ids: jax.Array,
    *,
    group: ExpertGroup,
    num_experts: int,
    capacity: int | None = None,
    capacity_factor: float | None = None,
    alignment: int = 1,
    tail: Tail | None = None,
    implementation: _implementation.Name | None = None,
) -> Plan:
    """Plans the exchange of one batch of tokens; call it inside `jax.shard_map` over the group.

    Rows at an expert's rank are ordered by (expert, source rank, token, k). An id of -1 means no
    expert; other ids outside 0..E-1 count as -1 and are reported in `Plan.invalid`. The same
    expert may stand twice in a token: each mention is a row of its own. Past the capacity the
    largest cap on every expert of the rank is used that fits; within an expert the last (source
    rank, token, k) are dropped, and `Plan.dropped` counts them exactly.

    Args:
      expert_ids: int32 [V*T, K]; row v*T + t is token t of the device's virtual rank v.
      group: the expert-parallel group; expert e lives on its rank e // (E/R).
      num_experts: E, a multiple of the group's ranks R.
      capacity: rows C of one rank. By default the worst case R*T*min(K, E/R), which ids that
        are distinct within a token cannot overflow; see `row_capacity`.
      capacity_factor: sets C to this multiple of the balanced load T*K instead.
      alignment: rows to a multiple of which each expert's group is padded with zero rows.
      tail: what dispatch (and combine's backward pass) leaves in the rows past the last group:
        "zero" or "undefined"; None takes the implementation's default: "undefined" for "ptx",
        where zeroing a worst-case capacity is dearer than the exchange, else "zero".
      implementation: "ptx", "cpu", "xla", "reference", or None to choose by the group's devices.

    Returns:
      A `Plan`, to be given to `dispatch` and `combine`.

    Raises:
      ValueError: wrong shapes, dtypes or sizes, or called outside a shard_map over the group.
      TypeError: an argument is of the wrong type.
      NotImplementedError: the named implementation does not run on these devices; or under vmap.

    Source: docs/design.md, "Semantics".
    """
    expert_ids = array("expert_ids", expert_ids)
    check_group(group)
    spec = _make_spec(
        expert_ids, group, num_experts, capacity, capacity_factor, alignment, tail, implementation
    )
    _implementation.check_context(group, "plan")
    (expert_ids,) = _implementation.vary_alike(expert_ids, also=group.axes)
    (expert_ids,) = _implementation.check_later("plan", group, expert_ids)
    arrays = _implementation.module(spec.implementation).plan(expert_ids, spec)
    return checkpoint_name(Plan(*arrays, spec=spec), PLAN_NAME)


def _make_spec(
    expert_ids, group, num_experts, capacity, capacity_factor, alignment, tail, implementation
) -> PlanSpec:
    """Checks plan's arguments and resolves the ones left open."""
    if expert_ids.ndim != 2 or expert_ids.dtype != jnp.int32:
        raise ValueError(
            f"expert_ids is {expert_ids.dtype}{list(expert_ids.shape)}: must be int32 "
            "[virtual ranks * tokens, top_k]; convert with .astype(jnp.int32) or reshape."
        )
    leading, top_k = expert_ids.shape
    if leading % group.virtual_ranks or not leading or not top_k:
        raise ValueError(
            f"expert_ids has shape {list(expert_ids.shape)}: its first axis must be a positive "
            f"multiple of the device's {group.virtual_ranks} virtual ranks and its second >= 1; "
            "ranks short of tokens pass rows of -1."
        )
    num_experts, alignment = integer("num_experts", num_experts), integer("alignment", alignment, 1)
    check_experts(num_experts, group.num_ranks)
    capacity, capacity_factor = check_capacity(capacity, capacity_factor)
    tokens = leading // group.virtual_ranks
    if capacity is None:
        capacity = row_capacity(
            tokens=tokens,
            top_k=top_k,
            num_experts=num_experts,
            num_ranks=group.num_ranks,
            capacity_factor=capacity_factor,
            alignment=alignment,
        )
    # Row numbers, and the numbers of (token, k) pairs in the group, are int32.
    largest = max(group.num_ranks * tokens * top_k + num_experts * alignment, capacity)
    if largest >= 2**31:
        raise ValueError(
            f"capacity={capacity} rows, {group.num_ranks} ranks x {tokens} tokens x {top_k}: the "
            "capacity and the (token, k) pairs of the group must each be < 2**31; use fewer "
            "tokens a call."
        )
    name = _implementation.resolve(implementation, group)
    if tail is None:
        tail = "undefined" if name == "ptx" else "zero"
    check_tail(tail)
    return PlanSpec(group, num_experts, capacity, alignment, tail, name)
