"""The bench of grouped matmuls: its cases, its check and its report."""

import functools
import itertools
import json
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_moe
from jax_moe.bench import _matmul_peers, matmul


@pytest.mark.parametrize("experts", [1, 8, 32])
@pytest.mark.parametrize("routing", matmul.ROUTINGS)
def test_sizes_add_up_and_are_skewed_as_said(experts, routing):
    sizes = matmul.Case(experts, 8192, 128, 128, routing).sizes()
    assert sizes.dtype == np.int32 and sizes.shape == (experts,)
    assert sizes.sum() == 8192 and sizes.min() > 0
    uneven = routing != "balanced" and experts > 1
    assert sizes.max() / sizes.mean() == pytest.approx(2 if uneven else 1, rel=0.01)
    if experts > 1:
        assert (sizes % 8 == 0).all() == (routing != "unaligned")


def test_report_has_every_engine_beside_the_dense_matmul(tmp_path, capsys):
    file = tmp_path / "matmul.json"
    sizes = "--experts 4 --rows 64 --shapes 16x24 --routings balanced,unaligned"
    timing = "--calls 2 --repetitions 3 --seconds 0.01"
    arguments = f"{sizes} {timing} --engines blocks,ragged_dot --json {file}"
    matmul.main(arguments.split())
    records = json.loads(file.read_text())["records"]
    engines = ("dense", "blocks", "ragged_dot")
    want = {
        (routing, operation, engine)
        for routing in ("balanced", "unaligned")
        for operation in matmul.OPERATIONS
        for engine in engines
    }
    assert {(r["case"]["routing"], r["operation"], r["engine"]) for r in records} == want
    assert all(r["median_us"] > 0 and r["bytes_us"] > 0 for r in records)
    report = capsys.readouterr().out
    assert report.count("| dense |") == 6 and "| 4 | 64 | 16 x 24 | unaligned |" in report


def test_the_engine_is_by_default_that_of_the_machine(capsys):
    arguments = "--experts 2 --rows 16 --shapes 16x24 --calls 1 --repetitions 3"
    matmul.main(arguments.split())
    report = capsys.readouterr().out
    assert report.count("| blocks |") == report.count("| dense |") == 6


def test_torch_computes_the_same_and_is_waited_for_in_each_timed_region(tmp_path, monkeypatch):
    waits = []

    def grouped_mm(a, b, *, offs):
        groups = list(itertools.pairwise([0, *offs.tolist()]))
        if b.ndim == 3:
            return jnp.concatenate([a[i:j] @ w for (i, j), w in zip(groups, b, strict=True)])
        return jnp.stack([a[:, i:j] @ b[i:j] for i, j in groups])

    cuda = types.SimpleNamespace(is_available=lambda: True, synchronize=lambda: waits.append(None))
    stand_in = {"from_dlpack": jnp.from_dlpack, "int32": jnp.int32, "_grouped_mm": grouped_mm}
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda, **stand_in))
    file = tmp_path / "matmul.json"
    sizes = "--experts 4 --rows 64 --shapes 16x24 --routings unaligned"
    timing = "--calls 2 --repetitions 3 --seconds 0.01"
    matmul.main(f"{sizes} {timing} --engines torch --json {file}".split())
    records = [r for r in json.loads(file.read_text())["records"] if r["engine"] == "torch"]
    assert [r["operation"] for r in records] == list(matmul.OPERATIONS)
    checks = len(records)
    assert len(waits) == checks + sum(r["repetitions"] for r in records)


@pytest.mark.parametrize("operation", matmul.OPERATIONS)
def test_jax_mosaic_is_one_kernel(operation, monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: [types.SimpleNamespace(core_count=132)])
    shapes = {"x": (1024, 256), "w": (4, 256, 384), "dy": (1024, 384)}
    operands = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes.values()]
    apply = jax.jit(_matmul_peers.operation("jax_mosaic", operation))
    traced = apply.trace(*operands, jax.ShapeDtypeStruct((4,), jnp.int32))
    lowered = traced.lower(lowering_platforms=("cuda",))
    result = {"product": "dy", "rows' gradient": "x", "weights' gradient": "w"}[operation]
    assert lowered.out_info.shape == shapes[result]
    assert lowered.as_text().count("custom_call @mosaic_gpu") == 1


def first_expert_only(rows, weights, sizes):
    del sizes
    return jnp.einsum("ck,kn->cn", rows, weights[0])


WRONG = "--experts 4 --rows 64 --shapes 16x24 --routings skewed --calls 1 --repetitions 3"


def test_a_wrong_result_of_ours_ends_the_bench(monkeypatch):
    monkeypatch.setattr(jax_moe, "grouped_matmul", lambda *a, engine: first_expert_only(*a))
    with pytest.raises(AssertionError, match="blocks, product"):
        matmul.main(f"{WRONG} --engines blocks".split())


def test_a_wrong_result_of_another_is_left_out(monkeypatch, capsys):
    apply = functools.partial(_matmul_peers.from_product, multiply=first_expert_only)
    monkeypatch.setattr(_matmul_peers, "operation", lambda peer, name: apply(name))
    matmul.main(f"{WRONG} --engines blocks,tokamax".split())
    report = capsys.readouterr().out
    assert report.count("| blocks |") == 3 and "| tokamax |" not in report
    assert "Left out, its result is wrong: tokamax, product, Case(experts=4" in report


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--engines fastest", "choose from blocks"),
        ("--routings even", "choose from balanced"),
        ("--engines tokamax", "tokamax cannot be imported"),
        ("--engines torch", "--engines: torch"),
        ("--rows 64,0", "--rows: '0': must be a number of 1 or more"),
        ("--calls -1", "--calls: '-1': must be"),
        ("--shapes 128", "--shapes: '128': must be KxN"),
        ("--engines pallas --rows 12", "--engines pallas: 12 rows: they must be a multiple of 8"),
        ("--engines pallas --shapes 64x128", "--engines pallas: weights of width 64"),
        ("--engines pallas", "--engines pallas: it runs on Hopper GPUs; here is 'cpu'"),
    ],
)
def test_refusals_say_what_there_is(arguments, message, capsys):
    with pytest.raises(SystemExit):
        matmul.main(arguments.split())
    assert message in capsys.readouterr().err
