"""The Pallas kernels on a Hopper GPU, against float64 and another engine."""

import contextlib

import jax
import numpy as np
import pytest
from pallas_cases import Groups, check_product, check_swiglu

import jax_moe

# Those with as many groups and rows share the kernels, whose compilation is what takes long.
GROUPS = {
    "unaligned": Groups(1, 640, (70, 0, 129, 5, 300, 64, 1, 8)),
    "empty": Groups(1, 640, (0,) * 8),
    "full": Groups(1, 640, (0, 640, 0, 0, 0, 0, 0, 0)),
    "one_row": Groups(1, 8, (1,)),
    # Tiles of one and three parts, and tails: a block of shared memory is taken again at once.
    "short_tiles": Groups(8, 8192, (150, 170, 190, 130, 40, 60, 1, 0) * 8),
    "virtual_ranks": Groups(4, 300, (299, 1, 0, 0, 150, 150, 7, 100)),
}


@pytest.mark.parametrize(
    ("name", "inner", "outer"),
    [
        *((name, 384, 1280) for name in ("unaligned", "empty", "full", "virtual_ranks")),
        ("unaligned", 2048, 256),
        ("one_row", 128, 128),
        ("short_tiles", 128, 128),
    ],
)
def test_product_and_gradients(name, inner, outer):
    check_product(GROUPS[name], inner, outer, repetitions=3)


def test_swiglu_equals_that_of_another_engine():
    check_swiglu(GROUPS["virtual_ranks"], 256, 384, "large_blocks", contextlib.nullcontext())


def test_random_sizes_again_and_again():
    # Many tiles on every multiprocessor.
    rng = np.random.default_rng(1)
    for _ in range(3):
        sizes = rng.multinomial(rng.integers(3000, 6000), rng.dirichlet(np.ones(16)))
        check_product(Groups(1, 6000, tuple(sizes.tolist())), 512, 2048, repetitions=20)


def test_arrays_on_the_cpu_are_multiplied_there():
    cpu = jax.devices("cpu")[0]
    rng = np.random.default_rng(2)
    shapes = (256, 128), (2, 128, 128)
    rows, weights = (rng.standard_normal(shape).astype(jax.numpy.bfloat16) for shape in shapes)
    out = jax_moe.grouped_matmul(*jax.device_put((rows, weights, np.int32([100, 156])), cpu))
    assert out.devices() == {cpu}
    x, w = np.float64(rows), np.float64(weights)
    want = np.concatenate([x[:100] @ w[0], x[100:] @ w[1]])
    np.testing.assert_allclose(np.float64(out), want, rtol=2**-8, atol=0.1)
