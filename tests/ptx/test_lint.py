"""The project's own PTX rules, on the sources and on small texts that break them."""

import kernels
import ptx_lint
import pytest

pytestmark = pytest.mark.ptx


@pytest.mark.parametrize("path", kernels.SOURCES, ids=lambda path: path.name)
def test_source_follows_the_rules(path):
    assert ptx_lint.lint_source(path.read_text(), path.name == "memory.ptxh") == []


@pytest.mark.parametrize("kernel", kernels.KERNELS)
def test_kernel_follows_the_rules(kernel):
    assert ptx_lint.lint_entry(kernels.preprocessed(kernel)) == []


def entry(body):
    return f".visible .entry k(.param .b64 p)\n{{\n{body}\n}}\n"


GOOD = entry("""
    .reg .pred %p_end;
    .reg .b32 %r_sum, %r_word;
    .reg .b64 %rd_base;
    ld.param.u64 %rd_base, [p];
    mov.u32 %r_sum, 0;
LOOP:
    ld.global.nc.u32 %r_word, [%rd_base];
    add.u32 %r_sum, %r_sum, %r_word;
    setp.eq.u32 %p_end, %r_word, 0;
    @%p_end bra END;
    bra LOOP;
END:
    st.global.u32 [%rd_base], %r_sum;
    ret;
""")


def test_good_text_passes():
    assert ptx_lint.lint_entry(GOOD) == []


@pytest.mark.parametrize(
    ("old", "new", "finding"),
    [
        ("    mov.u32 %r_sum, 0;\n", "", None),  # written on the loop's way back: allowed
        ("setp.eq.u32 %p_end, %r_word, 0;", "", "%p_end is read but never written"),
        ("    ld.global.nc.u32 %r_word, [%rd_base];\n", "", "%r_word is read but never"),
        ("    ret;\n", "", "can run past its end"),
        ("    ret;\n", "    @%p_end ret;\n", "can run past its end"),
        ("    bra LOOP;\n", "    bra LOOP;\n    mov.u32 %r_sum, 1;\n", "never reached"),
        ("ld.param.u64 %rd_base, [p];", "ld.global.u64 %rd_base, [p];", ".nc load of memory"),
        (".reg .b32 %r_sum,", ".reg .b64 %r_sum,", "the prefix says otherwise"),
        (".reg .b32 %r_sum,", ".reg .b32 %r_sum, %r_idle,", "%r_idle is never used"),
        ("LOOP:", "{ .reg .b32 %r_sum; mov.u32 %r_sum, 1; }\nLOOP:", "%r_sum hides another"),
    ],
)
def test_bad_entry_is_found(old, new, finding):
    assert old in GOOD
    findings = ptx_lint.lint_entry(GOOD.replace(old, new))
    if finding is None:
        assert findings == []
    else:
        assert any(finding in f for f in findings), findings


def test_pool_address_is_followed_through_arithmetic_and_cleared_by_a_new_value():
    body = """
    .reg .b32 %r_x;
    .reg .b64 %rd_pool, %rd_at, %rd_mine;
    ld.shared.u64 %rd_pool, [t];
    ld.param.u64 %rd_mine, [p];
    mad.wide.u32 %rd_at, %r_x, 4, %rd_pool;
    {}
    ld.global.nc.u32 %r_x, [%rd_at];
    ret;
    """
    start = "mov.u32 %r_x, 0;"
    bad = entry(body.replace("ld.shared", start + " ld.shared").format(""))
    good = entry(
        body.replace("ld.shared", start + " ld.shared").format("mov.u64 %rd_at, %rd_mine;")
    )
    assert any(".nc load" in f for f in ptx_lint.lint_entry(bad))
    assert ptx_lint.lint_entry(good) == []


@pytest.mark.parametrize(
    ("line", "finding"),
    [
        ("    ld.acquire.sys.global.u64 %rd_a, [%rd_b];  // x", "outside memory.ptxh"),
        ("    atom.add.u32 %r_a, [%rd_b], 1;  // x", "outside memory.ptxh"),
        ("    fence.proxy.async;  // x", "outside memory.ptxh"),
        ("    ld.volatile.global.u32 %r_a, [%rd_b];", "outside memory.ptxh"),
        ("    ld.global.u64 %rd_a, [%rd_flag];", "plain access to a flag"),
        ("    st.global.u32 [%rd_pool+ABI_POOL_ABORT], %r_a;", "plain access to a flag"),
        ("    WARP_BARRIER;", "no comment says what is ordered"),
        ("    ST_RELEASE_SYS_U64(%rd_flag, %rd_epoch);", "no comment says what is ordered"),
        ("    // " + "x" * 100, "columns"),
    ],
)
def test_bad_source_line_is_found(line, finding):
    assert any(finding in f for f in ptx_lint.lint_source(f"    mov.u32 %r_a, 0;\n{line}\n"))


def test_comment_above_a_run_of_synchronising_lines_counts_for_all():
    run = "    // why\n    BULK_WAIT_WRITES(0);\n    WARP_BARRIER;\n"
    assert ptx_lint.lint_source(run) == []
    assert ptx_lint.lint_source("    redux.sync.add.u32 %r_a, %r_a, 1;\n") == []
