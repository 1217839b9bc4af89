"""implementation="cpu": the XLA FFI custom calls of the CPU devices of one process.

The native side is a rendezvous: every device of the group leaves its buffers, and when the last
one has come the rows are copied straight between them. The calls are pure; each compiled call
site meets only itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jax_moe import _implementation, _reference
from jax_moe._plan import Plan, PlanSpec


def plan(expert_ids: jax.Array, spec: PlanSpec) -> _reference.PlanArrays:
    """See `jax_moe.plan`."""
    virtual = spec.group.virtual_ranks
    per_expert = (virtual * spec.experts_per_rank,)
    ids, rows = expert_ids.shape, (virtual * spec.capacity,)
    # expert_ids, positions, sources, the two sizes, dropped, invalid
    shapes = [ids, ids, rows, per_expert, per_expert, per_expert, (virtual,)]
    results = [(shape, jnp.int32) for shape in shapes]
    return _reference.PlanArrays(*_call("jax_moe_plan", results, spec, expert_ids))


def dispatch(x: jax.Array, s: jax.Array, plan: Plan) -> tuple[jax.Array, jax.Array]:
    """See `jax_moe.dispatch`."""
    num_rows = plan.sources.shape[0]
    results = [((num_rows, x.shape[1]), x.dtype), ((num_rows,), s.dtype)]
    rows, row_s = _call(
        "jax_moe_dispatch", results, plan.spec, x, s, plan.sources, plan.padded_group_sizes
    )
    return rows, row_s


def combine(rows: jax.Array, row_s: jax.Array, plan: Plan) -> tuple[jax.Array, jax.Array]:
    """See `jax_moe.combine`."""
    num_tokens, top_k = plan.expert_ids.shape
    results = [((num_tokens, rows.shape[1]), rows.dtype), ((num_tokens, top_k), row_s.dtype)]
    y, s = _call(
        "jax_moe_combine", results, plan.spec, rows, row_s, plan.expert_ids, plan.positions
    )
    return y, s


def _call(target: str, results: list, spec: PlanSpec, *operands: jax.Array) -> Sequence[jax.Array]:
    """Calls a target; the results vary over the mesh axes over which the operands do."""
    here = jax.typeof(operands[0])
    types = [
        jax.ShapeDtypeStruct(
            shape,
            dtype,
            sharding=here.sharding.update(spec=jax.P(*(None,) * len(shape))),
            manual_axis_type=here.manual_axis_type,
        )
        for shape, dtype in results
    ]
    # `where` varies over all mesh axes, and ffi_call wants its operands alike; the results do not
    # depend on which of several equal groups computes them.
    where = spec.group.location()
    axes = _implementation.varying_axes(where)
    alike = [_implementation.cast_varying(operand, axes) for operand in (where, *operands)]
    return jax.ffi.ffi_call(target, types, vmap_method=None)(*alike, **_attributes(spec))


def _attributes(spec: PlanSpec) -> dict[str, np.int64]:
    values = {
        "group": spec.group.key,
        "num_ranks": spec.group.num_ranks,
        "virtual_ranks": spec.group.virtual_ranks,
        "num_nodes": spec.group.nodes,
        "num_experts": spec.num_experts,
        "alignment": spec.alignment,
        "zero_tail": spec.tail == "zero",
    }
    return {name: np.int64(value) for name, value in values.items()}
