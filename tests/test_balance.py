"""The bias step, the sequence-wise loss and the bias loop of a layer."""

import functools

import dense_moe
import jax
import jax.numpy as jnp
import moe_runs
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import jax_moe

CONFIG = jax_moe.RouterConfig(num_experts=8, top_k=2, num_groups=4, top_groups=2)
# Small ones, so that loads often equal the mean, and large ones.
LOADS = st.integers(0, 4) | st.integers(0, 2**31 // 8 - 1)

moved = jax.jit(functools.partial(jax_moe.update_bias, step_size=0.25))


def directions(counts):
    """sign(mean - count) in Python integers."""
    total = sum(map(int, counts))
    return [(total > len(counts) * int(c)) - (total < len(counts) * int(c)) for c in counts]


@settings(deadline=None, max_examples=60)
@given(st.sampled_from([1, 3, 8]).flatmap(lambda n: st.lists(LOADS, min_size=n, max_size=n)))
def test_bias_step_is_the_exact_sign_of_the_difference_to_the_mean(counts):
    bias = np.linspace(-1, 1, len(counts), dtype=np.float32)
    got = moved(bias, np.array(counts, np.int32))
    np.testing.assert_array_equal(got, bias + np.float32(0.25) * np.float32(directions(counts)))


def test_bias_step_at_sizes_that_float32_rounds():
    # 2^26 + 1 and 2^26 are one float32; E * count would overflow int32.
    counts = jnp.full((2, 8), 2**26, jnp.int32).at[0, 3].add(1)
    got = jax_moe.update_bias(jnp.zeros((2, 8)), counts, 1.0)
    np.testing.assert_array_equal(got, [[1, 1, 1, -1, 1, 1, 1, 1], [0] * 8])


def test_bias_step_refuses_what_it_cannot_compare():
    with pytest.raises(TypeError, match="float32"):
        jax_moe.update_bias(jnp.zeros(4), jnp.zeros(4), 1e-3)
    with pytest.raises(ValueError, match=r"\(4,\).*\(2, 4\)"):
        jax_moe.update_bias(jnp.zeros(4), jnp.zeros((2, 4), jnp.int32), 1e-3)


def test_bias_loop_of_60_steps_equals_integer_arithmetic():
    layer = moe_runs.make(CONFIG, moe_runs.Layout((1, 4, 2)))
    x = np.random.default_rng(0).normal(size=(2, 24, 12)).astype(np.float32)
    x += 0.4  # one-sided, so that the loads start uneven
    scores = dense_moe.scores_of(np.float64(x.reshape(-1, 12)) @ layer.router[...], CONFIG)
    forward = nnx.jit(lambda layer, x: layer(x)[1])
    step_size, steps = 2.0**-7, np.zeros(8, int)  # every multiple is exact in float32
    max_vio = []
    for _ in range(60):
        stats = forward(layer, x)
        chosen = [dense_moe.choose(row, steps * step_size, CONFIG) for row in scores]
        counts = np.bincount(np.ravel(chosen), minlength=8)
        np.testing.assert_array_equal(stats.counts, counts)
        steps += directions(counts)
        layer.update_bias(stats.counts, step_size)
        np.testing.assert_array_equal(layer.bias[...], np.float32(steps * step_size))
        max_vio.append(float(stats.max_vio))
    assert np.mean(max_vio[-10:]) < 0.5 * max_vio[0]


def test_a_call_leaves_the_bias_alone_and_optimizers_do_not_see_it():
    layer = moe_runs.make(CONFIG, moe_runs.Layout((1, 1, 1)))
    assert "bias" not in nnx.state(layer, nnx.Param)
    assert isinstance(layer.bias, jax_moe.RouterBias)
    _, written = nnx.jit(lambda layer, x: (layer(x)[0], layer.bias[...]))(layer, jnp.ones((3, 12)))
    np.testing.assert_array_equal(written, np.zeros(8))


def test_sequence_loss_is_one_at_perfect_balance_and_at_most_experts_over_k():
    # Token t prefers experts t and t + 1: every expert is chosen by two of the eight.
    prefers = np.eye(8) + np.roll(np.eye(8), 1, axis=1)
    even = jax_moe.sequence_balance_loss(jnp.asarray(prefers * 3, jnp.float32), None, CONFIG)
    np.testing.assert_allclose(even, 1.0, rtol=1e-6)
    one = np.broadcast_to(prefers[0] * 60 - 30, (5, 8))
    uneven = jax_moe.sequence_balance_loss(jnp.asarray(one, jnp.float32), None, CONFIG)
    np.testing.assert_allclose(uneven, 4.0, rtol=1e-5)


def test_sequence_loss_is_a_mean_over_sequences_without_padding():
    rng = np.random.default_rng(1)
    logits = jnp.asarray(rng.normal(size=(2, 3, 6, 8)), jnp.float32)
    mask = jnp.asarray(rng.random((2, 3, 6)) < 0.6).at[0, 1].set(False).at[1].set(True)
    got = jax_moe.sequence_balance_loss(logits, mask, CONFIG)
    scores = dense_moe.scores_of(np.float64(logits), CONFIG).reshape(6, 6, 8)
    real = np.asarray(mask).reshape(6, 6)
    assert real.any(1).sum() == 5
    shares = scores / scores.sum(-1, keepdims=True) * real[..., None]
    mean_shares = shares.sum(1) / np.maximum(1, real.sum(1))[:, None]
    want = (dense_moe.load_shares(scores, real, CONFIG) * mean_shares).sum()
    np.testing.assert_allclose(got, want, rtol=1e-6)
    nothing = jax_moe.sequence_balance_loss(logits, mask & False, CONFIG)
    assert nothing == 0


@pytest.mark.parametrize("score", ["sigmoid", "softmax"])
def test_sequence_loss_has_finite_gradients_everywhere(score):
    config = jax_moe.RouterConfig(num_experts=4, top_k=2, num_groups=1, score=score)
    logits = jnp.array([[-200.0, -300, -400, -1e30], [200, 300, 400, 1e30], [0, 0, 0, 0]])
    mask = jnp.array([True, True, False])
    value, grad = jax.value_and_grad(jax_moe.sequence_balance_loss)(logits, mask, config)
    assert np.isfinite(value) and np.isfinite(grad).all()
    poisoned = logits.at[2].set(jnp.nan)
    same = jax.value_and_grad(jax_moe.sequence_balance_loss)(poisoned, mask, config)
    np.testing.assert_array_equal(same[0], value)
    np.testing.assert_array_equal(same[1], grad)
