"""The public surface: errors that print the value, the rule and the way out; groups and meshes."""

import copy
import logging
import pickle
import subprocess
import sys

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import jax_moe

CASE = cases.Case(
    "api", tokens=3, experts=8, topk=2, hidden=4, mesh=(1, 2, 2), virtual_ranks=2, capacity=9
)


def refused(function, *operands, words, error=ValueError):
    """Traces a per-device function and checks that the message holds all the words."""
    at = runs.setting(CASE)
    with pytest.raises(error) as caught:
        jax.eval_shape(at.shard_map(function), *operands)
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"


def operand(*trailing: int, dtype="float32", length: int | None = None) -> jax.ShapeDtypeStruct:
    """The type of a global array of V*T rows a device (or `length` of them)."""
    length = CASE.virtual_ranks * CASE.tokens if length is None else length
    return jax.ShapeDtypeStruct((CASE.devices * length, *trailing), dtype)


def _label(value) -> str:
    """Short names of parameters: a type, a setting, or the first word looked for."""
    if isinstance(value, jax.ShapeDtypeStruct):
        return f"{value.dtype}{list(value.shape)}"
    return value[0] if isinstance(value, list) else str(value)


IDS = operand(CASE.topk, dtype="int32")


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (operand(2, dtype="int16"), ["int16[6, 2]", "must be int32", ".astype(jnp.int32)"]),
        (operand(2), ["float32[6, 2]", "must be int32"]),
        (operand(dtype="int32"), ["int32[6]", "[virtual ranks * tokens, top_k]", "reshape"]),
        (operand(2, length=5, dtype="int32"), ["[5, 2]", "multiple of", "2 virtual ranks"]),
        (operand(2, length=0, dtype="int32"), ["[0, 2]", "positive", "pass rows of -1"]),
        (operand(0, dtype="int32"), ["[6, 0]", ">= 1"]),
    ],
    ids=_label,
)
def test_plan_refuses_ids(ids, words):
    at = runs.setting(CASE)
    refused(lambda ids: at.plan(ids, None).positions, ids, words=words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_experts": 12}, ["num_experts=12", "multiple of the group's 8 ranks", "smaller"]),
        ({"num_experts": 0}, ["num_experts=0", "positive multiple"]),
        ({"alignment": 0}, ["alignment=0", "at least 1"]),
        ({"capacity": 0}, ["capacity=0", "at least 1"]),
        ({"capacity": -4}, ["capacity=-4", "at least 1"]),
        ({"capacity": 2**31}, ["capacity=2147483648", "less than 2**31"]),
        ({"capacity_factor": 1.0}, ["capacity=9", "capacity_factor=1.0", "give one"]),
        ({"capacity": None, "capacity_factor": 0.0}, ["capacity_factor=0.0", "> 0"]),
        ({"capacity": None, "capacity_factor": np.nan}, ["capacity_factor=nan", "finite"]),
        ({"capacity": None, "capacity_factor": np.inf}, ["capacity_factor=inf", "finite"]),
        ({"capacity": None, "capacity_factor": 1e308}, ["2**31", "fewer tokens"]),
        ({"tail": "poison"}, ["tail='poison'", '"zero"', '"undefined"']),
        ({"implementation": "fast"}, ["implementation='fast'", "'xla'", "'reference'", "None"]),
    ],
    ids=_label,
)
def test_plan_refuses_settings(changes, words):
    at = runs.setting(CASE)
    refused(lambda ids: at.plan(ids, **({"implementation": None} | changes)), IDS, words=words)


@pytest.mark.parametrize(
    "changes", [{"capacity": 8.5}, {"alignment": 2.0}, {"num_experts": 8.0}], ids=str
)
def test_plan_refuses_numbers_that_are_no_integers(changes):
    at = runs.setting(CASE)
    ((name, value),) = changes.items()
    refused(
        lambda ids: at.plan(ids, None, **changes),
        IDS,
        words=[f"{name}={value}", "must be an integer"],
        error=TypeError,
    )


@pytest.mark.parametrize("changes", [{"virtual_ranks": 2.0}, {"num_nodes": "2"}], ids=str)
def test_group_refuses_numbers_that_are_no_integers(changes):
    ((name, value),) = changes.items()
    with pytest.raises(TypeError, match=f"{name}={value!r}: must be an integer"):
        jax_moe.ExpertGroup(jax_moe.make_mesh(node=2, rank=4), **changes)


def test_ptx_is_not_for_cpu_devices():
    at = runs.setting(CASE)
    refused(
        lambda ids: at.plan(ids, "ptx"),
        IDS,
        words=['implementation="ptx"', "cpu", 'implementation="xla"'],
        error=NotImplementedError,
    )


@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("x", "s", "words"),
    [
        (operand(4, length=5), operand(2), ["x is float32[5, 4]", "[6, hidden >= 1]"]),
        (operand(4, dtype="float16"), operand(2), ["x is float16[6, 4]", "float32 or bfloat16"]),
        (operand(4, dtype="int32"), operand(2), ["x is int32[6, 4]", "float32 or bfloat16"]),
        (operand(0), operand(2), ["x is float32[6, 0]", "hidden >= 1"]),
        (operand(2, 2), operand(2), ["x is float32[6, 2, 2]", "[6, hidden >= 1]"]),
        (operand(4), operand(3), ["s is float32[6, 3]", "float32[6, 2]"]),
        (operand(4), operand(2, dtype="bfloat16"), ["s is bfloat16[6, 2]", "float32[6, 2]"]),
    ],
    ids=_label,
)
def test_dispatch_refuses_operands(implementation, x, s, words):
    at = runs.setting(CASE)
    refused(
        lambda ids, x, s: jax_moe.dispatch(x, s, at.plan(ids, implementation)),
        IDS, x, s, words=words,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "row_s", "words"),
    [
        (operand(4, length=17), operand(length=18), ["rows is float32[17, 4]", "[18, hidden"]),
        (operand(4, length=18, dtype="float16"), operand(length=18), ["rows is float16[18, 4]"]),
        (operand(4, length=18), operand(length=17), ["row_s is float32[17]", "float32[18]"]),
        (operand(4, length=18), operand(1, length=18), ["row_s is float32[18, 1]", "float32[18]"]),
    ],
    ids=_label,
)
def test_combine_refuses_operands(rows, row_s, words):
    at = runs.setting(CASE)
    refused(
        lambda ids, rows, row_s: jax_moe.combine(rows, row_s, at.plan(ids, None)),
        IDS, rows, row_s, words=words,
    )  # fmt: skip


def test_outside_shard_map():
    at = runs.setting(CASE)
    with pytest.raises(ValueError, match=r"jax_moe\.plan .*'node', 'rank'.*inside jax\.shard_map"):
        jax.jit(lambda ids: at.plan(ids, None)).lower(IDS)


def test_another_mesh():
    at = runs.setting(CASE)
    other = jax_moe.make_mesh(node=4, rank=2)
    mapped = jax.shard_map(
        lambda ids: at.plan(ids, None), mesh=other, in_specs=at.spec, out_specs=at.spec
    )
    with pytest.raises(ValueError, match=r"mesh.*'node': 4.*'node': 2.*use one mesh for both"):
        jax.eval_shape(mapped, operand(2, length=12, dtype="int32"))


def test_a_mesh_of_other_devices():
    group = jax_moe.ExpertGroup(jax_moe.make_mesh(rank=2, devices=jax.devices()[:2]))
    for devices, words in ((jax.devices()[2:4], r"\[2, 3\]"), (jax.devices()[1::-1], r"\[1, 0\]")):
        mapped = jax.shard_map(
            lambda ids: jax_moe.plan(ids, group=group, num_experts=2).positions,
            mesh=jax_moe.make_mesh(rank=2, devices=devices),
            in_specs=P(group.axes),
            out_specs=P(group.axes),
        )
        with pytest.raises(ValueError, match=rf"devices {words}, but .* \[0, 1\].*use one mesh"):
            jax.jit(mapped).lower(jax.ShapeDtypeStruct((4, 1), "int32"))


def test_mesh_axes_that_are_not_manual():
    mesh = jax_moe.make_mesh(data=2, node=2, rank=2)
    group = jax_moe.ExpertGroup(mesh)
    mapped = jax.shard_map(
        lambda ids: jax_moe.plan(ids, group=group, num_experts=8),
        mesh=mesh,
        in_specs=P(group.axes),
        out_specs=P(group.axes),
        axis_names={"node", "rank"},
    )
    with pytest.raises(ValueError, match=r"'data'.*not manual.*axis_names"):
        jax.jit(mapped).lower(jax.ShapeDtypeStruct((8, 2), "int32"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"axes": ("node", "expert")}, ["'expert'", "'data', 'node', 'rank'", "axes=("]),
        ({"axes": ()}, ["axes ()", "'data', 'node', 'rank'"]),
        ({"axes": ("rank", "rank")}, ["('rank', 'rank')", "different"]),
        ({"virtual_ranks": 0}, ["virtual_ranks=0", "at least 1"]),
        ({"num_nodes": 3}, ["num_nodes=3", "divide", "8 ranks", "8 devices x 1"]),
        ({"num_nodes": 0}, ["num_nodes=0", "at least 1"]),
        ({"num_nodes": -2}, ["num_nodes=-2", "at least 1"]),
        ({"timeout_s": 0.0}, ["timeout_s=0.0", "> 0 seconds"]),
        ({"timeout_s": float("nan")}, ["timeout_s=nan", "> 0 seconds"]),
        ({"timeout_s": 1e9}, ["timeout_s=1000000000.0", "< 1e+09, which is 31 years"]),
    ],
    ids=_label,
)
def test_group_refuses(arguments, words):
    with pytest.raises(ValueError) as caught:
        jax_moe.ExpertGroup(jax_moe.make_mesh(node=2, rank=4), **arguments)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"data": 3}, ["data=3", "8 devices", "divisor"]),
        ({"data": 2, "node": 2, "rank": 3}, ["rank=3", "multiply to 12", "-1", "devices="]),
        ({"node": -1}, ["node=-1", "rank=-1", "at most one"]),
        ({"rank": 0}, ["rank=0", ">= 1"]),
        ({"node": 9}, ["node=9", '"jax_num_cpu_devices", 9)']),
    ],
    ids=_label,
)
def test_make_mesh_refuses(sizes, words):
    with pytest.raises(ValueError) as caught:
        jax_moe.make_mesh(**sizes)
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_group_is_made_from_a_mesh():
    with pytest.raises(TypeError, match="mesh is a list: must be a mesh"):
        jax_moe.ExpertGroup(jax.devices())  # pyright: ignore[reportArgumentType]


def test_make_mesh():
    mesh = jax_moe.make_mesh(data=2, node=-1, rank=2)
    assert dict(mesh.shape) == {"data": 2, "node": 2, "rank": 2}
    assert mesh.axis_types == (AxisType.Auto,) * 3
    assert mesh.devices.reshape(-1).tolist() == jax.devices()
    explicit = jax_moe.make_mesh(axis_types=(AxisType.Explicit,) * 3)
    assert dict(explicit.shape) == {"data": 1, "node": 1, "rank": 8}
    assert explicit.axis_types == (AxisType.Explicit,) * 3


def test_group_sizes_and_places():
    mesh = jax_moe.make_mesh(data=2, node=2, rank=2)
    group = jax_moe.ExpertGroup(mesh, virtual_ranks=3)
    assert (group.num_ranks, group.num_nodes, group.ranks_per_node) == (12, 2, 6)
    assert jax_moe.ExpertGroup(mesh, axes="rank").axes == ("rank",)
    assert jax_moe.ExpertGroup(mesh, axes=("rank",)).num_nodes == 1
    assert jax_moe.ExpertGroup(mesh, axes=("data", "node", "rank")).num_nodes == 1
    assert jax_moe.ExpertGroup(mesh, axes=("data", "rank"), num_nodes=4).ranks_per_node == 1


_KEY = """
import jax
jax.config.update("jax_num_cpu_devices", 8)
import jax_moe
mesh = jax_moe.make_mesh(node=2, rank=4)
print(jax_moe.ExpertGroup(mesh, virtual_ranks=2).key)
"""


def test_group_keys():
    """Equal groups have equal keys in every process; what changes a program changes the key."""
    mesh = jax_moe.make_mesh(node=2, rank=4)
    group = jax_moe.ExpertGroup(mesh, virtual_ranks=2)
    same = jax_moe.ExpertGroup(jax_moe.make_mesh(node=2, rank=4), virtual_ranks=2, timeout_s=5.0)
    assert (group.key, hash(group)) == (same.key, hash(same))
    assert group == same
    others = [
        jax_moe.ExpertGroup(mesh),
        jax_moe.ExpertGroup(mesh, virtual_ranks=2, num_nodes=4),
        jax_moe.ExpertGroup(mesh, virtual_ranks=2, axes=("rank", "node")),
        jax_moe.ExpertGroup(mesh, virtual_ranks=2, axes=("rank",)),
        jax_moe.ExpertGroup(jax_moe.make_mesh(node=4, rank=2), virtual_ranks=2),
        jax_moe.ExpertGroup(
            jax_moe.make_mesh(node=2, rank=4, devices=jax.devices()[::-1]), virtual_ranks=2
        ),
    ]
    keys = {g.key for g in (group, *others)}
    assert len(keys) == 7
    assert all(0 <= key < 2**63 for key in keys)
    elsewhere = subprocess.run(
        [sys.executable, "-P", "-c", _KEY],
        check=True,
        stdout=subprocess.PIPE,  # what goes wrong there is seen here
        text=True,
        timeout=120,
    )
    assert int(elsewhere.stdout) == group.key


def test_close_and_rebuild():
    """A closed group's programs fail by name, and work again after rebuild, uncompiled."""
    case = cases.Case("closed", tokens=2, experts=2, topk=1, hidden=4, mesh=(1, 1, 2))
    at = runs.setting(case)
    program = jax.jit(at.shard_map(lambda ids: at.plan(ids, "cpu").positions))
    ids = at.place(cases.expert_ids(case))
    want = np.asarray(program(ids))
    at.group.close()
    at.group.set_timeout(30.0)  # which leaves it closed
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"rebuild"):
        jax.block_until_ready(program(ids))
    at.group.rebuild()
    np.testing.assert_array_equal(program(ids), want)
    assert program._cache_size() == 1


@pytest.mark.parametrize("mesh", ["real", "abstract"])
def test_a_group_is_copied_but_not_pickled(mesh):
    real = jax_moe.make_mesh(rank=2, devices=jax.devices()[:2])
    group = jax_moe.ExpertGroup(real if mesh == "real" else real.abstract_mesh, "rank")
    with pytest.raises(TypeError, match=r"ExpertGroup\(rank=2.* make it anew from its arguments"):
        pickle.dumps({"group": group})
    assert copy.copy(group) is copy.deepcopy(group) is group


def test_the_choice_of_implementation_is_said_once(caplog):
    mesh = jax_moe.make_mesh(node=1, rank=2, devices=jax.devices()[2:4])
    group = jax_moe.ExpertGroup(mesh)
    mapped = jax.shard_map(
        lambda ids: jax_moe.plan(ids, group=group, num_experts=2).positions,
        mesh=mesh, in_specs=P(group.axes), out_specs=P(group.axes),
    )  # fmt: skip
    with caplog.at_level(logging.INFO, "jax_moe"):
        for tokens in (2, 4):
            jax.eval_shape(mapped, jax.ShapeDtypeStruct((tokens, 1), "int32"))
    (record,) = [r for r in caplog.records if r.name == "jax_moe"]
    assert '"cpu"' in record.getMessage()


def test_a_group_on_an_abstract_mesh_lowers():
    mesh = AbstractMesh((1, 1, 4), ("data", "node", "rank"), axis_types=(AxisType.Auto,) * 3)
    group = jax_moe.ExpertGroup(mesh)

    def program(ids, x, s):
        plan = jax_moe.plan(ids, group=group, num_experts=8)
        return jax_moe.combine(*jax_moe.dispatch(x, s, plan), plan)

    spec = P(group.axes)
    mapped = jax.shard_map(program, mesh=mesh, in_specs=spec, out_specs=spec)
    shapes = [
        jax.ShapeDtypeStruct((8, n), d) for n, d in [(2, "int32"), (4, "float32"), (2, "float32")]
    ]
    text = jax.jit(mapped).trace(*shapes).lower(lowering_platforms=("cpu",)).as_text()
    assert "jax_moe_combine" in text


def test_numpy_operands_inside_shard_map():
    """Constants made with numpy are as good as arrays."""
    at = runs.setting(CASE)
    rows = CASE.virtual_ranks * CASE.tokens
    ids = np.zeros((rows, 2), np.int32)

    def program(_):
        plan = at.plan(ids, None)
        sent = jax_moe.dispatch(
            np.ones((rows, 4), np.float32), np.ones((rows, 2), np.float32), plan
        )
        return jax_moe.combine(*sent, plan)[1]

    s = jax.jit(at.shard_map(program))(jnp.zeros(CASE.devices))
    assert s.sum() == CASE.capacity


def test_public_names():
    assert all(hasattr(jax_moe, name) for name in jax_moe.__all__)
    assert jax_moe.__version__
