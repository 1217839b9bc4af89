"""The bench's DeepEP columns, but for what needs GPUs: a stand-in plays the processes' part."""

import math
import os
import re
import time
import types
from pathlib import Path

import jax
import pytest

from jax_moe.bench import _columns, _deepep, _report, _run, _shapes

SHAPE = _shapes.Shape("test", tokens=12, hidden=16, experts=8, top_k=3, ranks=4)
MEASURES = ("plan", "plan+dispatch", "combine", "plan+dispatch+combine")


@pytest.fixture
def run(monkeypatch):
    """A run of the bench whose DeepEP processes do what the mode says."""
    monkeypatch.setattr(_deepep, "PROGRAM", Path(__file__).with_name("fake_deepep.py"))
    monkeypatch.setattr(_deepep, "obstacle", lambda *_: None)
    monkeypatch.setattr(_deepep, "_GRACE_S", 0.2)

    def run(mode: str, columns=("deepep:24", "deepep:64"), measures=MEASURES, calls=2, most=3):
        monkeypatch.setenv("FAKE_DEEPEP", mode)
        options = _run.Options(
            shape=SHAPE, routings=("skewed",), dtypes=("bfloat16",), columns=("cpu", *columns),
            measures=measures, repetitions=most, seconds=0.1, calls=calls,
        )  # fmt: skip
        return _run.run(options, jax.devices()[:4], say=lambda _: None)

    return run


@pytest.mark.multiproc
def test_same_routing_checked_results_and_times_of_one_call(run):
    outcome = run("good")
    assert outcome.skipped == {}
    found = {(r.column, r.measure): r for r in outcome.records if r.column != "cpu"}
    assert list(found) == [
        (column, measure)
        for column in ("deepep:24", "deepep:64")
        for measure in (*_deepep.MEASURES, "bare plan+dispatch", "bare combine")
    ]  # fmt: skip
    record = found["deepep:64", "bare combine"]
    seconds = [1e-3 * len("64 bare combine"), 3e-3, 5e-3]
    assert record.median_us == pytest.approx(5e-3 / 2 * 1e6)
    assert record.mean_us == pytest.approx(math.fsum(seconds) / 3 / 2 * 1e6)
    assert (record.repetitions, record.calls) == (3, 2)
    assert record.own_bytes == 64_000
    assert record.peak_bytes == 64_000 + 7 + len("64 bare combine")
    assert record.link_bytes == found["deepep:24", "combine"].link_bytes > 0
    report = _report.as_markdown(outcome, {})
    (line,) = (line for line in report.splitlines() if line.startswith("| deepep:24 | - |"))
    assert line.count("±") == 3, "no plan alone"
    assert "| deepep:64 | bare combine | 2.5 ± " in report
    assert "DeepEP V1 on PyTorch, intranode, 64 SMs" in report


@pytest.mark.multiproc
def test_no_column_has_fewer_repetitions_than_the_least(run):
    records = run("good", columns=("deepep",), measures=("combine",), most=0).records
    assert {(r.column, r.repetitions) for r in records} == {("cpu", 3), ("deepep", 3)}


@pytest.mark.multiproc
def test_wrong_rows_are_not_timed(run):
    outcome = run("swaps two rows", columns=("deepep",), calls=1)
    assert {r.column for r in outcome.records} == {"cpu"}
    ((name, why),) = outcome.skipped.items()
    assert name == "deepep, bfloat16, skewed routing"
    assert "deepep, plan+dispatch, result 0, rank 0" in why
    assert "values are wrong" in why
    assert f"Not run: {name}: {why.rstrip('.')}" in _report.as_markdown(outcome, {})


@pytest.mark.multiproc
def test_a_rank_that_fails_is_named_with_its_last_words_and_ends_the_others(run):
    outcome = run("fails")
    assert len(outcome.skipped) == 2
    for why in outcome.skipped.values():
        assert why == "rank 1: status 1; it said: no such symbol: frobnicate"


@pytest.mark.multiproc
def test_what_hangs_is_killed_with_its_children(run, monkeypatch, tmp_path):
    monkeypatch.setattr(_deepep, "LIMIT_S", 5.0)
    monkeypatch.setenv("CHILD", str(tmp_path / "child"))
    outcome = run("hangs", columns=("deepep",))
    (why,) = outcome.skipped.values()
    assert "not done after 5 s" in why
    children = [int(path.read_text()) for path in tmp_path.iterdir()]
    assert children
    end = time.monotonic() + 60
    while any(map(runs, children)):
        assert time.monotonic() < end, "a child is left"
        time.sleep(0.05)


def runs(pid: int) -> bool:
    """Whether a process is there and no zombie, which nobody may have buried yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"platform": "cpu"}, "NVIDIA GPUs"),
        ({"packages": ("torch", "triton")}, "no Python package deep_ep: pip install"),
        ({"dtype": "float32"}, "bfloat16, not float32"),
        ({"ranks": 3}, r"configuration for \(2, 4, 8\) ranks of one host, not 3"),
        ({"virtual": 2}, r"2 ranks on 1 GPU\(s\): with --share-gpus"),
        ({"virtual": 2, "share": True}, "need 160 SMs of a GPU that has 132"),
        ({}, None),
        ({"virtual": 2, "share": True, "name": "deepep:64"}, None),
    ],
    ids=str,
)
def test_what_stands_in_the_way(changes, words, monkeypatch):
    have = {"packages": {"torch", "triton", "deep_ep"}, "platform": "gpu", "dtype": "bfloat16",
            "ranks": 2, "virtual": 1, "share": False, "name": "deepep:80"} | changes  # fmt: skip
    monkeypatch.setattr(_deepep.importlib.util, "find_spec", lambda name: name in have["packages"])
    monkeypatch.setattr(_deepep, "_num_sms", lambda _: 132)
    device = types.SimpleNamespace(platform=have["platform"])
    devices = have["ranks"] // have["virtual"]
    group = types.SimpleNamespace(
        devices=[device] * devices, num_devices=devices, num_ranks=have["ranks"],
        virtual_ranks=have["virtual"],
    )  # fmt: skip
    why = _deepep.obstacle(have["name"], group, have["dtype"], have["share"])
    if words is None:
        assert why is None
    else:
        assert why is not None
        assert re.search(words, why), why


def test_names():
    assert _deepep.sms(_columns.check_name("deepep:100")) == 100
    assert _deepep.sms(_columns.check_name("deepep")) == 20
    for wrong in ("deepep:21", "deepep:x", "deepep2", "all_gather:8"):
        with pytest.raises(ValueError, match=f"'{wrong}'"):
            _columns.check_name(wrong)


def test_the_library_path_keeps_what_was_there(monkeypatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", "/somewhere")
    assert _deepep._environment()["LD_LIBRARY_PATH"].endswith("/somewhere")
    assert _deepep._environment()["PATH"] == os.environ["PATH"]
