"""The memory-order instructions of each cubin, against golden files made with one ptxas release.

`python tests/ptx/test_golden.py` makes the golden files anew; read the difference before you
commit it. Listed in program order: everything that orders memory, and every bulk copy.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import kernels
import pytest

pytestmark = pytest.mark.ptx

GOLDEN = Path(__file__).parent / "golden"
ORDERS = re.compile(
    r"(LD\.E|LDG\.E|ST\.E|STG\.E)\S*\.STRONG\S*|ATOM\S*|RED\.\S*STRONG\S*|REDG?\.E\S*|MEMBAR\S*|"
    r"FENCE\S*|ERRBAR\S*|CCTL\S*|UBLKCP\S*|UBLKRED\S*|BAR\.\S+|DEPBAR\S*|SYNCS\S*|UTMA\S*|WARPSYNC\S*"
)


def memory_orders(cubin: Path) -> list[str]:
    """Opcodes that order memory, in program order, guards and operands left out."""
    command = [kernels.tool("nvdisasm"), "-c", cubin]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = []
    for line in text.split("\n"):
        match = re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ +)?(\S+)", line)
        if match and ORDERS.fullmatch(match[1].rstrip(";")):
            found.append(match[1].rstrip(";"))
    return found


def golden_text(kernel: str, cubin: Path) -> str:
    """One line a run of equal opcodes."""
    lines = [f"# jax_moe_{kernel}, sm_90, ptxas and nvdisasm {kernels.TOOLS_VERSION}"]
    for opcode in memory_orders(cubin):
        times = 1
        if match := re.fullmatch(rf"{re.escape(opcode)} x(\d+)|{re.escape(opcode)}", lines[-1]):
            times = int(match[1] or 1) + 1
            lines.pop()
        lines.append(opcode if times == 1 else f"{opcode} x{times}")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("kernel", kernels.KERNELS)
def test_memory_orders_are_the_golden_ones(kernel, tmp_path):
    cubin, _ = kernels.assemble(kernels.preprocessed(kernel), tmp_path)
    assert golden_text(kernel, cubin) == (GOLDEN / f"{kernel}.txt").read_text()


@pytest.mark.parametrize("kernel", kernels.KERNELS)
def test_golden_file_shows_release_and_acquire_at_system_scope(kernel):
    text = (GOLDEN / f"{kernel}.txt").read_text()
    assert re.search(r"^MEMBAR\S*SYS", text, re.M)  # before each released flag
    assert re.search(r"^LDG?\.E\.64\.STRONG\.SYS", text, re.M)  # polls
    assert re.search(r"^STG?\.E\.64\.STRONG\.SYS", text, re.M)  # flags
    assert re.search(r"^CCTL\.IVALL", text, re.M)  # after an acquire: no stale line in L1


def test_a_weaker_flag_changes_the_list(tmp_path):
    text = kernels.preprocessed("combine")
    weaker = text.replace("st.release.sys.global.u64", "st.relaxed.sys.global.u64")
    assert weaker != text
    cubin, _ = kernels.assemble(weaker, tmp_path)
    assert golden_text("combine", cubin) != (GOLDEN / "combine.txt").read_text()


if __name__ == "__main__":
    for name in sys.argv[1:] or kernels.KERNELS:
        with tempfile.TemporaryDirectory() as folder:
            made, _ = kernels.assemble(kernels.preprocessed(name), Path(folder))
            (GOLDEN / f"{name}.txt").write_text(golden_text(name, made))
