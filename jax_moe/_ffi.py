"""Loads the native extension and registers its XLA FFI targets."""

from __future__ import annotations

import os

import jax
import jaxlib.version

from jax_moe._arguments import number

OLDEST_JAXLIB = (0, 11, 2)
FIRST_UNTRIED_JAXLIB = (0, 13)
LONGEST_TIMEOUT_S = 1e9


def _check_jaxlib() -> None:
    found = jaxlib.version.__version_info__
    if not OLDEST_JAXLIB <= found < FIRST_UNTRIED_JAXLIB:
        raise ImportError(
            f"jax_moe works with jaxlib >=0.11.2,<0.13, but jaxlib {jaxlib.version.__version__} is "
            "installed: pip install 'jax>=0.11.2,<0.13' 'jaxlib>=0.11.2,<0.13'."
        )


_check_jaxlib()
try:
    from jax_moe import _native
except ImportError as error:
    raise ImportError(
        f"jax_moe's native extension cannot be loaded ({error}). Build it with `pip install .` "
        "(needs a C++20 compiler), or install a wheel for this platform and Python. If it is "
        f"installed, {os.path.dirname(__file__)} hides it: leave that folder's parent, or `python "
        "-P`."
    ) from error


cuda = _native.cuda  # the CUDA runtime's eager functions


def _may_be_captured() -> bool:
    """Whether XLA may put our calls into CUDA graphs.

    Not where the graph's order would come from buffer conflicts alone (scheduling modes CONCURRENT
    and CONCURRENT_REGIONS): two calls of one group that share no buffer could then run at once.
    """
    return "command_buffer_scheduling_mode=CONCURRENT" not in os.environ.get("XLA_FLAGS", "")


def _register() -> None:
    for platform, targets in _native.targets(_may_be_captured()).items():
        for name, stages in targets.items():
            jax.ffi.register_ffi_target(name, stages, platform=platform)


_register()


def check_timeout(name: str, value: float) -> float:
    """The value as seconds to wait.

    Raises:
      ValueError: it is not positive, or too long to count in nanoseconds.
      TypeError: it is no number.
    """
    seconds = number(name, value)
    if not 0 < seconds < LONGEST_TIMEOUT_S:
        raise ValueError(
            f"{name}={value}: must be > 0 seconds and < {LONGEST_TIMEOUT_S:g}, which is 31 years."
        )
    return seconds


def register_group(key: int, timeout_s: float, description: str) -> None:
    """Makes a group known to the native side, or opens it again with a new timeout.

    Args:
      key: the group's stable hash, as in the calls' attributes.
      timeout_s: seconds that a call waits for missing ranks; calls that wait now see it too.
      description: what error messages call the group.

    Raises:
      ValueError: the timeout is out of range.
      TypeError: it is no number.
    """
    _native.register_group(key, check_timeout("timeout_s", timeout_s), description)


def set_timeout(key: int, timeout_s: float) -> None:
    """Changes the timeout of a group that is known, and nothing else."""
    _native.set_timeout(key, timeout_s)


def close_group(key: int) -> None:
    """Closes a group: its calls, those that wait included, fail until it is registered again.

    Args:
      key: the group's stable hash; an unknown one is ignored.
    """
    _native.close_group(key)
