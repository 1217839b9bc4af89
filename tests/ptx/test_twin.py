"""The protocol twin under ThreadSanitizer: right without a fault, and not with one."""

import os
import subprocess

import kernels
import pytest

pytestmark = pytest.mark.ptx

TWIN = kernels.REPOSITORY / "tests" / "twin"
ORACLE = kernels.REPOSITORY / "tests" / "gpu_harness" / "oracle.cc"


@pytest.fixture(scope="module")
def twin(tmp_path_factory):
    program = tmp_path_factory.mktemp("twin") / "twin"
    command = ["g++", "-std=c++20", "-Wall", "-Wextra", "-Werror", "-O1", "-g1", "-pthread"]
    command += ["-fsanitize=thread", *sorted(TWIN.glob("*.cc")), ORACLE, "-o", program]
    subprocess.run(command, check=True)

    def run(steps, mutant="none"):
        options = {"TSAN_OPTIONS": "halt_on_error=1 exitcode=66"}
        return subprocess.run(
            [program, str(steps), mutant],
            env=os.environ | options,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )

    return run


def test_protocol_is_right_and_free_of_races(twin):
    result = twin(15)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "15 calls right on 4 ranks" in result.stdout
    assert "works again once rebuilt" in result.stdout


@pytest.mark.parametrize("mutant", ["one_half", "flag_before_writes", "flag_relaxed", "ring_reuse"])
def test_a_fault_is_noticed(twin, mutant):
    result = twin(30, mutant)
    noticed = "is wrong" in result.stdout or "ThreadSanitizer: data race" in result.stderr
    assert result.returncode in (1, 66), result.stdout + result.stderr
    assert noticed
