"""plan: every array of it, in every implementation, against the oracle."""

import dataclasses
import itertools

import cases
import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import oracle
import origin
import pytest
import runs

import jax_moe


def _who(field: str, case: cases.Case):
    """Words for the index of an entry of a plan array."""

    def who(index: tuple[int, ...]) -> str:
        group, rank, *rest = index
        names = {"expert_ids": ("token", "k"), "positions": ("token", "k"), "sources": ("row",)}
        parts = [f"group {group} rank {rank}"]
        if field in names:
            parts += [f"{name} {i}" for name, i in zip(names[field], rest, strict=True)]
        elif field != "invalid":
            parts.append(f"expert {rank * case.local_experts + rest[0]}")
        return " ".join(parts)

    return who


@pytest.mark.parametrize(("case", "implementation"), runs.pairs())
def test_plan(case, implementation):
    got, want = runs.run(case, implementation), runs.plans(case)
    for field in runs.PLAN_FIELDS:
        expected = np.stack([getattr(p, field) for p in want])
        if field == "invalid":
            expected = expected[:, :, None]
        origin.assert_same_bits(got[field], expected, field, who=_who(field, case))


def test_rows_are_lost_only_where_reported():
    """Every valid (token, k) of every overflow case is either a row or counted as dropped."""
    for case in (c for c in cases.CASES if c.name.startswith("overflow")):
        got = runs.run(case, "cpu")
        valid = (got["expert_ids"] >= 0).sum((1, 2, 3))
        placed = (got["positions"] >= 0).sum((1, 2, 3))
        assert (got["dropped"].sum((1, 2)) == valid - placed).all(), case.name
        assert (got["group_sizes"].sum((1, 2)) == placed).all(), case.name
        assert (got["dropped"].sum((1, 2)) > 0).all(), case.name


_SMALL = cases.Case(
    "hypothesis", tokens=3, experts=8, topk=3, hidden=1, mesh=(1, 1, 4), capacity=10, alignment=2
)
_IDS = st.integers(-2, 9) | st.sampled_from([0, 0, 1, 5, cases.INT32.min, cases.INT32.max])


def test_any_ids_give_the_oracles_plan():
    at = runs.setting(_SMALL)
    functions = {
        name: jax.jit(
            at.shard_map(lambda ids, name=name: vars(at.plan(ids, name)) | {"spec": None})
        )
        for name in cases.IMPLEMENTATIONS
    }
    count = _SMALL.ranks * _SMALL.tokens * _SMALL.topk

    @hypothesis.settings(max_examples=40, deadline=None, database=None, derandomize=True)
    @hypothesis.given(st.lists(_IDS, min_size=count, max_size=count))
    def check(values):
        ids = np.array(values, np.int32).reshape(1, _SMALL.ranks, _SMALL.tokens, _SMALL.topk)
        want = oracle.plan(ids[0], num_experts=8, capacity=at.capacity, alignment=2)
        for name, function in functions.items():
            got = function(at.place(ids))
            for field in runs.PLAN_FIELDS:
                expected = getattr(want, field).reshape(got[field].shape)
                origin.assert_same_bits(np.asarray(got[field]), expected, f"{name} {field}")

    check()


@pytest.mark.parametrize("alignment", [1, 8, 128])
def test_the_default_capacity_holds_any_distinct_ids(alignment):
    for tokens, topk, local, ranks in itertools.product((1, 5), (1, 3, 8), (1, 2, 8), (1, 4)):
        if topk > local * ranks:
            continue
        capacity = jax_moe.row_capacity(
            tokens=tokens,
            top_k=topk,
            num_experts=local * ranks,
            num_ranks=ranks,
            alignment=alignment,
        )
        # The worst: all tokens here, each to min(K, E/R) experts, which fill unevenly.
        total, most = ranks * tokens * min(topk, local), ranks * tokens
        for busy in range(min(topk, local), local + 1):
            counts = [1] * (busy - min(topk, local)) + [most] * min(topk, local)
            counts[-1] -= busy - min(topk, local)
            if counts[-1] < 1:
                continue
            assert sum(counts) == total
            assert sum(oracle.align_up(n, alignment) for n in counts) <= capacity
        assert capacity % alignment == 0
        assert capacity < total + local * alignment + alignment


@pytest.mark.parametrize("alignment", [1, 8, 128])
def test_a_capacity_factor_of_one_holds_the_balanced_load(alignment):
    tokens, topk, experts, ranks = 128, 8, 256, 8
    capacity = jax_moe.row_capacity(
        tokens=tokens,
        top_k=topk,
        num_experts=experts,
        num_ranks=ranks,
        capacity_factor=1.0,
        alignment=alignment,
    )
    counts = np.full(experts // ranks, ranks * tokens * topk // experts)
    assert sum(oracle.align_up(n, alignment) for n in counts.tolist()) <= capacity
    # The same however unevenly the rank's load falls on its experts.
    counts[:2] += [1, -1]
    assert sum(oracle.align_up(n, alignment) for n in counts.tolist()) <= capacity


def test_the_plan_is_a_pytree_of_arrays_with_static_settings():
    at = runs.setting(_SMALL)
    plan = jax.jit(at.shard_map(lambda ids: at.plan(ids, None)))(at.place(cases.expert_ids(_SMALL)))
    leaves = jax.tree.leaves(plan)
    assert len(leaves) == len(runs.PLAN_FIELDS)
    assert all(leaf.dtype == np.int32 for leaf in leaves)
    assert plan.spec.capacity == 10
    assert hash(plan.spec) == hash(dataclasses.replace(plan.spec))
    assert jax.tree.structure(plan) == jax.tree.structure(jax.tree.map(lambda a: a + 1, plan))
