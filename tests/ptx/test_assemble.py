"""Every kernel assembles without a warning, within its budget, in the dialect that is promised."""

import re

import kernels
import pytest

pytestmark = pytest.mark.ptx

# Registers a thread: 64 Ki a multiprocessor, and a block must fit beside nothing else.
REGISTERS = {"plan": 64, "dispatch": 96, "combine": 128}
# Static shared memory in bytes: pool table 512, barriers, exit order.
STATIC_SHARED = {"plan": 768, "dispatch": 1024, "combine": 768}
SHARED_OF_A_BLOCK = 227 * 1024


def numbers(said, pattern):
    return [int(n) for n in re.findall(pattern, said)]


@pytest.fixture(params=kernels.KERNELS)
def kernel(request):
    return request.param


def test_assembles_within_its_budget(kernel, tmp_path, abi):
    _, said = kernels.assemble(kernels.preprocessed(kernel), tmp_path)
    assert f"Compiling entry function 'jax_moe_{kernel}' for 'sm_90'" in said
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in said
    (registers,) = numbers(said, r"Used (\d+) registers")
    (static,) = numbers(said, r"(\d+) bytes smem")
    assert registers <= REGISTERS[kernel]
    assert static <= STATIC_SHARED[kernel]
    assert registers * abi[f"ABI_{kernel.upper()}_THREADS"] <= 65536
    dynamic = (
        abi["ABI_PLAN_SMEM_BYTES_PER_ENTRY"] * (abi["ABI_MAX_EXPERTS"] + 4)
        if kernel == "plan"
        else abi[f"ABI_{kernel.upper()}_SMEM_BYTES"]
    )
    assert static + dynamic <= SHARED_OF_A_BLOCK


def test_errors_name_our_file_and_line(kernel, tmp_path):
    text = kernels.preprocessed(kernel, line_markers=True)
    kernels.assemble(text, tmp_path)
    broken = text.replace("ret;\n}", "ret\n}", 1)
    assert broken != text
    with pytest.raises(RuntimeError, match=rf"{kernel}\.ptx"):
        kernels.assemble(broken, tmp_path)


def test_dialect_is_the_oldest_that_knows_hopper(kernel):
    text = kernels.preprocessed(kernel)
    assert text.lstrip().startswith(".version 8.0\n.target sm_90\n.address_size 64\n")
    assert text.count(".entry") == 1
    assert f".visible .entry jax_moe_{kernel}(" in text
    assert re.search(r"\.reqntid \d+, 1, 1", text)
    assert ".func" not in text


def test_spilling_text_is_refused(tmp_path):
    registers = "\n".join(f"ld.volatile.global.u32 %r{i}, [%rd+{4 * i}];" for i in range(80))
    sums = "\n".join(f"st.volatile.global.u32 [%rd+{4 * i}], %r{i};" for i in range(80))
    text = (
        ".version 8.0\n.target sm_90\n.address_size 64\n"
        ".visible .entry k(.param .u64 p)\n.reqntid 1024, 1, 1\n.maxnreg 32\n"
        "{ .reg .b32 %r<80>; .reg .b64 %rd; ld.param.u64 %rd, [p];\n"
        f"{registers}\nbar.sync 0;\n{sums}\nret; }}"
    )
    with pytest.raises(RuntimeError, match="spill"):
        kernels.assemble(text.replace(".reqntid 1024, 1, 1\n", ""), tmp_path)
