"""Where the benches' reports go."""

from __future__ import annotations

import argparse
import json
import pathlib
from typing import Any


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
