"""Trains in several processes on this host: launch_local --processes N -- CONFIG ...

What stands after the "--" are the arguments of `python -m train`. Each process writes to a log of
its own, RUN_FOLDER/logs/process-I.log; that of process 0 is shown. The first one that fails ends
all.
"""

from __future__ import annotations

import dataclasses
import math
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import tyro

from train import processes
from train.__main__ import parse
from train.folder import hold_folder
from train.watch import LOST_PEER
from train.watcher import SETTLE_S

_POLL_S = 0.1
_GRACE_S = 20.0  # after a failure, for the others to say what they were waiting for
_VERDICT_S = 2 * SETTLE_S  # for the watchers of processes that are gone
_TAIL_LINES = 15
_TAIL_BYTES = 4096


@dataclasses.dataclass(frozen=True)
class Options:
    """How many processes, and which GPUs they get."""

    processes: int
    """Processes to start. CPU devices (mesh.cpu_devices) are shared out evenly among them."""
    gpus: tuple[str, ...] = ()
    """One entry per process, as for CUDA_VISIBLE_DEVICES: `0 1`, or `0,1 2,3` for two each. By
    default each process gets one, in order, of CUDA_VISIBLE_DEVICES or of all."""
    port: int = 0
    """Port of process 0 at which the others join; 0 takes a free one."""

    def __post_init__(self) -> None:
        if self.processes < 1:
            raise ValueError(f"processes={self.processes} must be at least 1.")
        if self.gpus and len(self.gpus) != self.processes:
            raise ValueError(
                f"gpus={self.gpus} has {len(self.gpus)} entries for {self.processes} processes: "
                "give one each."
            )


def free_port() -> int:
    """Returns a port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        return listener.getsockname()[1]


def gpus(options: Options) -> list[str]:
    """Returns CUDA_VISIBLE_DEVICES of each process."""
    if options.gpus:
        return list(options.gpus)
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    visible = visible or [str(index) for index in range(options.processes)]
    if len(visible) < options.processes:
        raise ValueError(
            f"CUDA_VISIBLE_DEVICES={','.join(visible)} has fewer GPUs than the "
            f"{options.processes} processes: start fewer, or name them with --gpus."
        )
    return visible[: options.processes]


def shared(visible: list[str]) -> bool:
    """Whether a GPU is named twice."""
    names = [name for entry in visible for name in entry.split(",")]
    return len(set(names)) < len(names)


class Worker:
    """One process of the run and its log.

    Args:
      index: which one.
      arguments: those of `python -m train`.
      environment: its environment.
      log: where its output goes.
    """

    def __init__(self, index: int, arguments: list[str], environment: dict[str, str], log: Path):
        self.index, self.log = index, log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "train", *arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches the launcher alone, which passes it on
            )
        self.pid = self._process.pid

    @property
    def status(self) -> int | None:
        """Its exit status, minus the signal that ended it; None while it runs."""
        return self._process.poll()

    def signal(self, number: int) -> None:
        """Sends a signal, unless it has ended."""
        if self.status is None:
            self._process.send_signal(number)

    def end(self) -> None:
        """Kills it and waits."""
        self.signal(signal.SIGKILL)
        self._process.wait()

    def __str__(self) -> str:
        status = self.status
        if status is None:
            end = "runs"
        elif status < 0:
            end = f"was ended by {signal.Signals(-status).name}"
        else:
            end = f"ended with status {status}"
        return f"process {self.index} (pid {self.pid}) {end}"

    def tail(self) -> str:
        """Returns the last lines of its log, indented."""
        with self.log.open("rb") as log:
            log.seek(max(0, self.log.stat().st_size - _TAIL_BYTES))
            lines = log.read().decode(errors="replace").splitlines()[-_TAIL_LINES:]
        return "\n".join(f"    {line}" for line in lines)


def start(options: Options, arguments: list[str], folder: Path) -> list[Worker]:
    """Starts the processes; their logs go to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {
        processes.ADDRESS: f"127.0.0.1:{options.port or free_port()}",
        processes.COUNT: str(options.processes),
        processes.LAUNCHER: str(os.getpid()),
        "PYTHONPATH": os.pathsep.join(sys.path),  # what is found here is found there
        "PYTHONUNBUFFERED": "1",
    }
    typed = [os.path.relpath(sys.executable), "-m", "train.launch_local", *sys.argv[1:]]
    environment.setdefault("TRAIN_COMMAND", shlex.join(typed))
    workers, visible = [], gpus(options)
    for index, names in enumerate(visible):
        own = {processes.INDEX: str(index), "CUDA_VISIBLE_DEVICES": names}
        own |= processes.sharing_a_gpu(index) if shared(visible) else {}
        log = folder / f"process-{index}.log"
        workers.append(Worker(index, arguments, environment | own, log))
    return workers


def follow(log: BinaryIO) -> None:
    """Prints what has come to the log since the last time."""
    sys.stdout.flush()
    sys.stdout.buffer.write(log.read())  # which may end within a character
    sys.stdout.buffer.flush()


def culprit(workers: list[Worker]) -> Worker | None:
    """Returns one that failed, if possible not because of another."""
    failed = [worker for worker in workers if worker.status not in (None, *_GOOD)]
    return min(failed, key=lambda worker: worker.status in _BECAUSE_OF_OTHERS, default=None)


def wait(workers: list[Worker], log: BinaryIO) -> Worker | None:
    """Waits for all, after a failure for a while only; returns the one that failed first.

    That one may show late: a stopped process is killed after the others have ended.
    """
    first, deadline = None, math.inf
    while time.monotonic() < deadline:
        running = any(worker.status is None for worker in workers)
        follow(log)
        if first is None and (first := culprit(workers)):
            deadline = time.monotonic() + _GRACE_S
        if not running:
            break
        time.sleep(_POLL_S)
    if first is not None:
        time.sleep(_VERDICT_S)
        follow(log)
        if first.status in _BECAUSE_OF_OTHERS:
            return culprit(workers)
    return first


_STOPPED = 128 + signal.SIGINT
_GOOD = (0, _STOPPED)
_BECAUSE_OF_OTHERS = (LOST_PEER, -signal.SIGABRT)  # the latter is JAX's own way


@contextmanager
def signals_passed_on(workers: list[Worker]) -> Iterator[None]:
    """Passes the first SIGINT or SIGTERM on to all processes; a second one kills them."""

    def handle(number, _frame):
        for worker in workers:
            worker.signal(signal.SIGKILL if asked else number)
        asked.append(number)

    asked = []
    old = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def report(first: Worker, workers: list[Worker]) -> None:
    """Says which process failed, how its log ends, and what became of the others."""
    print(f"error: {first}; {first.log} ends:\n{first.tail()}", file=sys.stderr)
    others = [str(worker) for worker in workers if worker is not first]
    if others:
        print(f"the others: {'; '.join(others)}", file=sys.stderr)


def launch(options: Options, arguments: list[str]) -> int:
    """Runs the processes to their end; returns the exit status: 0, 130 if stopped, else 1."""
    folder = parse(arguments).folder
    with hold_folder(folder):
        pass  # no other run's logs are overwritten; from now on process 0 holds it
    workers = start(options, arguments, folder / "logs")
    try:
        with signals_passed_on(workers), workers[0].log.open("rb") as log:
            first = wait(workers, log)
    finally:
        for worker in workers:
            worker.end()
    if first:
        report(first, workers)
        return 1
    return max(worker.status or 0 for worker in workers)


def main() -> int:
    """Runs the command line; returns its exit status."""
    own, arguments = sys.argv[1:], []
    if "--" in own:
        cut = own.index("--")
        own, arguments = own[:cut], own[cut + 1 :]
    try:
        options = tyro.cli(
            Options, prog="python -m train.launch_local", description=__doc__, args=own
        )
        return launch(options, arguments)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
