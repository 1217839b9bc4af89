"""The calls inside JAX under compute-sanitizer; a shard of its own, as it is slow."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("graph_program.py")
TOOL = shutil.which("compute-sanitizer") or shutil.which(
    "compute-sanitizer", path=os.path.join(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin")
)


@pytest.mark.skipif(
    TOOL is None, reason="needs a GPU's compute-sanitizer (CUDA toolkit), not found"
)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_sanitizer(tool):
    """Memory from cudaMalloc, so that each array has bounds; two rounds of two chains."""
    assert TOOL is not None
    environment = os.environ | {
        "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
        "XLA_FLAGS": "--xla_gpu_enable_command_buffer= --xla_gpu_autotune_level=0",
    }
    options = ["--tool", tool, "--error-exitcode", "9", "--report-api-errors", "no"]
    done = subprocess.run(
        [TOOL, *options, sys.executable, PROGRAM, "2", "slow"],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:]
    assert "ERROR SUMMARY: 0 errors" in done.stdout or "0 hazards displayed" in done.stdout
    print(tool, done.stdout[-300:])
