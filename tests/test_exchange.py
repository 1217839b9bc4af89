"""dispatch and combine, forward, byte for byte in every implementation."""

import cases
import jax
import ml_dtypes
import numpy as np
import oracle
import origin
import pytest
import runs

import jax_moe


@pytest.mark.parametrize(("case", "implementation"), runs.pairs())
def test_dispatch(case, implementation):
    rows, row_s = runs.run(case, implementation)["dispatch"]
    given, keep = runs.inputs(case), runs.specified(case)
    want = [
        oracle.dispatch(x, s, p) for x, s, p in zip(given.x, given.s, runs.plans(case), strict=True)
    ]
    want_rows, want_s = map(np.stack, zip(*want, strict=True))
    origin.assert_same_rows(rows, want_rows, "rows", keep=keep)
    origin.assert_same_bits(row_s, want_s, "row_s", who=_row, keep=keep)


@pytest.mark.parametrize(("case", "implementation"), runs.pairs())
def test_combine(case, implementation):
    y, s = runs.run(case, implementation)["combine"]
    given = runs.inputs(case)
    want = [
        oracle.combine(rows, row_s, p, num_nodes=case.nodes)
        for rows, row_s, p in zip(given.rows, given.row_s, runs.plans(case), strict=True)
    ]
    want_y, want_s = map(np.stack, zip(*want, strict=True))
    origin.assert_same_bits(y, want_y, "y", who=_token)
    origin.assert_same_bits(s, want_s, "s", who=_token)


def _row(index: tuple[int, ...]) -> str:
    return "group {} rank {} row {}".format(*index)


def _token(index: tuple[int, ...]) -> str:
    return "group {} rank {} token {} [{}]".format(*index)


def test_a_token_comes_back_as_often_as_it_has_rows():
    """dispatch then combine, with the same plan: y[t] = x[t] times its number of rows."""
    case = cases.BY_NAME["overflow_virtual"]
    at = runs.setting(case)

    def program(ids, x, s):
        plan = at.plan(ids, None)
        return jax_moe.combine(*jax_moe.dispatch(x, s, plan), plan)

    given = runs.inputs(case)
    y, s = jax.jit(at.shard_map(program))(*map(at.place, (given.ids, given.x, given.s)))
    kept = np.stack([p.positions for p in runs.plans(case)]) >= 0
    times = kept.sum(-1, keepdims=True).astype(np.float32)
    origin.assert_same_bits(at.stacked(y), given.x * times + np.float32(0), "y", who=_token)
    origin.assert_same_bits(at.stacked(s), np.where(kept, given.s, 0), "s", who=_token)


@pytest.mark.parametrize("name", ["ep8_invalid", "nodes_2x4", "overflow_virtual"])
def test_results_do_not_depend_on_the_number_of_devices(name):
    """Global arrays are the same whether a device hosts 1, 2, 4 or 8 of the ranks."""
    case = cases.BY_NAME[name]
    want = runs.run(case, "cpu")
    for devices in (1, 2, 4, 8):
        got = runs.run(case.on_devices(devices), "cpu")
        for what, value in want.items():
            for i, (g, w) in enumerate(zip(*map(jax.tree.leaves, (got[what], value)), strict=True)):
                origin.assert_same_bits(g, w, f"{what} {i} on {devices} devices")


def test_more_than_2_to_31_bytes_of_rows():
    """Row offsets past 2^31 bytes, in dispatch (writes) and in combine (reads)."""
    tokens, topk, hidden = 8320, 8, 16384
    count = tokens * topk
    assert count * hidden * 2 > 2**31
    group = jax_moe.ExpertGroup(jax_moe.make_mesh(devices=jax.devices()[:1]))
    rng = np.random.default_rng(1)
    ids = np.argsort(rng.random((tokens, topk)), axis=1).astype(np.int32)
    # Only the first and last columns differ between tokens; the rest is cheap to make and check.
    token = np.arange(tokens)
    x = np.ones((tokens, hidden), ml_dtypes.bfloat16)
    for column, digit in (
        (0, token % 128),
        (1, token // 128),
        (-2, token // 128),
        (-1, token % 128),
    ):
        x[:, column] = digit
    s = np.arange(count, dtype=np.float32).reshape(tokens, topk)

    def exchange(ids, x, s):
        plan = jax_moe.plan(ids, group=group, num_experts=topk, implementation="cpu")
        rows, row_s = jax_moe.dispatch(x, s, plan)
        y, back = jax_moe.combine(rows, row_s, plan)
        return rows, row_s, plan.sources, y, back

    spec = jax.P(group.mesh.axis_names)
    shard_map = jax.shard_map(exchange, mesh=group.mesh, in_specs=spec, out_specs=spec)
    rows, row_s, sources, y, back = jax.block_until_ready(jax.jit(shard_map)(ids, x, s))
    assert rows.nbytes > 2**31
    sources = np.asarray(sources)
    assert (np.sort(sources) == np.arange(count)).all()
    assert (np.diff(ids.reshape(-1)[sources]) >= 0).all()
    np.testing.assert_array_equal(np.asarray(row_s), sources.astype(np.float32))
    np.testing.assert_array_equal(np.asarray(back), s)
    u16 = x.view(np.uint16)
    got = np.asarray(rows).view(np.uint16)
    for first in range(0, count, 4096):
        part = slice(first, first + 4096)
        assert (got[part] == u16[sources[part] // topk]).all(), f"rows from {first}"
    assert (np.asarray(y) == x * ml_dtypes.bfloat16(topk)).all()
