"""The layer against Hugging Face transformers' DeepseekV3MoE in fp32."""

import golden_files
import moe_runs
import numpy as np
import pytest

import jax_moe


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("moe_block", moe_runs.Layout((1, 2, 2))),
        ("moe_block_scaled", moe_runs.Layout((1, 1, 2), virtual_ranks=4, num_nodes=8)),
    ],
)
def test_block_equals_hugging_face(name, layout):
    golden = golden_files.load(name)
    config = golden.config
    step = moe_runs.Step(
        moe_runs.make(
            golden.router_config(),
            layout,
            hidden=config["hidden_size"],
            width=config["moe_intermediate_size"],
            num_shared=config["n_shared_experts"],
        )
    )
    x, dy = golden.arrays["x"], golden.arrays["dy"]
    got = step(x, np.ones(x.shape[:-1], bool), dy, aux_weight=0.0, **golden.moe("weights"))
    moe_runs.assert_close(got.y, golden.arrays["y"], "y")
    moe_runs.assert_close(got.grads["x"], golden.arrays["gradients/x"], "gradient of x")
    for part, want in golden.moe("gradients").items():
        moe_runs.assert_close(got.grads[part], want, f"gradient of {part}")
    ids = golden.arrays["routing/gate/expert_ids"]
    counts = np.bincount(ids.reshape(-1), minlength=config["n_routed_experts"])
    np.testing.assert_array_equal(got.stats.counts, counts)


@pytest.mark.parametrize("name", ["moe_block", "moe_block_scaled", "model", "model_q_lora"])
def test_routing_equals_hugging_face(name):
    golden = golden_files.load(name)
    keys = [key for key in golden.arrays if key.endswith("/logits")]
    assert keys
    for key in (k for k in keys if k.startswith("routing/")):
        gate = key.removeprefix("routing/").removesuffix("/logits")
        bias = golden.arrays[f"weights/{gate}.e_score_correction_bias"]
        routing = jax_moe.route(golden.arrays[key], bias, golden.router_config())
        order = np.argsort(routing.expert_ids, axis=-1)
        ids = np.take_along_axis(np.asarray(routing.expert_ids), order, -1)
        np.testing.assert_array_equal(ids, golden.arrays[f"routing/{gate}/expert_ids"])
        weights = np.take_along_axis(np.asarray(routing.weights), order, -1)
        np.testing.assert_allclose(weights, golden.arrays[f"routing/{gate}/weights"], rtol=2e-6)
