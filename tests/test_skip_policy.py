"""The rules on skipped tests, each shown by a small run of pytest within pytest."""

import pytest

SKIPS = """
import pytest

@pytest.mark.skip(reason="no compiler here")
def test_software(): ...

@pytest.mark.multiproc
@pytest.mark.skip(reason="needs an InfiniBand NIC")
def test_hardware(): ...

@pytest.mark.xfail(strict=True)
def test_expected(): assert False
"""


@pytest.fixture
def run(pytester, monkeypatch):
    def run(source, *options, ci="", require=""):
        monkeypatch.setenv("CI", ci)
        monkeypatch.setenv("JAX_MOE_REQUIRE", require)
        monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take seconds to import
        pytester.makepyfile(source)
        return pytester.runpytest_inprocess("-p", "skip_policy", "-p", "no:cacheprovider", *options)

    return run


def test_a_skip_is_accepted_at_a_desk(run):
    run(SKIPS).assert_outcomes(skipped=2, xfailed=1)


def test_in_ci_a_skip_must_name_hardware(run):
    result = run(SKIPS, ci="true")
    result.assert_outcomes(skipped=1, xfailed=1, errors=1)
    result.stdout.fnmatch_lines(["*in CI a skip must name*the skip said: *no compiler here*"])


@pytest.mark.parametrize(
    ("require", "refused"), [("multiproc", 1), ("cpu", 1), ("cpu,multiproc", 2), ("all", 2)]
)
def test_a_required_level_accepts_no_skip(run, require, refused):
    run(SKIPS, require=require).assert_outcomes(skipped=2 - refused, xfailed=1, errors=refused)


def test_a_skip_in_the_body_of_a_test_fails_it(run):
    source = "import pytest\ndef test_it():\n    pytest.skip('not today')"
    run(source).assert_outcomes(skipped=1)
    run(source, ci="true").assert_outcomes(failed=1)


def test_a_module_that_skips_itself_is_an_error_in_ci(run):
    source = "import pytest\npytest.importorskip('no_such_module')"
    run(source).assert_outcomes(skipped=1)
    run(source, ci="true").assert_outcomes(errors=1)


def test_a_misspelt_level_is_refused(run):
    result = run(SKIPS, require="gpu3")
    result.stderr.fnmatch_lines(["*JAX_MOE_REQUIRE names*gpu3*"])
    assert result.ret == pytest.ExitCode.USAGE_ERROR


def test_an_unmarked_test_is_of_level_cpu(run):
    run(SKIPS, "-m", "cpu").assert_outcomes(skipped=1, xfailed=1, deselected=1)
