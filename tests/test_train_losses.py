"""The same run on other meshes, with other implementations, stacked or recomputed: the same losses."""

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
def start():
    """The first state, as numbers."""
    return jax.tree.map(np.asarray, Trainer(toy.CONFIG, toy.group(FIRST)).initialise())


@functools.cache
def losses(mesh: str, **changes) -> np.ndarray:
    trainer = Trainer(toy.changed(toy.CONFIG, **changes), toy.group(mesh))
    state = jax.device_put(start(), trainer.shardings)
    return np.array(toy.losses(trainer, state, toy.windows(STEPS)))


@pytest.mark.parametrize("mesh", [mesh for mesh in toy.MESHES if mesh != FIRST])
def test_meshes(mesh):
    np.testing.assert_allclose(losses(mesh), losses(FIRST), rtol=1e-5)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_implementations(implementation):
    assert losses(FIRST).shape == (STEPS,)
    found = losses(FIRST, implementation=implementation)
    np.testing.assert_allclose(found, losses(FIRST), rtol=1e-5)


def test_it_learns():
    assert losses(FIRST)[-1] < 0.7 * losses(FIRST)[0]


def test_start_does_not_depend_on_the_mesh():
    other = Trainer(toy.CONFIG, toy.group("2 devices, 4 virtual ranks")).initialise()
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, other), start())
