"""What the custom calls of "cpu" and "ptx" share: their results and their attributes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_moe._plan import Plan, PlanSpec

Results = list[tuple[tuple[int, ...], Any]]  # shape and dtype of each


def plan_results(expert_ids: jax.Array, spec: PlanSpec) -> Results:
    """The arrays of `_reference.PlanArrays`."""
    virtual = spec.group.virtual_ranks
    ids, rows = expert_ids.shape, (virtual * spec.capacity,)
    per_expert = (virtual * spec.experts_per_rank,)
    # expert_ids, positions, sources, the two sizes, dropped, invalid
    shapes = [ids, ids, rows, per_expert, per_expert, per_expert, (virtual,)]
    return [(shape, jnp.int32) for shape in shapes]


def dispatch_results(x: jax.Array, s: jax.Array, plan: Plan) -> Results:
    """Rows and their scalars."""
    num_rows = plan.sources.shape[0]
    return [((num_rows, x.shape[1]), x.dtype), ((num_rows,), s.dtype)]


def combine_results(rows: jax.Array, row_s: jax.Array, plan: Plan) -> Results:
    """Tokens and their scalars."""
    num_tokens = plan.expert_ids.shape[0]
    return [((num_tokens, rows.shape[1]), rows.dtype), (plan.expert_ids.shape, row_s.dtype)]


def call(
    target: str,
    results: Results,
    spec: PlanSpec,
    *operands: jax.Array,
    like: jax.Array,
    **attributes: int,
) -> Sequence[jax.Array]:
    """Calls a target; the results vary over the mesh axes over which `like` does."""
    here = jax.typeof(like)
    types = [
        jax.ShapeDtypeStruct(
            shape,
            dtype,
            sharding=here.sharding.update(spec=jax.P(*(None,) * len(shape))),
            manual_axis_type=here.manual_axis_type,
        )
        for shape, dtype in results
    ]
    attributes |= {
        "group": spec.group.key,
        "num_ranks": spec.group.num_ranks,
        "virtual_ranks": spec.group.virtual_ranks,
        "num_nodes": spec.group.nodes,
        "num_experts": spec.num_experts,
        "alignment": spec.alignment,
        "zero_tail": spec.tail == "zero",
    }
    encoded = {name: np.int64(value) for name, value in attributes.items()}
    return jax.ffi.ffi_call(target, types, vmap_method=None)(*operands, **encoded)
