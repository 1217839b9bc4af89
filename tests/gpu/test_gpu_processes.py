"""Two processes that share a group: on one GPU, on two, and on two of which each sees its own.

Each world runs process_program.py twice and keeps what the steps printed. The logs of the processes
go to JAX_MOE_PROCESS_LOGS, if that names a folder.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("process_program.py")
LIMIT_S = 70

pytestmark = pytest.mark.multiproc


class World:
    """Two processes, run to their end or to the limit."""

    def __init__(self, name: str, gpus: tuple[int, int], what: str, folder: Path, **changes):
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
            self._wait()
        finally:
            for process in self.started:
                process.kill()
                process.wait()
        self.codes = [process.returncode for process in self.started]
        self.steps = [self._steps(process) for process in range(2)]

    def _wait(self) -> None:
        end, stopped = time.monotonic() + LIMIT_S, True
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


@pytest.fixture(scope="module")
def one_gpu(tmp_path_factory) -> World:
    """Both on GPU 0, which gives them turns. No collectives: NCCL refuses that."""
    few = ("60", "60")
    return World(
        "one_gpu", (0, 0), "all", tmp_path_factory.mktemp("one"), SHARED_GPU=("1", "1"),
        JAX_MOE_SOAK_STEPS=few,
    )  # fmt: skip


@pytest.fixture(scope="module")
def two_gpus(tmp_path_factory) -> World:
    return World("two_gpus", (0, 1), "all", tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def apart(tmp_path_factory) -> World:
    """As launchers do that give every process its GPU."""
    return World(
        "apart", (-1, -1), "first", tmp_path_factory.mktemp("apart"),
        CUDA_VISIBLE_DEVICES=("0", "1"),
    )  # fmt: skip


BOTH = [pytest.param("two_gpus", marks=pytest.mark.gpu2), "one_gpu"]
ALL = [BOTH[0], pytest.param("apart", marks=pytest.mark.gpu2), "one_gpu"]


@pytest.fixture
def world(request) -> World:
    return request.getfixturevalue(request.param)


def worlds(names):
    return pytest.mark.parametrize("world", names, indirect=True)


@worlds(ALL)
def test_every_bit(world):
    for process in range(2):
        world.step(process, "exchanged")
        assert 'implementation "ptx"' in world.logs[process].read_text()


@worlds(ALL)
def test_preflight(world):
    log = world.logs[0].read_text()
    link = {"one_gpu": "same GPU", "two_gpus": "NVLink", "apart": "unknown"}[
        world.logs[0].stem[:-1]
    ]
    assert "IPC" in log and link in log, log[:3000]
    assert 'implementation="ptx": possible' in log


@worlds(BOTH)
def test_soak(world):
    for process in range(2):
        assert world.step(process, "soak")["wrong"] == 0


@pytest.mark.gpu2
def test_beside_collectives_in_one_program(two_gpus):
    for process in range(2):
        assert two_gpus.step(process, "soak beside collectives")["wrong"] == 0


@worlds(BOTH)
def test_rebuild_and_close(world):
    for process in range(2):
        world.step(process, "rebuilt")


@worlds(BOTH)
def test_a_stopped_process_is_named_and_the_group_comes_back(world):
    told = world.step(0, "stopped")
    assert "phase join: rank 0 (GPU" in told["fault"]
    assert re.search(r" of process 0\) waited 2(\.\d+)? s for rank 1 \(GPU", told["fault"])
    assert " of process 1) to start the same call" in told["fault"]
    assert told["fault"].splitlines()[0] in world.logs[0].read_text(), "printed at once"
    assert told["nan"]
    assert 1.9 < told["seconds"] < 20
    assert "gave up because rank 0" in world.step(1, "stopped")["fault"]
    for process in range(2):
        world.step(process, "mended")


@worlds(BOTH)
def test_the_survivor_of_a_killed_process_tells(world):
    told = world.step(0, "survived")
    assert "of process 1)" in told["fault"], told
    assert "waited 2" in told["fault"]
    assert "done" in world.steps[0]
    assert world.codes == [0, -signal.SIGKILL]
