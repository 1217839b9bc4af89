"""What the tests of the PTX sources share."""

import re

import kernels
import pytest


@pytest.fixture(scope="session")
def abi():
    """The names and numbers of ptx/abi.h (all but the PTX version and target)."""
    text = (kernels.PTX / "abi.h").read_text()
    return {n: int(v) for n, v in re.findall(r"^#define (ABI_\w+) (\d+)$", text, re.M)}
