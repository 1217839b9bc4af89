"""10,000 exchanges in one program, with new routing in each, checked on the GPU itself."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_moe

STEPS = int(os.environ.get("JAX_MOE_SOAK_STEPS", "10000"))
T, K, E, H = 24, 4, 32, 64


def _inputs(step, ranks: int):
    """ids, x, s of all ranks. Every device draws the same, so all is at hand everywhere."""
    keys = jax.random.split(jax.random.fold_in(jax.random.key(ranks), step), 3)
    # From all experts down to two of them, and some ids that name none.
    most = jnp.maximum(E >> (step % 5), 2)
    ids = jax.random.randint(keys[0], (ranks * T, K), -1, most, jnp.int32)
    # Integers, so that sums are exact.
    x = jax.random.randint(keys[1], (ranks * T, H), 1, 64, jnp.int32).astype(jnp.float32)
    return ids, x, jax.random.uniform(keys[2], (ranks * T, K), jnp.float32, 1, 2)


def _mismatches(group, first_rank, given, plan: jax_moe.Plan, rows, row_s, y, back):
    """Entries of this device's results that are wrong."""
    ids, x, s = given
    count, virtual, per_rank = ids.size, group.virtual_ranks, E // group.num_ranks
    sources = plan.sources.reshape(virtual, -1)
    real = sources >= 0
    owner = jnp.where(real, sources, 0)
    expert = ids.reshape(-1)[owner]
    # The rows of a rank: its own experts', in ascending (expert, source), without gaps.
    key = jnp.where(real, expert * count + owner, -1)
    rank = first_rank + jnp.arange(virtual, dtype=jnp.int32)[:, None]
    row = jnp.arange(sources.shape[1], dtype=jnp.int32)[None]
    wanted = jnp.where(ids >= 0, ids // per_rank, -1).reshape(-1)
    number = (wanted[None] == rank).sum(1, dtype=jnp.int32)
    wrong = (real != (row < number[:, None])).sum()
    wrong += (real & (expert // per_rank != rank)).sum()
    wrong += (real[:, 1:] & (key[:, 1:] <= key[:, :-1])).sum()
    # What was carried here.
    wrong += (real[..., None] & (rows.reshape(virtual, -1, H) != x[owner // K])).sum()
    wrong += (real & (row_s.reshape(virtual, -1) != s.reshape(-1)[owner])).sum()
    # What came back.
    x, s, ids = (_own(array, first_rank, virtual) for array in (x, s, ids))
    wrong += ((plan.positions >= 0) != (ids >= 0)).sum()
    wrong += (back != jnp.where(ids >= 0, s, 0)).sum()
    wrong += (y != x * (ids >= 0).sum(1, keepdims=True).astype(jnp.float32)).sum()
    return wrong.astype(jnp.int32)


def _own(array, first_rank, virtual: int):
    return jax.lax.dynamic_slice_in_dim(array, first_rank * T, virtual * T)


@pytest.mark.parametrize(
    ("devices", "virtual"),
    [(1, 2), (1, 8), *(pytest.param(2, v, marks=pytest.mark.gpu2) for v in (1, 4))],
)
def test_soak(devices, virtual):
    """On two GPUs a collective of XLA's own stands between any two steps."""
    mesh = jax_moe.make_mesh(devices=jax.devices()[:devices])
    group = jax_moe.ExpertGroup(mesh, virtual_ranks=virtual, timeout_s=10.0)
    capacity = group.num_ranks * T * K

    def program(zero):
        first_rank = jax.lax.axis_index(group.axes) * virtual

        def step(i, wrong):
            given = _inputs(i, group.num_ranks)
            ids, x, s = (_own(array, first_rank, virtual) for array in given)
            plan = jax_moe.plan(
                ids, group=group, num_experts=E, capacity=capacity, implementation="ptx"
            )
            rows, row_s = jax_moe.dispatch(x, s, plan)
            y, back = jax_moe.combine(rows, row_s, plan)
            here = _mismatches(group, first_rank, given, plan, rows, row_s, y, back)
            return wrong + jax.lax.psum(here, group.axes)

        return jax.lax.fori_loop(0, STEPS, step, zero[0])[None]

    spec = jax.P(mesh.axis_names)
    mapped = jax.shard_map(program, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    assert (np.asarray(jax.jit(mapped)(jnp.zeros(devices, jnp.int32))) == 0).all()
    group.check()
