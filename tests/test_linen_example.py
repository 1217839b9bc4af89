"""The Linen example runs and computes what the nnx layer computes."""

import sys
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import moe_runs
import numpy as np

import jax_moe

sys.path.append(str(Path(__file__).parents[1] / "examples"))
import linen_layer  # pyright: ignore[reportMissingImports]


def test_linen_layer_on_the_bare_operations_equals_the_nnx_layer():
    config = jax_moe.RouterConfig(num_experts=8, top_k=2, num_groups=4, top_groups=2)
    layout = moe_runs.Layout((1, 2, 2))
    step = moe_runs.Step(moe_runs.make(config, layout, num_shared=0))
    weights = step.weights()
    layer = linen_layer.LinenMoE(width=10, config=config, group=layout.group)
    x, dy = np.random.default_rng(0).normal(size=(2, 32, 12)).astype(np.float32)

    boxed = jax.eval_shape(layer.init, jax.random.key(0), x)["params"]
    assert jax.tree.map(np.shape, nn.unbox(boxed)) == jax.tree.map(np.shape, weights)
    assert nn.get_partition_spec(boxed)["down"] == jax.P(layout.group.axes, None, None)

    @jax.jit
    def run(weights, x):
        def loss(weights, x):
            bias = {"bias": jnp.zeros(8)}
            y, counts = layer.apply({"params": weights, "balance": bias}, x)
            return (y * dy).sum(), (y, counts)

        return jax.grad(loss, argnums=(0, 1), has_aux=True)(weights, x)

    (grads, dx), (y, counts) = run(weights, x)
    want = step(x[None], np.ones((1, 32), bool), dy[None], aux_weight=0.0)
    moe_runs.assert_close(y, want.y[0], "y")
    np.testing.assert_array_equal(counts, want.stats.counts)
    for name, grad in (grads | {"x": dx[None]}).items():
        moe_runs.assert_close(grad, want.grads[name], f"gradient of {name}")


def test_the_example_runs(capsys):
    linen_layer.main()
    out = capsys.readouterr().out
    assert "tokens per expert" in out and "gradient norms" in out and "nan" not in out
