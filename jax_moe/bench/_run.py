"""Runs the bench: sets up every setting, verifies, times in turns, and records."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_moe
from jax_moe.bench import _columns, _command_line, _deepep, _problem, _programs, _shapes
from jax_moe.bench._check import Expected, WrongResult
from jax_moe.bench._clock import Preparation, Timed, Times, time_in_turns
from jax_moe.bench._traffic import Traffic

WARM_UPS = 2  # of what the check has not run yet; on GPUs the first capture a CUDA graph
COPY_BYTES = {"cpu": 32 << 20, "gpu": 1 << 30}  # per device


@dataclasses.dataclass(frozen=True)
class Options:
    """What to run; see `--help`."""

    shape: _shapes.Shape
    routings: tuple[_shapes.Routing, ...]
    dtypes: tuple[str, ...]
    columns: tuple[str, ...]
    measures: tuple[str, ...]
    repetitions: int
    seconds: float
    capacity_factor: float | None = None
    tail: str | None = None
    virtual_ranks: int = 1
    calls: int = 1
    seed: int = 0
    share_gpus: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record(Timed):
    """One measure of one column in one setting; bytes are one rank's, the largest over ranks."""

    routing: str
    dtype: str
    column: str
    measure: str
    calls: int  # in one timed region, in sequence; times are those of one call
    link_bytes: int
    temp_bytes: int
    output_bytes: int
    own_bytes: int

    @property
    def peak_bytes(self) -> int:
        """XLA's temporaries and outputs, and our own buffers."""
        return self.temp_bytes + self.output_bytes + self.own_bytes


@dataclasses.dataclass(frozen=True)
class Setting:
    """One routing and type of payload: its facts, and its floor in microseconds a measure."""

    routing: _shapes.Routing
    dtype: str
    max_violation: float
    capacity: int  # rows of one rank
    rows: int  # of them used at the busiest rank
    copy_gb_per_s: float  # one device's share, read and written bytes
    floor_us: dict[str, float]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """All that a report tells of a run."""

    options: Options
    num_ranks: int
    preparation: str
    settings: list[Setting]
    records: list[Record]
    skipped: dict[str, str]  # column -> why


def run(options: Options, devices, say: Callable[[str], None] = _command_line.say) -> Outcome:
    """Measures every column in every setting, in all within about `options.seconds`."""
    mesh = jax_moe.make_mesh(rank=len(devices), devices=devices)
    group = jax_moe.ExpertGroup(mesh, axes=("rank",), virtual_ranks=options.virtual_ranks)
    prepare, skipped = Preparation(mesh), {}
    settings, records = [], []
    ids = {
        routing: _shapes.expert_ids(options.shape, group.num_ranks, routing, options.seed)
        for routing in options.routings
    }
    capacity = _capacity(options, group, list(ids.values()))
    deadline = time.monotonic() + options.seconds
    for i, dtype in enumerate(options.dtypes):
        compiled, dtype_end = None, _share(deadline, len(options.dtypes) - i)
        for j, routing in enumerate(options.routings):
            problem = _problem.Problem(options.shape, routing, dtype, group, capacity)
            inputs = problem.inputs(ids[routing], options.seed)
            placed = {
                field.name: problem.place(getattr(inputs, field.name))
                for field in dataclasses.fields(inputs)
            }
            if compiled is None:  # for every routing, as the capacity is one
                compiled = _compiled_columns(options, problem, placed, skipped, say)
            until = _share(dtype_end, len(options.routings) - j)
            expected = Expected(problem, inputs)
            programs = _verified(compiled, placed, expected)
            setting, found = _measure(options, problem, ids[routing], programs, prepare, until)
            settings.append(setting)
            records.extend(found)
            del programs, placed  # make room for the next setting's
            records.extend(_deepep_records(options, problem, inputs, expected, skipped))
            say(f"{dtype}, {routing}: verified and timed")
    return Outcome(options, group.num_ranks, prepare.words, settings, records, skipped)


def _share(deadline: float, parts: int) -> float:
    """When the first of the equal parts into which the time left falls is over."""
    now = time.monotonic()
    return now + (deadline - now) / parts


def _capacity(options: Options, group: jax_moe.ExpertGroup, ids: list[np.ndarray]) -> int:
    """Rows of one rank, the same for all routings and columns."""
    shape = options.shape
    if options.capacity_factor is None:
        return max(_shapes.tight_capacity(a, shape.experts) for a in ids)
    capacity = jax_moe.row_capacity(
        tokens=shape.tokens,
        top_k=shape.top_k,
        num_experts=shape.experts,
        num_ranks=group.num_ranks,
        capacity_factor=options.capacity_factor,
    )
    return capacity + -capacity % group.num_ranks  # so that every source has the same part


def _compiled_columns(options, problem, placed, skipped, say) -> list[_programs.CompiledColumn]:
    """The columns that can run here; the others go to `skipped`."""
    compiled = []
    for name in options.columns:
        if name.startswith(_deepep.KIND):
            continue
        try:
            column = _columns.make(name, problem.group, problem.sizes, options.tail)
        except NotImplementedError as why:
            skipped[name] = str(why)
            continue
        begin = time.monotonic()
        compiled.append(
            _programs.compile_column(column, problem, placed, options.measures, options.calls)
        )
        say(f"{problem.dtype}: {name} compiled in {time.monotonic() - begin:.0f} s")
    return compiled


def _verified(compiled, placed, expected: Expected) -> list[_programs.Program]:
    """The columns' programs, every one run and its results checked."""
    programs = [program for column in compiled for program in column.programs(placed)]
    for program in programs:
        expected.check(program)
        for _ in range(WARM_UPS if program.calls > 1 else 0):
            jax.block_until_ready(program.run_repeated())
    return programs


def _measure(options, problem, ids, programs, prepare, until) -> tuple[Setting, list[Record]]:
    copies, copied = _copies(problem, options.calls)
    timed = [*copies, *(program.run_repeated for program in programs)]
    times = time_in_turns(timed, prepare, until=until, most=options.repetitions)
    copy_us = min(taken.summary["median_us"] for taken in times[: len(copies)])
    bandwidth = copied / (copy_us * 1e-6)
    traffic = _traffic(problem, ids)
    on_cpu = problem.group.devices[0].platform == "cpu"
    necessary = traffic.necessary(packets=not on_cpu)
    setting = Setting(
        routing=problem.routing,
        dtype=problem.dtype,
        max_violation=_shapes.max_violation(ids, problem.shape.experts),
        capacity=problem.capacity,
        rows=int(traffic.rows.sum(0).max()),
        copy_gb_per_s=bandwidth / 1e9,
        floor_us={
            m: necessary[m] * options.virtual_ranks / bandwidth * 1e6 for m in options.measures
        },
    )
    records = [
        _record(problem, program, taken, traffic)
        for program, taken in zip(programs, times[len(copies) :], strict=True)
    ]
    return setting, records


def _traffic(problem, ids) -> Traffic:
    return Traffic(
        ids,
        experts=problem.shape.experts,
        capacity=problem.capacity,
        row_bytes=problem.shape.hidden * jnp.dtype(problem.dtype).itemsize,
    )


def _deepep_records(options, problem, inputs, expected, skipped) -> list[Record]:
    """DeepEP's columns in this setting; if they cannot run here or fail, `skipped` says why."""
    names = []
    for name in options.columns:
        if name.startswith(_deepep.KIND):
            why = _deepep.obstacle(name, problem.group, problem.dtype, options.share_gpus)
            skipped |= {name: why} if why else {}
            names += [] if why else [name]
    if not names:
        return []
    try:
        outcome = _deepep.run(
            names,
            problem,
            inputs,
            expected.check_rank,
            measures=options.measures,
            calls=options.calls,
            repetitions=options.repetitions,
        )
    except (_deepep.Failed, WrongResult) as error:
        setting = f"{problem.dtype}, {problem.routing} routing"
        skipped |= {f"{name}, {setting}": str(error) for name in names}
        return []
    link = _traffic(problem, inputs.ids).link(_deepep.KIND)
    return [
        Record(
            routing=problem.routing,
            dtype=problem.dtype,
            column=name,
            measure=measure,
            calls=options.calls,
            link_bytes=link[measure.removeprefix("bare ")],
            temp_bytes=outcome.memory[name, measure]["temp"],
            output_bytes=outcome.memory[name, measure]["output"],
            own_bytes=outcome.own_bytes[name],
            **Times(seconds).per_call(options.calls).summary,
        )
        for (name, measure), seconds in outcome.seconds.items()
    ]


def _record(problem, program, taken: Times, traffic: Traffic) -> Record:
    column, measure, memory = program.column, program.measure, program.memory
    ranks = problem.group.virtual_ranks  # of the device, whose bytes these are
    return Record(
        routing=problem.routing,
        dtype=problem.dtype,
        column=column.name,
        measure=measure,
        calls=program.calls,
        link_bytes=traffic.link(column.kind)[measure],
        temp_bytes=memory["temp"] // ranks,
        output_bytes=memory["output"] // ranks,
        own_bytes=_programs.own_bytes(column.kind, problem) // ranks,
        **taken.per_call(program.calls).summary,
    )


def _copies(problem, calls: int) -> tuple[list[Callable[[], Any]], int]:
    """Plain copies on every device at once, and the bytes that one device reads and writes by each.

    Each is called as often in a timed region as a column is, so that starting it weighs as little.
    """
    size = copy_bytes(problem.group.devices[0])
    shape = (problem.group.num_ranks, size // problem.group.virtual_ranks // 4, 1)
    words = _problem.random_values(np.random.default_rng(0), shape)
    return copy_programs(words, problem.place, calls), 2 * size * calls


def copy_bytes(device: Any) -> int:
    """How much a copy that is timed reads on a device."""
    return COPY_BYTES.get(device.platform, COPY_BYTES["gpu"])


def copy_programs(
    words: np.ndarray, place: Callable[[np.ndarray], jax.Array], calls: int
) -> list[Callable[[], jax.Array]]:
    """Copies of what `place` makes of the words, `calls` one after the other, in two ways.

    One copies, the other adds 1, as a copy by the driver is not always the fastest. They write
    into memory that is there already: fresh memory costs page faults on CPU, and half of the speed
    on an H200.
    """

    def program(function):
        source, held = place(words), [place(words)]
        compiled = jax.jit(lambda to, a: function(a), donate_argnums=0, keep_unused=True)
        compiled = compiled.lower(held[0], source).compile()

        def run():
            for _ in range(calls):
                held.append(compiled(held.pop(), source))
            return held[0]

        return run

    return [program(jnp.copy), program(lambda a: a + 1)]
