"""The whole model against Hugging Face's DeepseekV3, in fp32, through golden files."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from flax import nnx

from train import convert
from train.config import Config
from train.model import find_places
from train.step import Trainer, cross_entropy

pytestmark = pytest.mark.cpu

GOLDEN = Path(__file__).parent / "golden"
FILES = ["model", "model_q_lora"]


@functools.cache
def golden(name):
    with np.load(GOLDEN / f"{name}.npz") as file:
        return {key: file[key] for key in file.files}


def part(name, prefix):
    start = f"{prefix}/"
    return {k.removeprefix(start): v for k, v in golden(name).items() if k.startswith(start)}


def config_of(name) -> Config:
    sizes = json.loads(str(golden(name)["header"]))["config"]
    return toy.changed(toy.CONFIG, model=convert.model_config(sizes))


@functools.cache
def ours(name):
    """Loss, gradients by path, logits and hidden states, with two tokens on every device."""
    config = config_of(name)
    trainer = Trainer(config, toy.group("2 devices, 4 virtual ranks"))
    arrays = convert.from_hugging_face(part(name, "weights"), config.model)
    biases = {path: arrays.pop(path) for path in trainer.abstract_state.biases}
    assert {p: a.shape for p, a in arrays.items()} == {
        p: a.shape for p, a in trainer.abstract_state.params.items()
    }

    def loss(params, tokens):
        model = trainer.model(params, biases)
        logits, _ = model(tokens)
        x = model.embedding(tokens)
        hidden = [x]
        assert isinstance(model.moe_blocks, nnx.List)
        for block in [*model.dense_blocks, *model.moe_blocks]:
            x, _ = block(x, find_places(x.shape[1], None))
            hidden.append(x)
        hidden[-1] = model.norm(x)
        return cross_entropy(logits[:, :-1], tokens[:, 1:]).mean(), (logits, hidden)

    tokens = jnp.asarray(golden(name)["tokens"])
    function = jax.jit(jax.value_and_grad(loss, has_aux=True))
    compiled = function.lower(arrays, tokens).compile(compiler_options=toy.FAST_COMPILE)
    (value, (logits, hidden)), gradients = jax.device_get(compiled(arrays, tokens))
    return value, logits, hidden, gradients


def assert_near(found, expected, name=""):
    """Within 1e-5 of the largest entry."""
    np.testing.assert_allclose(
        found, expected, rtol=0, atol=1e-5 * np.abs(expected).max(), err_msg=name
    )


@pytest.mark.parametrize("name", FILES)
def test_hidden_states_and_logits(name):
    _, logits, hidden, _ = ours(name)
    for number, state in enumerate(hidden):
        assert_near(state, golden(name)[f"hidden/{number}"], f"hidden/{number}")
    assert_near(logits, golden(name)["logits"])


@pytest.mark.parametrize("name", FILES)
def test_loss(name):
    np.testing.assert_allclose(ours(name)[0], golden(name)["loss"], rtol=1e-6)


@pytest.mark.parametrize("name", FILES)
def test_gradients(name):
    gradients = ours(name)[3]
    expected = convert.from_hugging_face(part(name, "gradients"), config_of(name).model)
    assert gradients.keys() == expected.keys()
    for path, gradient in gradients.items():
        assert_near(gradient, expected[path], path)


@pytest.mark.parametrize("name", FILES)
def test_experts_without_a_token_have_no_gradient(name):
    gradients = ours(name)[3]
    model = config_of(name).model
    idle = 0
    for layer in range(model.num_moe_layers):
        number = layer + model.num_dense_layers
        used = golden(name)[f"routing/model.layers.{number}.mlp.gate/expert_ids"]
        for expert in set(range(model.num_experts)) - set(used.flat):
            for matrix in ("gate_up", "down"):
                assert not gradients[f"moe_blocks/{layer}/mlp/{matrix}"][expert].any()
            idle += 1
    assert idle, "every expert has a token: the file tests nothing here"


def test_what_the_model_lacks_is_refused():
    sizes = json.loads(str(golden("model")["header"]))["config"]
    for change in ({"tie_word_embeddings": True}, {"rope_parameters": {"rope_type": "yarn"}}):
        with pytest.raises(ValueError, match=next(iter(change)).split("_")[0]):
            convert.model_config(sizes | change)
