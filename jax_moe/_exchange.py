"""dispatch and combine: tokens to their experts' ranks and back. Each is the other's transpose."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_moe import _implementation
from jax_moe._arguments import array, instance, payload_dtypes
from jax_moe._plan import Plan
from jax_moe._rounding import sum_dtype

ROWS_NAME = "jax_moe_rows"  # for policies of jax.checkpoint


def dispatch(
    x: jax.Array,
    s: jax.Array,
    plan: Plan,
    *,
    implementation: _implementation.Name | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Copies every token to the rows of its experts, together with one scalar a (token, k).

    rows[position of (t, k)] = x[t] and row_s[position of (t, k)] = s[t, k], bit for bit. Rows
    that pad a group are zero; rows past the last group are as `plan`'s `tail` says. Its VJP is
    `combine`.

    Args:
      x: float32 or bfloat16 [V*T, H], the tokens of this device.
      s: float32 [V*T, K], one scalar a (token, k): normally the gate weight.
      plan: the plan of these tokens' expert ids.
      implementation: None for the plan's own.

    Returns:
      (rows [V*C, H] of x's dtype, row_s float32 [V*C]), ordered by (expert, source rank, token,
      k) within each virtual rank.

    Raises:
      ValueError: wrong shapes or dtypes, or called outside a shard_map over the plan's group.
      TypeError: `plan` is no Plan, or another operand no array.
      NotImplementedError: the named implementation cannot serve the group; or under vmap.

    Source: docs/design.md, "Semantics".
    """
    name = _prepare(plan, "dispatch", implementation)
    x, s = array("x", x), array("s", s)
    tokens, top_k = plan.expert_ids.shape
    _check_operands("x", x, tokens, "s", s, (tokens, top_k), name)
    x, s, plan = _implementation.vary_alike(x, s, plan, also=plan.spec.group.axes)
    return checkpoint_name(_dispatch(name, x, s, plan), ROWS_NAME)


def combine(
    rows: jax.Array,
    row_s: jax.Array,
    plan: Plan,
    *,
    implementation: _implementation.Name | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Sums every token's expert rows at the token's rank, and returns its scalars.

    y[t] is summed in float32 in a fixed order and rounded to the payload type at each level:
    the token's rows at one rank in ascending k, then the ranks of one node (where the group has
    several nodes), then the nodes. s[t, k] = row_s[position of (t, k)], +0 where there is none.
    Rows past the last group are never read. Its VJP is `dispatch`.

    Args:
      rows: float32 or bfloat16 [V*C, H], the experts' outputs in the order of `dispatch`.
      row_s: float32 [V*C], one scalar a row.
      plan: the plan with which the rows were dispatched.
      implementation: None for the plan's own.

    Returns:
      (y [V*T, H] of rows' dtype, s float32 [V*T, K]). A token without a row gets +0.

    Raises:
      ValueError: wrong shapes or dtypes, or called outside a shard_map over the plan's group.
      TypeError: `plan` is no Plan, or another operand no array.
      NotImplementedError: the named implementation cannot serve the group; or under vmap.

    Source: docs/design.md, "Semantics".
    """
    name = _prepare(plan, "combine", implementation)
    rows, row_s = array("rows", rows), array("row_s", row_s)
    num_rows = plan.sources.shape[0]
    _check_operands("rows", rows, num_rows, "row_s", row_s, (num_rows,), name)
    rows, row_s, plan = _implementation.vary_alike(rows, row_s, plan, also=plan.spec.group.axes)
    return _combine(name, rows, row_s, plan)


def _prepare(plan: Plan, operation: str, implementation: str | None) -> str:
    """Checks the place of the call and names the implementation."""
    instance("plan", plan, Plan, "a jax_moe.Plan, as jax_moe.plan makes")
    spec = plan.spec
    _implementation.check_context(spec.group, operation)
    if implementation is None:
        return spec.implementation
    return _implementation.resolve(implementation, spec.group)


def _check_operands(x_name, x, length, s_name, s, s_shape, implementation) -> None:
    allowed = payload_dtypes(implementation)
    if x.ndim != 2 or x.shape[0] != length or x.shape[1] < 1 or x.dtype.name not in allowed:
        raise ValueError(
            f"{x_name} is {x.dtype}{list(x.shape)}: this plan and implementation="
            f'"{implementation}" need [{length}, hidden >= 1] of {" or ".join(allowed)}; cast '
            "others, float16 to bfloat16."
        )
    wide = sum_dtype(x.dtype)
    if s.shape != s_shape or s.dtype != wide:
        raise ValueError(
            f"{s_name} is {s.dtype}{list(s.shape)}: must be {jnp.dtype(wide)}{list(s_shape)} "
            "with this plan."
        )


# The rules call the differentiable functions, not the implementations, so that they can be
# differentiated again.
def _dispatch_impl(name: str, x, s, plan: Plan):
    x, s, plan = _implementation.check_later("dispatch", plan.spec.group, x, s, plan)
    return _implementation.module(name).dispatch(x, s, plan)


def _combine_impl(name: str, rows, row_s, plan: Plan):
    rows, row_s, plan = _implementation.check_later("combine", plan.spec.group, rows, row_s, plan)
    return _implementation.module(name).combine(rows, row_s, plan)


_dispatch = jax.custom_vjp(_dispatch_impl, nondiff_argnums=(0,))
_combine = jax.custom_vjp(_combine_impl, nondiff_argnums=(0,))


def _dispatch_fwd(name, x, s, plan):
    return _dispatch(name, x, s, plan), plan


def _dispatch_bwd(name, plan, cotangents):
    return *_combine(name, *cotangents, plan), None


def _combine_fwd(name, rows, row_s, plan):
    return _combine(name, rows, row_s, plan), plan


def _combine_bwd(name, plan, cotangents):
    return *_dispatch(name, *cotangents, plan), None


_dispatch.defvjp(_dispatch_fwd, _dispatch_bwd)
_combine.defvjp(_combine_fwd, _combine_bwd)
