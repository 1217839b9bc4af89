"""The loop around a step that is faked: what is not finite, SIGTERM, and the trace."""

import io
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from rich.console import Console

from train.folder import hold_folder
from train.loop import Run
from train.report import read_log

pytestmark = pytest.mark.cpu


def make_run(folder, monkeypatch, act=lambda step: True, **changes) -> Run:
    """A run of 8 steps that only counts; `act` gets each step and tells whether it is finite."""
    config = toy.changed(
        toy.CONFIG,
        run_dir=str(folder / "run"),
        data__file=str(toy.write_text(folder / "text.txt")),
        steps=8,
        save_every=4,
        model__num_layers=1,
        print_every=1,
        **changes,
    )
    run = Run(config, Console(file=io.StringIO(), width=200))
    shapes, shardings = run.trainer.abstract_state, run.trainer.shardings
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
    run.seen = []

    def step(state, batch):
        number = int(state.step) + 1
        run.seen.append((number, np.asarray(batch)))
        finite = act(number)
        value = jnp.float32(1.0 if finite else np.nan)
        metrics = {"loss": value, "grad_norm": value, "learning_rate": jnp.float32(1e-3)}
        state = state._replace(step=state.step + 1)
        return state, metrics | {"finite": jnp.bool_(finite)}

    run.trainer.initialise = lambda: jax.device_put(zeros, shardings)
    run.trainer.evaluate = lambda *_: (jnp.float32(1), jnp.float32(1))
    monkeypatch.setattr(run.trainer, "compile_step", lambda: step)
    return run


def said(run: Run) -> str:
    return run.console.file.getvalue()


def test_a_step_that_is_not_finite_stops_and_nothing_is_lost(tmp_path, monkeypatch):
    run = make_run(tmp_path, monkeypatch, lambda step: step != 6)
    message = r"step 6: loss nan.*nothing was updated.*state of step 5 is saved.*--nan-guard skip"
    with pytest.raises(RuntimeError, match=message):
        run.train()
    again = make_run(tmp_path, monkeypatch)
    assert again.train() and "going on from the checkpoint at step 5" in said(again)
    assert [number for number, _ in again.seen] == [6, 7, 8]
    np.testing.assert_array_equal(again.seen[0][1], run.seen[5][1])


def test_a_refused_setting_leaves_the_folder_free(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="does not fit"):
        make_run(tmp_path, monkeypatch, mesh__rank=3, seed=1)
    assert make_run(tmp_path, monkeypatch).train()


def test_a_run_holds_its_folder_and_another_changes_nothing_there(tmp_path, monkeypatch):
    folder = tmp_path / "run"

    def times():
        return {path: path.stat().st_mtime_ns for path in folder.iterdir()}

    def act(step):
        if step < 4:  # from which on checkpoints are written beside the training
            before = times()
            with pytest.raises(ValueError, match=r"another run \(pid \d+ on .*\) trains there"):
                make_run(tmp_path, monkeypatch)
            assert times() == before
        return True

    with hold_folder(folder):
        act(0)
        assert [path.name for path in folder.iterdir()] == ["lock"]
    assert make_run(tmp_path, monkeypatch, act).train()
    assert make_run(tmp_path, monkeypatch).train()


def test_an_edited_text_is_noticed(tmp_path, monkeypatch):
    run = make_run(tmp_path, monkeypatch)
    assert run.train()
    assert run.reached == 8

    def write(path):
        path.write_bytes(b"another text " * 500)
        return path

    monkeypatch.setattr(toy, "write_text", write)
    with pytest.raises(ValueError, match="holds a run on another text"):
        make_run(tmp_path, monkeypatch)


def test_or_it_is_skipped(tmp_path, monkeypatch):
    run = make_run(tmp_path, monkeypatch, lambda step: step not in (3, 4), nan_guard="skip")
    assert run.train()
    assert "step 3: loss nan, gradient norm nan: skipped, nothing was updated" in said(run)
    records = [r for r in read_log(tmp_path / "run/log.jsonl") if "loss" in r]
    assert [record["skipped"] for record in records] == [step in (3, 4) for step in range(1, 9)]


def test_but_not_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr("train.loop._MOST_SKIPPED", 3)
    run = make_run(tmp_path, monkeypatch, lambda step: step < 4, nan_guard="skip")
    with pytest.raises(RuntimeError, match="step 6: loss nan"):
        run.train()


def test_sigterm_saves_and_ends(tmp_path, monkeypatch):
    def act(step):
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return True

    run = make_run(tmp_path, monkeypatch, act)
    assert not run.train() and "asked to stop: saving step 3" in said(run)
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["3"]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_the_trace_holds_the_steps_asked_for(tmp_path, monkeypatch):
    calls = []

    def recorded(name):
        function = getattr(jax.profiler, name)

        def call(*arguments):
            calls.append((name, len(run.seen)))
            function(*arguments)

        return call

    for name in ("start_trace", "stop_trace"):
        monkeypatch.setattr(jax.profiler, name, recorded(name))
    run = make_run(tmp_path, monkeypatch, profile_at=3, profile_steps=2)
    run.train()
    assert calls == [("start_trace", 2), ("stop_trace", 4)]
    assert list((tmp_path / "run").glob("profile/**/*.xplane.pb"))


def test_a_trace_ends_with_the_run(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda path: calls.append(path))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append("stop"))
    make_run(tmp_path, monkeypatch, profile_at=8).train()
    assert calls == [str(tmp_path / "run/profile"), "stop"]
