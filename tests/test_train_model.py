"""The model itself: causality, rotation, types."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from flax import nnx

from train import model
from train.model import MIXES, find_places, rotate
from train.step import Trainer

pytestmark = pytest.mark.cpu


def test_rotation_is_of_neighbouring_pairs():
    x = np.random.default_rng(0).normal(size=(5, 3, 8)).astype(np.float32)
    angles = np.random.default_rng(1).normal(size=(5, 1, 4)).astype(np.float32)
    turned = np.asarray(rotate(jnp.asarray(x), jnp.asarray(angles)))
    complex_x = x[..., 0::2] + 1j * x[..., 1::2]
    expected = complex_x * np.exp(1j * angles)
    np.testing.assert_allclose(turned[..., :4] + 1j * turned[..., 4:], expected, rtol=1e-5)


def logits(config, *batches):
    trainer = Trainer(config, toy.group("2 devices, 4 virtual ranks"))
    state = toy.first_state(trainer)
    function = jax.jit(lambda tokens: trainer.model(state.params, state.biases)(tokens)[0])
    tokens = [jnp.asarray(batch, jnp.int32) for batch in batches]
    compiled = function.lower(tokens[0]).compile(compiler_options=toy.FAST_COMPILE)
    return [np.asarray(compiled(batch)) for batch in tokens]


def test_a_token_sees_only_those_before_it():
    tokens = toy.windows(1)[0][:, :-1]
    changed = tokens.copy()
    changed[:, 15] += 1
    first, second = logits(toy.CONFIG, tokens, changed)
    np.testing.assert_array_equal(first[:, :15], second[:, :15])
    assert (first[:, 15:] != second[:, 15:]).any(axis=-1).mean() > 0.9


def test_flash_attention_is_asked_for_the_same(monkeypatch):
    """XLA's own implementation stands in for cuDNN's: scale, causality, values less wide."""
    asked, real = [], jax.nn.dot_product_attention

    def by_xla(*arrays, implementation, **options):
        asked.append(implementation)
        return real(*arrays, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", by_xla)
    random = np.random.default_rng(0)
    shapes = (2, 7, 3, 16), (2, 7, 3, 16), (2, 7, 3, 12)
    query, key, value = (jnp.asarray(random.normal(size=s), jnp.float32) for s in shapes)
    visible = find_places(7, None).visible
    found = MIXES["cudnn"](query, key, value, visible)
    np.testing.assert_allclose(
        found, MIXES["xla"](query, key, value, visible), rtol=1e-5, atol=1e-6
    )
    assert asked == ["cudnn"]


def test_bfloat16_computation_is_near_and_its_logits_are_float32():
    tokens = toy.windows(1)[0][:, :-1]
    (exact,) = logits(toy.CONFIG, tokens)
    (rounded,) = logits(toy.changed(toy.CONFIG, model__dtype="bfloat16"), tokens)
    assert rounded.dtype == np.float32
    assert not np.array_equal(exact, rounded)
    assert np.abs(exact - rounded).max() < 0.05 * np.abs(exact).max()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_look_up_by_matmul_is_the_look_up(dtype, monkeypatch):
    config = toy.changed(toy.CONFIG, model__dtype=dtype).model
    embedding = model.Embedding(model.Parts(config, "xla", nnx.Rngs(0)))
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, config.vocab_size, (4, 64)))
    dy = jnp.asarray(rng.standard_normal((4, 64, config.hidden)), dtype)
    graph, state = nnx.split(embedding)
    outcomes = []
    for small in (config.vocab_size, 0):
        monkeypatch.setattr(model, "SMALL_VOCABULARY", small)
        y, pull = jax.vjp(lambda state: nnx.merge(graph, state)(tokens), state)
        outcomes.append((y, jax.tree.leaves(pull(dy))[0]))
    (y, gradient), (want, want_gradient) = outcomes
    assert y.dtype == want.dtype == dtype
    np.testing.assert_array_equal(y, want)
    assert gradient.dtype == jnp.float32
    np.testing.assert_allclose(gradient, want_gradient, rtol=1e-6, atol=1e-6)
