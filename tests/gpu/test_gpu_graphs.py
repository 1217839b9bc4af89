"""The calls inside CUDA graphs, in every way XLA makes them; two chains of one group in one jit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("graph_program.py")
SMALL = "--xla_gpu_graph_min_graph_size=1"


@pytest.mark.parametrize(
    ("flags", "captured"),
    [
        ("", None),  # as users run it; whether XLA captures so short a program is its choice
        ("--xla_gpu_enable_command_buffer=", False),
        (f"{SMALL} --xla_gpu_command_buffer_scheduling_mode=SERIALIZE", True),
        (f"{SMALL} --xla_gpu_command_buffer_scheduling_mode=LHS", True),
        # Orders by buffer conflicts alone, so the calls stay out of its graphs.
        (f"{SMALL} --xla_gpu_command_buffer_scheduling_mode=CONCURRENT", False),
        ("--xla_gpu_enable_latency_hiding_scheduler=true", None),
    ],
)
def test_graphs(flags, captured):
    counts = run_program(flags)
    if captured is True:
        assert counts["launches"] < counts["calls"], "no call was replayed by a graph"
    elif captured is False:
        assert counts["launches"] == counts["calls"]


def test_on_the_stream_of_collectives():
    run_program("--xla_gpu_experimental_stream_annotation=true", "collective")


def run_program(flags: str, *arguments: str) -> dict[str, int]:
    """Runs the program, which checks every result; returns what it counted."""
    environment = os.environ | {
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip(),
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.05",
    }
    done = subprocess.run(
        [sys.executable, PROGRAM, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    counts = json.loads(done.stdout.splitlines()[-1])
    print(flags, *arguments, counts)
    return counts
