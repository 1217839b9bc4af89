"""Command line of the bench."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from jax_moe.bench import _columns, _command_line, _environment, _report, _run
from jax_moe.bench._command_line import count, some_of
from jax_moe.bench._programs import MEASURES
from jax_moe.bench._shapes import ROUTINGS, SHAPES

# The specification is too slow to be a column of its own; DeepEP is of another library.
DEFAULT_COLUMNS = tuple(name for name in _columns.NAMES if name not in ("reference", "deepep"))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jax_moe.bench",
        description="Times plan, dispatch and combine beside the plain-JAX ways, after verifying "
        "every column. On CPU it makes as many devices as the shape has ranks; else it takes "
        "those it finds.",
    )
    parser.add_argument("--shape", choices=SHAPES, default="cpu8")
    parser.add_argument("--routing", type=some_of(ROUTINGS), default=ROUTINGS)
    parser.add_argument(
        "--dtype", type=some_of(("bfloat16", "float32")), default=("bfloat16", "float32")
    )
    parser.add_argument(
        "--columns", type=_columns_of, default=DEFAULT_COLUMNS,
        help='comma-separated; "ptx:N" is ptx with N SMs that send to other GPUs, "deepep:N" '
        "DeepEP V1 with N SMs, if PyTorch and tokenspeed_deepep are installed",
    )  # fmt: skip
    parser.add_argument("--measures", type=some_of(tuple(MEASURES)), default=tuple(MEASURES))
    parser.add_argument("--devices", type=count, help="devices to use (on CPU, to make)")
    parser.add_argument("--virtual-ranks", type=count, default=1, help="ranks of each device")
    parser.add_argument(
        "--share-gpus", action="store_true",
        help="DeepEP's processes share GPUs where these have virtual ranks",
    )  # fmt: skip
    parser.add_argument(
        "--capacity-factor", type=float,
        help="rows of a rank as a multiple of the balanced load; by default just what the ids "
        "need, which favours the plain-JAX ways",
    )  # fmt: skip
    parser.add_argument(
        "--calls", type=count,
        help="calls in sequence in one timed region, by default 1 on CPU and 10 on GPUs, where "
        "starting a program would outweigh one call",
    )  # fmt: skip
    parser.add_argument("--tail", choices=("zero", "undefined"), help="of ours; default: its own")
    parser.add_argument("--repetitions", type=count, default=50, help="most of each program")
    seconds = (
        "after about so long each program is timed a few more times at most; compiling and "
        "checking count, but are not cut short"
    )
    parser.add_argument("--seconds", type=float, default=200.0, help=seconds)
    parser.add_argument("--seed", type=int, default=0)
    _command_line.add_arguments(parser)
    return parser


def _columns_of(text: str) -> tuple[str, ...]:
    try:
        return tuple(_columns.check_name(name) for name in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the bench and prints its report."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = _parser()
    args = parser.parse_args(given)
    shape = SHAPES[args.shape]
    devices = _environment.take_devices(args.devices, shape, args.virtual_ranks)
    conditions = _environment.conditions(devices, parser.prog, given)
    outcome = _run.run(
        _run.Options(
            shape=shape,
            routings=args.routing,
            dtypes=args.dtype,
            columns=args.columns,
            measures=args.measures,
            repetitions=args.repetitions,
            seconds=args.seconds,
            capacity_factor=args.capacity_factor,
            tail=args.tail,
            virtual_ranks=args.virtual_ranks,
            calls=args.calls or (1 if devices[0].platform == "cpu" else 10),
            seed=args.seed,
            share_gpus=args.share_gpus,
        ),
        devices,
    )
    conditions["load average"] += f" before, {_environment.load_average()} after"
    report = _report.as_markdown(outcome, conditions)
    _command_line.publish(args, report, _report.as_document(outcome, conditions))


if __name__ == "__main__":
    main()
