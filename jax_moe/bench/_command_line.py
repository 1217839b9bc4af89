"""What the benches' command lines share: numbers, names, and where reports go."""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any


def say(text: str) -> None:
    """Tells on standard error how far a bench is; its report goes to standard output."""
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def told(what: str) -> Iterator[None]:
    """Says what begins, and how long it took."""
    say(f"{what} ...")
    start = time.monotonic()
    yield
    say(f"{what}: {time.monotonic() - start:.0f} s")


def count(text: str) -> int:
    """Parses a number of 1 or more."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number of 1 or more")
    return int(text)


def some_of(allowed: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """Makes the parser of a comma-separated list of some of `allowed`."""

    def parse(text: str) -> tuple[str, ...]:
        chosen = tuple(text.split(","))
        if wrong := [name for name in chosen if name not in allowed]:
            raise argparse.ArgumentTypeError(f"{wrong}: choose from {', '.join(allowed)}")
        return chosen

    return parse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that name files."""
    parser.add_argument("--json", type=pathlib.Path, help="write everything there")
    parser.add_argument("--markdown", type=pathlib.Path, help="append the report there")


def publish(args: argparse.Namespace, report: str, document: dict[str, Any]) -> None:
    """Prints the report (Markdown), and writes it and everything into the files asked for."""
    print(report)
    if args.json:
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    if args.markdown:
        with args.markdown.open("a") as file:
            file.write("\n" + report)
