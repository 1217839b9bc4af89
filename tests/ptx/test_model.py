"""The Spin model of flags, slot reuse and abort: no error in the protocol, one in each fault."""

import shutil
import subprocess

import kernels
import pytest

pytestmark = pytest.mark.ptx

MODEL = kernels.REPOSITORY / "tests" / "twin" / "protocol.pml"


def errors(folder, *options):
    """Errors Spin finds in the model; the search is exhaustive."""
    if shutil.which("spin") is None:
        pytest.skip("needs the model checker spin (Debian: apt-get install spin)")
    subprocess.run(["spin", *options, "-a", MODEL], cwd=folder, check=True, capture_output=True)
    compile_ = ["gcc", "-O1", "-DSAFETY", "-DCOLLAPSE", "-o", "pan", "pan.c"]
    subprocess.run(compile_, cwd=folder, check=True, capture_output=True)
    result = subprocess.run(
        ["./pan", "-m100000"], cwd=folder, capture_output=True, text=True, timeout=200, check=True
    )
    assert "Search not completed" not in result.stdout or "errors: 1" in result.stdout
    assert "max search depth too small" not in result.stdout
    return int(result.stdout.split("errors: ")[1].split()[0])


def test_protocol_holds(tmp_path):
    assert errors(tmp_path) == 0


@pytest.mark.parametrize("fault", ["ONE_HALF", "FLAG_FIRST", "EMPTY_CALL", "NO_ABORT_CHECK"])
def test_a_fault_is_found(tmp_path, fault):
    assert errors(tmp_path, f"-D{fault}") == 1
