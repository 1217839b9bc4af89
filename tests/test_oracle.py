"""The oracle against examples worked out by hand, and the cases against wrong specifications."""

import cases
import ml_dtypes
import numpy as np
import oracle
import origin
import pytest

BF16 = np.dtype(ml_dtypes.bfloat16)
TINY = np.finfo(np.float32).tiny


def test_plan_by_hand():
    ids = np.array([[[0, 3], [3, 1]], [[2, 0], [-1, 7]]], np.int32)  # R = T = K = 2, E = 4
    p = oracle.plan(ids, num_experts=4, capacity=5, alignment=2)
    assert p.expert_ids.tolist() == [[[0, 3], [3, 1]], [[2, 0], [-1, -1]]]
    assert p.positions.tolist() == [[[0, 2], [3, 2]], [[0, 1], [-1, -1]]]
    assert p.sources.tolist() == [[0, 5, 3, -1, -1], [4, -1, 1, 2, -1]]
    assert p.group_sizes.tolist() == [[2, 1], [1, 2]]
    assert p.padded_group_sizes.tolist() == [[2, 2], [2, 2]]
    assert p.dropped.tolist() == [[0, 0], [0, 0]]
    assert p.invalid.tolist() == [0, 1]


def test_plan_drops_the_last_by_hand():
    ids = np.array([[[0, 0], [1, 0]], [[0, 1], [0, 1]]], np.int32)  # one rank's experts only
    p = oracle.plan(ids, num_experts=4, capacity=5, alignment=1)
    # n = [5, 3]: a cap of 2 gives 4 rows, a cap of 3 would give 6.
    assert p.group_sizes.tolist() == [[2, 2], [0, 0]]
    assert p.dropped.tolist() == [[3, 1], [0, 0]]
    assert p.positions.tolist() == [[[0, 1], [2, -1]], [[-1, 3], [-1, -1]]]
    assert p.expert_ids.tolist() == ids.tolist()
    assert p.sources.tolist() == [[0, 1, 2, 5, -1], [-1] * 5]


@pytest.mark.parametrize(
    ("counts", "capacity", "alignment", "cap"),
    [
        ([5, 1, 3], 9, 1, 5),
        ([5, 1, 3], 7, 1, 3),
        ([5, 1, 3], 6, 1, 2),
        ([5, 1, 3], 12, 4, 4),
        ([5, 1, 3], 8, 4, 0),
        ([5, 1, 3], 0, 1, 0),
        ([0, 0], 0, 8, 0),
        ([9, 0], 8, 8, 8),
    ],
)
def test_cap_by_hand(counts, capacity, alignment, cap):
    assert oracle.per_expert_cap(counts, capacity, alignment) == cap


def test_dispatch_by_hand():
    p = oracle.plan(
        np.array([[[1, 0]], [[1, -1]]], np.int32), num_experts=2, capacity=3, alignment=1
    )
    rows, row_s = oracle.dispatch(
        np.array([[[1.0]], [[2.0]]], np.float32), np.array([[[3.0, 4]], [[5, 6]]], np.float32), p
    )
    assert rows[..., 0].tolist() == [[1, 0, 0], [1, 2, 0]]
    assert row_s.tolist() == [[4, 0, 0], [3, 5, 0]]


def combined(terms, dtype, *, ranks, num_nodes=1):
    """y of one token whose k-th row, terms[k] = (rank, value), is at the one expert of a rank."""
    ids = np.full((ranks, 1, len(terms)), -1, np.int32)
    ids[0, 0] = [rank for rank, _ in terms]
    p = oracle.plan(ids, num_experts=ranks, capacity=len(terms), alignment=1)
    rows = np.full((ranks, len(terms), 1), np.nan, dtype)
    for k, (rank, value) in enumerate(terms):
        rows[rank, p.positions[0, 0, k], 0] = value
    y, _ = oracle.combine(rows, np.zeros(rows.shape[:2], np.float32), p, num_nodes=num_nodes)
    return y[0, 0, 0]


def test_combine_adds_in_ascending_k():
    big = 2.0**24
    assert combined([(0, big), (0, 1), (0, -big)], np.float32, ranks=1) == 0.0
    assert combined([(0, big), (0, -big), (0, 1)], np.float32, ranks=1) == 1.0


def test_combine_adds_ranks_in_ascending_order_whatever_k():
    big = 2.0**24
    assert combined([(2, -big), (0, big), (1, 1)], np.float32, ranks=3) == 0.0
    assert combined([(1, -big), (0, big), (2, 1)], np.float32, ranks=3) == 1.0


def test_combine_rounds_each_rank():
    half = 2.0**-8  # half a unit in the last place of bfloat16 1.0
    assert combined([(0, 1), (0, half), (1, half)], BF16, ranks=2) == 1.0
    assert combined([(0, 1), (0, half), (0, half)], BF16, ranks=2) == 1.0 + 2 * half


def test_combine_rounds_each_node():
    half = 2.0**-8
    terms = [(0, 1), (1, half), (2, half)]
    assert combined(terms, BF16, ranks=4, num_nodes=1) == 1.0 + 2 * half
    assert combined(terms, BF16, ranks=4, num_nodes=2) == 1.0


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BF16])
def test_combine_copies_one_term_and_flushes_in_sums(dtype):
    tiny = float(TINY)
    assert combined([(1, tiny / 4)], dtype, ranks=2, num_nodes=2) == tiny / 4
    assert combined([(0, tiny / 4), (0, 0)], dtype, ranks=1) == 0.0
    assert combined([(0, tiny / 4), (1, tiny)], dtype, ranks=2) == tiny
    for total in (
        combined([(0, -tiny / 4), (0, -tiny / 4)], dtype, ranks=1),
        combined([(0, tiny), (1, -1.5 * tiny)], dtype, ranks=2),
        combined([(0, -0.0), (1, -0.0)], dtype, ranks=2),
        combined([(0, -0.0)], dtype, ranks=1),
    ):
        assert total == 0.0
        assert np.signbit(total)
    assert not np.signbit(combined([], dtype, ranks=1))


def test_align_up():
    assert [oracle.align_up(n, 8) for n in (0, 1, 8, 9)] == [0, 8, 8, 16]


# A case is only worth its time if a plausible misreading of the specification would fail it.


def _expectation(case):
    (ids,) = cases.expert_ids(case)
    p = oracle.plan(ids, num_experts=case.experts, capacity=case.capacity or 4096, alignment=1)
    rows = cases.terms(case, "rows", (*p.sources.shape, case.hidden), case.payload)
    row_s = np.zeros(p.sources.shape, np.float32)
    return oracle.combine(rows, row_s, p, num_nodes=case.nodes)[0]


def _unflushed(v):
    return v


def _flushed_copy(terms):
    total = oracle.flush(terms[0].astype(np.float32))
    for term in terms[1:]:
        total = oracle.add(total, term.astype(np.float32))
    return total.astype(terms[0].dtype)


def _backwards(terms, forwards=oracle.ordered_sum):
    return forwards(terms[::-1])


def _from_zero(terms, forwards=oracle.ordered_sum):
    return forwards([np.zeros_like(terms[0]), *terms])


@pytest.mark.parametrize("name", ["special_float32", "special_bfloat16", "special_nodes"])
@pytest.mark.parametrize(
    ("function", "wrong"),
    [
        ("flush", _unflushed),
        ("ordered_sum", _flushed_copy),
        ("ordered_sum", _from_zero),
        ("ordered_sum", _backwards),
    ],
)
def test_special_cases_catch_wrong_sums(monkeypatch, name, function, wrong):
    case = cases.BY_NAME[name]
    right = _expectation(case)
    monkeypatch.setattr(oracle, function, wrong)
    assert (origin.bits(_expectation(case)) != origin.bits(right)).any()


@pytest.mark.parametrize("name", ["nodes_2x4", "swapped_axes", "virtual8_nodes_2"])
def test_node_cases_catch_a_wrong_topology(name):
    case = cases.BY_NAME[name]
    right = _expectation(case)
    flat = cases.dataclasses.replace(case, num_nodes=1)
    assert (_expectation(flat) != right).any()


@pytest.mark.parametrize("case", [c for c in cases.CASES if c.name.startswith("overflow")], ids=str)
def test_overflow_cases_overflow(case):
    capacity = case.capacity
    if capacity is None:
        capacity = int(np.ceil(case.capacity_factor * case.tokens * case.topk))
    p = oracle.plan(
        cases.expert_ids(case)[0],
        num_experts=case.experts, capacity=capacity, alignment=case.alignment,
    )  # fmt: skip
    assert p.dropped.sum() > 0


@pytest.mark.parametrize("case", [c for c in cases.CASES if c.routing == "invalid"], ids=str)
def test_invalid_cases_reach_both_ends(case):
    ids = cases.expert_ids(case)
    assert {int(cases.INT32.min), int(cases.INT32.max), case.experts} <= set(ids.ravel().tolist())


def test_names_are_unique():
    assert len(cases.BY_NAME) == len(cases.CASES)
