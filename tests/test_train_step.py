"""One optimizer step: the schedule, what is updated, what is spread, the routing bias."""

import functools
from typing import Any

import jax
import numpy as np
import optax
import pytest
import toy
from jax.sharding import PartitionSpec

from train.presets import TINY
from train.step import Trainer, bias_schedule, make_optimizer, schedule

pytestmark = pytest.mark.cpu


def test_schedule():
    rate = schedule(TINY.optimizer)
    for step in (0, 1, 50, 98, 99, 100, 500, 1250, 2499, 2500):
        cosine = 3e-4 + (3e-3 - 3e-4) * 0.5 * (1 + np.cos(np.pi * step / 2500))
        expected = cosine * min(1, (step + 1) / 100)
        np.testing.assert_allclose(rate(step), expected, rtol=1e-5)


def test_no_warmup():
    np.testing.assert_allclose(schedule(toy.changed(TINY.optimizer, warmup_steps=0))(0), 3e-3)


def test_a_decay_at_the_end():
    config = toy.changed(TINY.optimizer, decay_steps=500, bias_frozen_steps=300)
    rate, bias = schedule(config), bias_schedule(config)
    for step in (99, 1000, 2000):
        np.testing.assert_allclose(rate(step), 3e-3, rtol=1e-5)
    np.testing.assert_allclose(rate(2250), (3e-3 + 3e-4) / 2, rtol=1e-5)
    np.testing.assert_allclose(rate(2500), 3e-4, rtol=1e-5)
    assert [float(bias(step)) for step in (0, 2199, 2200, 2499)] == pytest.approx(
        [1e-3, 1e-3, 0, 0]
    )


def test_adamw_by_hand():
    """Two steps against the formulas: clip, means, correction, decay of every parameter."""
    config = toy.changed(TINY.optimizer, warmup_steps=0)
    optimizer = make_optimizer(config)
    params: Any = {"matrix": np.float32([[1, -2]]), "scale": np.float32([3])}
    mean, square = ({k: np.zeros_like(v, np.float64) for k, v in params.items()} for _ in "12")
    by_hand = {k: v.astype(np.float64) for k, v in params.items()}
    state = optimizer.init(params)
    for step in range(2):
        grads = {"matrix": np.float32([[3, 0.5]]), "scale": np.float32([4 - step])}
        with jax.numpy_dtype_promotion("standard"):
            updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        norm = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in grads.values()))
        assert norm > 1
        rate = float(schedule(config)(step))
        for name, grad in grads.items():
            clipped = grad / norm
            mean[name] = 0.9 * mean[name] + 0.1 * clipped
            square[name] = 0.95 * square[name] + 0.05 * clipped**2
            root = np.sqrt(square[name] / (1 - 0.95 ** (step + 1)))
            direction = mean[name] / (1 - 0.9 ** (step + 1)) / (root + 1e-8)
            by_hand[name] = by_hand[name] - rate * (direction + 0.1 * by_hand[name])
            np.testing.assert_allclose(params[name], by_hand[name], rtol=1e-6)


def test_tiny_has_as_many_parameters_as_published():
    trainer = Trainer(TINY, toy.group())
    assert trainer.num_params == 756_576
    assert len(trainer.abstract_state.biases) == 2


@pytest.mark.parametrize("scan_layers", [False, True])
def test_experts_are_spread_and_so_are_their_means(scan_layers):
    trainer = Trainer(toy.changed(toy.CONFIG, model__scan_layers=scan_layers), toy.group())
    state = trainer.abstract_state
    adam = state.optimizer[1][0]
    spread = 0
    for arrays in (state.params, adam.mu, adam.nu):
        for path, leaf in arrays.items():
            is_expert = path.endswith(("mlp/gate_up", "mlp/down"))
            expert = PartitionSpec(*(None,) * scan_layers, ("node", "rank"), None, None)
            assert leaf.sharding.spec == (expert if is_expert else PartitionSpec())
            spread += is_expert
    assert spread == 3 * (2 if scan_layers else 4)


@functools.cache
def compiled():
    """A trainer and its compiled step."""
    trainer = Trainer(toy.CONFIG, toy.group())
    return trainer, trainer.compile_step(toy.FAST_COMPILE)


@functools.cache
def steps():
    """States (as numbers) and metrics of three steps."""
    trainer, step = compiled()
    state = toy.first_state(trainer)
    found: list[tuple[Any, Any]] = [(jax.device_get(state), None)]
    for batch in toy.windows(3):
        state, metrics = step(state, jax.device_put(batch, trainer.batch_sharding))
        found.append((jax.device_get(state), jax.device_get(metrics)))
    return found


def test_bias_steps_once_by_the_sign_of_the_global_load():
    tokens = toy.CONFIG.data.batch * toy.CONFIG.data.sequence
    for (before, _), (after, metrics) in zip(steps()[:-1], steps()[1:], strict=True):
        counts = metrics["moe"].counts
        assert counts.shape == (2, 8) and (counts.sum(1) == 2 * tokens).all()
        for layer in range(2):
            path = f"moe_blocks/{layer}/mlp/bias"
            sign = np.sign(2 * tokens - 8 * counts[layer]).astype(np.float32)
            expected = before.biases[path] + np.float32(toy.CONFIG.optimizer.bias_step) * sign
            np.testing.assert_array_equal(after.biases[path], expected)


def test_every_parameter_moves():
    (before, _), (after, metrics) = steps()[:2]
    for path, array in before.params.items():
        assert (array != after.params[path]).mean() > 0.5, path
    assert after.step == 1 and metrics["learning_rate"] == pytest.approx(1e-2 / 5, rel=1e-6)
    assert metrics["grad_norm"] > 0


def test_the_dense_rest_is_split_over_the_devices():
    """No device works on another's sequences: the compiled step has no whole-batch activation."""
    text = compiled()[1].as_text()
    length, heads = toy.CONFIG.data.sequence, toy.CONFIG.model.num_heads
    assert f"f32[1,{heads},{length},{length}]" in text, "the attention scores of one sequence"
    assert f"f32[8,{heads},{length},{length}]" not in text, "the attention scores of the batch"
    assert "f32[8,24,32]" not in text, "the residual stream of the batch"
