"""The Pallas kernels: interpreted on the CPU against float64, and lowered for a GPU.

The interpreter runs their copies, barriers and warpgroups as threads; tests/gpu has the rest.
"""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import PartitionSpec as P
from pallas_cases import Groups, check_product, check_swiglu

import jax_moe
from jax_moe import _pallas_matmul

UNALIGNED = Groups(1, 224, (70, 0, 129, 5))


@pytest.fixture(autouse=True)
def few_multiprocessors(monkeypatch):
    # Each takes several tiles in turn, and the interpreter less time.
    monkeypatch.setattr(_pallas_matmul, "_multiprocessors", lambda: 3)


@pytest.mark.parametrize(
    ("groups", "outer"),
    [(UNALIGNED, 256), (Groups(2, 124, (60, 3, 0, 124)), 128)],
    ids=["unaligned", "two_ranks"],
)
def test_product_and_gradients(groups, outer):
    with plgpu.force_gpu_interpret_mode():
        check_product(groups, 128, outer)


def test_swiglu_and_gradients_equal_those_of_another_engine():
    check_swiglu(UNALIGNED, 128, 128, "blocks", plgpu.force_gpu_interpret_mode())


def test_two_layers_lower_for_a_gpu_inside_shard_map_with_the_kernels_of_one():
    mesh = jax_moe.make_mesh(rank=1, devices=jax.devices()[:1])

    def gradients(rows, row_s, gate_up, down, sizes):
        def loss(rows, *operands):
            for _ in range(2):
                rows = jax_moe.grouped_swiglu(rows, *operands, sizes, engine="pallas")
            return rows.sum()

        return jax.grad(loss, argnums=(0, 1, 2, 3))(rows, row_s, gate_up, down)

    shapes = [(4096, 2048), (4096,), (8, 2048, 1536), (8, 768, 2048), (8,)]
    dtypes = [jnp.bfloat16, jnp.float32, jnp.bfloat16, jnp.bfloat16, jnp.int32]
    operands = map(jax.ShapeDtypeStruct, shapes, dtypes)
    mapped = jax.shard_map(gradients, mesh=mesh, in_specs=P("rank"), out_specs=P("rank"))
    lowered = jax.jit(mapped).trace(*operands).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("custom_call @mosaic_gpu") == 6


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
