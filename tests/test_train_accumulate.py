"""Micro-batches, cut parameters, another mesh, checkpoints written meanwhile: alike."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from jax.sharding import PartitionSpec

import jax_moe
from train import packing, sharding
from train.checkpoint import Checkpoints
from train.config import MeshConfig
from train.data import Packed
from train.step import Trainer, add_up, real_predictions

pytestmark = pytest.mark.cpu

ONE_LAYER = {"model__num_layers": 1, "model__num_dense_layers": 0, "data__batch": 16}
CONFIG = toy.changed(toy.CONFIG, **ONE_LAYER)
# Half the expert parallelism, twice the replicas, every parameter cut, and two micro-batches.
OTHER = toy.changed(
    CONFIG,
    mesh=MeshConfig(data=2, fsdp=2, node=2, rank=1, shard_dense=True),
    micro_batches=2,
)


@functools.cache
def plain():
    """A trainer on (node 4, rank 2) and its compiled step."""
    trainer = Trainer(CONFIG, toy.group("8 devices"))
    return trainer, trainer.compile_step(toy.FAST_COMPILE)


def run(trainer, step, state, batches, save=None):
    """Metrics of one step per batch, and the last state; `save` is called after the third."""
    found = []
    for number, batch in enumerate(batches, 1):
        state, metrics = step(state, jax.device_put(batch, trainer.batch_sharding))
        found.append(jax.device_get(metrics))
        if save is not None and number == 3:
            save(state)
    return found, state


def test_another_mesh_with_micro_batches_goes_on_alike(tmp_path, monkeypatch):
    monkeypatch.setattr(sharding, "_SMALL", 1)
    trainer, step = plain()
    checkpoints, saved = Checkpoints(tmp_path), []

    def save(state):
        saved.append(jax.tree.map(np.array, state))
        checkpoints.save(state, {"place": 3})  # the next steps take the state's memory meanwhile

    batches = toy.windows(6, CONFIG)
    whole, _ = run(trainer, step, toy.first_state(trainer), batches, save)
    checkpoints.close()

    other = Trainer(OTHER, sharding.make_group(OTHER.mesh))
    state, data_state = Checkpoints(tmp_path).restore(other.abstract_state)
    assert data_state == {"place": 3}
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, state), saved[0])
    assert all(leaf.sharding.spec != PartitionSpec() for leaf in state.params.values())

    found, _ = run(other, other.compile_step(toy.FAST_COMPILE), state, batches[3:])
    for ours, theirs in zip(found, whole[3:], strict=True):
        for name in ("loss", "grad_norm"):
            np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-5)
        np.testing.assert_array_equal(ours["moe"].counts, theirs["moe"].counts)
        np.testing.assert_array_equal(ours["bias"], theirs["bias"])
        for name in ("max_vio", "min_load", "aux_loss", "router_entropy"):
            ours_value, value = getattr(ours["moe"], name), getattr(theirs["moe"], name)
            np.testing.assert_allclose(ours_value, value, rtol=1e-5, err_msg=name)


def packed(config) -> Packed:
    """A batch of documents of random lengths: three a window, in every other two windows two."""
    random, window = np.random.default_rng(3), config.data.sequence + 1
    rows = []
    for row in range(config.data.batch):
        lengths = random.integers(2, 9, 3 - row % 4 // 2)
        rows.append(packing.pack([random.integers(0, 256, n, np.uint8) for n in lengths], window))
    batch = Packed(*(np.concatenate(arrays) for arrays in zip(*rows, strict=True)))
    assert len(batch.tokens) == config.data.batch
    return batch


def test_packed_documents_in_micro_batches():
    """Each has another number of predictions, and they weigh alike all the same."""
    config = toy.changed(CONFIG, data__documents=True, optimizer__clip_norm=1e9)
    batch = packed(config)
    real = np.asarray(real_predictions(batch.segments)).sum(axis=1)
    assert real.reshape(-1, 4).sum(axis=0).max() > 1.1 * real.reshape(-1, 4).sum(axis=0).min()
    group, start, found = toy.group("2 devices, 4 virtual ranks"), None, []
    for parts in (1, 4):
        trainer = Trainer(toy.changed(config, micro_batches=parts), group)
        start = jax.device_get(start or toy.first_state(trainer))
        state = jax.device_put(start, trainer.shardings)
        step = trainer.compile_step(toy.FAST_COMPILE)
        ((metrics,), state) = run(trainer, step, state, [batch])
        found.append((metrics, toy.gradients(state)))
    (whole, expected), (parts, summed) = found
    np.testing.assert_allclose(parts["loss"], whole["loss"], rtol=1e-6)
    toy.assert_gradients_near(summed, expected)
    # The last token of a full window is predicted only, so it goes to no expert.
    tokens = (batch.segments[:, :-1] > 0).sum() * config.model.top_k
    for metrics in (whole, parts):
        assert metrics["moe"].counts.sum(axis=1).tolist() == [tokens]
    np.testing.assert_array_equal(parts["moe"].counts, whole["moe"].counts)
    np.testing.assert_array_equal(parts["bias"], whole["bias"])


def test_counts_are_added_up_not_their_signs():
    counts = [[9, 0, 0, 0, 1, 1, 1, 4], [0, 5, 5, 4, 1, 1, 0, 0], [0, 5, 5, 4, 1, 1, 0, 0]]
    one = jnp.ones((3, 1))
    rest = {f.name: one for f in dataclasses.fields(jax_moe.MoEStats)}
    rest |= {
        "counts": jnp.int32(counts)[:, None],
        "dropped": jnp.int32(one),
        "invalid": jnp.int32(one),
    }
    stats = jax_moe.MoEStats(**rest)
    total = add_up(stats)
    assert total.counts.tolist() == [[9, 10, 10, 8, 3, 3, 1, 4]] and total.dropped.tolist() == [3]
    assert total.invalid.tolist() == [3]
    np.testing.assert_allclose(total.max_vio, 10 / 6 - 1, rtol=1e-6)
    np.testing.assert_allclose(total.min_load, 1 / 6, rtol=1e-6)
    assert total.aux_loss.tolist() == [1.0]


def test_a_step_that_is_not_finite_changes_nothing_but_its_number():
    trainer, step = plain()
    state = jax.tree.map(np.asarray, toy.first_state(trainer))
    broken = state._replace(params=dict(state.params))
    broken.params["head/kernel"] = np.full_like(state.params["head/kernel"], np.inf)
    placed = jax.device_put(broken, trainer.shardings)
    after, metrics = step(placed, jax.device_put(toy.windows(1, CONFIG)[0], trainer.batch_sharding))
    assert not metrics["finite"] and after.step == 1
    after = jax.tree.map(np.asarray, after)
    for name in ("params", "biases", "optimizer"):
        jax.tree.map(np.testing.assert_array_equal, getattr(after, name), getattr(broken, name))


def test_a_batch_that_does_not_divide_is_refused():
    trainer = Trainer(toy.changed(CONFIG, micro_batches=16), toy.group("8 devices"))
    with pytest.raises(ValueError, match=r"data\.batch=16 is not a multiple of 8 devices x micro"):
        trainer.lower_step()
