"""Settings of every test: CPU devices, strict dtype promotion, and the run's header."""

import os
import sys
from pathlib import Path

import fake_driver
import jax
import pytest

pytest_plugins = ["skip_policy", "pytester"]

NUM_CPU_DEVICES = 8

if not os.environ.get("JAX_NUM_CPU_DEVICES"):  # a run may ask for another number
    jax.config.update("jax_num_cpu_devices", NUM_CPU_DEVICES)
jax.config.update("jax_numpy_dtype_promotion", "strict")

# At the end, so that the trainer is found but an installed jax_moe goes before this tree's.
sys.path.append(str(Path(__file__).parents[1]))


# These files share compiled programs, and so one process where pytest-xdist spreads the tests.
CASES = ("test_exchange", "test_gradients", "test_plan")
# These take longest.
LONG = (*CASES, "test_train_processes", "test_transformations")


def pytest_collection_modifyitems(items):
    """What takes longest first, so that in the end no process is left alone with it."""
    items.sort(key=lambda item: item.path.stem not in LONG)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Keeps in one process what shares fixtures and compiled programs: a file, or these files.

    The long ones still come first, where xdist would take first what has most tests.
    """
    config.option.loadscopereorder = False
    from xdist.scheduler import LoadScopeScheduling

    class ByPrograms(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            name = Path(nodeid.partition("::")[0]).stem
            return "cases" if name in CASES else name

    return ByPrograms(config, log)


@pytest.fixture(scope="session")
def fake_library(tmp_path_factory) -> Path:
    """The stand-in for the CUDA driver."""
    output = tmp_path_factory.mktemp("fake") / "libcuda.so.1"
    return fake_driver.compile_cpp(output, "-shared", "-fPIC", fake_driver.CPP / "fake_cuda.cc")


def pytest_report_header():
    import jaxlib.version

    import jax_moe

    devices = jax.devices()
    return [
        f"jax {jax.__version__}, jaxlib {jaxlib.version.__version__}, "
        f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform})",
        f"jax_moe from {Path(jax_moe.__file__).parent}",
    ]
