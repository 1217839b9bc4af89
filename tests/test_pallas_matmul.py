"""The Pallas kernels: interpreted on the CPU against float64, and lowered for a GPU.

The interpreter runs their copies, barriers and warpgroups as threads; tests/gpu has the rest.
"""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import PartitionSpec as P
from pallas_cases import Groups, check_product, check_swiglu

import jax_moe
from jax_moe import _pallas_matmul, _pallas_tiles

UNALIGNED = Groups(1, 224, (70, 0, 129, 5))


@pytest.fixture(autouse=True)
def few_multiprocessors(monkeypatch):
    # Each takes several tiles in turn, and the interpreter less time.
    monkeypatch.setattr(_pallas_matmul, "_multiprocessors", lambda: 3)


@pytest.mark.parametrize(
    ("groups", "outer", "blocks"),
    [(UNALIGNED, 256, 3), (Groups(2, 128, (60, 3, 0, 104)), 128, 10)],
    ids=["unaligned", "two_ranks"],
)
def test_product_and_gradients(groups, outer, blocks, monkeypatch):
    monkeypatch.setattr(_pallas_matmul, "_multiprocessors", lambda: blocks)
    with plgpu.force_gpu_interpret_mode():
        check_product(groups, 128, outer)


def test_swiglu_and_gradients_equal_those_of_another_engine():
    check_swiglu(UNALIGNED, 128, 128, "blocks", plgpu.force_gpu_interpret_mode())


def test_two_layers_lower_for_a_gpu_inside_shard_map_with_the_kernels_of_one():
    mesh = jax_moe.make_mesh(rank=1, devices=jax.devices()[:1])

    def gradients(rows, weights, sizes):
        def loss(rows, weights):
            for _ in range(2):
                rows = jax_moe.grouped_matmul(rows, weights, sizes, engine="pallas")
            return rows.sum()

        return jax.grad(loss, argnums=(0, 1))(rows, weights)

    shapes = [(4096, 2048), (8, 2048, 2048), (8,)]
    dtypes = [jnp.bfloat16, jnp.bfloat16, jnp.int32]
    operands = map(jax.ShapeDtypeStruct, shapes, dtypes)
    mapped = jax.shard_map(gradients, mesh=mesh, in_specs=P("rank"), out_specs=P("rank"))
    lowered = jax.jit(mapped).trace(*operands).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("custom_call @mosaic_gpu") == 3


def _per_group(most):
    return st.lists(st.integers(0, most), min_size=12, max_size=12).map(np.array)


@hypothesis.settings(max_examples=60, deadline=None, database=None, derandomize=True)
@hypothesis.given(st.integers(1, 4), _per_group(700), _per_group(9))
def test_tiles_of_rows_cover_each_row_once(ranks, sizes, gaps):
    sizes, gaps = sizes.reshape(4, -1)[:ranks], gaps.reshape(4, -1)[:ranks]
    num_rows = 3 * 709 // 8 * 8 + 8
    starts = np.cumsum(sizes + gaps, axis=1) - sizes + np.arange(ranks)[:, None] * num_rows
    tiles = jax.jit(_pallas_tiles.row_tiles, static_argnums=(2, 3, 4))
    operands = (jnp.array(a.ravel(), jnp.int32) for a in (starts, sizes))
    table, used = tiles(*operands, ranks * num_rows, ranks, True)
    assert used <= table.shape[1]
    owner = np.full(ranks * num_rows, -2)
    longest = {}
    for group, down, low, high in np.array(table).T[: int(used)]:
        assert down % 8 == 0 and 0 <= low and high <= _pallas_tiles.MOST_ROWS
        assert (owner[down + low : down + high] == -2).all()
        owner[down + low : down + high] = group
        longest.setdefault(group, -(-high // _pallas_tiles.COUNTS.step) if group >= 0 else 0)
    want = np.full_like(owner, -2)
    for group, (first, size) in enumerate(zip(starts.ravel(), sizes.ravel(), strict=True)):
        want[first : first + size] = group
    for rank, end in enumerate((starts + sizes)[:, -1]):
        want[end : (rank + 1) * num_rows] = -1
    np.testing.assert_array_equal(owner, want)
    assert list(longest.values()) == sorted(longest.values(), reverse=True)


@pytest.mark.parametrize("tiles_down", [0, 1, 2, 33, 40, 66, 67, 132])
def test_tiles_of_a_nearly_empty_last_wave_are_shared(tiles_down):
    across, blocks = 2, 132
    tiles = tiles_down * across
    _, whole, parts = np.array(_pallas_tiles.shared_tiles(jnp.int32(tiles_down), across, blocks))
    assert whole % blocks == 0 or (whole == tiles and 2 * (tiles % blocks) > blocks)
    assert 1 <= parts <= _pallas_tiles.MOST_PARTS and (tiles - whole) * parts <= blocks


@pytest.mark.parametrize(
    ("rows", "weights", "message"),
    [
        (jnp.zeros((8, 128)), jnp.zeros((1, 128, 128)), "must be bfloat16"),
        (jnp.zeros((9, 128), "bfloat16"), jnp.zeros((1, 128, 128), "bfloat16"), "multiple of 8"),
        (jnp.zeros((8, 64), "bfloat16"), jnp.zeros((1, 64, 128), "bfloat16"), "width 64"),
    ],
)
def test_refusals_name_the_rule(rows, weights, message):
    with pytest.raises(ValueError, match=message):
        jax_moe.grouped_matmul(rows, weights, jnp.zeros(1, jnp.int32), engine="pallas")
