"""Our view of the driver against NVIDIA's header and compiler."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax

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


def test_kernels_that_the_driver_compiled():
    """What chips later than sm_90 get, tried on this one; the program checks its results."""
    environment = os.environ | {
        "JAX_MOE_COMPILE_PTX": "1",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.05",
    }
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("graph_program.py")],
        env=environment, capture_output=True, text=True, timeout=150,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1])["precompiled"] is False


CPU_ERROR = """
import jax, jax_moe, numpy as np
assert jax.devices()[0].platform == "gpu"  # its plugin is loaded
mesh = jax_moe.make_mesh(devices=jax.devices("cpu")[:1])
group = jax_moe.ExpertGroup(mesh)
spec = jax.P(mesh.axis_names)
plan = jax.jit(jax.shard_map(
    lambda ids: jax_moe.plan(ids, group=group, num_experts=2).sources,
    mesh=mesh, in_specs=spec, out_specs=spec,
))
ids = np.zeros((4, 1), np.int32)
plan(ids)
group.close()
try:
    jax.block_until_ready(plan(ids))
except (ValueError, jax.errors.JaxRuntimeError) as error:  # JAX maps the code to either
    assert "group.rebuild()" in str(error), error
    print("told")
"""


def test_cpu_calls_can_tell_an_error_beside_the_cuda_plugin():
    """C++ streams once crashed here, where the compiler links the C++ runtime statically."""
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", CPU_ERROR],
        env=environment, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.stdout.endswith("told\n"), (done.returncode, done.stderr[-2000:])
