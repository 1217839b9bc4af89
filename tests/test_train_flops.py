"""Parameters and operations of the named configurations, against published figures."""

import functools

import pytest
from jax.sharding import AbstractMesh, AxisType

import jax_moe
from train.flops import flops_per_token, matrix_weights_per_token, peak_tflops
from train.presets import CONFIGS, DEBUG, V3
from train.step import Trainer

pytestmark = pytest.mark.cpu


@functools.cache
def sizes(name: str) -> dict[str, int]:
    """Elements of each parameter by path, from tracing the model; nothing is allocated."""
    mesh = AbstractMesh((1, 1, 1), ("data", "node", "rank"), axis_types=(AxisType.Auto,) * 3)
    trainer = Trainer(CONFIGS[name][1], jax_moe.ExpertGroup(mesh))
    found = {path: leaf.size for path, leaf in trainer.abstract_state.params.items()}
    assert trainer.num_params == sum(found.values())
    return found


@pytest.mark.parametrize(
    ("name", "billions", "digits"),
    [("tiny", 0.000757, 6), ("debug", 0.10, 2), ("16b", 15.7, 1), ("deepseek-v3-671b", 671.0, 1)],
)
def test_parameters(name, billions, digits):
    assert round(sum(sizes(name).values()) / 1e9, digits) == billions


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_per_token_are_those_of_the_model(name):
    model = CONFIGS[name][1].model
    total = 0
    for path, size in sizes(name).items():
        if path.endswith(("mlp/gate_up", "mlp/down")):
            size = size * model.top_k // model.num_experts
        total += 0 if path.endswith(("scale", "embedding")) else size
    assert matrix_weights_per_token(model) == total


def test_deepseek_v3_takes_250_gflop_a_token():
    """As published for a sequence of 4096, causal, without multi-token prediction."""
    assert round(flops_per_token(V3.model, 4096) / 1e9, 1) == 250.4


def test_attention_grows_with_the_sequence():
    model = DEBUG.model
    short, long = (flops_per_token(model, length) for length in (512, 1024))
    head = model.nope_dim + model.rope_dim + model.value_dim
    # Two products, two operations each, three passes, and half of 512 positions more.
    assert long - short == 2 * 3 * model.num_layers * model.num_heads * head * 256


@pytest.mark.parametrize(
    ("kind", "peak"), [("NVIDIA H200", 989.4), ("NVIDIA H100 PCIe", 756.0), ("cpu", None)]
)
def test_peaks(kind, peak):
    assert peak_tflops(kind) == peak
