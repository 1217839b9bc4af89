"""A layer whose bits no fusion can change, with its results by hand: what transformations keep."""

import dataclasses
import functools

import cases
import jax
import numpy as np
import oracle
import origin
import runs

import jax_moe

CASE = cases.Case(
    "transformed", tokens=6, experts=16, topk=2, hidden=8, mesh=(2, 2, 2), virtual_ranks=2,
    routing="uneven", capacity=9, alignment=2,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Example:
    """Operands and results of `layer` and its VJP, stacked [groups, R, ...]."""

    ids: np.ndarray
    x: np.ndarray
    s: np.ndarray
    dy: np.ndarray
    ds: np.ndarray
    y: np.ndarray
    s_back: np.ndarray
    x_bar: np.ndarray
    s_bar: np.ndarray

    @property
    def operands(self) -> tuple[np.ndarray, ...]:
        return self.ids, self.x, self.s, self.dy, self.ds

    @property
    def results(self) -> tuple[np.ndarray, ...]:
        return self.y, self.s_back, self.x_bar, self.s_bar


def layer(x: jax.Array, s: jax.Array, plan: jax_moe.Plan) -> tuple[jax.Array, jax.Array]:
    """Squares the rows and triples the scalars: products only, whose bits no fusion can change."""
    rows, row_s = jax_moe.dispatch(x, s, plan)
    return jax_moe.combine(rows * rows, row_s * 3.0, plan)


def layer_and_vjp(plan_of):
    """Per device: `layer` and its VJP; `plan_of` turns ids into a plan."""

    def program(ids, x, s, dy, ds):
        out, vjp = jax.vjp(lambda x, s: layer(x, s, plan_of(ids)), x, s)
        return *out, *vjp((dy, ds))

    return program


@functools.cache
def example(case: cases.Case = CASE, seed: int = 0) -> Example:
    rng = case.rng(f"example {seed}")
    owned = (case.groups, case.ranks, case.tokens)
    x, dy = (rng.uniform(0.5, 1.5, (*owned, case.hidden)).astype(case.payload) for _ in range(2))
    s, ds = (rng.uniform(0.5, 1.5, (*owned, case.topk)).astype(np.float32) for _ in range(2))
    ids = cases.expert_ids(dataclasses.replace(case, name=f"{case.name} {seed}"))
    results = [layer_by_hand(case, *operands) for operands in zip(ids, x, s, dy, ds, strict=True)]
    return Example(ids, x, s, dy, ds, *(np.stack(r) for r in zip(*results, strict=True)))


def layer_by_hand(case, ids, x, s, dy, ds):
    capacity = runs.setting(case).capacity
    p = oracle.plan(ids, num_experts=case.experts, capacity=capacity, alignment=case.alignment)
    combine = functools.partial(oracle.combine, p=p, num_nodes=case.nodes)
    rows, row_s = oracle.dispatch(x, s, p)
    d_rows, d_row_s = oracle.dispatch(dy, ds, p)
    three, two = np.float32(3), case.payload.type(2)
    return *combine(rows * rows, row_s * three), *combine(two * rows * d_rows, d_row_s * three)


def check(at: runs.Setting, results, expected: Example | None = None) -> None:
    expected = expected or example(at.case)
    for name, got, want in zip(
        ("y", "s", "x_bar", "s_bar"), results, expected.results, strict=False
    ):
        origin.assert_same_bits(at.stacked(got), want, name)


def placed(at: runs.Setting, expected: Example | None = None) -> list[jax.Array]:
    return [at.place(a) for a in (expected or example(at.case)).operands]


def chain_by_hand(ids, x, s, dy, ds):
    """The layers of one group one after the other, then backwards."""
    entered = []
    for layer_ids in ids:
        entered.append((x, s))
        x, s, _, _ = layer_by_hand(CASE, layer_ids, x, s, dy, ds)
    for layer_ids, (x_in, s_in) in zip(ids[::-1], entered[::-1], strict=True):
        _, _, dy, ds = layer_by_hand(CASE, layer_ids, x_in, s_in, dy, ds)
    return x, s, dy, ds


def named(results) -> dict[str, np.ndarray]:
    stacked = (np.stack(r) for r in zip(*results, strict=True))
    return dict(zip(("y", "s_back", "x_bar", "s_bar"), stacked, strict=True))
