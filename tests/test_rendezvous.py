"""How the devices of a group meet in the CPU custom calls: no deadlock, and named failures."""

import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import jax_moe
from jax_moe import _native

HERE = Path(__file__).parent


def run_program(name: str, *arguments: object) -> str:
    """Runs a program of this folder in a process of its own, as it sets its number of devices."""
    command = [sys.executable, str(HERE / name), *map(str, arguments)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(("devices", "repetitions", "threads"), [(32, 200, 1), (8, 50, 4)])
def test_many_independent_calls(devices, repetitions, threads):
    assert run_program("rendezvous_stress.py", devices, repetitions, threads) == "ok"


def test_compilation_cache_across_processes(tmp_path):
    assert run_program("rendezvous_cached.py", tmp_path) == "0 1 128.0"
    assert run_program("rendezvous_cached.py", tmp_path) == "1 0 128.0"


def exchange(group, axis_index_that_skips=None):
    """A jitted plan, dispatch and combine over `group`; one device may leave the combine out."""

    def step(ids, x):
        plan = jax_moe.plan(ids, group=group, num_experts=8, implementation="cpu")
        rows, row_s = jax_moe.dispatch(x, x[:, :2], plan)

        def join(rows):
            return jax_moe.combine(rows, row_s, plan)[0]

        if axis_index_that_skips is None:
            return join(rows)
        skips = jax.lax.axis_index(group.axes) == axis_index_that_skips
        return jax.lax.cond(skips, lambda rows: rows[: x.shape[0]], join, rows)

    spec = jax.P(group.axes)
    return jax.jit(jax.shard_map(step, mesh=group.mesh, in_specs=spec, out_specs=spec))


@pytest.fixture
def group():
    mesh = jax_moe.make_mesh(devices=jax.devices()[:4])
    group = jax_moe.ExpertGroup(mesh, timeout_s=60.0)
    yield group
    group.rebuild()


@pytest.fixture
def inputs(group):
    ids = np.arange(32, dtype=np.int32).reshape(16, 2) % 8
    x = np.arange(64, dtype=np.float32).reshape(16, 4)
    return jax.device_put((ids, x), NamedSharding(group.mesh, jax.P(group.axes)))


def check_works(step, inputs):
    """Every token has two different experts, so that it comes back twice as large."""
    np.testing.assert_array_equal(step(*inputs), 2 * np.asarray(inputs[1]))


def test_rank_that_never_joins_is_named(group, inputs, capfd):
    step = exchange(group)
    check_works(step, inputs)
    group.set_timeout(0.5)
    started = time.monotonic()
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        jax.block_until_ready(exchange(group, axis_index_that_skips=2)(*inputs))
    assert time.monotonic() - started < 30
    message = str(caught.value)
    for part in ("jax_moe_combine", str(group), "arrived ranks 0-1, 3", "MISSING ranks 2"):
        assert part in message
    assert "MISSING ranks 2" in capfd.readouterr().err, "also where the error comes too late"
    assert "lax.cond" in message
    assert "set_timeout" in message
    group.set_timeout(60.0)
    for _ in range(3):
        check_works(step, inputs)
    assert _native.num_waiting() == 0


def test_timeout_can_be_raised_while_a_call_waits(group, inputs):
    """The slow device's host callback holds it back for longer than the first timeout."""
    group.set_timeout(1.0)
    release = threading.Event()

    def hold(rank, x):
        if rank == 1:
            release.wait(30)
        return x

    def step(ids, x):
        rank = jax.lax.axis_index(group.axes)
        x = jax.pure_callback(hold, jax.typeof(x), rank, x)
        plan = jax_moe.plan(ids, group=group, num_experts=8, implementation="cpu")
        return jax_moe.combine(*jax_moe.dispatch(x, x[:, :2], plan), plan)[0]

    spec = jax.P(group.axes)
    step = jax.jit(
        jax.shard_map(step, mesh=group.mesh, in_specs=spec, out_specs=spec, check_vma=False)
    )
    out = step(*inputs)
    while _native.num_waiting() == 0:
        time.sleep(0.01)
    group.set_timeout(60.0)
    time.sleep(1.5)
    release.set()
    np.testing.assert_array_equal(out, 2 * np.asarray(inputs[1]))


def test_closed_group_fails_by_name_and_comes_back(group, inputs):
    step = exchange(group)
    check_works(step, inputs)
    group.close()
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=rf"{re.escape(str(group))} is closed: call rebuild\(\)"
    ):
        jax.block_until_ready(step(*inputs))
    group.rebuild()
    check_works(step, inputs)  # the compiled program has survived


def test_plan_of_other_ids_is_refused(group, inputs):
    """Positions that no plan made are an error, not a read out of bounds."""

    def step(ids, x):
        plan = jax_moe.plan(ids, group=group, num_experts=8, implementation="cpu")
        rows, row_s = jax_moe.dispatch(x, x[:, :2], plan)
        bad = jax.tree.map(lambda leaf: leaf + jnp.int32(1000), plan)
        return jax_moe.combine(rows, row_s, bad)[0]

    spec = jax.P(group.axes)
    step = jax.jit(jax.shard_map(step, mesh=group.mesh, in_specs=spec, out_specs=spec))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"out of range; pass the plan"):
        jax.block_until_ready(step(*inputs))
    check_works(exchange(group), inputs)
