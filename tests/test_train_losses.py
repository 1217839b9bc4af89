"""The same run on other meshes, by other implementations, stacked or recomputed: same losses."""

import functools

import jax
import numpy as np
import pytest
import toy

from train import sharding
from train.config import MeshConfig
from train.sharding import make_group
from train.step import Trainer

pytestmark = pytest.mark.cpu

STEPS = 20
FIRST = "8 devices"


@functools.cache
def start(**changes):
    """The first state, as numbers."""
    trainer = Trainer(toy.changed(toy.CONFIG, **changes), toy.group(FIRST))
    return jax.tree.map(np.asarray, toy.first_state(trainer))


@functools.cache
def train(mesh: str | MeshConfig, stacked: bool = False, **changes):
    """Losses by step, and the gradients of the first one."""
    scan = {"model__scan_layers": True} if stacked else {}
    if isinstance(mesh, str):
        group = toy.group(mesh)
    else:
        group, changes = make_group(mesh), changes | {"mesh": mesh}
    trainer = Trainer(toy.changed(toy.CONFIG, **changes, **scan), group)
    state = jax.device_put(start(**scan), trainer.shardings)
    step, found, gradients = trainer.compile_step(toy.FAST_COMPILE), [], {}
    for batch in toy.windows(STEPS):
        state, metrics = step(state, jax.device_put(batch, trainer.batch_sharding))
        gradients = gradients or toy.gradients(state)
        found.append(float(metrics["loss"]))
    assert np.isfinite(found).all()
    return np.array(found), gradients


def losses(mesh: str, **changes) -> np.ndarray:
    return train(mesh, **changes)[0]


# The one left out lies between those of 2 and of 8 virtual ranks.
LEFT_OUT = FIRST, "2 devices, 4 virtual ranks"


@pytest.mark.parametrize("mesh", [mesh for mesh in toy.MESHES if mesh not in LEFT_OUT])
def test_meshes(mesh):
    np.testing.assert_allclose(losses(mesh), losses(FIRST), rtol=1e-5)


def test_another_implementation():
    np.testing.assert_allclose(losses(FIRST, implementation="xla"), losses(FIRST), rtol=1e-5)


def test_cut_parameters_of_stacked_layers_recomputed(monkeypatch):
    monkeypatch.setattr(sharding, "_SMALL", 1)
    cut = MeshConfig(fsdp=2, node=2, rank=2, shard_dense=True)
    found, gradients = train(cut, stacked=True, model__remat=True)
    expected, whole = train(FIRST)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    toy.assert_gradients_near(gradients, {path: stack(whole, path) for path in gradients})


def stack(gradients: dict[str, np.ndarray], path: str) -> np.ndarray:
    """The array of that path where layers are stacked."""
    if path in gradients:
        return gradients[path]
    head, _, rest = path.partition("/")
    return np.stack([gradients[f"{head}/{layer}/{rest}"] for layer in range(2)])


def test_it_learns():
    assert losses(FIRST)[-1] < 0.7 * losses(FIRST)[0]


def test_start_does_not_depend_on_the_mesh():
    other = toy.first_state(Trainer(toy.CONFIG, toy.group("2 devices, 4 virtual ranks")))
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, other), start())
