"""Host and kernels agree: abi.h, struct Params and what the kernels load of it."""

import re
import subprocess
from pathlib import Path

import kernels
import pytest

pytestmark = pytest.mark.ptx

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def fields(tmp_path_factory):
    """Offset -> (bytes, name) of struct Params; params_fields has its own checks too."""
    program = tmp_path_factory.mktemp("abi") / "params_fields"
    command = ["g++", "-std=c++17", "-Wall", "-Wextra", "-Werror", HERE / "params_fields.cc"]
    subprocess.run([*command, "-o", program], check=True)
    result = subprocess.run([program], check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
    lines = (line.split() for line in result.stdout.splitlines())
    return {int(offset): (int(size), name) for offset, size, name in lines}


def test_every_value_is_a_bare_decimal_literal():
    for line in (kernels.PTX / "abi.h").read_text().splitlines():
        if line.startswith("#define") and not line.endswith("_H_"):
            assert re.fullmatch(r"#define ABI_\w+ (\d+|8\.0|sm_90)", line), line


def test_offsets_are_those_of_the_struct(abi, fields):
    offsets = {n: v for n, v in abi.items() if n.startswith("ABI_PARAMS_")}
    size = offsets.pop("ABI_PARAMS_BYTES")
    named = {v: n.removeprefix("ABI_PARAMS_").lower() for n, v in offsets.items()}
    assert named == {offset: name for offset, (_, name) in fields.items()}
    arrays = max(fields)
    assert arrays + fields[arrays][0] == size


@pytest.mark.parametrize("kernel", kernels.KERNELS)
def test_kernel_loads_whole_fields(kernel, abi, fields):
    arrays = abi["ABI_PARAMS_ARRAYS"]
    own = {v for n, v in abi.items() if n.startswith(f"ABI_{kernel.upper()}_") and v >= arrays}
    loads = re.findall(r"ld\.param\.(\w+) \S+, \[params\+(\d+)\]", kernels.preprocessed(kernel))
    assert loads
    for kind, offset in loads:
        if int(offset) >= arrays:
            assert kind == "u64"
            assert int(offset) in own
        else:
            assert int(kind[1:]) // 8 == fields[int(offset)][0], (kind, offset)


@pytest.mark.parametrize("kernel", kernels.KERNELS)
def test_arrays_of_an_operation_are_distinct_and_inside(kernel, abi):
    start, end = abi["ABI_PARAMS_ARRAYS"], abi["ABI_PARAMS_BYTES"]
    names = re.findall(
        rf"\[params\+ABI_{kernel.upper()}_\w+\]", (kernels.PTX / f"{kernel}.ptx").read_text()
    )
    offsets = [abi[name[8:-1]] for name in sorted(set(names))]
    assert len(set(offsets)) == len(offsets)
    assert sorted(offsets) == list(range(start, start + 8 * len(offsets), 8))
    assert max(offsets) + 8 <= end


def test_every_number_of_the_contract_is_used(abi):
    texts = [p.read_text() for p in kernels.SOURCES]
    texts.append((kernels.PTX / "params.h").read_text())
    words = set(re.findall(r"ABI_\w+", "\n".join(texts)))
    host_only = {"ABI_HOST_ABORT_RANK", "ABI_MAX_EXPERTS", "ABI_MAX_PAYLOAD_BYTES"}
    assert {name for name in abi if name not in words} <= host_only
