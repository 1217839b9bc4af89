"""Every column gives the right result before it is timed."""

from __future__ import annotations

import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_moe import _reference
from jax_moe.bench._problem import Inputs, Problem
from jax_moe.bench._programs import Program

# Allowed relative to the sum of the terms' magnitudes: a baseline may add in another order, and in
# the payload's type (K additions, each off by half a unit in the last place).
SUM_TOLERANCE = {"bfloat16": 2.0**-6, "float32": 2.0**-21}


class WrongResult(AssertionError):
    """A column's result is not the specified one, so it must not be timed."""


class Wanted(NamedTuple):
    """A specified result [R, ...]: copies of what went in, to rows or tokens, or sums of it."""

    kind: Literal["rows", "tokens", "sum"]
    array: np.ndarray
    magnitude: np.ndarray  # of a sum's terms, added up


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
        combine = functools.partial(
            _reference.combine,
            num_experts=self.problem.shape.experts,
            num_nodes=self.problem.group.nodes,
        )
        dispatch, combine = jax.jit(_reference.dispatch), jax.jit(combine)
        maps = (plan.expert_ids, plan.positions)

        # Kept on the host: the devices' memory is the columns'.
        def copied(kind, array) -> Wanted:
            return Wanted(kind, *[np.asarray(array)] * 2)

        def summed(rows, row_s) -> Wanted:
            magnitude, _ = combine(jnp.abs(rows).astype(jnp.float32), row_s, *maps)
            return Wanted("sum", np.asarray(combine(rows, row_s, *maps)[0]), np.asarray(magnitude))

        rows, row_s = dispatch(inputs.x, inputs.s, plan.sources)
        y = summed(rows, row_s)
        dispatched = (copied("rows", rows), copied("rows", row_s))
        d_rows, d_row_s = dispatch(inputs.dy, inputs.ds, plan.sources)
        return {
            "plan+dispatch+combine": (y, copied("rows", row_s)),
            "dispatch+combine": (y, copied("rows", row_s)),
            "plan": (),  # shows in what dispatch and combine make of it
            "plan+dispatch": dispatched,
            "dispatch": dispatched,
            "combine": (summed(inputs.rows, inputs.row_s),),
            "forward+backward": (
                y,
                copied("tokens", inputs.s),
                summed(d_rows, d_row_s),
                copied("tokens", inputs.ds),
            ),
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
            for shard in got.addressable_shards:
                self._check_part(
                    f"{where}, device {shard.device.id}",
                    np.asarray(shard.data),
                    want,
                    shard.index[0],
                    exact=program.column.ours,
                )

    def check_rank(self, column: str, measure: str, rank: int, results: list[np.ndarray]) -> None:
        """Compares what one rank of another library got with the specified results.

        Raises:
          WrongResult: they differ by more than a column that is not ours may.
        """
        for i, (got, want) in enumerate(zip(results, self._results[measure], strict=True)):
            part = slice(rank * want.array.shape[1], (rank + 1) * want.array.shape[1])
            where = f"{column}, {measure}, result {i}, rank {rank}"
            self._check_part(where, got, want, part, exact=False)

    def _check_part(self, where: str, have, want: Wanted, part: slice, *, exact: bool) -> None:
        """Compares some ranks' result; `exact` asks for the same bits of sums too."""
        need, magnitude = (a.reshape(-1, *a.shape[2:])[part] for a in want[1:])
        if have.shape != need.shape:
            raise WrongResult(f"{where}: shape {have.shape}, must be {need.shape}.")
        exact = exact or want.kind != "sum"
        tolerance = 0.0 if exact else SUM_TOLERANCE[self.problem.dtype]
        if want.kind == "rows":  # past the real rows anything is allowed
            real = self._real[part]
            have, need, magnitude = have[real], need[real], magnitude[real]
        if not tolerance:
            wrong = _bits(have) != _bits(need)
        else:
            error = np.abs(have.astype(np.float32) - need.astype(np.float32))
            wrong = ~(error <= tolerance * magnitude.astype(np.float32))
        if wrong.any():
            at = tuple(int(i) for i in np.argwhere(wrong)[0])
            raise WrongResult(
                f"{where}: {int(wrong.sum())} of {wrong.size} values are wrong; the first is at "
                f"{at}: {have[at]}, must be {need[at]}."
            )


def _bits(array: np.ndarray) -> np.ndarray:
    return array.view({2: np.uint16, 4: np.uint32}[array.dtype.itemsize])
