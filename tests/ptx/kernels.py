"""Where the kernels' sources are, and the tools that read them, from the pinned wheels."""

import functools
import importlib.metadata
import shutil
import subprocess
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PTX = REPOSITORY / "ptx"
KERNELS = ("plan", "dispatch", "combine")
SOURCES = sorted([*PTX.glob("*.ptx"), *PTX.glob("*.ptxh")])

# ptxas and nvdisasm of one release: golden files and budgets hold for this one.
TOOLS_VERSION = "13.2.78"


def tool(name: str) -> Path:
    """The path of ptxas or nvdisasm in its wheel."""
    package = {"ptxas": "nvidia-cuda-nvcc", "nvdisasm": "nvidia-cuda-nvdisasm"}[name]
    distribution = importlib.metadata.distribution(package)
    if distribution.version != TOOLS_VERSION:
        raise RuntimeError(
            f"{package} is {distribution.version}, but the golden files were made with "
            f"{TOOLS_VERSION}: install that, or make them anew (tests/ptx/test_golden.py)"
        )
    found = [f for f in distribution.files or () if f.name == name]
    path = Path(str(distribution.locate_file(found[0])))
    path.chmod(path.stat().st_mode | 0o111)  # wheels may arrive without the executable bit
    return path


@functools.cache
def preprocessed(kernel: str, line_markers: bool = False) -> str:
    """The text of one kernel that ptxas and the driver read."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise RuntimeError("no C++ compiler for the preprocessor: install g++")
    command = [compiler, "-x", "assembler-with-cpp", "-E", PTX / f"{kernel}.ptx"]
    command += [] if line_markers else ["-P"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def assemble(text: str, folder: Path, *options: str) -> tuple[Path, str]:
    """Assembles PTX text with warnings as errors. Returns the cubin and what ptxas said."""
    source, cubin = folder / "kernel.ptx", folder / "kernel.cubin"
    source.write_text(text)
    command = [tool("ptxas"), "-arch=sm_90", "-v", "-warn-spills", "-warn-lmem-usage", "-Werror"]
    result = subprocess.run(
        [*command, *options, source, "-o", cubin], capture_output=True, text=True, check=False
    )
    if result.returncode != 0:
        raise RuntimeError(f"ptxas refused the text:\n{result.stdout}{result.stderr}")
    return cubin, result.stdout + result.stderr
