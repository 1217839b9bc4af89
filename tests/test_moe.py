"""The MoE layer against the dense float64 restatement: output, every gradient, every statistic."""

import functools

import dense_moe
import moe_runs
import numpy as np
import oracle
import pytest
from moe_runs import Layout, Step

import jax_moe
from jax_moe import _moe

HIDDEN, WIDTH = 12, 10
GROUPED = jax_moe.RouterConfig(num_experts=8, top_k=2, num_groups=4, top_groups=2)
NODES_4X2 = Layout((1, 4, 2))
LAYOUTS = (
    NODES_4X2,
    Layout((1, 1, 1), virtual_ranks=8, num_nodes=4),
    Layout((1, 2, 1), virtual_ranks=2),
    Layout((2, 2, 2), implementation="xla"),
    Layout((1, 2, 2), virtual_ranks=2, implementation="reference"),
)
# 42 tokens: no multiple of any layout's ranks.
SHAPE = (3, 14, HIDDEN)


@functools.cache
def step(layout: Layout) -> Step:
    return Step(moe_runs.make(GROUPED, layout, hidden=HIDDEN, width=WIDTH))


def tokens(seed: int, shape=SHAPE):
    """x, mask of real tokens only, dy."""
    rng = np.random.default_rng(seed)
    x, dy = rng.normal(size=(2, *shape)).astype(np.float32)
    return x, np.ones(shape[:-1], bool), dy


def check(layout: Layout, x, mask, dy, bias=None, **changed):
    """Runs the layer and the restatement, compares them, and returns the layer's results."""
    run = step(layout)
    bias = np.zeros(8, np.float32) if bias is None else np.float32(bias)
    got = run(x, mask, dy, bias=bias, **changed)
    want = dense_moe.run(
        run.weights() | changed, bias, x, mask, dy, GROUPED,
        nodes=layout.group.num_nodes, aux_weight=moe_runs.AUX_WEIGHT,
    )  # fmt: skip
    moe_runs.assert_agrees(got, want)
    assert got.stats.dropped == 0
    return got


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layouts_and_implementations_agree_with_the_restatement(layout):
    x, mask, dy = tokens(1)
    mask[0, 9:] = mask[2, :3] = False
    check(layout, x, mask, dy, bias=[0.1, 0, -0.1, 0.05, 0, 0, -0.05, 0])


def test_experts_without_tokens_have_exactly_zero_gradients():
    got = check(NODES_4X2, *tokens(2), bias=[-3, -3, 0, -3, 0, 0, 0, 0])
    idle = np.flatnonzero(np.asarray(got.stats.counts) == 0)
    assert {0, 1, 3} <= set(idle)
    assert not got.grads["gate_up"][idle].any()
    assert not got.grads["down"][idle].any()


def test_hot_experts():
    got = check(NODES_4X2, *tokens(3), bias=[0, 0, 4, 0, 0, 4, 0, 0])
    assert got.stats.counts[2] == got.stats.counts[5] == 42


def test_ties_go_to_the_lowest_expert():
    got = check(NODES_4X2, *tokens(4), router=np.zeros((HIDDEN, 8), np.float32))
    np.testing.assert_array_equal(got.stats.counts, [42, 42, 0, 0, 0, 0, 0, 0])


def test_strongly_negative_bias_neither_hides_experts_nor_changes_weights():
    check(NODES_4X2, *tokens(5), bias=[-2.0] * 8)
    got = check(NODES_4X2, *tokens(5), bias=[-1e4] * 4 + [0] * 4)
    assert not np.asarray(got.stats.counts[:4]).any()


def test_padding_tokens_may_hold_anything_and_count_nowhere():
    x, mask, dy = tokens(6)
    mask[1] = False
    mask[2, 5:] = False
    clean = check(NODES_4X2, x, mask, dy)
    x[~mask] = np.nan
    poisoned = step(NODES_4X2)(x, mask, dy)
    np.testing.assert_array_equal(clean.y, poisoned.y)
    assert not poisoned.y[~mask].any()
    for name in clean.grads:
        np.testing.assert_array_equal(clean.grads[name], poisoned.grads[name], err_msg=name)


def test_no_real_token_at_all():
    x, mask, dy = tokens(7)
    got = check(NODES_4X2, x, mask & False, dy)
    assert not got.y.any()


def test_top_1_of_softmax_scores_without_groups_or_shared_expert():
    config = jax_moe.RouterConfig(
        num_experts=12, top_k=1, num_groups=1, score="softmax", normalize=False, scale=1.7
    )
    layout = Layout((2, 1, 2), virtual_ranks=2)
    run = Step(moe_runs.make(config, layout, num_shared=0))
    x, mask, dy = tokens(8)
    mask[0, 11:] = False
    got = run(x, mask, dy)
    want = dense_moe.run(
        run.weights(), np.zeros(12), x, mask, dy, config, aux_weight=moe_runs.AUX_WEIGHT
    )
    moe_runs.assert_agrees(got, want)


def test_rows_past_the_capacity_are_dropped_and_counted():
    layout, capacity, per_rank = Layout((1, 2, 2)), 7, 6
    run = Step(moe_runs.make(GROUPED, layout, capacity=capacity, shared_width=6))
    x, mask, dy = tokens(9, (2, 12, HIDDEN))
    mask[1, 10:] = False
    want = functools.partial(
        dense_moe.run, run.weights(), np.zeros(8), x, mask, dy, GROUPED,
        nodes=2, aux_weight=moe_runs.AUX_WEIGHT,
    )  # fmt: skip
    ids = want().expert_ids
    exchange = oracle.plan(
        ids.reshape(4, per_rank, 2), num_experts=8, capacity=capacity, alignment=1
    )
    dropped = (exchange.positions.reshape(-1, 2) < 0) & (ids >= 0)
    assert dropped.sum() > 3
    got = run(x, mask, dy)
    moe_runs.assert_agrees(got, want(dropped=dropped))
    assert got.stats.dropped == dropped.sum()


def test_given_ids_that_are_no_experts_are_counted():
    layer = moe_runs.make(GROUPED, Layout((1, 1, 2)))
    ids = np.stack([np.arange(7, dtype=np.int32), np.full(7, 7, np.int32)], axis=1)
    ids[2], ids[5, 1] = [8, -9], -1
    _, stats = layer(np.ones((7, HIDDEN), np.float32), expert_ids=ids)
    assert stats.invalid == 2 and stats.dropped == 0
    assert stats.counts.sum() == 14 - 3


@pytest.mark.parametrize("capacity", [None, 56], ids=["default", "given"])
def test_padding_of_groups_takes_no_room_from_rows(capacity, monkeypatch):
    """An engine's wish for padded groups, as on Hopper GPUs, changes no result and drops no row."""
    monkeypatch.setitem(_moe.ROW_ALIGNMENT, "blocks", 8)
    layout = Layout((1, 2, 2))
    run = Step(moe_runs.make(GROUPED, layout, capacity=capacity, shared_width=7))
    x, mask, dy = tokens(10, (2, 14, HIDDEN))
    bias = np.float32([9, 9, 0, 0, 0, 0, 0, 0])  # 28 tokens, 2 experts: 56 rows, padded 64
    got = run(x, mask, dy, bias=bias)
    want = dense_moe.run(
        run.weights(), bias, x, mask, dy, GROUPED, nodes=2, aux_weight=moe_runs.AUX_WEIGHT
    )
    assert want.counts.tolist() == [28, 28] + 6 * [0]
    assert got.stats.dropped == 0
    moe_runs.assert_agrees(got, want)
