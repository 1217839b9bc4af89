"""Runs of the trainer in several processes, by a program small enough to be compiled in each."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import toy

from train import config as configs
from train.config import MeshConfig
from train.report import read_log

STEPS = 10
CONFIG = toy.changed(
    toy.CONFIG,
    name="job",
    model__num_layers=1,
    model__num_dense_layers=0,
    optimizer__total_steps=100_000,  # a run that is to be stopped is not to end before
    data__validation_windows=1,
    mesh=MeshConfig(node=4, rank=1, cpu_devices=4),
    steps=STEPS,
)


@dataclasses.dataclass(frozen=True)
class Job:
    """A folder with the configuration and a text; runs go to folders in it."""

    folder: Path

    @classmethod
    def make(cls, folder: Path) -> Job:
        configs.save(CONFIG, folder / "job.json")
        toy.write_text(folder / "text.txt")
        # Of this tree only the trainer: jax_moe is the installed one.
        (folder / "modules").mkdir()
        (folder / "modules" / "train").symlink_to(Path(__file__).parents[1] / "train")
        return cls(folder)

    def arguments(self, run: str, *more: str) -> list[str]:
        """Those of `python -m train` for a run into a folder of that name."""
        text = ["--data.file", str(self.folder / "text.txt")]
        return [str(self.folder / "job.json"), "--run-dir", str(self.folder / run), *text, *more]

    def command(self, module: str, *arguments: str, before: str = "") -> list[str]:
        """The command line of a module of the trainer; `before` is run first."""
        run = "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
        program = f"import runpy, sys; exec({before!r}); {run}" if before else ""
        start = ["-c", program] if before else ["-m"]
        return [sys.executable, "-P", *start, module, *arguments]

    @property
    def environment(self) -> dict[str, str]:
        known = os.environ.get("PYTHONPATH")  # where packages may lie
        return toy.environment(
            PYTHONPATH=os.pathsep.join([str(self.folder / "modules"), *([known] if known else [])]),
            PYTHONUNBUFFERED="1",
            # Serves process 0 of all runs alike; JAX has a key for each process, and writes that's.
            JAX_COMPILATION_CACHE_DIR=str(self.folder / "cache"),
        )

    def start(self, command: list[str], output: Path, **changes) -> subprocess.Popen:
        """Starts a command; what it prints goes to the file."""
        with output.open("wb") as to:
            return subprocess.Popen(
                command,
                cwd=self.folder,
                env=self.environment | changes,
                stdout=to,
                stderr=subprocess.STDOUT,
            )

    def losses(self, run: str) -> np.ndarray:
        """Losses by step; fails where a step is missing or doubled."""
        records = [r for r in read_log(self.folder / run / "log.jsonl") if "loss" in r]
        assert [r["step"] for r in records] == list(range(1, len(records) + 1))
        return np.array([r["loss"] for r in records])

    def wait_for_step(self, run: str, step: int, process: subprocess.Popen, output: Path) -> None:
        """Waits until the run's log has the step; fails where the process ends before."""
        log = self.folder / run / "log.jsonl"
        while not log.exists() or log.read_bytes().count(b'"loss"') < step:
            assert process.poll() is None, output.read_text()
            time.sleep(0.02)

    def checkpoints(self, run: str) -> list[int]:
        """Steps of the run's checkpoints."""
        return sorted(int(name) for name in os.listdir(self.folder / run / "checkpoints"))
