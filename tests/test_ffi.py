"""What loading the native side says when it cannot be loaded."""

import subprocess
import sys
from pathlib import Path

import pytest

import jax_moe


def import_after(statements: str) -> str:
    """Output of a fresh process that runs the statements, then imports the package."""
    program = f"{statements}\nimport jax_moe\nprint('no trouble')"
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        check=False,
        text=True,
        timeout=120,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    return done.stdout


@pytest.mark.parametrize("found", ["(0, 11, 1)", "(0, 13, 0)"])
def test_unsupported_jaxlib_is_named(found):
    said = import_after(f"import jaxlib.version as v; v.__version_info__ = {found}")
    assert "no trouble" not in said
    assert "ImportError: jax_moe works with jaxlib >=0.11.2,<0.13, but jaxlib" in said


def test_missing_extension_says_how_to_build():
    said = import_after("import sys; sys.modules['jax_moe._native'] = None")
    assert "no trouble" not in said
    assert "ImportError: jax_moe's native extension cannot be loaded" in said
    assert "pip install ." in said
    assert f"{Path(jax_moe.__file__).parent} hides it" in said


def test_loads_without_a_gpu():
    """No backend is started by the import, so that devices can still be set up after it."""
    statements = "import os; os.environ['CUDA_VISIBLE_DEVICES'] = ''"
    program = (
        "\nimport sys, jax_moe, jax._src.xla_bridge as b\nassert not b.backends_are_initialized()"
    )
    program += "\nassert 'jax.experimental.mosaic.gpu' not in sys.modules  # it takes a second"
    assert import_after(statements + program) == "no trouble\n"
