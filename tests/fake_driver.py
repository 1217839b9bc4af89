"""The stand-in for libcuda: how it is built, and views of tests/cpp/fake_cuda.h."""

import ctypes
import subprocess
from pathlib import Path

CPP = Path(__file__).parent / "cpp"


def compile_cpp(output: Path, *arguments) -> Path:
    command = ["g++", "-std=c++20", "-g1", "-Wall", "-Wextra", "-Werror", "-o", output, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return output


class Settings(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in (
            "driver_version", "num_devices", "compute_major", "cooperative", "num_sms",
            "blocks_per_sm", "peers_refused", "peers_enabled", "cubin_refused", "ptx_refused",
            "no_nvlink", "ipc_refused", "ipc_same_process", "first_uuid",
        )),
        ("memory_bytes", ctypes.c_uint64),
    ]  # fmt: skip


class State(ctypes.Structure):
    """The first fields."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in (
            "num_launches", "num_allocations", "num_modules", "num_synchronized", "misuses",
        )),
        ("used_bytes", ctypes.c_uint64 * 8),
        ("num_open", ctypes.c_int64),
        ("num_opened", ctypes.c_int64),
    ]  # fmt: skip
