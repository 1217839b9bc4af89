"""The MoE layer on a GPU with 8 virtual ranks, forward and backward, against JAX's collectives."""

import jax
import moe_runs
import numpy as np
import pytest

import jax_moe

CONFIG = jax_moe.RouterConfig(num_experts=32, top_k=4, num_groups=4, top_groups=2)


@pytest.mark.parametrize("capacity_factor", [None, 0.75], ids=["worst_case", "overflowing"])
def test_layer(capacity_factor):
    rng = np.random.default_rng(3)
    x = rng.standard_normal((4, 64, 64), np.float32)
    dy = rng.standard_normal(x.shape, np.float32)
    mask = rng.random(x.shape[:2]) < 0.9
    outcomes = []
    with jax.default_matmul_precision("highest"):
        for implementation in ("xla", "ptx"):
            layout = moe_runs.Layout(
                (1, 1, 1), virtual_ranks=8, num_nodes=2, implementation=implementation
            )
            layer = moe_runs.make(
                CONFIG, layout, hidden=64, width=32, capacity_factor=capacity_factor
            )
            outcomes.append(moe_runs.Step(layer)(x, mask, dy))
            layout.group.check()
    want, got = outcomes
    np.testing.assert_array_equal(got.stats.counts, want.stats.counts)
    moe_runs.assert_close(got.y, want.y, "y")
    for name, grad in want.grads.items():
        moe_runs.assert_close(got.grads[name], grad, f"gradient of {name}")
