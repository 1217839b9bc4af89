"""Arguments of wrong types are refused by name, and what makes an array is taken."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_moe

MESH = jax_moe.make_mesh(rank=2, devices=jax.devices()[:2])
GROUP = jax_moe.ExpertGroup(MESH)
SPEC = jax.P(GROUP.axes)
ROUTER = jax_moe.RouterConfig(num_experts=4, top_k=2)
SIZES = dict(tokens=4, top_k=2, num_experts=4, num_ranks=2)
IDS, ROWS = [[0, 1]] * 2, [[1.0, 2.0]] * 2


def exchange(ids=IDS, x=ROWS, s=ROWS, plan=None, **settings):
    """Traces all three operations with the same arguments on every device."""

    def program(_):
        made = jax_moe.plan(ids, **(dict(group=GROUP, num_experts=4) | settings))
        return jax_moe.combine(*jax_moe.dispatch(x, s, plan or made), made)

    return jax.eval_shape(
        jax.shard_map(program, mesh=MESH, in_specs=SPEC, out_specs=SPEC),
        jax.ShapeDtypeStruct((2,), "float32"),
    )


def moe(hidden=4, width=4, config=ROUTER, group=GROUP, **options):
    return nnx.eval_shape(
        lambda: jax_moe.MoE(hidden, width, config, group, **({"rngs": nnx.Rngs(0)} | options))
    )


def saved_bytes(**changes):
    return jax_moe.saved_bytes("save_rows", **(SIZES | dict(capacity=8, hidden=8) | changes))


def grouped_matmul(rows=ROWS, **settings):
    return jax_moe.grouped_matmul(rows, [[[1.0], [2.0]]], np.int32([2]), **settings)


def grouped_swiglu(row_s=(1.0, 1.0), **settings):
    gate_up, down = [[[1.0, 1.0]] * 2], [[[1.0, 2.0]]]
    return jax_moe.grouped_swiglu(ROWS, row_s, gate_up, down, np.int32([2]), **settings)


INTEGERS = {
    jax_moe.make_mesh: ["data", "node", "rank"],
    exchange: ["num_experts", "capacity", "alignment"],
    moe: ["hidden", "width", "num_shared", "shared_width", "capacity"],
    ROUTER.resolve: ["num_nodes"],
    lambda **changes: jax_moe.row_capacity(**(SIZES | changes)): [*SIZES, "alignment"],
    lambda **changes: jax_moe.pool_bytes(**(SIZES | dict(hidden=8) | changes)): [*SIZES, "hidden"],
    saved_bytes: [*SIZES, "capacity", "hidden"],
    grouped_matmul: ["virtual_ranks"],
    grouped_swiglu: ["virtual_ranks"],
}
NUMBERS = {
    GROUP.set_timeout: ["timeout_s"],
    lambda **changes: jax_moe.ExpertGroup(MESH, **changes): ["timeout_s"],
    exchange: ["capacity_factor"],
    moe: ["capacity_factor"],
    lambda **changes: jax_moe.RouterConfig(4, 2, **changes): ["scale"],
}


def check_refusals(calls, value, words):
    for function, names in calls.items():
        for name in names:
            with pytest.raises(TypeError) as caught:
                function(**{name: value})
            assert f"{name}={value!r}: {words}" in str(caught.value)


@pytest.mark.parametrize("value", [2.0, "2", True, [2]], ids=repr)
def test_integers(value):
    check_refusals(INTEGERS, value, "must be an integer")


@pytest.mark.parametrize("value", ["2", True, [2.0], 10**400], ids=["str", "bool", "list", "huge"])
def test_numbers(value):
    check_refusals(NUMBERS, value, "must be a number")


@pytest.mark.parametrize("value", [None, "bfloat17", 3, "int8"])
def test_dtypes(value):
    calls = {"dtype": saved_bytes, "param_dtype": moe}
    for name, function in calls.items():
        with pytest.raises(TypeError, match=f"{name}={value!r}: must be a floating-point type"):
            function(**{name: value})


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: exchange(group=MESH), "group is a Mesh: must be a jax_moe.ExpertGroup"),
        (lambda: exchange(plan=IDS), "plan is a list: must be a jax_moe.Plan"),
        (lambda: exchange(ids="0"), "expert_ids is a str: must be an array"),
        (lambda: exchange(x=object()), "x is a object: must be an array"),
        (lambda: jax_moe.make_mesh(devices=8), "devices is a int64: must be a jax.Device"),
        (lambda: moe(config={"num_experts": 4}), "config is a dict: must be a jax_moe.Router"),
        (lambda: moe(rngs=0), "rngs is a int: must be a flax.nnx.Rngs"),
        (lambda: jax_moe.route(ROWS, None, None), "config is a NoneType: must be a jax_moe.Router"),
        (lambda: jax_moe.update_bias(jnp.zeros(2), [1, 2], "0.1"), "step_size is a str"),
        (lambda: jax_moe.update_bias([0, 0], [1, 2], 0.1), "bias has dtype int32"),
        (lambda: grouped_matmul(rows=None), "rows is a NoneType: must be an array"),
        (lambda: grouped_swiglu(row_s="1"), "row_s is a str: must be an array"),
        (lambda: jax_moe.preflight(MESH), "target is a Mesh: must be a jax_moe.ExpertGroup"),
        (lambda: jax_moe.preflight(["cpu"]), "element of target is a str: must be a jax.Device"),
    ],
)
def test_other_types(call, words):
    with pytest.raises(TypeError) as caught:
        call()
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (np.array([[0, 2**32 + 1]]), "expert_ids is int64 with integers that no int32 has"),
        ([[0, 2**40]], "expert_ids has integers that do not fit an int32"),
    ],
)
def test_integers_that_do_not_fit(ids, words):
    with pytest.raises(ValueError, match=words):
        exchange(ids=ids)
    assert exchange(ids=np.array(IDS))[0].shape == (4, 2)


def test_devices_that_are_not_there():
    for target in ([], jax_moe.ExpertGroup(MESH.abstract_mesh)):
        with pytest.raises(ValueError, match="preflight of no devices"):
            jax_moe.preflight(target)


def test_lists_are_arrays():
    assert exchange()[0].shape == (4, 2)
    assert grouped_matmul().tolist() == [[5.0], [5.0]]
    assert grouped_swiglu().shape == (2, 2)
    logits = [[1.0, 2.0, 3.0, 0.0]]
    routing = jax_moe.route(logits, [0.0] * 4, ROUTER)
    assert routing.expert_ids.tolist() == [[2, 1]]
    assert jax_moe.route(logits, None, ROUTER, expert_ids=[[0, 3]]).expert_ids.tolist() == [[0, 3]]
    np.testing.assert_allclose(jax_moe.update_bias([0.0, 0.0], [1, 2], 0.5), [0.5, -0.5])
    assert jax_moe.sequence_balance_loss(logits, [True], ROUTER).shape == ()


@pytest.mark.parametrize(
    ("logits", "mask", "words"),
    [
        (jnp.ones(4), None, "logits have shape"),
        (jnp.ones((3, 5)), None, "logits have shape"),
        (jnp.ones((3, 4)), jnp.ones(3), r"mask is float32\[3\]: must be bool\[3\]"),
    ],
)
def test_operands_of_the_balance_loss(logits, mask, words):
    with pytest.raises(ValueError, match=words):
        jax_moe.sequence_balance_loss(logits, mask, ROUTER)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"capacity": 0}, "capacity=0: must be at least 1"),
        ({"capacity": 2**31}, "less than 2"),
        ({"capacity_factor": -1.0}, "capacity_factor=-1.0: must be a finite number > 0"),
        ({"capacity": 8, "capacity_factor": 1.0}, "give one of them"),
        ({"dtype": "float16"}, 'dtype=float16: implementation="cpu" carries float32 or bfloat16'),
    ],
)
def test_layers_are_refused_when_they_are_made(options, words):
    with pytest.raises(ValueError, match=words):
        moe(**options)


def test_a_layer_for_other_devices_is_refused_when_it_is_made():
    with pytest.raises(NotImplementedError, match='implementation="ptx" cannot serve'):
        moe(implementation="ptx")


def test_calls_of_a_layer():
    layer = jax_moe.MoE(4, 4, ROUTER, GROUP, rngs=nnx.Rngs(0))
    x = jnp.ones((2, 3, 4))
    y, stats = layer(x.tolist(), [[True] * 3] * 2, expert_ids=[[[0, 3]] * 3] * 2)
    assert y.shape == x.shape
    assert stats.counts.tolist() == [6, 0, 0, 6]
    for ids in (jnp.zeros((3, 2, 2), jnp.int32), jnp.zeros((2, 3, 1), jnp.int32)):
        with pytest.raises(ValueError, match=r"must be int32\[2, 3, 2\], top_k ids"):
            layer(x, expert_ids=ids)
    inside = jax.shard_map(lambda x: layer(x)[0], mesh=MESH, in_specs=SPEC, out_specs=SPEC)
    with pytest.raises(ValueError, match=r"MoE was called inside a jax\.shard_map"):
        jax.eval_shape(inside, x)
