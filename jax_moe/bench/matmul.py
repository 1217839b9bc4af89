"""Times the experts' grouped matmul and its gradients beside a dense matmul of as many rows.

python -m jax_moe.bench.matmul --help
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

import jax_moe
from jax_moe import _grouped_matmul, _pallas_operands
from jax_moe.bench import _command_line, _environment, _matmul_peers
from jax_moe.bench._clock import Preparation, Timed, time_in_turns
from jax_moe.bench._command_line import count, some_of
from jax_moe.bench._problem import random_values
from jax_moe.bench._report import fact_lines, ms
from jax_moe.bench._run import copy_bytes, copy_programs

DENSE = "dense"
ENGINES = (*get_args(_grouped_matmul.Engine), *_matmul_peers.NAMES)
OPERATIONS = ("product", "rows' gradient", "weights' gradient")
SKEW = 1.0  # MaxVio of the uneven routings: the busiest expert has twice the mean
ROUTINGS = {
    "balanced": "every expert has as many rows",
    "skewed": "the busiest has twice the mean, the others half to one and a half of theirs; "
    "groups begin at multiples of 8 rows, as in the layer",
    "unaligned": "the same with groups that begin anywhere",
}
TOLERANCE = 2.0**-6  # of the largest value, between bfloat16 results of two orders of summation


@dataclasses.dataclass(frozen=True)
class Case:
    """Rows [rows, inner] over `experts` matrices [inner, outer]; no row is padding."""

    experts: int
    rows: int
    inner: int
    outer: int
    routing: str

    @property
    def flops(self) -> int:
        """Of one operation."""
        return 2 * self.rows * self.inner * self.outer

    @property
    def bytes(self) -> int:
        """Read and written by one operation at the least, bfloat16."""
        matrices = self.experts * self.inner * self.outer
        return 2 * (self.rows * (self.inner + self.outer) + matrices)

    def sizes(self) -> np.ndarray:
        """Rows of each expert, int32."""
        share = np.ones(self.experts)
        if self.routing != "balanced" and self.experts > 1:
            rng = np.random.default_rng(self.experts)
            others = np.arange(self.experts) != self.experts // 2
            share[others] = rng.uniform(0.5, 1.5, self.experts - 1)
            share[others] *= (self.experts - 1 - SKEW) / share[others].sum()
            share[~others] = 1 + SKEW
        step = 1 if self.routing == "unaligned" else np.gcd(8, self.rows)
        edges = np.rint(np.cumsum(share) / share.sum() * self.rows / step) * step
        return np.diff(edges, prepend=0).astype(np.int32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record(Timed):
    """One engine's time of one operation, microseconds a call."""

    case: Case
    operation: str
    engine: str
    bytes_us: float  # the operation's bytes at the speed of a copy


def _operation(name: str, engine: Any) -> Callable:
    """One operation as a function of (rows, weights, cotangent, group sizes)."""
    if engine == DENSE:
        return {
            "product": lambda x, w, dy, sizes: x @ w[0],
            "rows' gradient": lambda x, w, dy, sizes: dy @ w[0].T,
            "weights' gradient": lambda x, w, dy, sizes: x.T @ dy,
        }[name]
    if engine in _matmul_peers.NAMES:
        return _matmul_peers.operation(engine, name)
    return _matmul_peers.from_product(
        name, functools.partial(jax_moe.grouped_matmul, engine=engine)
    )


def _program(name: str, engine: str, operands: Sequence[jax.Array]) -> Callable:
    """The same, compiled where JAX compiles it."""
    apply = _operation(name, engine)
    return apply if engine == _matmul_peers.EAGER else jax.jit(apply).lower(*operands).compile()


def _operands(case: Case) -> tuple[jax.Array, ...]:
    shapes = (
        (case.rows, case.inner),
        (case.experts, case.inner, case.outer),
        (case.rows, case.outer),
    )
    keys = jax.random.split(jax.random.key(0), 3)
    draw = jax.jit(jax.random.normal, static_argnums=(1, 2))
    return tuple(draw(k, s, jnp.bfloat16) for k, s in zip(keys, shapes, strict=True))


def _fault(case: Case, engine: str, operation: str, got: jax.Array, operands) -> str | None:
    """What is wrong with the busiest expert's part, compared with a plain matmul."""
    x, w, dy = operands
    sizes = case.sizes()
    expert = int(sizes.argmax())
    start, end = int(sizes[:expert].sum()), int(sizes[: expert + 1].sum())
    want = {
        "product": lambda: x[start:end] @ w[expert],
        "rows' gradient": lambda: dy[start:end] @ w[expert].T,
        "weights' gradient": lambda: x[start:end].T @ dy[start:end],
    }[operation]()
    part = got[expert] if operation == "weights' gradient" else got[start:end]
    error, scale = (float(jnp.abs(a.astype(jnp.float32)).max()) for a in (part - want, want))
    if error <= TOLERANCE * scale:
        return None
    return f"{engine}, {operation}, {case}: off by {error:.3g} of {scale:.3g}"


def measure(
    cases: Sequence[Case],
    args: argparse.Namespace,
    before: Preparation,
    copy_bytes_per_us: float,
    left_out: list[str],
) -> Iterator[Record]:
    """Times the operations of cases that differ in the routing alone, after comparing results.

    Another library's wrong result is left out, and said in `left_out`; ours raises AssertionError.
    """
    operands = _operands(cases[0])
    sizes = [jnp.asarray(case.sizes()) for case in cases]
    for operation in OPERATIONS:
        programs = {
            engine: _program(operation, engine, (*operands, sizes[0]))
            for engine in (DENSE, *args.engines)
        }
        for case, own_sizes in zip(cases, sizes, strict=True):
            right = [DENSE]
            for engine in args.engines:
                result = jnp.asarray(programs[engine](*operands, own_sizes))
                why = _fault(case, engine, operation, result, operands)
                if why is None:
                    right.append(engine)
                elif engine in _matmul_peers.NAMES:
                    left_out.append(why)
                else:
                    raise AssertionError(why)
            repeated = [
                functools.partial(_repeat, programs[engine], args.calls, (*operands, own_sizes))
                for engine in right
            ]
            until = time.monotonic() + args.seconds
            times = time_in_turns(repeated, before, until=until, most=args.repetitions)
            for engine, taken in zip(right, times, strict=True):
                yield Record(
                    case=case,
                    operation=operation,
                    engine=engine,
                    bytes_us=case.bytes / copy_bytes_per_us,
                    **taken.per_call(args.calls).summary,
                )


def _repeat(program: Callable, calls: int, operands: Sequence[jax.Array]) -> Any:
    for _ in range(calls - 1):  # one after the other on the device, and the host ahead of it
        program(*operands)
    return program(*operands)


def _copy_bytes_per_us(before: Preparation, calls: int) -> float:
    """Of the faster of two copies, bytes read and written, as many calls as of the operations."""
    size = copy_bytes(jax.local_devices()[0])
    words = random_values(np.random.default_rng(0), (size // 4,))
    programs = copy_programs(words, jnp.array, calls)
    times = time_in_turns(programs, before, until=time.monotonic() + 1, most=20)
    return 2 * size / min(taken.per_call(calls).summary["median_us"] for taken in times)


def _lines(
    records: Sequence[Record], left_out: Sequence[str], conditions: dict[str, str], calls: int
) -> Iterator[str]:
    yield "## Grouped matmul, bfloat16"
    yield ""
    yield from fact_lines(conditions)
    yield (
        f"- milliseconds a call, median ± deviation of repetitions of {calls} calls, all engines "
        "in turns; `reached` is the longer of the dense time and the bytes' (at the speed of "
        "a copy) over the engine's; the busiest expert's results were compared before"
    )
    for routing in dict.fromkeys(r.case.routing for r in records):
        yield f"- {routing}: {ROUTINGS[routing]}"
    yield ""
    yield "| experts | rows | K x N | routing | operation | engine | ms | TFLOP/s | reached |"
    yield "| ---: | ---: | --- | --- | --- | --- | ---: | ---: | ---: |"
    dense = {(r.case, r.operation): r for r in records if r.engine == DENSE}
    for r in records:
        yield _row(r, dense[r.case, r.operation])
    for why in left_out:
        yield ""
        yield f"Left out, its result is wrong: {why}."


def _row(r: Record, dense: Record) -> str:
    c, bound = r.case, max(dense.median_us, r.bytes_us)
    return (
        f"| {c.experts} | {c.rows} | {c.inner} x {c.outer} | {c.routing} | {r.operation} | "
        f"{r.engine} | {ms(r.median_us)} ± {ms(r.deviation_us)} | "
        f"{c.flops / r.median_us / 1e6:.0f} | {bound / r.median_us:.0%} |"
    )


def _parser() -> argparse.ArgumentParser:
    def counts(text: str) -> list[int]:
        return [count(part) for part in text.split(",")]

    def shapes(text: str) -> list[list[int]]:
        found = [[count(n) for n in part.split("x")] for part in text.split(",")]
        if any(len(shape) != 2 for shape in found):
            raise argparse.ArgumentTypeError(f"{text!r}: must be KxN, as 7168x2048")
        return found

    parser = argparse.ArgumentParser(
        prog="python -m jax_moe.bench.matmul", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--experts", type=counts, default=[8, 32], help="of one device")
    parser.add_argument("--rows", type=counts, default=[8192, 32768, 65536], help="of all experts")
    parser.add_argument("--shapes", type=shapes, default=[[7168, 2048], [2048, 7168]], help="KxN")
    parser.add_argument(
        "--routings", type=some_of(tuple(ROUTINGS)), default=("balanced", "skewed"),
        help=f"of {', '.join(ROUTINGS)}",
    )  # fmt: skip
    parser.add_argument(
        "--engines", type=some_of(ENGINES),
        help=f"of {', '.join(ENGINES)}; by default what grouped_matmul takes here",
    )  # fmt: skip
    parser.add_argument("--calls", type=count, default=10, help="in one timed region")
    parser.add_argument("--repetitions", type=count, default=10, help="most of each")
    seconds = "about what timing one operation may take; compiling comes before"
    parser.add_argument("--seconds", type=float, default=1.0, help=seconds)
    _command_line.add_arguments(parser)
    return parser


def _shapes(case: Case) -> list[jax.ShapeDtypeStruct]:
    """Rows and weights."""
    shapes = (case.rows, case.inner), (case.experts, case.inner, case.outer)
    return [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]


def _engine_of(case: Case) -> str:
    """What `grouped_matmul` takes here by default."""
    return _grouped_matmul.choose_engine(jax.local_devices()[0], *_shapes(case))


def _obstacle(cases: Sequence[Case]) -> str | None:
    """Why the engine "pallas" cannot run all of these cases here, or None."""
    for case in cases:
        if why := _pallas_operands.obstacle(*_shapes(case)):
            return f"{why}; got --rows {case.rows} --shapes {case.inner}x{case.outer}"
        if _engine_of(case) != "pallas":
            return f"it runs on Hopper GPUs; here is {jax.local_devices()[0].device_kind!r}"
    return None


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the bench and prints its report."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = _parser()
    args = parser.parse_args(given)
    for peer in (n for n in args.engines or () if n in _matmul_peers.NAMES):
        try:
            _matmul_peers.operation(peer, OPERATIONS[0])
        except NotImplementedError as why:
            parser.error(f"--engines: {why}")
    cases = [
        [Case(experts, rows, inner, outer, routing) for routing in args.routings]
        for inner, outer in args.shapes
        for experts in args.experts
        for rows in args.rows
    ]
    args.engines = args.engines or tuple(dict.fromkeys(_engine_of(alike[0]) for alike in cases))
    if "pallas" in args.engines and (why := _obstacle([alike[0] for alike in cases])):
        parser.error(f"--engines pallas: {why}")
    devices = jax.local_devices()[:1]
    conditions = _environment.conditions(devices, parser.prog, given)
    before = Preparation(jax_moe.make_mesh(rank=1, devices=devices))
    speed = _copy_bytes_per_us(before, args.calls)
    conditions["copy"] = f"{speed / 1e3:.0f} GB/s, bytes read and written"
    records: list[Record] = []
    left_out: list[str] = []
    dense: Any = None
    for alike in cases:
        for record in measure(alike, args, before, speed, left_out):
            dense = record if record.engine == DENSE else dense
            _command_line.say(_row(record, dense))
            records.append(record)
    report = "\n".join(_lines(records, left_out, conditions, args.calls)) + "\n"
    document: dict[str, Any] = {"conditions": conditions, "left_out": left_out}
    document["records"] = [dataclasses.asdict(r) for r in records]
    _command_line.publish(args, report, document)


if __name__ == "__main__":
    main()
