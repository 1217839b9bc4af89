"""tools/with_mps.sh with a stand-in for the daemon: it ends with the command, however that ends."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "tools" / "with_mps.sh"
# As the daemon it starts what stands for its server, and notes their numbers; else it gives orders.
STAND_IN = """#!/bin/bash
if [[ $1 == -f ]]; then
  trap '' TERM
  sleep 600 &
  echo $$ $! >"$STARTED"
  wait
else
  read -r order
  test -e "$STARTED"
fi
"""

pytestmark = pytest.mark.multiproc


@pytest.fixture
def environment(tmp_path) -> dict[str, str]:
    stand_in = tmp_path / "nvidia-cuda-mps-control"
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)
    return os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "STARTED": str(tmp_path / "started"),
        "TMPDIR": str(tmp_path),
    }


def check_that_nothing_is_left(environment) -> None:
    numbers = Path(environment["STARTED"]).read_text().split()
    assert len(numbers) == 2
    end = time.monotonic() + 60
    while any(_runs(number) for number in numbers):
        assert time.monotonic() < end, f"{numbers}: one is left"
        time.sleep(0.05)
    assert not [path for path in Path(environment["TMPDIR"]).iterdir() if path.is_dir()]


def _runs(number: str) -> bool:
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except FileNotFoundError:
        return False


def test_the_command_finds_the_daemon_and_its_status_is_kept(environment):
    command = ["bash", "-c", "ls -d $CUDA_MPS_PIPE_DIRECTORY $CUDA_MPS_LOG_DIRECTORY; exit 7"]
    done = subprocess.run([SCRIPT, *command], env=environment, capture_output=True, text=True)
    assert done.returncode == 7, done.stderr
    assert [line.rpartition("/")[2] for line in done.stdout.split()] == ["log", "pipe"]
    check_that_nothing_is_left(environment)


def test_a_command_that_is_ended_leaves_no_daemon(environment):
    command = [SCRIPT, "bash", "-c", "echo begun; exec sleep 600"]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout.readline() == "begun\n"
        os.killpg(process.pid, signal.SIGTERM)
        process.wait()
    check_that_nothing_is_left(environment)


def test_without_a_daemon_the_command_does_not_run(environment):
    Path(environment["TMPDIR"], "nvidia-cuda-mps-control").write_text("#!/bin/sh\nexit 1\n")
    done = subprocess.run([SCRIPT, "echo", "ran"], env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "does not start" in done.stdout
    assert "ran" not in done.stdout
