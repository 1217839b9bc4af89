"""The same run on other meshes, by other implementations, stacked or recomputed: same losses."""

import functools

import jax
import numpy as np
import pytest
import toy

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
def losses(mesh: str, stacked: bool = False, **changes) -> np.ndarray:
    scan = {"model__scan_layers": True} if stacked else {}
    trainer = Trainer(toy.changed(toy.CONFIG, **changes, **scan), toy.group(mesh))
    state = jax.device_put(start(**scan), trainer.shardings)
    found = np.array(toy.losses(trainer, state, toy.windows(STEPS)))
    assert found.shape == (STEPS,)
    assert np.isfinite(found).all()
    return found


@pytest.mark.parametrize("mesh", [mesh for mesh in toy.MESHES if mesh != FIRST])
def test_meshes(mesh):
    np.testing.assert_allclose(losses(mesh), losses(FIRST), rtol=1e-5)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_implementations(implementation):
    found = losses(FIRST, implementation=implementation)
    np.testing.assert_allclose(found, losses(FIRST), rtol=1e-5)


def test_stacked_layers_recomputed():
    found = losses(FIRST, stacked=True, model__remat=True)
    np.testing.assert_allclose(found, losses(FIRST), rtol=1e-5)


def test_it_learns():
    assert losses(FIRST)[-1] < 0.7 * losses(FIRST)[0]


def test_start_does_not_depend_on_the_mesh():
    other = toy.first_state(Trainer(toy.CONFIG, toy.group("2 devices, 4 virtual ranks")))
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, other), start())
