"""The measured programs, one per measure and column."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jax_moe
from jax_moe.bench._columns import Column
from jax_moe.bench._problem import Problem

# What is inside the timed region of each measure; inputs are on the devices, compilation is done.
MEASURES = {
    "plan+dispatch+combine": "expert ids and tokens in, summed tokens out, one program",
    "dispatch+combine": "the same with the plan (a baseline's sorting) given",
    "plan+dispatch": "expert ids and tokens in, expert rows out, one program",
    "plan": "all that depends on the expert ids alone; a baseline's sorting",
    "dispatch": "tokens to expert rows, the plan given",
    "combine": "expert rows to summed tokens, the plan given",
    "forward+backward": "plan, dispatch and combine, and the gradients of both",
}
HEADLINE = "plan+dispatch+combine"


def repeat(function: Callable, calls: int) -> Callable:
    """The function called several times, each call waiting for the one before.

    A zero made of the results is added to the int32 operands (expert ids, plans), which every
    measure depends on; the barrier keeps XLA from computing only what the zero needs.
    """

    def after(results, operands):
        results = jax.lax.optimization_barrier(results)
        firsts = [a.reshape(-1)[0].astype(jnp.float32) for a in jax.tree.leaves(results)]
        zero = (jnp.stack(firsts).sum() * 0).astype(jnp.int32)
        return jax.tree.map(lambda a: a + zero if a.dtype == jnp.int32 else a, operands)

    def repeated(*operands):
        results = function(*operands)
        for _ in range(calls - 1):
            results = function(*after(results, operands))
        return results

    return repeated


def functions(way: Any) -> dict[str, tuple[Callable, tuple[str, ...]]]:
    """Each measure's function on one device, and the names of its operands.

    Between dispatch and combine a barrier stands for the experts, so that the rows exist.
    """
    barrier = jax.lax.optimization_barrier

    def exchange(x, s, state):
        rows, row_s = barrier(way.dispatch(x, s, state))
        return way.combine(rows, row_s, state)[0], row_s

    def forward_backward(ids, x, s, dy, ds):
        state = way.prepare(ids)
        rows, pull_tokens = jax.vjp(lambda x, s: way.dispatch(x, s, state), x, s)
        tokens, pull_rows = jax.vjp(lambda *rows: way.combine(*rows, state), *barrier(rows))
        # As with a loss in between, the way back begins when the tokens are there.
        tokens, cotangents = barrier((tokens, (dy, ds)))
        return tokens, pull_tokens(barrier(pull_rows(cotangents)))

    return {
        "plan+dispatch+combine": (
            lambda ids, x, s: exchange(x, s, way.prepare(ids)), ("ids", "x", "s"),
        ),
        "dispatch+combine": (exchange, ("x", "s", "state")),
        "plan+dispatch": (
            lambda ids, x, s: way.dispatch(x, s, way.prepare(ids)), ("ids", "x", "s"),
        ),
        "plan": (way.prepare, ("ids",)),
        "dispatch": (way.dispatch, ("x", "s", "state")),
        "combine": (
            lambda rows, row_s, state: way.combine(rows, row_s, state)[0],
            ("rows", "row_s", "state"),
        ),
        "forward+backward": (forward_backward, ("ids", "x", "s", "dy", "ds")),
    }  # fmt: skip


def pool_bytes(group, tokens: int, top_k: int, experts: int, hidden: int, dtype: str) -> int:
    """Bytes of the `ptx` implementation's pool on one device."""
    return group.virtual_ranks * jax_moe.pool_bytes(
        num_ranks=group.num_ranks,
        tokens=tokens,
        top_k=top_k,
        num_experts=experts,
        hidden=hidden,
        dtype=dtype,
    )


def own_bytes(name: str, problem: Problem) -> int:
    """Bytes that a column keeps or takes outside XLA's accounting, on one device."""
    sizes, group = problem.sizes, problem.group
    if name == "ptx":
        hidden = problem.shape.hidden
        return pool_bytes(
            group, sizes.tokens, sizes.top_k, sizes.num_experts, hidden, problem.dtype
        )
    if name == "cpu":
        # Rows are copied straight between the devices' buffers; a plan takes scratch, one for all
        # devices: int32 [R, E], int64 [E], and int64 [E/R] while an expert rank is laid out.
        scratch = sizes.num_experts * (4 * sizes.num_ranks + 16)
        return -(-scratch // group.num_devices)
    return 0


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled measure of one column, with its operands on the devices."""

    column: Column
    measure: str
    compiled: jax.stages.Compiled
    operands: tuple[Any, ...]
    repeated: jax.stages.Compiled  # `calls` of it, one after the other
    calls: int

    def __call__(self):
        """Runs it once."""
        return self.compiled(*self.operands)

    def run_repeated(self):
        """Runs it `calls` times: what is timed."""
        return self.repeated(*self.operands)

    @property
    def memory(self) -> dict[str, int]:
        """XLA's own accounting of one device's bytes, arguments apart."""
        stats = self.compiled.memory_analysis()
        assert stats is not None, "this backend does not account for its memory"
        return {"temp": stats.temp_size_in_bytes, "output": stats.output_size_in_bytes}


@dataclasses.dataclass(frozen=True)
class CompiledMeasure:
    """One of a column's measures, compiled for any operands of a problem's shapes."""

    measure: str
    names: tuple[str, ...]  # of the operands
    once: jax.stages.Compiled
    repeated: jax.stages.Compiled


@dataclasses.dataclass(frozen=True)
class CompiledColumn:
    """A column's measures, for any routing."""

    column: Column
    prepare: jax.stages.Compiled  # expert ids to plan
    measures: tuple[CompiledMeasure, ...]
    calls: int

    def programs(self, placed: dict[str, Any]) -> list[Program]:
        """The measures with their operands, given by name; the plan is made here."""
        operands = placed | {"state": self.prepare(placed["ids"])}
        return [
            Program(
                column=self.column,
                measure=m.measure,
                compiled=m.once,
                operands=tuple(operands[name] for name in m.names),
                repeated=m.repeated,
                calls=self.calls,
            )
            for m in self.measures
        ]


def compile_column(
    column: Column,
    problem: Problem,
    placed: dict[str, Any],
    measures: tuple[str, ...],
    calls: int = 1,
) -> CompiledColumn:
    """Compiles a column's measures.

    Args:
      column: what to compile.
      problem: its sizes and group.
      placed: operands by name, on the devices, for their shapes.
      measures: which programs to make.
      calls: how many calls in sequence make one timed region.
    """
    shard_map = functools.partial(
        jax.shard_map, mesh=problem.group.mesh, in_specs=problem.spec, out_specs=problem.spec
    )
    every = functions(column.way)
    prepare = jax.jit(shard_map(every["plan"][0])).lower(placed["ids"]).compile()
    examples = placed | {"state": prepare(placed["ids"])}
    compiled = []
    for measure in measures:
        function, names = every[measure]
        operands = [examples[name] for name in names]
        once = jax.jit(shard_map(function)).lower(*operands).compile()
        repeated = once
        if calls > 1:
            repeated = jax.jit(shard_map(repeat(function, calls))).lower(*operands).compile()
        compiled.append(CompiledMeasure(measure, names, once, repeated))
    return CompiledColumn(column, prepare, tuple(compiled), calls)
