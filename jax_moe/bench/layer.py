"""Times the whole MoE layer beside the same layer with other exchanges, and by part.

python -m jax_moe.bench.layer --help
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jax_moe
from jax_moe.bench import _command_line, _environment, _layer_columns, _shapes
from jax_moe.bench._clock import Preparation, Timed, time_in_turns
from jax_moe.bench._command_line import count, some_of
from jax_moe.bench._layer_parts import PARTS, make_parts
from jax_moe.bench._programs import pool_bytes
from jax_moe.bench._report import fact_lines, ms, skipped_lines

# Allowed difference of outputs and gradients, relative to the largest value: other orders of
# summation, and in bfloat16 other roundings between the steps.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2.0**-4}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record(Timed):
    """One program's time, microseconds, and what it takes on one device."""

    column: str  # "part" for a part of ours
    measure: str
    tflops: float | None  # per second on one device; of whole layers
    peak_bytes: int | None  # temporaries, outputs and our pool; of whole layers


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jax_moe.bench.layer",
        description="Times forward + backward of the whole MoE layer, with our exchange and with "
        "others, after comparing outputs and gradients; and each part of ours by itself.",
    )
    parser.add_argument("--shape", choices=_shapes.SHAPES, default="cpu8")
    for name in ("tokens", "hidden", "width", "experts"):
        parser.add_argument(f"--{name}", type=count, help="instead of the shape's")
    parser.add_argument("--routing", choices=_shapes.ROUTINGS, default="balanced")
    parser.add_argument("--dtype", choices=tuple(TOLERANCE), default="bfloat16")
    parser.add_argument(
        "--columns", type=some_of(_layer_columns.NAMES), default=_layer_columns.NAMES,
        help="comma-separated",
    )  # fmt: skip
    parser.add_argument("--devices", type=count, help="devices to use (on CPU, to make)")
    parser.add_argument("--virtual-ranks", type=count, default=1, help="ranks of each device")
    parser.add_argument("--repetitions", type=count, default=30, help="most of each program")
    seconds = "about what timing may take; compiling comes before, and takes what it takes"
    parser.add_argument("--seconds", type=float, default=60.0, help=seconds)
    parser.add_argument("--no-parts", action="store_true", help="whole layers only")
    _command_line.add_arguments(parser)
    return parser


def _gradients(apply: Callable, layer: _layer_columns.Layer) -> jax.stages.Compiled:
    """Output and gradients of weights and tokens, given (params, x, dy)."""

    def program(params, x, dy):
        y, pull = jax.vjp(apply, params, x)
        y, dy = jax.lax.optimization_barrier((y, dy))  # as with a loss in between
        return y, pull(dy)

    return jax.jit(program).lower(layer.params, layer.x, layer.dy).compile()


def _check(name: str, got: Any, want: Any, tolerance: float) -> None:
    """Raises AssertionError where outputs or gradients differ too much."""
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        scale = float(jnp.abs(b).max())
        error = float(jnp.abs(a.astype(jnp.float32) - b.astype(jnp.float32)).max())
        if not error <= tolerance * scale:
            raise AssertionError(
                f"{name}: {jax.tree_util.keystr(path)} differs by {error:.3g} from the first "
                f"column's, whose largest value is {scale:.3g}; allowed is {tolerance:.3g} of it."
            )


def _peak_bytes(program: jax.stages.Compiled, layer: _layer_columns.Layer, *, pool: bool) -> int:
    analysis: Any = program.memory_analysis()
    found = analysis.temp_size_in_bytes + analysis.output_size_in_bytes
    sizes = layer.shape.tokens, layer.shape.top_k, layer.shape.experts, layer.shape.hidden
    return found + (pool_bytes(layer.group, *sizes, layer.dtype) if pool else 0)


def _whole_layers(layer, ids, names: Sequence[str], skipped: dict[str, str]):
    """The columns that can run here, compiled, each found equal to the first."""
    compiled, first = {}, None
    for name in names:
        try:
            with _command_line.told(f"compiling {name}"):
                compiled[name] = _gradients(_layer_columns.make(name, layer, ids), layer)
        except NotImplementedError as error:
            skipped[name] = str(error)
            continue
        if name != "local":  # which computes something else
            results = compiled[name](layer.params, layer.x, layer.dy)
            first = results if first is None else first
            _check(name, results, first, TOLERANCE[layer.dtype])
    return compiled


def _shape(args: argparse.Namespace) -> _shapes.Shape:
    changes = {n: getattr(args, n) for n in ("tokens", "hidden", "width", "experts")}
    given = {name: value for name, value in changes.items() if value is not None}
    return dataclasses.replace(_shapes.SHAPES[args.shape], **given)


def run(args: argparse.Namespace, devices: Sequence[Any]) -> tuple[dict[str, Any], list[Record]]:
    """Facts of the setting, and a record of each program."""
    mesh = jax_moe.make_mesh(rank=len(devices), devices=devices)
    group = jax_moe.ExpertGroup(mesh, axes=("rank",), virtual_ranks=args.virtual_ranks)
    layer = _layer_columns.make_layer(_shape(args), group, args.dtype, args.routing)
    ids, skipped = _layer_columns.routed_ids(layer), {}
    whole = _whole_layers(layer, ids, args.columns, skipped)
    programs: dict[tuple[str, str], Callable[[], Any]] = {
        (name, "forward+backward"): functools.partial(p, layer.params, layer.x, layer.dy)
        for name, p in whole.items()
    }
    on_cpu = devices[0].platform == "cpu"
    if not args.no_parts:
        way = _layer_columns.make_way("cpu" if on_cpu else "ptx", layer, ids)
        with _command_line.told("compiling the parts"):
            parts = make_parts(layer, *way)
        programs |= {("part", name): part for name, part in parts.items()}
    for program in programs.values():  # on GPUs the first runs capture a CUDA graph
        for _ in range(2):
            jax.block_until_ready(program())
    until, before = time.monotonic() + args.seconds, Preparation(mesh)
    times = time_in_turns(list(programs.values()), before, until=until, most=args.repetitions)
    records = []
    for (column, measure), taken in zip(programs, times, strict=True):
        tflops = peak = None
        if column in whole:
            tflops = layer.flops / taken.summary["median_us"] / 1e6
            pool = not on_cpu and column in ("moe", "ptx")
            peak = _peak_bytes(whole[column], layer, pool=pool)
        records.append(
            Record(
                column=column,
                measure=measure,
                tflops=tflops,
                peak_bytes=peak,
                **taken.summary,
            )
        )
    experts = layer.shape.experts
    facts = {
        "layer": f"{layer.shape}, W {layer.shape.width}, {layer.shape.num_shared} shared, "
        f"{args.dtype}, {layer.group.num_ranks} ranks on {len(devices)} devices",
        "routing": f"{args.routing}, MaxVio {_shapes.max_violation(ids, experts):.2f}, "
        f"{_shapes.tight_capacity(ids, experts)} rows of capacity a rank",
        "before each timed call": before.words,
        "skipped": skipped,
    }
    return facts, records


def _lines(facts: dict[str, Any], records: list[Record], conditions) -> Iterator[str]:
    yield f"## The layer: {facts['layer']}"
    yield ""
    yield from fact_lines(conditions | {n: facts[n] for n in ("routing", "before each timed call")})
    yield (
        "- forward and backward, milliseconds, median ± deviation of repetitions in which all "
        "programs take turns; outputs and gradients of tokens and weights of all columns but "
        "`local` were equal before; peak memory is XLA's temporaries and outputs, and our pool"
    )
    yield ""
    yield "| column | what | ms | of the first's | TFLOP/s a device | peak MB | repetitions |"
    yield "| --- | --- | ---: | ---: | ---: | ---: | ---: |"
    whole = [r for r in records if r.column != "part"]
    for r in whole:
        yield (
            f"| {r.column} | {_layer_columns.title(r.column)} | {ms(r.median_us)} ± "
            f"{ms(r.deviation_us)} | {r.median_us / whole[0].median_us:.2f} | {r.tflops:.3g} | "
            f"{(r.peak_bytes or 0) / 1e6:.0f} | {r.repetitions} |"
        )
    if parts := [r for r in records if r.column == "part"]:
        yield ""
        yield "| part of ours, alone | inside the timed region | ms | of their sum | repetitions |"
        yield "| --- | --- | ---: | ---: | ---: |"
        total = sum(r.median_us for r in parts)
        for r in parts:
            share = f"{ms(r.median_us)} | {r.median_us / total:.1%} | {r.repetitions}"
            yield f"| {r.measure} | {PARTS[r.measure]} | {share} |"
        yield f"| sum | | {ms(total)} | | |"
    yield from skipped_lines(facts["skipped"])


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the bench and prints its report."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = _parser()
    args = parser.parse_args(given)
    devices = _environment.take_devices(args.devices, _shape(args), args.virtual_ranks)
    conditions = _environment.conditions(devices, parser.prog, given)
    facts, records = run(args, devices)
    report = "\n".join(_lines(facts, records, conditions)) + "\n"
    document: dict[str, Any] = facts | {"conditions": conditions}
    document["records"] = [dataclasses.asdict(r) for r in records]
    _command_line.publish(args, report, document)


if __name__ == "__main__":
    main()
