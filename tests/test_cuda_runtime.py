"""The CUDA runtime without a GPU: on a stand-in for the driver, and as far as lowering."""

import ctypes
import dataclasses
import logging
import math
import re
import subprocess
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_driver import CPP, Settings, compile_cpp
from jax.sharding import AbstractMesh, AxisType

import jax_moe
from jax_moe import _cuda, _ffi, _ptx

ROOT = Path(__file__).parents[1]
PARTS = (
    "device", "driver", "group", "group_processes", "launch", "meeting", "pool", "pool_share",
    "registry", "report",
)  # fmt: skip
SOURCES = [f"cuda_{part}.cc" for part in PARTS]


@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_runtime_program(sanitizers, fake_library, tmp_path):
    """Driver table, devices, limits, launch parameters, pools, faults, close and rebuild."""
    # In one translation unit, which takes half the time.
    runtime = tmp_path / "cuda_runtime.cc"
    runtime.write_text("".join(f'#include "{source}"\n' for source in SOURCES))
    program = compile_cpp(
        tmp_path / "cuda_runtime_test",
        f"-fsanitize={sanitizers}",
        *(f"-I{path}" for path in (ROOT, ROOT / "xla_ffi", CPP)),
        runtime,
        CPP / "cuda_runtime_test.cc",
        CPP / "cuda_processes_test.cc",
        "-ldl",
        "-lpthread",
    )
    done = subprocess.run([program, fake_library], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    # The monitor printed the planted fault, once.
    assert done.stderr.count("waited 10.1 s for part 5 of the data from rank 1") == 1


def test_a_missing_driver_is_named():
    with pytest.raises(NotImplementedError, match=r"/no/such\.so.*install it"):
        _ffi.cuda.open_driver("/no/such.so")


def test_the_kernels_are_embedded():
    images = _ffi.cuda.images()
    assert list(images) == ["jax_moe_plan", "jax_moe_dispatch", "jax_moe_combine"]
    for name, (text, cubin) in images.items():
        assert text.lstrip().startswith(".version 8.0"), text[:60]
        assert re.search(rf"\.visible\s+\.entry\s+{name}\b", text)
        assert "#" not in re.sub(r"//.*|/\*.*?\*/", "", text), "not preprocessed"
        assert cubin is None or cubin.startswith(b"\x7fELF")


@pytest.mark.parametrize(
    ("ranks", "tokens", "top_k", "experts", "hidden"), [(2, 4, 2, 4, 8), (8, 4096, 8, 256, 7168)]
)
def test_pool_bytes(ranks, tokens, top_k, experts, hidden):
    def up(size, multiple=128):
        return math.ceil(size / multiple) * multiple

    segments = 128 // ranks
    segment_ids = up(math.ceil(tokens * top_k / segments), 8)
    halves = (
        ranks * segments * segment_ids * 2,  # ids
        ranks * segments * up(experts + 1, 4) * 4,  # counts
        ranks * tokens * top_k * 4,  # gates
        ranks * tokens * up(hidden * 2),  # slots
    )
    expected = 8192 + up(ranks * tokens * 8) + 2 * sum(map(up, halves))
    got = jax_moe.pool_bytes(
        num_ranks=ranks, tokens=tokens, top_k=top_k, num_experts=experts, hidden=hidden
    )
    assert got == expected


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_ranks": 128}, "128 ranks.*1 to 64"),
        ({"num_experts": 9}, "9 experts on 2 ranks.*multiple"),
        ({"top_k": 17}, "17 experts a token.*1 to 16"),
        ({"hidden": 12}, "24 bytes.*multiple of 16.*pad the hidden axis"),
        ({"tokens": 2**30}, "< 2\\*\\*31: use fewer tokens"),
        ({"dtype": "float16"}, "dtype=float16: .*float32 or bfloat16"),
        ({"num_ranks": 0}, "num_ranks=0: must be at least 1"),
    ],
)
def test_pool_bytes_refuses_what_the_kernels_refuse(changes, words):
    sizes = dict(num_ranks=2, tokens=4, top_k=2, num_experts=4, hidden=8)
    with pytest.raises(ValueError, match=words):
        jax_moe.pool_bytes(**(sizes | changes))


# What is traced and lowered for GPUs elsewhere: a mesh of two devices with four ranks each.
MESH = AbstractMesh((1, 1, 2), ("data", "node", "rank"), axis_types=(AxisType.Auto,) * 3)
SPEC = jax.P(("data", "node", "rank"))


def _lower(function, group, *operands):
    """Lowers function(*operands), given per device, inside shard_map for platform CUDA."""
    sharding = jax.sharding.NamedSharding(group.mesh, SPEC)
    structs = [
        jax.ShapeDtypeStruct((2 * shape[0], *shape[1:]), dtype, sharding=sharding)
        for shape, dtype in operands
    ]
    mapped = jax.shard_map(function, mesh=group.mesh, in_specs=SPEC, out_specs=SPEC)
    return jax.jit(mapped).trace(*structs).lower(lowering_platforms=("cuda",)).as_text()


def _exchange(group, **arguments):
    def function(ids, x, s):
        arguments.setdefault("num_experts", 16)
        plan = jax_moe.plan(ids, group=group, implementation="ptx", **arguments)
        assert plan.arrivals is not None
        assert plan.arrivals.shape == (8 * ids.shape[0], ids.shape[1])

        def loss(x, s):
            rows, row_s = jax_moe.dispatch(x, s, plan)
            y, back = jax_moe.combine(rows * 2, row_s, plan)
            return (y.astype(jnp.float32) ** 2).sum() + (back**2).sum()

        return jax.grad(loss)(x, s)

    return function


def _operands(tokens=5, top_k=3, hidden=16, dtype=jnp.bfloat16):
    leading = 4 * tokens
    return (
        ((leading, top_k), jnp.int32),
        ((leading, hidden), dtype),
        ((leading, top_k), jnp.float32),
    )


def test_lowered_program():
    group = jax_moe.ExpertGroup(MESH, virtual_ranks=4)
    text = _lower(_exchange(group), group, *_operands())
    calls = re.findall(r"stablehlo\.custom_call @(jax_moe_\w+)", text)
    assert sorted(calls) == sorted(["jax_moe_plan", *["jax_moe_dispatch", "jax_moe_combine"] * 2])
    assert not re.search(r"all_gather|all_to_all|all_reduce|collective_permute", text)
    assert f"group = {group.key} : i64" in text
    assert "zero_tail = 0" in text, "the tail of ptx is undefined unless asked"
    assert "num_sms = 0" in text and "virtual_ranks = 4" in text
    zeroed = jax_moe.ExpertGroup(MESH, virtual_ranks=4, num_sms=24, link_sms=8)
    text = _lower(_exchange(zeroed, tail="zero"), zeroed, *_operands())
    assert "zero_tail = 1" in text and "num_sms = 24" in text and "link_sms = 8" in text


@pytest.mark.parametrize(
    ("operands", "arguments", "message"),
    [
        (dict(hidden=7), {}, "14 bytes.*multiple of 16 bytes.*pad the hidden axis"),
        (dict(hidden=32776), {}, "65552 bytes.*at most 65536"),
        (dict(hidden=16392, dtype=jnp.float32), {}, "65568 bytes.*at most 65536"),
        (dict(top_k=17), {}, "17 experts a token.*1 to 16"),
        ({}, dict(num_experts=2056), "2056 experts.*at most 2048"),
    ],
)
def test_limits_are_named_when_traced(operands, arguments, message):
    group = jax_moe.ExpertGroup(MESH, virtual_ranks=4)
    with pytest.raises(ValueError, match=message):
        _lower(_exchange(group, **arguments), group, *_operands(**operands))


def test_a_plan_of_another_implementation_is_refused():
    group = jax_moe.ExpertGroup(MESH, virtual_ranks=4)

    def function(ids, x, s):
        plan = jax_moe.plan(ids, group=group, num_experts=16, implementation="xla")
        return jax_moe.dispatch(x, s, plan, implementation="ptx")

    with pytest.raises(ValueError, match='made with implementation="xla"'):
        _lower(function, group, *_operands())


def test_cpu_devices_are_named():
    group = jax_moe.ExpertGroup(jax_moe.make_mesh())
    assert _cuda.obstacle(group) == "its devices are of platform cpu, not cuda"
    with pytest.raises(NotImplementedError, match=r'"ptx" cannot serve.*platform cpu.*"xla"'):
        jax.shard_map(
            lambda ids: jax_moe.plan(ids, group=group, num_experts=8, implementation="ptx").sources,
            mesh=group.mesh,
            in_specs=SPEC,
            out_specs=SPEC,
        )(jnp.zeros((8, 1), jnp.int32))
    group.check()
    assert {name: array.shape for name, array in group.waits().items()} == dict.fromkeys(
        ("plan", "dispatch", "combine"), (1, 8, 8)
    )
    group.reserve(tokens=1, top_k=1, num_experts=8, hidden=8)  # nothing to do


@pytest.mark.parametrize("name", ["num_sms", "link_sms"])
def test_sms_must_be_positive(name):
    with pytest.raises(ValueError, match=f"{name}=0"):
        jax_moe.ExpertGroup(MESH, **{name: 0})


@pytest.fixture
def fake_gpus(fake_library, monkeypatch):
    """The eight CPU devices as GPUs of the stand-in; yields what the tests may set of it."""
    if any(device.platform == "gpu" for device in jax.devices()):
        pytest.skip("the driver of real GPUs is in use; needs a machine without a GPU")
    _ffi.cuda.open_driver(str(fake_library))
    get = ctypes.CDLL(str(fake_library)).FakeCuda_Settings
    get.restype = ctypes.POINTER(Settings)
    settings = get().contents
    settings.num_devices = 8
    monkeypatch.setattr(_cuda, "_wrong_devices", lambda group: None)
    before = bytes(settings)
    yield settings
    ctypes.memmove(ctypes.byref(settings), before, len(before))


def test_life_of_a_group(fake_gpus, caplog):
    caplog.set_level(logging.INFO, "jax_moe")
    mesh = jax_moe.make_mesh(data=2, node=1, rank=4)
    group = jax_moe.ExpertGroup(mesh, virtual_ranks=2, timeout_s=30.0)
    sizes = dict(tokens=64, top_k=2, num_experts=16, hidden=32)
    group.reserve(**sizes)
    each = jax_moe.pool_bytes(num_ranks=8, **sizes)
    assert f"allocating {2 * each / 2**20:.2f} MiB a GPU, the pools of 2 rank(s)" in caplog.text
    caplog.clear()
    group.reserve(**sizes | dict(tokens=32))
    assert not caplog.text, "there was room"
    group.check()
    assert not any(waited.any() for waited in group.waits().values())
    assert group.waits()["combine"].shape == (2, 8, 8)
    group.set_timeout(3.0)
    group.set_timeout(3.0, flight_timeout_s=0.5)
    with pytest.raises(ValueError, match=r"flight_timeout_s=-1\.0: must be > 0"):
        group.set_timeout(3.0, flight_timeout_s=-1.0)
    with pytest.raises(ValueError, match=r"timeout_s=1000000000\.0: must be > 0 seconds and < 1"):
        group.set_timeout(1e9)
    group.close()
    group.set_timeout(3.0)
    with pytest.raises(RuntimeError, match=r"is closed: call rebuild\(\)"):
        group.check()
    group.rebuild()
    group.check()
    fake_gpus.memory_bytes = 2**20
    with pytest.raises(MemoryError, match=r"free beside XLA's preallocation.*MEM_FRACTION"):
        group.reserve(**sizes | dict(tokens=4096))
    fake_gpus.memory_bytes = 2**32
    group.check()
    group.close()
    dataclasses.replace(group)  # an equal group is the same one, and opens it again
    group.check()


def test_lowering_makes_the_pool_and_tracing_does_not(fake_gpus, caplog):
    caplog.set_level(logging.INFO, "jax_moe")
    mesh = jax_moe.make_mesh(devices=jax.devices()[:2])
    group = jax_moe.ExpertGroup(mesh, virtual_ranks=4)
    mapped = jax.shard_map(_exchange(group), mesh=mesh, in_specs=SPEC, out_specs=SPEC)
    structs = [jax.ShapeDtypeStruct((2 * a[0], *a[1:]), t) for a, t in _operands()]
    jax.eval_shape(mapped, *structs)
    sizes = (5, 3, 16, 32)
    assert _ffi.cuda.missing_bytes(group.key, *sizes) > 0
    assert "allocating" not in caplog.text
    _lower(_exchange(group), group, *_operands())
    assert _ffi.cuda.missing_bytes(group.key, *sizes) == 0
    # One for the plan, which is lowered first, and in its place one for all.
    assert caplog.text.count("allocating") == 2
    assert "and 32 bytes a token" in caplog.text.splitlines()[-1]
    crowded = jax_moe.ExpertGroup(mesh, virtual_ranks=4, num_sms=3)
    with pytest.raises(ValueError, match=r"num_sms=3 .*4 virtual ranks need a block each"):
        _lower(_exchange(crowded), crowded, *_operands())
    greedy = jax_moe.ExpertGroup(mesh, virtual_ranks=4, num_sms=133)
    with pytest.raises(ValueError, match=r"num_sms=133.*132 SMs"):
        _lower(_exchange(greedy), greedy, *_operands())


def test_gpus_out_of_reach_are_named_and_xla_serves(fake_gpus, caplog, monkeypatch):
    caplog.set_level(logging.INFO, "jax_moe")
    fake_gpus.peers_refused = 1
    mesh = jax_moe.make_mesh(node=2, devices=jax.devices()[:2])
    group = jax_moe.ExpertGroup(mesh)
    assert _cuda.obstacle(group) == "these GPUs cannot reach each other's memory: 0 -> 1"
    monkeypatch.setattr(_cuda, "is_cuda", lambda device: True)

    def traced(implementation):
        return jax.eval_shape(
            jax.shard_map(
                lambda ids: jax_moe.plan(
                    ids, group=group, num_experts=8, implementation=implementation
                ),
                mesh=mesh,
                in_specs=SPEC,
                out_specs=SPEC,
            ),
            jax.ShapeDtypeStruct((8, 1), np.int32),
        )

    with pytest.raises(NotImplementedError, match='memory: 0 -> 1; use implementation="xla"'):
        traced("ptx")
    assert traced(None).spec.implementation == "xla"
    assert 'implementation "xla", since these GPUs cannot reach' in caplog.text


def test_preflight_of_one_process(fake_gpus, monkeypatch):
    with pytest.raises(NotImplementedError, match=r'of platform cpu, .*give jax\.devices\("gpu"\)'):
        jax_moe.preflight()
    monkeypatch.setattr(_cuda, "is_cuda", lambda device: True)
    fake_gpus.peers_refused = 1
    fake_gpus.no_nvlink = 1
    found = jax_moe.preflight(jax.devices()[:3])
    assert [(link.way, link.link) for link in found.links] == [("pointer", "PCIe")] * 6
    assert [link.refused for link in found.links] == ["no peer access"] + [""] * 5
    assert "GPU 0 of process 0 cannot reach the memory of GPU 1 of process 0" in found.obstacle
    fake_gpus.peers_refused = fake_gpus.no_nvlink = 0
    found = jax_moe.preflight(jax_moe.ExpertGroup(jax_moe.make_mesh(devices=jax.devices()[:2])))
    assert (found.obstacle, found.links[1].link, found.ordinals) == (None, "NVLink", {0: 0, 1: 1})
    assert str(found).splitlines()[-1] == 'implementation="ptx": possible'


def test_programs_keep_their_numbers_while_other_threads_lower():
    here, there = (
        types.SimpleNamespace(module_context=types.SimpleNamespace(channel_iterator=object()))
        for _ in range(2)
    )
    first = _ptx._lowerings.number(here)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(_ptx._lowerings.number, there).result()
    assert _ptx._lowerings.number(here) == first != other


def test_concurrent_graphs_capture_no_call(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_command_buffer_scheduling_mode=LHS")
    assert _ffi._may_be_captured()
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_command_buffer_scheduling_mode=CONCURRENT")
    assert not _ffi._may_be_captured()
