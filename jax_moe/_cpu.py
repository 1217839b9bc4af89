"""implementation="cpu": the XLA FFI custom calls of the CPU devices of one process.

The native side is a rendezvous: every device of the group leaves its buffers, and when the last
one has come the rows are copied straight between them. The calls are pure; each compiled call
site meets only itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax

from jax_moe import _calls, _implementation, _reference
from jax_moe._plan import Plan, PlanSpec


def plan(expert_ids: jax.Array, spec: PlanSpec) -> _reference.PlanArrays:
    """See `jax_moe.plan`."""
    results = _calls.plan_results(expert_ids, spec)
    return _reference.PlanArrays(*_call("jax_moe_plan", results, spec, expert_ids))


def dispatch(x: jax.Array, s: jax.Array, plan: Plan) -> tuple[jax.Array, jax.Array]:
    """See `jax_moe.dispatch`."""
    results = _calls.dispatch_results(x, s, plan)
    operands = (x, s, plan.sources, plan.padded_group_sizes)
    rows, row_s = _call("jax_moe_dispatch", results, plan.spec, *operands)
    return rows, row_s


def combine(rows: jax.Array, row_s: jax.Array, plan: Plan) -> tuple[jax.Array, jax.Array]:
    """See `jax_moe.combine`."""
    results = _calls.combine_results(rows, row_s, plan)
    operands = (rows, row_s, plan.expert_ids, plan.positions)
    y, s = _call("jax_moe_combine", results, plan.spec, *operands)
    return y, s


def _call(
    target: str, results: _calls.Results, spec: PlanSpec, *operands: jax.Array
) -> Sequence[jax.Array]:
    # `where` varies over all mesh axes, and ffi_call wants its operands alike; the results do not
    # depend on which of several equal groups computes them.
    where = spec.group.location()
    axes = _implementation.varying_axes(where)
    alike = [_implementation.cast_varying(operand, axes) for operand in (where, *operands)]
    return _calls.call(target, results, spec, *alike, like=operands[0])
