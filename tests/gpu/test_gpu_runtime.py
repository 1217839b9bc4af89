"""Our view of the driver against NVIDIA's header and compiler."""

import ctypes
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp

from jax_moe import _ffi

ROOT = Path(__file__).parents[2]


def test_driver_types_agree_with_cuda_h(tmp_path):
    places = [Path("/usr/local/cuda/include"), *Path("/usr/local").glob("cuda*/include")]
    include = next(place for place in places if (place / "cuda.h").exists())
    done = subprocess.run(
        ["g++", "-std=c++20", f"-I{include}", f"-I{ROOT / 'xla_ffi'}", "-c", "-o", tmp_path / "o",
         ROOT / "tests" / "cpp" / "cuda_abi_test.cc"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_the_machine_code_is_used_where_it_was_built():
    built = all(cubin is not None for _, cubin in _ffi.cuda.images().values())
    device = jax.devices()[0]
    assert _ffi.cuda.is_precompiled(device.local_hardware_id) == (
        built and device.compute_capability == "9.0"
    )


def test_the_driver_compiles_the_text():
    """What chips later than sm_90 get."""
    jnp.zeros(1).block_until_ready()  # a context is current from here on, or made below
    cuda = ctypes.CDLL("libcuda.so.1")
    device, context = ctypes.c_int(), ctypes.c_void_p()
    assert cuda.cuDeviceGet(ctypes.byref(device), jax.devices()[0].local_hardware_id) == 0
    assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
    assert cuda.cuCtxPushCurrent_v2(context) == 0
    for name, (text, _) in _ffi.cuda.images().items():
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        result = cuda.cuModuleLoadData(ctypes.byref(module), text.encode())
        assert result == 0, f"{name}: the driver's compiler gave error {result}"
        assert cuda.cuModuleGetFunction(ctypes.byref(function), module, name.encode()) == 0
        assert cuda.cuModuleUnload(module) == 0
    cuda.cuCtxPopCurrent_v2(ctypes.byref(context))
