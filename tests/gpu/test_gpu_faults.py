"""Missing ranks, closed groups, and the way back."""

import time

import cases
import jax
import jax.numpy as jnp
import numpy as np
import on_gpus
import oracle
import origin
import pytest
import runs

import jax_moe
from jax_moe import _ffi

T, K, E, C, H = 8, 2, 4, 32, 64
LONELY = 4711


def _attributes(**values):
    names = dict(
        group=LONELY, num_ranks=2, virtual_ranks=1, num_nodes=1, num_experts=E, alignment=1,
        zero_tail=1, num_sms=0, link_sms=0,
    )  # fmt: skip
    return {name: np.int64(value) for name, value in (names | values).items()}


@pytest.fixture(scope="module")
def lonely_plan():
    """plan as rank 0 of two calls it; rank 1 is on the same GPU, where nothing ever launches it."""
    ordinal = jax.devices()[0].local_hardware_id
    _ffi.cuda.register_group(LONELY, "the lonely group", 2, 1, [[ordinal] * 2], 1.0, 0.5)
    _ffi.cuda.reserve(LONELY, T, K, E, 4 * H)
    shapes = [(T, K), (T, K), (C,), (E // 2,), (E // 2,), (E // 2,), (1,), (2 * T, K)]
    types = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]
    call = jax.ffi.ffi_call("jax_moe_plan", types, vmap_method=None)
    return jax.jit(lambda ids: call(ids, **_attributes()))


def test_a_missing_rank_is_named_and_the_group_can_be_rebuilt(lonely_plan, capfd):
    ids = jnp.zeros((T, K), jnp.int32)
    lonely_plan.lower(ids).compile()

    def timed():
        start = time.monotonic()
        results = jax.block_until_ready(lonely_plan(ids))
        return time.monotonic() - start, results

    seconds, (_, positions, sources, sizes, *_) = timed()
    assert 0.9 < seconds < 10
    assert (np.asarray(positions) == -1).all() and (np.asarray(sources) == -1).all()
    assert (np.asarray(sizes) == 0).all()
    (fault,) = _ffi.cuda.faults(LONELY)
    assert "jax_moe_plan of the lonely group, phase join: rank 0 (GPU" in fault
    assert "for rank 1 (GPU" in fault
    time.sleep(0.3)
    assert fault in capfd.readouterr().err, "the monitor prints it at once"
    seconds, _ = timed()
    assert seconds < 0.5, "a broken group does not wait again"
    _ffi.cuda.set_timeouts(LONELY, 0.2, 0.1)
    _ffi.cuda.rebuild_group(LONELY)
    assert _ffi.cuda.faults(LONELY) == []
    seconds, _ = timed()
    assert 0.15 < seconds < 5
    assert "waited 0.2" in _ffi.cuda.faults(LONELY)[0]


CASE = cases.Case(
    "faults", tokens=16, experts=16, topk=3, hidden=64, virtual_ranks=4, dtype="bfloat16"
)


def test_a_group_can_be_closed_and_rebuilt_under_compiled_programs():
    at, given = on_gpus.setting(CASE), runs.inputs(CASE)
    (p,) = runs.plans(CASE)

    def chain(ids, x, s):
        plan = at.plan(ids, "ptx")
        y, back = jax_moe.combine(*jax_moe.dispatch(x, s, plan), plan)
        return y, back, plan.positions

    function = jax.jit(at.shard_map(chain))
    operands = tuple(map(at.place, (given.ids, given.x, given.s)))
    want = oracle.combine(*oracle.dispatch(given.x[0], given.s[0], p), p, num_nodes=1)

    def run_and_check():
        for _ in range(4):
            y, back, _ = function(*operands)
            origin.assert_same_bits(np.asarray(y).reshape(want[0].shape), want[0], "y")
            origin.assert_same_bits(np.asarray(back).reshape(want[1].shape), want[1], "s")
        at.group.check()

    run_and_check()
    at.group.close()
    # Refused by the handler; or, where a CUDA graph replays the call, NaN.
    refused = None
    try:
        y, _, positions = jax.block_until_ready(function(*operands))
    except jax.errors.JaxRuntimeError as error:
        refused = str(error)
    else:
        assert np.isnan(np.asarray(y, np.float32)).all()
        assert (np.asarray(positions) == -1).all()
    assert refused is None or "closed" in refused
    with pytest.raises(RuntimeError, match="is closed"):
        at.group.check()
    at.group.rebuild()
    run_and_check()
    at.group.rebuild()  # a sound group too
    run_and_check()


def test_a_program_without_a_pool_says_what_to_do():
    ordinal = jax.devices()[0].local_hardware_id
    _ffi.cuda.register_group(LONELY + 1, "the poor group", 1, 1, [[ordinal]], 1.0, 0.5)
    types = [
        jax.ShapeDtypeStruct(shape, jnp.int32)
        for shape in [(T, K), (T, K), (C,), (E,), (E,), (E,), (1,), (T, K)]
    ]
    call = jax.ffi.ffi_call("jax_moe_plan", types, vmap_method=None)
    ids = jnp.zeros((T, K), jnp.int32)

    def run(**attributes):
        jax.block_until_ready(jax.jit(lambda i: call(i, **_attributes(**attributes)))(ids))

    with pytest.raises(jax.errors.JaxRuntimeError, match=r"no pool.*tokens=8.*reserve"):
        run(group=LONELY + 1, num_ranks=1)
    with pytest.raises(jax.errors.JaxRuntimeError, match="no such group"):
        run(group=LONELY + 2, num_ranks=1)


def test_the_pool_must_fit():
    group = jax_moe.ExpertGroup(jax_moe.make_mesh(devices=jax.devices()[:1]), virtual_ranks=64)
    with pytest.raises(MemoryError, match="free beside XLA's preallocation"):
        group.reserve(tokens=65536, top_k=8, num_experts=256, hidden=7168)
    # The group is as it was.
    case = on_gpus.on_gpus(cases.BY_NAME["virtual8_ep8"])
    on_gpus.check(case, runs.run(case, "ptx"))
