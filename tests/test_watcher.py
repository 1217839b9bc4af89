"""What the others of a run say and do when a process dies, stops, sticks or fails; without JAX."""

import json
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import train
from train import watcher
from train.watch import LOST_PEER

pytestmark = pytest.mark.multiproc

DEAD_S = 5.0
LONG_S = 600.0
PROCESSES = 3


class Group:
    """Three watched processes and what they print."""

    def __init__(self, folder: Path, stall_s: float = LONG_S, **acts: str):
        self.outputs = [folder / f"{index}.txt" for index in range(PROCESSES)]
        modules = str(Path(train.__file__).parents[1])
        self.processes = []
        for index, output in enumerate(self.outputs):
            arguments = [str(index), str(folder), str(DEAD_S), str(stall_s)]
            arguments += acts.get(f"process{index}", "").split()
            program = str(Path(__file__).parent / "watched.py")
            with output.open("wb") as to:
                process = subprocess.Popen(
                    [sys.executable, program, *arguments],
                    env={"PYTHONPATH": modules},
                    stdout=to,
                    stderr=subprocess.STDOUT,
                )
            self.processes.append(process)

    def text(self, index: int) -> str:
        return self.outputs[index].read_text()

    def wait_for_step(self, step: int) -> None:
        while not all(f"step {step}," in self.text(index) for index in range(PROCESSES)):
            assert all(p.poll() is None for p in self.processes), list(map(self.text, range(3)))
            time.sleep(0.05)

    def watcher(self, index: int) -> int:
        return int(re.findall(r"watched by (\d+)", self.text(index))[0])

    def ends(self) -> list[int]:
        return [process.wait(timeout=60) for process in self.processes]

    def said(self, index: int) -> str:
        """The verdict that a process printed, and where it was itself."""
        found = re.findall(
            rf"error: process {index}, step \d+, running the step: (.*)\. This", self.text(index)
        )
        assert len(found) == 1, self.text(index)
        return found[0]

    def name(self, index: int) -> str:
        """How messages name a process."""
        return rf"process {index} \(host \S+, pid {self.processes[index].pid}\)"


@pytest.fixture
def start(tmp_path):
    groups = []

    def start(**settings) -> Group:
        groups.append(Group(tmp_path, **settings))
        return groups[-1]

    yield start
    for process in (process for group in groups for process in group.processes):
        process.kill()
        process.wait()


@pytest.mark.parametrize("victim", [0, 2])
def test_killed(start, victim):
    group = start()
    group.wait_for_step(5)
    group.processes[victim].kill()
    statuses = group.ends()
    assert statuses.pop(victim) == -signal.SIGKILL and statuses == [LOST_PEER] * 2
    for index in range(PROCESSES):  # the watcher of the killed one says it too
        while index == victim and "error" not in group.text(index):
            time.sleep(0.05)
        pattern = rf"{group.name(victim)} died \(step \d+, running the step\)"
        assert re.fullmatch(pattern, group.said(index)), group.said(index)


def test_killed_with_its_watcher(start):
    group = start()
    group.wait_for_step(5)
    for pid in (group.watcher(0), group.processes[0].pid):
        subprocess.run(["kill", "-9", str(pid)], check=True)
    assert group.ends() == [-signal.SIGKILL, LOST_PEER, LOST_PEER]
    assert {group.said(1), group.said(2)} == {"process 0 and its watcher died"}


def test_stopped(start):
    group = start()
    group.wait_for_step(5)
    group.processes[1].send_signal(signal.SIGSTOP)
    assert group.ends() == [LOST_PEER, -signal.SIGKILL, LOST_PEER]
    pattern = rf"{group.name(1)} has been stopped by a signal .*\(step \d+, running the step\)"
    assert re.fullmatch(pattern, group.said(2)), group.said(2)


def test_silent(start):
    group = start()
    group.wait_for_step(5)
    for pid in (group.watcher(1), group.processes[1].pid):
        subprocess.run(["kill", "-STOP", str(pid)], check=True)
    try:
        assert [group.processes[index].wait(timeout=60) for index in (0, 2)] == [LOST_PEER] * 2
    finally:
        subprocess.run(["kill", "-9", str(group.watcher(1))], check=True)
    pattern = rf"{group.name(1)} has not been heard of for \d+ s \(step \d+, running the step\)"
    assert re.fullmatch(pattern, group.said(0)), group.said(0)


def test_stuck(start):
    group = start(stall_s=3, process0="stick 8", process1="stick 7", process2="stick 8")
    assert group.ends() == [LOST_PEER] * 3
    pattern = rf"no process has got on for \d+ s; behind the others: {group.name(1)} \(step 7, .*\)"
    assert re.fullmatch(pattern, group.said(2)), group.said(2)


def test_failed_by_itself_beside_those_that_lose_it(start):
    group = start(process0="lose 8", process1="fail 9", process2="lose 8")
    assert group.ends() == [LOST_PEER, 1, LOST_PEER]
    assert re.search(rf"{group.name(1)} failed: something: no \(step 9, ", group.said(0))


def test_nobody_but_the_network_failed(start):
    group = start(process1="lose 8")
    assert group.ends() == [LOST_PEER] * 3
    assert re.fullmatch(rf"{group.name(1)} failed: something: no \(step 8, .*\)", group.said(0))


def test_all_is_well(start):
    group = start(process0="end 90", process1="end 60", process2="end 120")
    assert group.ends() == [0, 0, 0]
    assert not any("error" in group.text(index) for index in range(PROCESSES))


def test_a_process_is_done_when_the_connection_to_the_hub_ends():
    """Both come at once, as where a watcher did not get to run in between."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        own = dict(index=1, host="here", pid=1, token="token")  # pid: no process of ours
        options = own | dict(hub="127.0.0.1", port=port, dead_s=LONG_S, stall_s=LONG_S)
        command = [sys.executable, "-I", "-S", watcher.__file__, json.dumps(options)]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        with subprocess.Popen(command, **pipes) as process:
            connection, _ = server.accept()
            assert json.loads(process.stdout.readline()) == {"ready": port}
            process.send_signal(signal.SIGSTOP)
            while "\nState:\tT" not in Path(f"/proc/{process.pid}/status").read_text():
                time.sleep(0.01)
            process.stdin.write(b'{"done": true}\n')
            process.stdin.flush()
            connection.shutdown(socket.SHUT_WR)
            process.send_signal(signal.SIGCONT)
            assert process.wait(timeout=60) == 0
            assert process.stderr.read() == b""
            connection.close()


def test_a_reader_that_comes_late_gets_whole_messages():
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as ours,
        listener.accept()[0] as theirs,
    ):
        sender, reader = watcher.Lines(ours.fileno()), watcher.Lines(theirs.fileno())
        for number in range(20_000):
            sender.send(number=number, operation="x" * 999)
        numbers = []
        while not numbers or numbers[-1] != -1:
            messages, more = reader.receive()
            assert more
            numbers += [message["number"] for message in messages]
            if not messages:
                sender.send(number=-1)
        assert numbers == sorted(numbers[:-1]) + [-1] and len(numbers) < 20_000
