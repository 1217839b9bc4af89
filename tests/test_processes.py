"""Groups of two processes, on the stand-in for the driver: what they agree on, and refuse."""

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("fake_process.py")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


@pytest.fixture(scope="module")
def steps(fake_library, tmp_path_factory) -> list[dict]:
    """What each step brought in each of the two processes."""
    logs = [tmp_path_factory.mktemp("processes") / f"{process}.log" for process in range(2)]
    port = str(free_port())
    started = []
    for process, log in enumerate(logs):
        command = [sys.executable, "-P", PROGRAM, str(process), port, fake_library]
        with log.open("w") as output:
            started.append(
                subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT
                )
            )
    try:
        # Process 0 goes last: its standard input is closed when the other has ended.
        started[1].wait(timeout=200)
        started[0].communicate(timeout=100)
        codes = [process.returncode for process in started]
    finally:
        for process in started:
            process.kill()
            process.communicate()
    texts = [log.read_text() for log in logs]
    assert codes == [0, 0], "\n".join(text[-3000:] for text in texts)
    return [_steps(text) | {"log": text} for text in texts]


def _steps(text: str) -> dict:
    lines = [json.loads(line) for line in text.splitlines() if line.startswith('{"step"')]
    return {line["step"]: line["value"] for line in lines}


pytestmark = pytest.mark.multiproc


def test_pools_are_opened_by_the_others_and_closed_before_they_are_freed(steps):
    for step in steps:
        assert step["lowered"] == ["jax_moe_combine", "jax_moe_dispatch", "jax_moe_plan"]
        assert 'implementation "ptx"' in step["log"]
        # One pool set in place of the plan's: the pools of two ranks.
        assert step["pools"] == {"missing": 0, "open": 2, "misuses": 0}
        assert step["closed"]["open"] == 0
        assert "is closed" in step["closed"]["check"]
        assert step["rebuilt"] == {"open": 2, "misuses": 0}
        assert step["opened again"] == "no error"


def test_preflight_shows_every_pair(steps):
    for step in steps:
        (header, *rows, verdict) = step["preflight"].splitlines()
        assert header.split() == ["from", "to", "way", "link"]
        assert re.match(r"GPU 0 of process 0 +GPU 0 of process 1 +IPC +unknown +ok", rows[0])
        assert len(rows) == 2
        assert verdict == 'implementation="ptx": possible'


def test_processes_of_one_gpu_share_its_sms(steps):
    for step in steps:
        assert step["same GPU"]["sharing"] == 2
        assert "same GPU" in step["same GPU"]["text"]


def test_other_calls_are_named(steps):
    texts = [step["other sizes"] for step in steps]
    assert any("came to making a pool for tokens=10" in text for text in texts), texts


def test_a_process_that_does_not_come_is_named_and_the_next_call_meets(steps):
    assert "process(es) 1 did not come within 1 s (phase begun)" in steps[0]["alone"]
    assert "tokens=200" in steps[0]["alone"]
    for step in steps:
        assert step["again"] == {"open": 4, "misuses": 0}


def test_refused_ipc_is_told_by_both_and_xla_serves(steps):
    for step in steps:
        assert "NotImplementedError" in step["ipc"]
        assert "cannot reach the memory of" in step["ipc"]
        assert "IPC is refused (cuIpcOpenMemHandle_v2" in step["ipc"]
        assert 'use implementation="xla"' in step["ipc"]
        assert step["ipc, none"] is False
        assert 'implementation "xla", since GPU 0 of process 1 cannot reach' in step["log"]


def test_hosts_are_told_apart_by_boot_id(steps):
    for step in steps:
        assert "spans 2 hosts (processes 0; 1, told apart by boot id)" in step["hosts"]


def test_pools_are_kept_where_another_process_may_use_them(steps):
    assert "process(es) 1 did not come within 2 s" in steps[0]["left alone"]
    assert "its pools stay allocated" in steps[0]["left alone"]
