"""Routing that is forced: dealt out, drawn, or replayed from a run."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from train.config import RoutingConfig
from train.record_routing import Options, chosen_experts, record
from train.routing import forced_routing
from train.step import Trainer

pytestmark = pytest.mark.cpu

GROUP = "2 devices, 4 virtual ranks"
ONE_LAYER = toy.changed(toy.CONFIG, model__num_layers=1, model__num_dense_layers=0)
TOKENS = toy.windows(1)[0][:, :-1].astype(np.int32)


def run(function, *operands):
    return jax.jit(function).lower(*operands).compile(compiler_options=toy.FAST_COMPILE)(*operands)


def ids(tokens=TOKENS, **routing) -> np.ndarray:
    config = toy.changed(toy.CONFIG, routing=RoutingConfig(**routing))
    return np.asarray(run(forced_routing(config), jnp.asarray(tokens)))


def test_balanced():
    found = ids(mode="balanced")
    assert found.shape == (2, 8, 24, 2) and found.dtype == np.int32
    assert np.bincount(found[0].ravel()).tolist() == [8 * 24 * 2 // 8] * 8


def test_random_keeps_the_routers_limits_and_changes_with_the_batch():
    found = ids(mode="random")
    assert found.shape == (2, 8, 24, 2) and (found[..., 0] != found[..., 1]).all()
    assert (found[0] != found[1]).any(axis=-1).mean() > 0.5
    assert (ids(TOKENS + 1, mode="random") != found).any()
    np.testing.assert_array_equal(ids(mode="random"), found)
    assert np.bincount(found.ravel(), minlength=8).min() > 0


def test_learned_routing_is_not_forced():
    assert forced_routing(toy.CONFIG) is None


@functools.cache
def trainer_and_state():
    trainer = Trainer(ONE_LAYER, toy.group(GROUP))
    return trainer, toy.first_state(trainer)


def test_replaying_a_models_own_choice_changes_nothing(tmp_path):
    trainer, state = trainer_and_state()

    def both(state, tokens):
        model = trainer.model(state.params, state.biases)
        return model(tokens), chosen_experts(model, tokens)

    (logits, stats), chosen = run(both, state, TOKENS)
    path = tmp_path / "ids.npy"
    np.save(path, np.asarray(chosen)[:, :4])
    routing = RoutingConfig(mode="replay", file=str(path))
    forced = forced_routing(toy.changed(ONE_LAYER, routing=routing))
    replayed = jax.jit(forced)(TOKENS)
    np.testing.assert_array_equal(replayed, np.tile(np.asarray(chosen)[:, :4], (1, 2, 1, 1)))

    np.save(path, np.asarray(chosen))
    replay = Trainer(toy.changed(ONE_LAYER, routing=routing), toy.group(GROUP))
    found, found_stats = run(
        lambda state, tokens: replay.model(state.params, state.biases)(tokens), state, TOKENS
    )
    np.testing.assert_allclose(found, logits, rtol=1e-5, atol=1e-6)
    for field in dataclasses.fields(stats):
        values = (getattr(s, field.name) for s in (found_stats, stats))
        np.testing.assert_allclose(*values, rtol=1e-5, err_msg=field.name)


def test_a_recording_of_nothing_is_refused():
    with pytest.raises(ValueError, match="sequences=0: must be at least 1"):
        record(Options(sequences=0))


def test_a_recording_of_another_model_is_refused(tmp_path):
    path = tmp_path / "ids.npy"
    np.save(path, np.zeros((3, 8, 24, 2), np.int32))
    with pytest.raises(ValueError, match=r"int32\[3, 8, 24, 2\], but this run needs int32 \[2 lay"):
        ids(mode="replay", file=str(path))


@pytest.mark.parametrize("expert", [-2, 8])
def test_a_recording_of_other_experts_is_refused(tmp_path, expert):
    path = tmp_path / "ids.npy"
    np.save(path, np.full((2, 8, 24, 2), expert, np.int32))
    with pytest.raises(ValueError, match=rf"from {expert} to {expert}, .* are 0 to 7 \(-1"):
        ids(mode="replay", file=str(path))


@pytest.mark.parametrize("options", [{"mode": "replay"}, {"mode": "random", "file": "a.npy"}])
def test_a_file_goes_with_replay_alone(options):
    with pytest.raises(ValueError, match=r"routing\.file"):
        RoutingConfig(**options)
