"""The extension module, built from xla_ffi/."""

from typing import Any

cuda: Any  # a submodule: see xla_ffi/cuda_binding.cc

def targets(cuda_captured: bool = True) -> dict[str, dict[str, dict[str, object]]]:
    """Capsules of the FFI handlers: {platform: {target: {stage: capsule}}}."""

def register_group(key: int, timeout_s: float, description: str) -> None:
    """See `jax_moe._ffi.register_group`."""

def set_timeout(key: int, timeout_s: float) -> None:
    """See `jax_moe._ffi.set_timeout`."""

def close_group(key: int) -> None:
    """See `jax_moe._ffi.close_group`."""

def num_waiting() -> int:
    """Calls that wait for devices now."""
