"""One of two processes that share a group on GPUs; run by test_gpu_processes.py.

Arguments: number of this process, the coordinator's port, the GPU to use (-1: all that it sees),
what to do: "first" (the first exchange), "all" (exchanges, soak, faults), "suite" (each case of the
suite that two processes can share, and replayed graphs) or "collectives" (XLA's own in the same
program). Prints a line of JSON after each step; what else it prints is the log. The steps are the
same in both processes. Without GPUs it does what it can.
"""

import dataclasses
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import cases  # noqa: E402
import jax  # noqa: E402
import numpy as np  # noqa: E402
import on_gpus  # noqa: E402
import runs  # noqa: E402
import test_gpu_soak as soak  # noqa: E402

import jax_moe  # noqa: E402
from jax_moe import _ffi  # noqa: E402

START = time.monotonic()
PROCESS, PORT, GPU, WHAT = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
SOAK_STEPS = int(os.environ.get("JAX_MOE_SOAK_STEPS", "300"))
KILLS = os.environ.get("JAX_MOE_KILLS", "1") != "0"
TIMEOUT_S = 25.0  # so that what goes wrong is told before the test gives up
DEADLINE_S = 2.0

PAIR = (1, 1, 2)
CASES = (
    cases.Case("v1", tokens=37, experts=8, topk=3, hidden=64, mesh=PAIR, routing="uneven"),
    cases.Case(
        "v2_overflow", tokens=64, experts=16, topk=4, hidden=256, mesh=PAIR, virtual_ranks=2,
        num_nodes=2, dtype="bfloat16", routing="skewed", capacity_factor=0.8, alignment=8,
    ),
    cases.Case(
        "v4_special", tokens=33, experts=32, topk=8, hidden=128, mesh=PAIR, virtual_ranks=4,
        num_nodes=2, routing="invalid", special=True,
    ),
    cases.Case(
        "deepseek", tokens=128, experts=64, topk=8, hidden=7168, mesh=PAIR, dtype="bfloat16",
        tail="undefined",
    ),
)  # fmt: skip


# Every case of the suite whose ranks two processes can share evenly: V from 1 to 32.
SUITE = tuple(
    case.on_devices(2)
    for case in (*map(on_gpus.on_gpus, cases.CASES), *on_gpus.LARGER)
    if case.ranks % 2 == 0
)
# The same program with other routing each.
REPLAYED = tuple(
    cases.Case(
        f"replayed_{routing}", tokens=24, experts=16, topk=4, hidden=128, mesh=PAIR,
        virtual_ranks=2, num_nodes=2, dtype="bfloat16", routing=routing,
    )
    for routing in ("uniform", "skewed", "repeats", "uneven", "quiet", "invalid")
)  # fmt: skip
REPLAYS = 30


def say(step: str, **values) -> None:
    at = round(time.monotonic() - START, 1)
    print(json.dumps({"step": step, "at_s": at, **values}), flush=True)


def barrier(name: str) -> None:
    jax._src.distributed.global_state.client.wait_at_barrier(name, 30_000)


def place(host: np.ndarray, group) -> jax.Array:
    """A global array; `jax.device_put` would compare the processes' copies by a collective."""
    sharding = jax.NamedSharding(group.mesh, jax.P(group.mesh.axis_names))
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def here(array: jax.Array) -> np.ndarray:
    """What lies on this process's device."""
    (shard,) = array.addressable_shards
    return np.asarray(shard.data)


class Exchange:
    """plan, dispatch, combine and both VJPs of a case, and the check of every bit."""

    def __init__(self, case: cases.Case):
        self.case, self.at = case, runs.setting(case)
        self.at.group.set_timeout(TIMEOUT_S)
        given = [getattr(runs.inputs(case), f.name) for f in dataclasses.fields(runs.Inputs)]
        self.operands = [place(a.reshape(-1, *a.shape[3:]), self.at.group) for a in given]
        self.function = jax.jit(self.at.shard_map(runs.everything(self.at, None)))

    def run(self) -> dict:
        return jax.block_until_ready(self.function(*self.operands))

    def check(self) -> None:
        virtual = self.case.virtual_ranks

        def mine(array):
            local = here(array)
            return local.reshape(1, virtual, -1, *local.shape[1:])

        ranks = slice(PROCESS * virtual, (PROCESS + 1) * virtual)
        on_gpus.check(self.case, jax.tree.map(mine, self.run()), ranks)
        self.at.group.check()


class Soak:
    """Exchanges with new routing in each step, checked where they happen; see test_gpu_soak.py."""

    def __init__(self, virtual: int, *, collective: bool):
        self.group = jax_moe.ExpertGroup(
            jax_moe.make_mesh(), virtual_ranks=virtual, timeout_s=TIMEOUT_S
        )
        capacity = self.group.num_ranks * soak.T * soak.K

        def program(steps):
            first_rank = jax.lax.axis_index(self.group.axes) * virtual

            def step(i, wrong):
                given = soak._inputs(i, self.group.num_ranks)
                ids, x, s = (soak._own(array, first_rank, virtual) for array in given)
                plan = jax_moe.plan(ids, group=self.group, num_experts=soak.E, capacity=capacity)
                rows, row_s = jax_moe.dispatch(x, s, plan)
                y, back = jax_moe.combine(rows, row_s, plan)
                found = soak._mismatches(self.group, first_rank, given, plan, rows, row_s, y, back)
                return wrong + (jax.lax.psum(found, self.group.axes) if collective else found)

            return jax.lax.fori_loop(0, steps[0], step, np.int32(0))[None]

        spec = jax.P(self.group.mesh.axis_names)
        self.function = jax.jit(
            jax.shard_map(
                program, mesh=self.group.mesh, in_specs=spec, out_specs=spec, check_vma=False
            )
        )

    def start(self, steps: int) -> jax.Array:
        return self.function(place(np.full(2, steps, np.int32), self.group))

    def wrong(self, steps: int) -> int:
        return int(here(self.start(steps))[0])


def fault_of(group) -> str:
    try:
        group.check()
    except RuntimeError as error:
        return str(error)
    return ""


def exchanges() -> Exchange:
    """Every case once; the first is given back."""
    done = []
    for case in CASES if WHAT == "all" else CASES[:1]:
        done.append(Exchange(case))
        done[-1].check()
        say("exchange", case=case.name)
    # Programs of all cases, turn about.
    for exchange in done + done:
        exchange.check()
    say("exchanged")
    return done[0]


def soaks() -> Soak:
    free = Soak(2, collective=False)
    start = time.monotonic()
    say("soak", steps=SOAK_STEPS, wrong=free.wrong(SOAK_STEPS),
        seconds=round(time.monotonic() - start, 1))  # fmt: skip
    free.group.check()
    return free


def every_case() -> None:
    for case in SUITE:
        Exchange(case).check()
        say("case", case=case.name)
    say("every case", count=len(SUITE), virtual_ranks=sorted({c.virtual_ranks for c in SUITE}))


def replays() -> None:
    """One program with changing operands, which XLA captures into a graph if its flags say so."""
    exchanges = [Exchange(case) for case in REPLAYED]
    before = launches(exchanges[0])
    for i in range(REPLAYS):
        exchange = exchanges[i % len(exchanges)]
        exchange.function = exchanges[0].function
        exchange.check()
    # Plan, dispatch, combine and the VJPs of the last two.
    say("replayed", calls=5 * REPLAYS, launches=launches(exchanges[0]) - before)


def launches(exchange: Exchange) -> int:
    return _ffi.cuda.num_launches(exchange.at.group.key)


def beside_collectives() -> None:
    wrong = {}
    for virtual in (1, 4):
        beside = Soak(virtual, collective=True)
        wrong[virtual] = beside.wrong(SOAK_STEPS)
        beside.group.check()
    say("soak beside collectives", steps=SOAK_STEPS, wrong=wrong)


def rebuilds(exchange: Exchange) -> None:
    group = exchange.at.group
    group.rebuild()
    exchange.check()
    group.close()
    group.rebuild()
    exchange.check()
    say("rebuilt")


def a_process_stops(exchange: Exchange) -> None:
    """Process 1 stops; the test lets it go on when process 0 has told."""
    group = exchange.at.group
    group.set_timeout(DEADLINE_S, flight_timeout_s=DEADLINE_S)
    barrier("before the stop")
    if PROCESS == 1:
        say("stopping")
        os.kill(os.getpid(), signal.SIGSTOP)
    start = time.monotonic()
    out = exchange.run()
    seconds = time.monotonic() - start
    nan = bool(np.isnan(here(out["combine"][0]).astype(np.float32)).all())
    say("stopped", seconds=round(seconds, 2), nan=nan, fault=fault_of(group))
    group.set_timeout(TIMEOUT_S)
    group.rebuild()
    exchange.check()
    say("mended")


def a_process_dies(soak_: Soak) -> None:
    """Process 1 is killed in the middle of a program."""
    soak_.group.set_timeout(DEADLINE_S, flight_timeout_s=DEADLINE_S)
    barrier("before the end")
    if PROCESS == 1:
        say("dying")
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    start = time.monotonic()
    error = ""
    try:
        while not fault_of(soak_.group) and time.monotonic() < start + TIMEOUT_S:
            soak_.wrong(SOAK_STEPS)
    except Exception as failure:
        error = str(failure)
    seconds = round(time.monotonic() - start, 2)
    say("survived", seconds=seconds, error=error, fault=fault_of(soak_.group))


def the_long_way(exchange: Exchange, has_gpus: bool) -> bool:
    """Soak, rebuild, stop and kill; whether process 1 is gone."""
    long = soaks()
    rebuilds(exchange)
    if not has_gpus:
        return False
    a_process_stops(exchange)
    if not KILLS:
        return False
    a_process_dies(long)
    say("done")
    return True


def main() -> None:
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s")
    gpus = None if GPU < 0 else [GPU]
    jax.distributed.initialize(f"localhost:{PORT}", 2, PROCESS, local_device_ids=gpus)
    has_gpus = jax.default_backend() == "gpu"
    at_platform, platform = runs.setting, "cuda" if has_gpus else "cpu"
    runs.setting = lambda case: at_platform(case, platform)  # where runs and oracle look
    say("devices", found=[str(device) for device in jax.devices()])
    if has_gpus:
        print(jax_moe.preflight(), flush=True)
    if WHAT == "suite":
        every_case()
        if has_gpus:
            replays()
    elif WHAT == "collectives":
        beside_collectives()
    else:
        exchange = exchanges()
        if WHAT == "all" and the_long_way(exchange, has_gpus):
            return
    barrier("end")
    time.sleep(2 - 2 * PROCESS)  # process 0 has the service, without which JAX ends the other
    say("done")


status = 1
try:
    main()
    status = 0
except Exception:
    traceback.print_exc()
sys.stderr.flush()
os._exit(status)  # JAX would wait for the other process
