"""Pytest plugin: which level a test is of, and when a skip counts as a failure.

A test without a level's marker is of level `cpu`; `gpu1` and `gpu2` skip where GPUs are missing.
`JAX_MOE_REQUIRE=gpu1,cpu` (or `all`) turns every skip at these levels into a failure, so that a run
on the right machine cannot pass by skipping. With `CI` set, a skip must name missing hardware.
"""

import os
import re

import pytest

LEVELS = {
    "ptx": "checks of the PTX sources; no GPU",
    "cpu": "runs on CPU devices of one process (the default)",
    "gpu1": "needs one NVIDIA GPU",
    "gpu2": "needs two NVIDIA GPUs",
    "multiproc": "starts several processes",
}
HARDWARE = re.compile(r"\b(GPUs?|NVLink|InfiniBand|NICs?)\b")


def pytest_configure(config):
    for level, meaning in LEVELS.items():
        config.addinivalue_line("markers", f"{level}: {meaning}")
    if unknown := _required() - LEVELS.keys() - {"all"}:
        raise pytest.UsageError(
            f"JAX_MOE_REQUIRE names {sorted(unknown)}: use {', '.join(LEVELS)} or all"
        )


def _required():
    return {name.strip() for name in os.environ.get("JAX_MOE_REQUIRE", "").split(",")} - {""}


def pytest_collection_modifyitems(items):
    for item in items:
        if not any(item.get_closest_marker(level) for level in LEVELS):
            item.add_marker("cpu")


def pytest_runtest_setup(item):
    for level, needed in (("gpu1", 1), ("gpu2", 2)):
        if item.get_closest_marker(level) and (found := _num_gpus()) < needed:
            pytest.skip(f"needs {needed} NVIDIA GPU(s), found {found}")


def _num_gpus():
    import jax  # not at the top: this plugin is tested without JAX

    try:
        return len(jax.devices("cuda"))
    except RuntimeError:
        return 0


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    if report.skipped and not hasattr(report, "wasxfail"):
        levels = {level for level in LEVELS if item.get_closest_marker(level)}
        _judge_skip(report, levels)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    report = yield
    if report.skipped:
        _judge_skip(report, set(LEVELS))  # a whole module: its tests' levels are not known
    return report


def _judge_skip(report, levels):
    """Turns a skipped report into a failed one where a skip is not accepted."""
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    if (levels | {"all"}) & _required():
        refusal = f"JAX_MOE_REQUIRE={os.environ['JAX_MOE_REQUIRE']} accepts no skip here"
    elif os.environ.get("CI") and not HARDWARE.search(reason):
        refusal = "in CI a skip must name the missing hardware (GPU, NVLink, InfiniBand, NIC)"
    else:
        return
    report.outcome = "failed"
    report.longrepr = f"{refusal}; the skip said: {reason}"
