"""The bench: its columns are right, wrong ones are refused, its numbers are what they say."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_moe
from jax_moe.bench import __main__ as command_line
from jax_moe.bench import (
    _check,
    _clock,
    _columns,
    _environment,
    _problem,
    _programs,
    _ragged_all_to_all,
    _run,
    _shapes,
    layer,
)
from jax_moe.bench._traffic import Traffic

SHAPE = _shapes.Shape("test", tokens=24, hidden=16, experts=8, top_k=3, ranks=4)
ELSEWHERE = ("ptx", "ragged_all_to_all")  # columns that CPU devices do not have


@pytest.fixture(scope="module")
def group():
    devices = jax.devices()[: SHAPE.ranks]
    return jax_moe.ExpertGroup(jax_moe.make_mesh(devices=devices), axes=("rank",))


@dataclasses.dataclass(frozen=True)
class Bench:
    """A problem, its operands on the devices, and its specified results."""

    problem: _problem.Problem
    placed: dict[str, jax.Array]
    expected: _check.Expected

    def check(self, way, *measures, name="all_to_all", calls=1):
        column = _columns.Column(name, way)
        compiled = _programs.compile_column(column, self.problem, self.placed, measures, calls)
        programs = compiled.programs(self.placed)
        for program in programs:
            self.expected.check(program)
        return programs


def make_bench(group, dtype, routing="skewed"):
    ids = _shapes.expert_ids(SHAPE, SHAPE.ranks, routing)
    capacity = _shapes.tight_capacity(ids, SHAPE.experts)
    problem = _problem.Problem(SHAPE, routing, dtype, group, capacity)
    inputs = problem.inputs(ids)
    placed = {f.name: problem.place(getattr(inputs, f.name)) for f in dataclasses.fields(inputs)}
    return Bench(problem, placed, _check.Expected(problem, inputs))


@pytest.fixture(scope="module")
def bfloat16(group):
    return make_bench(group, "bfloat16")


def test_command_line_verifies_times_and_reports(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(_shapes.SHAPES, "test", SHAPE)
    measures = ("plan+dispatch+combine", "plan+dispatch", "forward+backward")
    columns = ["cpu", "all_gather"]
    every = ",".join([*columns, *ELSEWHERE])
    out = [tmp_path / "out.json", tmp_path / "out.md"]
    command_line.main(
        ["--shape", "test", "--devices", "4", "--routing", "skewed", "--dtype", "float32",
         "--columns", every, "--measures", ",".join(measures), "--repetitions", "3",
         "--seconds", "1", "--json", str(out[0]), "--markdown", str(out[1])]
    )  # fmt: skip
    found = json.loads(out[0].read_text())
    assert [(r["column"], r["measure"]) for r in found["records"]] == [
        (column, measure) for column in columns for measure in measures
    ]
    for record in found["records"]:
        assert record["repetitions"] == 3
        assert 0 < record["least_us"] <= record["median_us"]
        assert record["peak_bytes"] == sum(
            record[f"{kind}_bytes"] for kind in ("temp", "output", "own")
        )
    assert set(found["skipped"]) == set(ELSEWHERE)
    (setting,) = found["settings"]
    assert setting["rows"] <= setting["capacity"]
    assert found["num_ranks"] == 4
    check_comparisons(found)
    report = out[1].read_text()
    assert report.strip() in capsys.readouterr().out
    for words in (*columns, *measures, "jaxlib", "--shape test", "peak", "Not run: ptx"):
        assert words in report


@pytest.mark.parametrize("main", [command_line.main, layer.main])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--virtual-ranks 0", "--virtual-ranks: '0': must be a number of 1 or more"),
        ("--repetitions -1", "--repetitions: '-1': must be"),
        ("--columns pdx", "--columns: "),
    ],
)
def test_refusals_name_the_option(main, arguments, message, capsys):
    with pytest.raises(SystemExit):
        main(arguments.split())
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("main", "arguments"),
    [
        (command_line.main, "--shape tiny --devices 3"),
        (layer.main, "--shape tiny --devices 1 --virtual-ranks 3"),
        (layer.main, "--shape cpu8 --devices 2 --experts 7"),
    ],
)
def test_experts_must_fit_the_ranks(main, arguments):
    with pytest.raises(SystemExit, match=r"experts cannot be shared out evenly to [23] ranks"):
        main(arguments.split())


def test_more_virtual_ranks_than_the_shape_has_ranks_take_one_device():
    assert len(_environment.take_devices(None, SHAPE, 2 * SHAPE.ranks)) == 1


def check_comparisons(found):
    """Ours against the fastest of the others, from the records alone."""
    assert [c["measure"] for c in found["comparisons"]] == [
        "plan+dispatch+combine",
        "forward+backward",
    ]
    for comparison in found["comparisons"]:
        rows = [r for r in found["records"] if r["measure"] == comparison["measure"]]
        ours, *others = sorted(rows, key=lambda r: (r["column"] != "cpu", r["median_us"]))
        assert (comparison["ours"], comparison["rival"]) == ("cpu", others[0]["column"])
        assert comparison["times_faster"] == pytest.approx(
            others[0]["median_us"] / ours["median_us"]
        )
        least = min(r["peak_bytes"] for r in others)
        assert comparison["least_memory_ratio"] == pytest.approx(ours["peak_bytes"] / least)


@pytest.mark.parametrize("name", ["all_gather", "all_to_all"])
def test_plain_ways_in_bfloat16(bfloat16, name):
    way = _columns.PLAIN[name](bfloat16.problem.sizes)
    bfloat16.check(way, "dispatch", "combine", "forward+backward", name=name)


def emulated_ragged_all_to_all(
    operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name
):
    """What its documentation says, from gathered operands: CPU devices have no such collective."""
    me, size = jax.lax.axis_index(axis_name), jax.lax.axis_size(axis_name)

    def to_me(offsets):
        return jax.lax.all_gather(offsets.reshape(size, -1), axis_name)[:, me].reshape(-1)

    begin, length, to = to_me(input_offsets), to_me(send_sizes), to_me(output_offsets)
    length = jnp.where(length == recv_sizes, length, 0)  # the receiver must expect what is sent
    place = jnp.arange(output.shape[0])[:, None]
    inside = (place >= to) & (place < to + length)
    which = inside.argmax(1)
    row = jnp.clip(place[:, 0] - to[which] + begin[which], 0, operand.shape[0] - 1)
    sent = jax.lax.all_gather(operand, axis_name)[which // (to.size // size), row]
    return jnp.where(inside.any(1).reshape(-1, *[1] * (output.ndim - 1)), sent, output)


def test_ragged_all_to_all_on_an_emulated_collective(bfloat16, monkeypatch):
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", emulated_ragged_all_to_all)
    way = _ragged_all_to_all.RaggedAllToAll(bfloat16.problem.sizes, updates=2)
    bfloat16.check(way, "forward+backward", name="ragged_all_to_all")


class Broken(_columns.AllToAll):
    """Swaps two rows: every sum that it makes is right, for a plan that nobody made."""

    def send(self, x, s, state):
        rows, row_s = super().send(x, s, state)
        return rows.at[jnp.array([0, 1])].set(rows[:2][::-1]), row_s


class Imprecise(_columns.AllToAll):
    def receive(self, rows, row_s, state):
        y, s = super().receive(rows, row_s, state)
        return (y.astype(jnp.float32) * 1.03).astype(y.dtype), s


@pytest.mark.parametrize(("way", "measure"), [(Broken, "dispatch"), (Imprecise, "combine")])
def test_a_wrong_column_is_refused(bfloat16, way, measure):
    with pytest.raises(_check.WrongResult, match=f"all_to_all, {measure}, result 0, device"):
        bfloat16.check(way(bfloat16.problem.sizes), measure)


def test_ours_must_be_exact(bfloat16):
    """What passes as a baseline's rounding does not pass as ours."""
    way = _columns.AllToAll(bfloat16.problem.sizes)
    bfloat16.check(way, "combine", name="all_to_all")
    with pytest.raises(_check.WrongResult, match="combine"):
        bfloat16.check(way, "combine", name="cpu")


def test_drops_are_refused(bfloat16):
    problem = bfloat16.problem
    ids = _shapes.expert_ids(SHAPE, SHAPE.ranks, problem.routing)
    small = dataclasses.replace(problem, capacity=SHAPE.tokens)
    inputs = dataclasses.replace(
        problem.inputs(ids),
        rows=np.zeros((SHAPE.ranks, small.capacity, SHAPE.hidden), np.float32),
        row_s=np.zeros((SHAPE.ranks, small.capacity), np.float32),
    )
    with pytest.raises(ValueError, match=r"capacity=24 rows a rank drop \d+ rows"):
        _check.Expected(small, inputs)


def test_repeated_calls_are_all_made(bfloat16):
    """Three calls in one program: right results, and none of them merged or left out."""
    problem = bfloat16.problem
    way = _columns.make("cpu", problem.group, problem.sizes, None).way
    programs = bfloat16.check(way, "plan+dispatch+combine", "combine", name="cpu", calls=3)
    for program in programs:
        once, thrice = (
            p.as_text().count("jax_moe_combine") for p in (program.compiled, program.repeated)
        )
        assert thrice == 3 * once > 0
        got, want = program.run_repeated(), program()
        assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), got, want))


def test_routings():
    shape = _shapes.SHAPES["cpu8"]
    for routing, low, high in (("balanced", 0.0, 0.2), ("skewed", 0.9, 1.1)):
        ids = _shapes.expert_ids(shape, 8, routing)
        assert ids.shape == (8, shape.tokens, shape.top_k)
        assert low <= _shapes.max_violation(ids, shape.experts) <= high
        assert (np.diff(np.sort(ids, -1)) > 0).all(), "an expert twice in one token"
        assert 0 <= ids.min() <= ids.max() < shape.experts
        np.testing.assert_array_equal(ids, _shapes.expert_ids(shape, 8, routing))


def test_traffic_by_hand():
    """Two ranks with two experts each, one token with experts 0 and 1, one with 1 and 3."""
    ids = np.array([[[0, 1], [1, 3]], [[0, 1], [1, 3]]], np.int32)
    traffic = Traffic(ids, experts=4, capacity=8, row_bytes=100)
    np.testing.assert_array_equal(traffic.rows, [[3, 1], [3, 1]])
    np.testing.assert_array_equal(traffic.packets, [[2, 1], [2, 1]])
    # Rank 0 gets three rows, in two packets, from rank 1; and one row of its tokens comes back.
    assert traffic.link("cpu")["dispatch"] == 300
    assert traffic.link("cpu")["combine"] == 300
    assert traffic.link("ptx")["dispatch"] == 200
    assert traffic.link("all_gather")["combine"] == 200
    assert traffic.link("all_to_all")["plan+dispatch+combine"] == 2 * 400
    assert traffic.link("xla")["forward+backward"] == 4 * 200
    # Rank 0 reads two tokens and writes six rows; two packets come to it, and one back.
    assert traffic.necessary(packets=False)["dispatch"] == 200 + 600
    assert traffic.necessary(packets=True)["dispatch"] == 200 + 600 + 2 * 200
    assert traffic.necessary(packets=True)["combine"] == 200 + 600 + 2 * 100


def test_bytes_are_one_ranks_where_a_device_has_two(group):
    def record(group):
        bench = make_bench(group, "bfloat16")
        column = _columns.make("cpu", group, bench.problem.sizes, "undefined")
        (program,) = bench.check(column.way, "dispatch", name="cpu")
        ids = _shapes.expert_ids(SHAPE, SHAPE.ranks, bench.problem.routing)
        traffic = _run._traffic(bench.problem, ids)
        return _run._record(bench.problem, program, _clock.Times([1.0]), traffic)

    mesh = jax_moe.make_mesh(devices=jax.devices()[: SHAPE.ranks // 2])
    halves = record(jax_moe.ExpertGroup(mesh, axes=("rank",), virtual_ranks=2))
    whole = record(group)
    assert halves.output_bytes == pytest.approx(whole.output_bytes, rel=0.02)
    assert halves.own_bytes == pytest.approx(whole.own_bytes, abs=1)


def test_copies_that_set_the_floor(bfloat16, monkeypatch):
    monkeypatch.setitem(_run.COPY_BYTES, "cpu", 4096)
    (copy, add_one), copied = _run._copies(bfloat16.problem, calls=3)
    assert copied == 3 * 2 * 4096
    source = np.asarray(copy())
    assert source.nbytes == 4096 * SHAPE.ranks
    assert np.unique(source).size > source.size // 2, "random, as what the columns move"
    np.testing.assert_array_equal(np.asarray(add_one()), source + 1)
    np.testing.assert_array_equal(np.asarray(copy()), source)


def test_programs_take_turns(group, monkeypatch):
    calls = []
    programs = [lambda i=i: calls.append(i) for i in range(3)]
    prepare = _clock.Preparation(group.mesh, flush_bytes=4096)
    monkeypatch.setattr(_clock, "LEAST_SECONDS", 0.0)
    times = _clock.time_in_turns(programs, prepare, until=-math.inf, most=50)
    assert [len(t.seconds) for t in times] == [_clock.LEAST] * 3
    assert sorted(calls[:3]) == [0, 1, 2]
    calls.clear()
    times = _clock.time_in_turns(programs, prepare, until=math.inf, most=5)
    assert [len(t.seconds) for t in times] == [5] * 3
    turns = np.array(calls).reshape(5, 3)
    assert (np.sort(turns) == [0, 1, 2]).all(), "every program once before any runs again"
    assert "L2 flush" in prepare.words


def test_quick_programs_run_more_often(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(_clock.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(_clock.time, "perf_counter", lambda: now[0])

    def taking(seconds):
        def program():
            now[0] += seconds

        return program

    times = _clock.time_in_turns([taking(1.0), taking(0.1)], lambda: None, until=21.1, most=50)
    assert [len(t.seconds) for t in times] == [11, 50]
    late = _clock.time_in_turns([taking(1.0), taking(0.125)], lambda: None, until=0.0, most=50)
    assert [len(t.seconds) for t in late] == [3, 5]
    assert times[1].summary["median_us"] == pytest.approx(1e5)
    assert times[1].per_call(10).summary["mean_us"] == pytest.approx(1e4)
