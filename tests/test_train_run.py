"""Whole runs in processes of their own: Ctrl-C, kill -9, and going on to the last bit."""

import json
import re
import shutil
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
import toy

from train import config as configs
from train import plot
from train.report import Log, read_log

pytestmark = pytest.mark.cpu

STEPS = 12


# A run that gets signals at given steps; at step 8 within its save, or else after the next step.
SIGNALS = """
import os, signal, threading
from train import checkpoint, report
step, save = report.Reporter.step, checkpoint.Checkpoints.save

def kill(number):
    os.kill(os.getpid(), number)

def step_and_stop(self, number, *rest):
    step(self, number, *rest)
    if number in {at}:
        kill({at}[number])

def save_and_die(self, state, *rest):
    if int(state.step) == 8 and 9 in {at}:
        threading.Timer(0.01, kill, [signal.SIGKILL]).start()
    save(self, state, *rest)

report.Reporter.step, checkpoint.Checkpoints.save = step_and_stop, save_and_die
"""


def run(
    folder: Path,
    text: Path,
    status: int,
    at: dict[int, int] | None = None,
    *more: str,
    before: str = "",
) -> str:
    """Runs STEPS steps with a checkpoint every 4 and signals as asked; returns what it printed."""
    options = ["--run-dir", str(folder), "--data.file", str(text), "--steps", str(STEPS)]
    options += ["--save-every", "4", "--eval-every", "6", "--print-every", "1", *more]
    if at:
        before = SIGNALS.replace("{at}", repr({k: int(v) for k, v in at.items()}))
    done = subprocess.run(
        toy.command("train", "toy", *options, before=before),
        env=toy.environment(TRAIN_COMMAND="make train STEPS=12"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == status, done.stdout
    return done.stdout


def losses(folder: Path) -> list[tuple[int, float]]:
    return [(r["step"], r["loss"]) for r in read_log(folder / "log.jsonl") if "loss" in r]


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return toy.write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(scope="module")
def whole(tmp_path_factory, text) -> tuple[Path, str]:
    """An uninterrupted run: its folder and its output."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, run(folder, text, 0, None, "--tensorboard")


def test_what_a_run_says_and_leaves(whole):
    folder, output = whole
    assert f"step {STEPS}  val bits/byte" in output
    for name in ("checkpoints", "log.jsonl", "plot.png"):
        assert str(folder / name) in output.replace("\n", "")
        assert (folder / name).exists()
    assert "steps: run on with: make train STEPS=40" in output
    assert f"make sample RUN={folder}" in output
    assert [step for step, _ in losses(folder)] == list(range(1, STEPS + 1))
    records = read_log(folder / "log.jsonl")
    assert [r["step"] for r in records if "val_bits_per_byte" in r] == [6, STEPS]
    for record in (r for r in records if "loss" in r):
        assert record["bits_per_byte"] == pytest.approx(record["loss"] / np.log(2))
        assert record["max_vio"] == max(record["layers"]["max_vio"])
        assert record["layers"]["dropped"] == [0, 0]
        assert record["layers"]["rows_mean"] == [8 * 24 * 2 / 8] * 2
        assert record["bias_step"] == pytest.approx(1e-2) and not record["skipped"]
        assert all(1 <= nodes <= 2 for nodes in record["layers"]["nodes_per_token"])
    saved = configs.load(folder / "config.json")
    assert (saved.steps, saved.model) == (STEPS, toy.CONFIG.model)
    assert (folder / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert list(folder.glob("tensorboard/event*"))


def test_stopped_killed_and_gone_on_with_to_the_last_bit(whole, text, tmp_path):
    output = run(tmp_path, text, 130, {2: signal.SIGINT})
    assert "stopped and saved; go on with: make train STEPS=12" in output
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["2"]

    run(tmp_path, text, -signal.SIGKILL, {9: signal.SIGKILL})
    assert losses(tmp_path)[-1][0] in (8, 9)

    output = run(tmp_path, text, 0)
    # Those of steps 4 and 8 are written beside the training: the kill may have come before.
    assert re.search("going on from the checkpoint at step [248]", output)
    assert losses(tmp_path) == losses(whole[0])
    scores = [
        [r for r in read_log(folder / "log.jsonl") if "val_bits_per_byte" in r]
        for folder in (whole[0], tmp_path)
    ]
    assert scores[0] == scores[1]


FULL_DISK = """
from train import report
step = report.Reporter.step

def step_on_a_full_disk(self, number, *rest):
    if number == 5:
        self._logs[0]._file = open("/dev/full", "a")
    step(self, number, *rest)

report.Reporter.step = step_on_a_full_disk
"""


def test_a_full_disk_is_told_and_leaves_the_last_checkpoint(text, tmp_path):
    output = run(tmp_path, text, 1, before=FULL_DISK)
    assert f"error: /dev/full: No space left on device. What {tmp_path} holds stays" in output
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["4"]


def test_a_step_whose_gradient_alone_is_not_finite_is_left_out_of_the_plot(whole, tmp_path):
    records = read_log(whole[0] / "log.jsonl")
    records[2] |= {"grad_norm": None, "skipped": True}
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    assert plot.plot(tmp_path).read_bytes().startswith(b"\x89PNG")


def sample(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        toy.command("train.sample", *arguments), env=toy.environment(), capture_output=True
    )


def test_sample_goes_on_from_the_prompt_on_any_device(whole, tmp_path):
    folder = shutil.copytree(whole[0], tmp_path / "elsewhere")
    config = toy.changed(configs.load(folder / "config.json"), implementation="ptx")
    configs.save(config, folder / "config.json")
    done = sample(str(folder), "--prompt", "7 times ", "--length", "30")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(b"7 times ")
    assert len(done.stdout) > len(b"7 times ") + 30


def test_sample_without_a_run_says_so(tmp_path):
    done = sample(str(tmp_path))
    assert done.returncode == 1 and b"make train" in done.stderr


def test_log_is_cut_back_and_torn_lines_are_dropped(tmp_path):
    path = tmp_path / "log.jsonl"
    lines = [json.dumps({"step": step, "loss": 1.0}) for step in range(1, 7)]
    path.write_text("\n".join(lines) + '\n{"step": 7, "lo')
    log = Log(path, start_step=4)
    log.write({"step": 5, "loss": 2.0})
    log.write({"step": 5, "loss": 2.0})
    log.close()
    assert [(r["step"], r["loss"]) for r in read_log(path)] == [
        *((step, 1.0) for step in range(1, 5)),
        (5, 2.0),
    ]


def test_running_mean():
    values = np.arange(200.0)
    expected = [values[max(0, i - 49) : i + 1].mean() for i in range(200)]
    np.testing.assert_allclose(plot.running_mean(values), expected)
