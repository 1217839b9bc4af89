"""Whole runs in processes of their own: Ctrl-C, kill -9, and going on to the last bit."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import toy

from train import config as configs
from train import plot
from train.report import Log, read_log

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parents[1]
STEPS = 12

# The toy configuration through the trainer's own command line.
PROGRAM = """
import sys
import toy
from train import __main__, config
config.CONFIGS["toy"] = ("for the tests", toy.CONFIG)
sys.exit(__main__.main())
"""


def start(folder: Path, text: Path, *arguments: str) -> subprocess.Popen:
    """Starts a run of STEPS steps with a checkpoint every 4."""
    options = ["--run-dir", str(folder), "--data.file", str(text), "--steps", str(STEPS)]
    options += ["--save-every", "4", "--eval-every", "6", "--print-every", "1", *arguments]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        "XLA_FLAGS": "--xla_backend_optimization_level=0",  # compiles in half the time
        "TRAIN_COMMAND": "make train STEPS=12",
    }
    environment.pop("JAX_NUM_CPU_DEVICES", None)
    return subprocess.Popen(
        [sys.executable, "-P", "-c", PROGRAM, "toy", *options],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen, status: int) -> str:
    output, _ = process.communicate(timeout=500)
    assert process.returncode == status, output
    return output


def signal_after(process: subprocess.Popen, folder: Path, step: int, number: int) -> None:
    """Sends the signal once the log has the step."""
    log, deadline = folder / "log.jsonl", time.monotonic() + 500
    while not (log.exists() and any(record["step"] >= step for record in read_log(log))):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(number)


def losses(folder: Path) -> list[tuple[int, float]]:
    return [(r["step"], r["loss"]) for r in read_log(folder / "log.jsonl") if "loss" in r]


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return toy.write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(scope="module")
def whole(tmp_path_factory, text) -> tuple[Path, str]:
    """An uninterrupted run: its folder and its output."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, finish(start(folder, text), 0)


def test_what_a_run_says_and_leaves(whole):
    folder, output = whole
    assert f"step {STEPS}  val bits/byte" in output
    for name in ("checkpoints", "log.jsonl", "plot.png"):
        assert str(folder / name) in output.replace("\n", "")
        assert (folder / name).exists()
    assert "steps: run on with" in output
    assert [step for step, _ in losses(folder)] == list(range(1, STEPS + 1))
    records = read_log(folder / "log.jsonl")
    assert [r["step"] for r in records if "val_bits_per_byte" in r] == [6, STEPS]
    for record in (r for r in records if "loss" in r):
        assert record["bits_per_byte"] == pytest.approx(record["loss"] / np.log(2))
        assert record["max_vio"] == max(record["layers"]["max_vio"])
        assert record["layers"]["dropped"] == [0, 0]
        assert all(1 <= nodes <= 2 for nodes in record["layers"]["nodes_per_token"])
    saved = configs.load(folder / "config.json")
    assert (saved.steps, saved.model) == (STEPS, toy.CONFIG.model)
    assert (folder / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_stopped_killed_and_gone_on_with_to_the_last_bit(whole, text, tmp_path):
    process = start(tmp_path, text)
    signal_after(process, tmp_path, 2, signal.SIGINT)
    output = finish(process, 130)
    assert "stopped and saved; go on with: make train STEPS=12" in output
    (stopped_at,) = [int(path.name) for path in (tmp_path / "checkpoints").iterdir()]
    assert stopped_at == losses(tmp_path)[-1][0] < STEPS

    process = start(tmp_path, text)
    signal_after(process, tmp_path, 9, signal.SIGKILL)
    finish(process, -signal.SIGKILL)
    assert losses(tmp_path)[-1][0] < STEPS, "the kill came too late to test anything"

    output = finish(start(tmp_path, text), 0)
    assert "going on from the checkpoint at step 8" in output
    assert losses(tmp_path) == losses(whole[0])
    val = [
        [r for r in read_log(folder / "log.jsonl") if "val_bits_per_byte" in r]
        for folder in (whole[0], tmp_path)
    ]
    assert val[0] == val[1]


def test_another_configuration_does_not_go_on(whole, text):
    output = finish(start(whole[0], text, "--seed", "1"), 1)
    assert "seed: 0 -> 1" in output and "--run-dir" in output


def test_sample_continues_the_prompt(whole):
    command = [sys.executable, "-m", "train.sample", str(whole[0]), "--prompt", "7 times "]
    command += ["--length", "30"]
    environment = os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
    environment.pop("JAX_NUM_CPU_DEVICES", None)
    found = [
        subprocess.run(
            [*command, *extra], cwd=ROOT, env=environment, capture_output=True, check=True
        ).stdout
        for extra in ([], ["--seed", "1"])
    ]
    assert all(text.startswith(b"7 times ") for text in found)
    assert found[0] != found[1]


def test_sample_without_a_run_says_so(tmp_path):
    command = [sys.executable, "-m", "train.sample", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "make train" in done.stderr


def test_log_is_cut_back_and_torn_lines_are_dropped(tmp_path):
    path = tmp_path / "log.jsonl"
    lines = [json.dumps({"step": step, "loss": 1.0}) for step in range(1, 7)]
    path.write_text("\n".join(lines) + '\n{"step": 7, "lo')
    log = Log(path, start_step=4)
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
