"""How the layer is used: creation, sharding, scan and remat, precision, refusals, its program."""

import functools
import re

import jax
import jax.numpy as jnp
import moe_runs
import numpy as np
import pytest
from flax import nnx

import jax_moe

CONFIG = jax_moe.RouterConfig(num_experts=8, top_k=2, num_groups=4, top_groups=2)
NODES_4X2 = moe_runs.Layout((1, 4, 2))
NODES_2 = moe_runs.Layout((1, 2, 1))


@functools.cache
def single_layer() -> moe_runs.Step:
    return moe_runs.Step(moe_runs.make(CONFIG, NODES_2))


def test_created_under_jit_every_device_holds_its_own_experts():
    layout = moe_runs.Layout((2, 2, 2))
    group = layout.group

    @nnx.jit
    def create():
        return jax_moe.MoE(12, 10, CONFIG, group, rngs=nnx.Rngs(0))

    layer = create()
    for name in ("gate_up", "down"):
        for shard in getattr(layer, name)[...].addressable_shards:
            _, node, rank = np.argwhere(group.mesh.devices == shard.device)[0]
            experts = range(*shard.index[0].indices(8))
            assert list(experts) == [2 * (2 * node + rank), 2 * (2 * node + rank) + 1]
    spec = nnx.get_partition_spec(nnx.state(layer))
    assert spec["down"].get_value() == jax.P(("node", "rank"), None, None)
    spread = {float(jnp.std(layer.gate_up[e])) for e in range(8)}
    assert len(spread) == 8 and min(spread) > 0.01
    assert layer.router.dtype == layer.bias.dtype == jnp.float32


def nnx_scan(layers, x):
    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=(nnx.Carry, 0))
    @nnx.remat
    def block(layer, x):
        y, stats = layer(x)
        return x + y, stats.counts

    return block(layers, x)


def lax_scan(layers, x):
    graph, state = nnx.split(layers)

    @jax.checkpoint
    def block(x, state):
        y, stats = nnx.merge(graph, state)(x)
        return x + y, stats.counts

    return jax.lax.scan(block, x, state)


def chained(layers, x, dy):
    """Two stacked layers one after the other by the chain rule, with one layer's program."""
    step, mask = single_layer(), np.ones(x.shape[:-1], bool)
    weights = nnx.to_pure_dict(nnx.state(layers, nnx.Param))
    run = [
        functools.partial(step, mask=mask, aux_weight=0.0, **{k: w[i] for k, w in weights.items()})
        for i in range(2)
    ]
    between = x + run[0](x, dy=dy).y
    second = run[1](between, dy=dy)
    first = run[0](x, dy=dy + second.grads["x"])
    out = {"y": between + second.y}
    out["counts"] = np.stack([first.stats.counts, second.stats.counts])
    return out | {name: np.stack([first.grads[name], second.grads[name]]) for name in weights}


def test_stacked_layers_under_scan_and_remat_equal_one_after_the_other():
    @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: None})
    def create(rngs):
        return jax_moe.MoE(12, 10, CONFIG, NODES_2.group, rngs=rngs)

    layers = moe_runs.fill(nnx.eval_shape(lambda: create(nnx.Rngs(0).split(2))), seed=2)
    assert layers.down.out_sharding == (None, ("node", "rank"), None, None)
    x, dy = np.random.default_rng(0).normal(size=(2, 2, 16, 12)).astype(np.float32)
    want = chained(layers, x, dy)
    assert want["counts"].sum() == 2 * 32 * 2
    for apply in (nnx_scan, lax_scan):

        @nnx.jit
        def step(layers, x, apply=apply):
            def loss(layers):
                y, counts = apply(layers, x)
                return (y * dy).sum(), (y, counts)

            return nnx.grad(loss, has_aux=True)(layers)

        grads, (y, counts) = step(layers, x)
        np.testing.assert_array_equal(counts, want["counts"])
        moe_runs.assert_close(y, want["y"], f"{apply.__name__}: y")
        grads = nnx.to_pure_dict(grads)
        assert grads.keys() == want.keys() - {"y", "counts"}
        for name, grad in grads.items():
            moe_runs.assert_close(grad, want[name], f"{apply.__name__}: gradient of {name}")


def test_bfloat16_rows_with_a_float32_router():
    step = moe_runs.Step(moe_runs.make(CONFIG, NODES_2, dtype=jnp.bfloat16))
    exact = single_layer()
    x, dy = np.random.default_rng(1).normal(size=(2, 2, 16, 12)).astype(np.float32)
    mask = np.ones((2, 16), bool)
    got, want = step(x, mask, dy), exact(x, mask, dy)
    assert got.y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got.stats.counts, want.stats.counts)
    np.testing.assert_array_equal(got.stats.router_entropy, want.stats.router_entropy)
    moe_runs.assert_close(got.y, want.y, "y", 0.02)
    for name, grad in want.grads.items():
        assert got.grads[name].dtype == np.float32
        moe_runs.assert_close(got.grads[name], grad, f"gradient of {name}", 0.02)


def test_the_program_has_our_calls_and_sums_only():
    """Forward: no collective but the sums of the statistics, and each operation once."""
    layer = moe_runs.make(CONFIG, NODES_4X2)
    graph, state = nnx.split(layer)
    mesh = NODES_4X2.group.mesh
    placed = jax.tree.map(jax.device_put, state, nnx.get_named_sharding(state, mesh))
    tokens = jax.NamedSharding(mesh, jax.P(mesh.axis_names))
    x = jax.device_put(jnp.ones((8, 4, 12)), tokens)
    forward = jax.jit(lambda state, x: nnx.merge(graph, state)(x), out_shardings=(tokens, None))
    text = forward.lower(placed, x).compile().as_text()
    for name in ("plan", "dispatch", "combine"):
        assert len(re.findall(rf'custom_call_target="jax_moe_{name}"', text)) == 1, name
    for moving in ("all-gather", "all-to-all", "collective-permute", "reduce-scatter"):
        assert moving not in text


def test_groups_are_settled_once_by_the_nodes():
    unset = jax_moe.RouterConfig(num_experts=8, top_k=2)
    layer = moe_runs.make(unset, NODES_4X2)
    assert (layer.config.num_groups, layer.config.top_groups) == (4, 4)
    # The settled configuration moves to a mesh with fewer nodes unchanged.
    assert moe_runs.make(layer.config, NODES_2).config == layer.config


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ({"num_groups": 2, "top_groups": 1}, {}, "num_groups=2 is not a multiple of num_nodes=4"),
        (
            {"num_experts": 12, "num_groups": 4, "top_groups": 2},
            {},
            "multiple of the group's 8 ranks",
        ),
        ({}, {"num_shared": -1}, "num_shared=-1"),
        ({}, {"width": 0}, "width=0"),
        ({}, {"num_shared": 0, "shared_width": 5}, "shared_width=5 with num_shared=0"),
    ],
)
def test_creation_refuses_with_the_reason(config, options, message):
    config = jax_moe.RouterConfig(**({"num_experts": 8, "top_k": 2} | config))
    with pytest.raises(ValueError, match=message):
        moe_runs.make(config, NODES_4X2, **options)


def test_explicit_mesh_axes_are_refused_with_the_reason():
    mesh = jax_moe.make_mesh(node=4, axis_types=(jax.sharding.AxisType.Explicit,) * 3)
    with pytest.raises(ValueError, match="make them Auto"):
        jax_moe.MoE(12, 10, CONFIG, jax_moe.ExpertGroup(mesh), rngs=nnx.Rngs(0))


def test_an_unknown_implementation_is_refused_at_once():
    with pytest.raises(ValueError, match="implementation='nccl'"):
        jax_moe.MoE(12, 10, CONFIG, NODES_2.group, implementation="nccl", rngs=nnx.Rngs(0))


def test_a_mesh_is_no_group():
    with pytest.raises(TypeError, match="group is a Mesh"):
        jax_moe.MoE(12, 10, CONFIG, NODES_2.group.mesh, rngs=nnx.Rngs(0))


def test_no_tokens_at_all():
    layer = moe_runs.make(CONFIG, NODES_2)
    y, stats = nnx.jit(lambda layer, x: layer(x))(layer, jnp.zeros((0, 3, 12)))
    assert y.shape == (0, 3, 12)
    assert not stats.counts.any()
    assert float(stats.aux_loss) == float(stats.max_vio) == 0.0


def test_calls_refuse_with_the_reason():
    layer = moe_runs.make(CONFIG, NODES_2)
    with pytest.raises(ValueError, match="hidden=12"):
        layer(jnp.zeros((2, 3, 11)))
    with pytest.raises(ValueError, match=r"x is int32\[2, 3, 12\]: it must be floating point"):
        layer(jnp.zeros((2, 3, 12), jnp.int32))
    with pytest.raises(ValueError, match=r"bool\[2, 3\]"):
        layer(jnp.zeros((2, 3, 12)), jnp.ones((2, 3), jnp.int32))
