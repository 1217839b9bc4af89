"""Runs process_program.py as two processes, and keeps what its steps printed.

The logs of the processes go to JAX_MOE_PROCESS_LOGS, if that names a folder.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from train import processes

PROGRAM = Path(__file__).with_name("process_program.py")
LIMIT_S = 70.0
ON_ONE_GPU = {"JAX_MOE_SOAK_STEPS": ("60", "60")}
COLLECTIVES_ON_ONE_GPU = {
    name: (value, processes.sharing_a_gpu(1)[name])
    for name, value in processes.sharing_a_gpu(0).items()
}
BOTH = [pytest.param("two_gpus", marks=pytest.mark.gpu2), "one_gpu"]


def worlds(names):
    """Parametrizes a test by fixtures that are worlds."""
    return pytest.mark.parametrize("world", names, indirect=True)


class World:
    """Two processes, run to their end or to the limit.

    Args:
      name: of their logs.
      gpus: the GPU of each; -1 for all that it sees.
      what: the part of process_program.py.
      folder: for the logs.
      limit_s: seconds after which they are killed.
      changes: of the environment, a pair of values each.
    """

    def __init__(
        self, name: str, gpus: tuple[int, int], what: str, folder: Path, *,
        limit_s: float = LIMIT_S, **changes: tuple[str, str],
    ):  # fmt: skip
        with socket.socket() as listener:
            listener.bind(("localhost", 0))
            port = listener.getsockname()[1]
        folder = Path(os.environ.get("JAX_MOE_PROCESS_LOGS", folder))
        folder.mkdir(parents=True, exist_ok=True)
        self.logs = [folder / f"{name}{process}.log" for process in range(2)]
        self.started = []
        for process, log in enumerate(self.logs):
            ours = {variable: values[process] for variable, values in changes.items()}
            environment = os.environ | {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.08"} | ours
            command = [PROGRAM, str(process), str(port), str(gpus[process]), what]
            with log.open("w") as output:
                self.started.append(
                    subprocess.Popen(
                        [sys.executable, "-P", *command],
                        stdout=output, stderr=subprocess.STDOUT, env=environment,
                    )
                )  # fmt: skip
        try:
            self._wait(time.monotonic() + limit_s)
        finally:
            for process in self.started:
                process.kill()
                process.wait()
        self.codes = [process.returncode for process in self.started]
        self.steps = [self._steps(process) for process in range(2)]

    def _wait(self, end: float) -> None:
        stopped = True
        while time.monotonic() < end:
            codes = [process.poll() for process in self.started]
            if stopped and "stopped" in self._steps(0):
                self.started[1].send_signal(signal.SIGCONT)
                stopped = False
            if None not in codes:
                return
            if codes[0] is not None or (codes[1] or 0) > 0:  # nothing more can come of it
                end = min(end, time.monotonic() + 5)
            time.sleep(0.05)

    def _steps(self, process: int) -> dict[str, dict]:
        lines = self.logs[process].read_text(errors="replace").splitlines(keepends=True)
        whole = [line for line in lines if line.startswith('{"step"') and line.endswith("}\n")]
        parsed = [json.loads(line) for line in whole]
        return {step["step"]: step for step in parsed}

    def text(self) -> str:
        tails = [log.read_text(errors="replace")[-4000:] for log in self.logs]
        return f"codes {self.codes}\n" + "\n---- process 1\n".join(tails)

    def step(self, process: int, name: str) -> dict:
        assert name in self.steps[process], f"process {process} has no step {name}: {self.text()}"
        return self.steps[process][name]
