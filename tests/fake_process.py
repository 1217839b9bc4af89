"""One of two processes that share a group, on the stand-in for the driver; test_processes.py.

Arguments: number of this process, the coordinator's port, the stand-in. Prints what each step
brought as a line of JSON. The steps are the same in both processes, but where process 1 stays away.
"""

import ctypes
import json
import logging
import os
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

import jax_moe
from jax_moe import _cuda, _ffi, _preflight

sys.path.append(str(Path(__file__).parent))
from fake_driver import Settings, State

PROCESS, PORT, LIBRARY = int(sys.argv[1]), sys.argv[2], sys.argv[3]
SIZES = dict(tokens=64, top_k=2, num_experts=8, hidden=32)

logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s")
jax.config.update("jax_num_cpu_devices", 1)
jax.distributed.initialize(f"localhost:{PORT}", 2, PROCESS)
_ffi.cuda.open_driver(LIBRARY)
_library = ctypes.CDLL(LIBRARY)
for _name, _type in (("Settings", Settings), ("State", State)):
    getattr(_library, f"FakeCuda_{_name}").restype = ctypes.POINTER(_type)
settings = _library.FakeCuda_Settings().contents
state = _library.FakeCuda_State().contents
settings.first_uuid = PROCESS
settings.num_devices = 1
_cuda._wrong_devices = lambda group: None
_cuda.is_cuda = lambda device: True
mesh = jax_moe.make_mesh()


def say(step: str, value) -> None:
    print(json.dumps({"step": step, "value": value}), flush=True)


def error_of(function, *arguments, **keywords) -> str:
    try:
        function(*arguments, **keywords)
    except (RuntimeError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def barrier(name: str) -> None:
    jax._src.distributed.global_state.client.wait_at_barrier(name, 60_000)


def program(group, implementation):
    def function(ids, x, s):
        plan = jax_moe.plan(ids, group=group, num_experts=8, implementation=implementation)
        return jax_moe.combine(*jax_moe.dispatch(x, s, plan), plan)

    spec = jax.P(mesh.axis_names)
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec))


def operands(group):
    rows = 64 * group.num_ranks
    types = [((rows, 2), jnp.int32), ((rows, 32), jnp.bfloat16), ((rows, 2), jnp.float32)]
    return [jax.ShapeDtypeStruct(*shape_and_type) for shape_and_type in types]


def lower(group, implementation=None):
    traced = program(group, implementation).trace(*operands(group))
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def life() -> None:
    group = jax_moe.ExpertGroup(mesh, virtual_ranks=2)
    say("preflight", str(jax_moe.preflight(group)))
    say("lowered", sorted(set(re.findall(r"@(jax_moe_\w+)", lower(group)))))
    missing = _ffi.cuda.missing_bytes(group.key, 64, 2, 8, 64)
    say("pools", {"missing": missing, "open": state.num_open, "misuses": state.misuses})
    jax_moe.ExpertGroup(mesh, virtual_ranks=2, timeout_s=50.0)  # the same group: nobody waits
    group.close()
    say("closed", {"open": state.num_open, "check": error_of(group.check)})
    group.rebuild()
    group.check()
    say("rebuilt", {"open": state.num_open, "misuses": state.misuses})
    group.close()
    jax_moe.ExpertGroup(mesh, virtual_ranks=2)
    say("opened again", error_of(group.check))
    tokens = 100 + PROCESS
    say("other sizes", error_of(group.reserve, **SIZES | dict(tokens=tokens)))
    barrier("sizes")
    group.set_timeout(1.0)
    if PROCESS == 0:
        say("alone", error_of(group.reserve, **SIZES | dict(tokens=200)))
    barrier("alone")
    group.set_timeout(60.0)
    group.reserve(**SIZES | dict(tokens=200))
    say("again", {"open": state.num_open, "misuses": state.misuses})


def refusals() -> None:
    settings.ipc_refused = PROCESS
    group = jax_moe.ExpertGroup(mesh, virtual_ranks=1)
    say("ipc", error_of(lower, group, "ptx"))
    say("ipc, none", "jax_moe_" in lower(group, None))
    settings.ipc_refused = 0
    host = _preflight._host
    _preflight._host = lambda: f"host of {PROCESS}"
    say("hosts", error_of(lower, jax_moe.ExpertGroup(mesh, virtual_ranks=4), "ptx"))
    _preflight._host = host


def same_gpu() -> None:
    settings.first_uuid = 0
    found = jax_moe.preflight()
    say("same GPU", {"sharing": found.processes_per_gpu, "text": str(found)})


def end() -> None:
    group = jax_moe.ExpertGroup(mesh, virtual_ranks=2, timeout_s=2.0)
    if PROCESS == 0:
        say("left alone", error_of(group.close))
        sys.stdin.read()  # JAX ends process 1 when this one, which has the service, is gone


life()
refusals()
same_gpu()
end()
os._exit(0)  # without JAX's own goodbyes
