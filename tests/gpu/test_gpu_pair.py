"""What needs two GPUs of one process; test_gpu_exchange.py takes two as well where it can."""

import dataclasses
import time

import cases
import jax
import jax.numpy as jnp
import numpy as np
import on_gpus
import origin
import pytest
import runs

import jax_moe
from jax_moe import _ffi

pytestmark = pytest.mark.gpu2

CASE = cases.Case(
    "pair", tokens=64, experts=16, topk=4, hidden=256, mesh=(1, 1, 2), virtual_ranks=2,
    dtype="bfloat16",
)  # fmt: skip


def _chain(at):
    def program(ids, x, s):
        plan = at.plan(ids, "ptx")
        rows, row_s = jax_moe.dispatch(x, s, plan)
        return jax_moe.combine(rows, row_s, plan)

    return program


def test_two_instances_of_a_group():
    """data=2: each GPU has a group of its own, with its own pools."""
    case = cases.Case(
        "instances", tokens=9, experts=8, topk=3, hidden=32, mesh=(2, 1, 1), virtual_ranks=4
    )
    at = runs.setting(case, "cuda")
    operands = [
        at.place(getattr(runs.inputs(case), f.name)) for f in dataclasses.fields(runs.Inputs)
    ]
    function = jax.jit(at.shard_map(runs.everything(at, "ptx")))
    on_gpus.check(case, jax.tree.map(at.stacked, jax.block_until_ready(function(*operands))))


def test_beside_collectives_in_one_program():
    at, given = on_gpus.setting(CASE), runs.inputs(CASE)

    def program(ids, x, s):
        y, back = _chain(at)(ids, x, s)
        total = jax.lax.psum(x.astype(jnp.float32), ("node", "rank"))
        again, _ = _chain(at)(ids, (x + 0 * total.astype(x.dtype)), s)
        return y, back, again

    function = jax.jit(at.shard_map(program))
    operands = tuple(map(at.place, (given.ids, given.x, given.s)))
    for _ in range(50):
        y, _, again = function(*operands)
        origin.assert_same_bits(np.asarray(y), np.asarray(again), "y")
    at.group.check()


def test_a_gpu_that_stays_away_is_named_and_the_group_comes_back(capfd):
    at, given = on_gpus.setting(CASE), runs.inputs(CASE)
    function = jax.jit(at.shard_map(_chain(at)))
    operands = tuple(map(at.place, (given.ids, given.x, given.s)))
    right = [np.asarray(a) for a in function(*operands)]
    # The same plan call on the first GPU alone.
    group = at.group
    shapes = [(2 * 64, 4), (2 * 64, 4), (2 * at.capacity,), (8,), (8,), (8,), (2,), (4 * 128, 4)]
    types = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]
    call = jax.ffi.ffi_call("jax_moe_plan", types, vmap_method=None)
    attributes = dict(
        group=group.key, num_ranks=4, virtual_ranks=2, num_nodes=1, num_experts=16, alignment=1,
        zero_tail=1, num_sms=0, link_sms=0,
    )  # fmt: skip
    alone = jax.jit(lambda ids: call(ids, **{k: np.int64(v) for k, v in attributes.items()}))
    ids = jax.device_put(np.zeros((128, 4), np.int32), jax.devices()[0])
    group.set_timeout(1.0)
    start = time.monotonic()
    jax.block_until_ready(alone(ids))
    assert 0.9 < time.monotonic() - start < 10
    with pytest.raises(RuntimeError, match=r"jax_moe_plan .*phase join: rank .* for rank [23] "):
        group.check()
    time.sleep(0.3)
    assert "phase join" in capfd.readouterr().err
    y, _ = function(*operands)
    assert np.isnan(np.asarray(y, np.float32)).all(), "broken until rebuilt"
    group.rebuild()
    group.set_timeout(20.0)
    for _ in range(3):
        for got, want in zip(function(*operands), right, strict=True):
            origin.assert_same_bits(np.asarray(got), want, "after rebuild")
    group.check()
    assert _ffi.cuda.num_launches(group.key) > 0
