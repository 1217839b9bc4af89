"""The core of the CPU custom calls, driven by a C++ program of its own under the sanitizers.

The program (tests/cpp) knows nothing of JAX, so that what a sanitizer reports is ours.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TARGET = "jax_moe_core_test"


def tool(name: str) -> str:
    """A build tool: this environment's own one, else the system's."""
    path = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    assert path, f"{name} is missing: pip install {name}"
    return path


def build(name: str, sanitizers: str) -> Path:
    """Configures and builds in build/, where the next run finds what has not changed."""
    folder = ROOT / "build" / f"core-test-{name}"
    options = {
        "JAX_MOE_BUILD_EXTENSION": "OFF",
        "JAX_MOE_BUILD_TESTS": "ON",
        "JAX_MOE_SANITIZE": sanitizers,
        "CMAKE_UNITY_BUILD": "ON",  # takes half the time
        "CMAKE_MAKE_PROGRAM": tool("ninja"),
    }
    configure = [tool("cmake"), "-S", str(ROOT / "xla_ffi"), "-B", str(folder), "-G", "Ninja"]
    configure += [f"-D{key}={value}" for key, value in options.items()]
    run(configure)
    run([tool("cmake"), "--build", str(folder), "--target", TARGET])
    return folder / "tests" / TARGET


def run(command: list[str], **environment: str) -> str:
    done = subprocess.run(
        command,
        check=False,
        text=True,
        timeout=400,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ | environment,
    )
    assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}"
    return done.stdout


@pytest.mark.parametrize(
    ("name", "sanitizers", "rounds"),
    [("plain", "", 20), ("thread", "thread", 8), ("address", "address", 6)],
)
def test_core(name, sanitizers, rounds):
    program = build(name, sanitizers)
    output = run(
        # Fixed addresses, as GCC's ThreadSanitizer cannot cope with much randomness in them.
        [tool("setarch"), "-R", str(program), str(rounds)],
        TSAN_OPTIONS="halt_on_error=1",
        UBSAN_OPTIONS="halt_on_error=1:print_stacktrace=1",
    )
    # The faults of calls that come too late, and no word of a sanitizer's.
    assert [line for line in output.splitlines() if ": no answer from ranks " not in line] == ["ok"]
