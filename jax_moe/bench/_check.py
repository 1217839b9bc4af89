"""Every column gives the right result before it is timed."""

from __future__ import annotations

import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_moe import _reference
from jax_moe.bench._programs import Inputs, Problem, Program, weigh

# Allowed relative to 1 + |expected|: a baseline may add in another order and precision, and XLA
# may add over the hidden axis (in float32) as it likes.
SUM_TOLERANCE = {"bfloat16": 2.0**-5, "float32": 1e-5}
HIDDEN_SUM_TOLERANCE = 1e-3


class WrongResult(AssertionError):
    """A column's result is not the specified one, so it must not be timed."""


class Wanted(NamedTuple):
    """A specified result [R, ...] and how it comes about."""

    kind: Literal["rows", "sum", "hidden_sum"]
    array: np.ndarray


class Expected:
    """The specified results of a problem, from the reference on stacked arrays.

    Raises:
      ValueError: the capacity drops rows; the columns would then not do the same.
    """

    def __init__(self, problem: Problem, inputs: Inputs):
        self.problem = problem
        plan = functools.partial(
            _reference.plan,
            num_experts=problem.shape.experts,
            capacity=problem.capacity,
            alignment=1,
        )
        plan = jax.jit(plan)(inputs.ids)
        dropped = int(plan.dropped.sum())
        if dropped:
            raise ValueError(
                f"capacity={problem.capacity} rows a rank drop {dropped} rows of these ids, and "
                "the columns drop differently; raise the capacity."
            )
        self._real = (np.asarray(plan.sources) >= 0).reshape(-1)
        self._results = self._specify(plan, inputs)

    def _specify(self, plan, inputs: Inputs) -> dict[str, tuple[Wanted, ...]]:
        # Kept on the host: the devices' memory is the columns'.
        def wanted(kind, array) -> Wanted:
            return Wanted(kind, np.asarray(array))

        combine = functools.partial(
            _reference.combine,
            num_experts=self.problem.shape.experts,
            num_nodes=self.problem.group.nodes,
        )
        dispatch, combine = jax.jit(_reference.dispatch), jax.jit(combine)
        maps = (plan.expert_ids, plan.positions)
        rows, row_s = dispatch(inputs.x, inputs.s, plan.sources)
        exchanged = (
            wanted("sum", combine(rows, row_s, *maps)[0]),
            wanted("rows", row_s),
        )
        combined = wanted("sum", combine(inputs.rows, inputs.row_s, *maps)[0])
        y = wanted("sum", combine(weigh(rows, row_s), row_s, *maps)[0])
        d_rows, _ = dispatch(inputs.dy, jnp.zeros_like(inputs.s), plan.sources)
        d_rows, d_row_s = jax.jit(lambda r, s, d: jax.vjp(weigh, r, s)[1](d))(rows, row_s, d_rows)
        dx, ds = combine(d_rows, d_row_s, *maps)
        return {
            "plan+dispatch+combine": exchanged,
            "dispatch+combine": exchanged,
            "plan": (),  # shows in what dispatch and combine make of it
            "dispatch": (wanted("rows", rows), wanted("rows", row_s)),
            "combine": (combined,),
            "forward+backward": (y, wanted("sum", dx), wanted("hidden_sum", ds)),
        }

    def check(self, program: Program) -> None:
        """Runs a program and compares its results with the specified ones.

        Raises:
          WrongResult: they differ by more than the column may.
        """
        results = jax.block_until_ready(program())
        wanted = self._results[program.measure]
        if not wanted:
            return
        for i, (got, want) in enumerate(zip(jax.tree.leaves(results), wanted, strict=True)):
            where = f"{program.column.name}, {program.measure}, result {i}"
            exact = want.kind == "rows" or (want.kind == "sum" and program.column.exact)
            tolerance = (
                SUM_TOLERANCE[self.problem.dtype] if want.kind == "sum" else HIDDEN_SUM_TOLERANCE
            )
            flat = want.array.reshape(-1, *want.array.shape[2:])
            for shard in got.addressable_shards:
                have, need = np.asarray(shard.data), flat[shard.index[0]]
                if want.kind == "rows":  # past the real ones anything is allowed
                    real = self._real[shard.index[0]]
                    have, need = have[real], need[real]
                _compare(f"{where}, device {shard.device.id}", have, need, exact, tolerance)


def _compare(where: str, have: np.ndarray, need: np.ndarray, exact: bool, tolerance: float) -> None:
    if exact:
        wrong = _bits(have) != _bits(need)
    else:
        target = need.astype(np.float32)
        wrong = ~(np.abs(have.astype(np.float32) - target) <= tolerance * (1 + np.abs(target)))
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise WrongResult(
            f"{where}: {int(wrong.sum())} of {wrong.size} values are wrong; the first is at "
            f"{at}: {have[at]}, must be {need[at]}."
        )


def _bits(array: np.ndarray) -> np.ndarray:
    return array.view({2: np.uint16, 4: np.uint32}[array.dtype.itemsize])
