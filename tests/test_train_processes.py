"""Several processes, on one host or on several: they train as one does, stop and fail together."""

import contextlib
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import hosts
import jobs
import numpy as np
import pytest

from train import launch_local
from train.watch import LOST_PEER

pytestmark = pytest.mark.multiproc


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> jobs.Job:
    return jobs.Job.make(tmp_path_factory.mktemp("job"))


@pytest.fixture(scope="module")
def alone(job) -> np.ndarray:
    """Losses of a run in one process, of twice STEPS."""
    output = job.folder / "alone.txt"
    arguments = job.arguments("alone", "--steps", str(2 * jobs.STEPS))
    run = job.start(job.command("train", *arguments), output)
    assert run.wait() == 0, output.read_text()
    return job.losses("alone")


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def watcher(pid: int) -> list[int]:
    """The process's watcher, if it has one yet; what it imports may start others for a moment."""
    found = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for child in children(pid):
            if b"watcher.py" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(child)
    return found


@pytest.mark.parametrize("watched", [False, True])
def test_a_killed_launcher_takes_its_processes_with_it(job, watched):
    """Also those that it has only just started; watchers come when all have met."""
    name = f"killed-{watched}"
    output = job.folder / f"{name}.txt"
    arguments = ["--processes", "2", "--", *job.arguments(name, "--steps", "50000")]
    run = job.start(job.command("train.launch_local", *arguments), output)
    started, watchers = [], []
    while len(started) < 2 or (watched and len(watchers) < 2):
        assert run.poll() is None, output.read_text()
        time.sleep(0.02)
        started = children(run.pid)
        watchers = [found for pid in started for found in watcher(pid)]
    left = [os.pidfd_open(pid) for pid in started + watchers]
    run.kill()
    run.wait()
    try:
        for descriptor in left:
            assert select.select([descriptor], [], [], 60)[0], (started, watchers)
    finally:
        for descriptor in left:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and init knows
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            os.close(descriptor)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--processes", "0", "--", "tiny"], "processes=0 must be at least 1"),
        (["--processes", "2", "--gpus", "0", "--", "tiny"], "gpus=('0',) has 1 entries"),
        (["--processes", "2", "--", "tiny", "--steps", "0"], "steps=0 must be"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_starts(arguments, words, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["train.launch_local", *arguments])
    with pytest.raises(SystemExit):
        launch_local.main()
    printed = " ".join(re.sub("[│╭╮╰╯─]", " ", "".join(capsys.readouterr())).split())
    assert words in printed


def test_gpus_are_shared_out(monkeypatch):
    def shared_out(number, visible, *named):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        return launch_local.gpus(launch_local.Options(number, named))

    assert shared_out(2, "") == ["0", "1"]
    assert shared_out(2, "5,3,2") == ["5", "3"]
    assert shared_out(2, "5", "0", "0") == ["0", "0"]
    assert [launch_local.shared(given) for given in (["0", "1"], ["0", "0"], ["0,1", "2,1"])] == [
        False, True, True,
    ]  # fmt: skip
    with pytest.raises(ValueError, match="fewer GPUs"):
        shared_out(2, "5")


def test_a_character_that_comes_in_two_parts_is_printed_whole(tmp_path, capfdbinary):
    path = tmp_path / "a.log"
    with path.open("wb", buffering=0) as written, path.open("rb") as log:
        for part in (b"loss \xc2", b"\xb1 1"):
            written.write(part)
            launch_local.follow(log)
    assert capfdbinary.readouterr().out.decode() == "loss ± 1"


FAILS_AS_PROCESS_1 = """#!/bin/sh
echo "this is process $JAX_PROCESS_ID of $JAX_NUM_PROCESSES at $JAX_COORDINATOR_ADDRESS"
if [ "$JAX_PROCESS_ID" = 1 ]; then echo "it broke"; exit 3; fi
exec sleep 60
"""


def test_the_first_failure_ends_all_and_is_named(monkeypatch, tmp_path, capfd):
    program = tmp_path / "fails"
    program.write_text(FAILS_AS_PROCESS_1)
    program.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(program))
    monkeypatch.setattr(launch_local, "_GRACE_S", 0.2)
    arguments = ["tiny", "--run-dir", str(tmp_path / "run")]
    assert launch_local.launch(launch_local.Options(2), arguments) == 1
    shown = capfd.readouterr()
    assert re.search(r"this is process 0 of 2 at 127\.0\.0\.1:\d+\n", shown.out)
    assert "this is process 1" not in shown.out
    assert re.search(
        r"error: process 1 \(pid \d+\) ended with status 3; .*/process-1\.log ends:\n"
        r"    this is process 1 of 2 at .*\n    it broke\n"
        r"the others: process 0 \(pid \d+\) was ended by SIGKILL\n",
        shown.err,
    )


DIES_AFTER_STEP = """
import os, signal, time
from train import report
step = report.Reporter.step

def step_and_die(self, number, *rest):
    step(self, number, *rest)
    if number == {number}:
        while not os.path.exists({checkpoint!r}):  # written beside the steps
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)

report.Reporter.step = step_and_die
"""


# Of the run that four hosts begin and two processes go on with; its checkpoint is at step STEPS.
LENGTH = "--steps", "50000", "--save-every", str(jobs.STEPS)
DIED = jobs.STEPS + 5


@pytest.fixture(scope="module")
def broken_off(job) -> tuple[list[int], list[int], list[str]]:
    """Four hosts with a process each, of which host 2's dies after step DIED.

    Returns each process's id, exit status and output.
    """
    checkpoint = str(job.folder / "hosts" / "checkpoints" / str(jobs.STEPS))
    dies = DIES_AFTER_STEP.format(number=DIED, checkpoint=checkpoint)
    with hosts.Hosts(4, job.folder) as machines:
        processes, outputs = [], []
        for index in range(4):
            command = job.command(
                "train", *job.arguments("hosts", *LENGTH), before=dies if index == 2 else ""
            )
            outputs.append(job.folder / f"host{index}.txt")
            environment = {
                "JAX_COORDINATOR_ADDRESS": f"{machines.addresses[0]}:4000",
                "JAX_NUM_PROCESSES": "4",
                "JAX_PROCESS_ID": str(index),
            }
            with outputs[-1].open("wb") as to:
                process = machines.run(
                    index,
                    command,
                    env=job.environment | environment,
                    stdout=to,
                    stderr=subprocess.STDOUT,
                )
            processes.append(process)
        statuses = [process.wait() for process in processes]
    return [p.pid for p in processes], statuses, [output.read_text() for output in outputs]


def test_of_four_hosts_one_dies_and_all_say_so(job, alone, broken_off):
    pids, statuses, outputs = broken_off
    printed = "\n".join(outputs)
    assert statuses == [LOST_PEER, LOST_PEER, -signal.SIGKILL, LOST_PEER], printed
    for index in (0, 1, 3):
        where = rf"step {DIED}, running the step"
        victim = rf"process 2 \(host host2, pid {pids[2]}\) died \({where}\)"
        pattern = rf"error: process {index}, step ({DIED}|{DIED + 1}), [^:]*: {victim}"
        assert re.search(pattern, outputs[index]), outputs[index]
    assert job.checkpoints("hosts") == [jobs.STEPS]
    np.testing.assert_allclose(job.losses("hosts"), alone[:DIED], rtol=1e-5)


def test_two_processes_go_on_from_there_to_the_same_losses_and_stop_together(
    job, alone, broken_off
):
    output = job.folder / "two.txt"
    arguments = ["--processes", "2", "--", *job.arguments("hosts", *LENGTH)]
    run = job.start(job.command("train.launch_local", *arguments), output)
    job.wait_for_step("hosts", len(alone), run, output)
    run.send_signal(signal.SIGTERM)
    printed = f"{output} {run.wait()}\n{output.read_text()}"
    assert run.returncode == 130, printed
    assert f"going on from the checkpoint at step {jobs.STEPS}\n" in printed
    assert "stopped and saved; go on with: " in printed
    assert "train.launch_local --processes 2 -- " in printed
    losses = job.losses("hosts")
    np.testing.assert_allclose(losses[: len(alone)], alone, rtol=1e-5)
    # Both processes stopped after the same step, or there would be no checkpoint of both.
    assert job.checkpoints("hosts")[-1] == len(losses)
    assert (job.folder / "hosts" / "logs" / "process-1.log").exists()


@pytest.mark.skipif(not shutil.which("mpirun"), reason="needs Open MPI's mpirun")
def test_started_by_mpirun(job, alone):
    output = job.folder / "mpirun.txt"
    script = str(Path(launch_local.__file__).parent / "launch" / "mpirun.sh")
    environment = {"PYTHON": sys.executable, "MPIRUN_FLAGS": "--oversubscribe"}
    run = job.start([script, "2", *job.arguments("mpirun")], output, **environment)
    assert run.wait() == 0, output.read_text()
    np.testing.assert_allclose(job.losses("mpirun"), alone[: jobs.STEPS], rtol=1e-5)
