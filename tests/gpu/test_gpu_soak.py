"""10,000 exchanges in one program, with new routing in each, checked on the GPU itself."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_moe

STEPS = int(os.environ.get("JAX_MOE_SOAK_STEPS", "10000"))
T, K, E, H = 24, 4, 32, 64


def _mismatches(plan: jax_moe.Plan, ids, x, s, rows, row_s, y, back, virtual: int):
    """Entries that are wrong. All ranks are on this device, so all is at hand."""
    count = ids.size
    sources = plan.sources.reshape(virtual, -1)
    real = sources >= 0
    owner = jnp.where(real, sources, 0)
    expert = ids.reshape(-1)[owner]
    # The rows of a rank: its own experts', in ascending (expert, source), without gaps.
    key = jnp.where(real, expert * count + owner, -1)
    rank = jnp.arange(virtual, dtype=jnp.int32)[:, None]
    row = jnp.arange(sources.shape[1], dtype=jnp.int32)[None]
    valid = (ids >= 0) & (ids < E)
    wanted = jnp.where(valid, ids // (E // virtual), -1)
    number = (wanted.reshape(-1)[None] == rank).sum(1, dtype=jnp.int32)
    wrong = (real != (row < number[:, None])).sum()
    wrong += (real & (expert // (E // virtual) != rank)).sum()
    wrong += (real[:, 1:] & (key[:, 1:] <= key[:, :-1])).sum()
    wrong += (real & (plan.positions.reshape(-1)[owner] != row)).sum()
    wrong += ((plan.positions >= 0) != valid).sum()
    # What was carried.
    rows = rows.reshape(virtual, -1, H)
    wrong += (real[..., None] & (rows != x[owner // K])).sum()
    wrong += (real & (row_s.reshape(virtual, -1) != s.reshape(-1)[owner])).sum()
    wrong += (back != jnp.where(valid, s, 0)).sum()
    times = valid.sum(1, keepdims=True).astype(jnp.float32)
    wrong += (y != x * times).sum()
    return wrong.astype(jnp.int32)


@pytest.mark.parametrize("virtual", [2, 8])
def test_soak(virtual):
    group = jax_moe.ExpertGroup(
        jax_moe.make_mesh(devices=jax.devices()[:1]), virtual_ranks=virtual, timeout_s=10.0
    )

    def step(i, wrong):
        keys = jax.random.split(jax.random.fold_in(jax.random.key(virtual), i), 3)
        # From all experts down to two of them, and some ids that name none.
        most = jnp.maximum(E >> (i % 5), 2)
        ids = jax.random.randint(keys[0], (virtual * T, K), -1, most, jnp.int32)
        # Integers, so that sums are exact.
        x = jax.random.randint(keys[1], (virtual * T, H), 1, 64, jnp.int32).astype(jnp.float32)
        s = jax.random.uniform(keys[2], (virtual * T, K), jnp.float32, 1, 2)
        plan = jax_moe.plan(
            ids, group=group, num_experts=E, capacity=virtual * T * K, implementation="ptx"
        )
        rows, row_s = jax_moe.dispatch(x, s, plan)
        y, back = jax_moe.combine(rows, row_s, plan)
        return wrong + _mismatches(plan, ids, x, s, rows, row_s, y, back, virtual)

    def program(zero):
        return jax.lax.fori_loop(0, STEPS, step, zero[0])[None]

    spec = jax.P(group.mesh.axis_names)
    soak = jax.jit(jax.shard_map(program, mesh=group.mesh, in_specs=spec, out_specs=spec))
    assert np.asarray(soak(jnp.zeros(1, jnp.int32))) == [0]
    group.check()
