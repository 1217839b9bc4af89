"""The conditions of a run, for its report: versions, machine, commit."""

from __future__ import annotations

import contextlib
import datetime
import os
import pathlib
import platform
import shlex
import subprocess
from collections.abc import Sequence
from typing import Any

import jax
import jaxlib.version

import jax_moe
from jax_moe.bench._shapes import Shape


def take_devices(wanted: int | None, shape: Shape, virtual_ranks: int) -> list[Any]:
    """The first `wanted` devices; by default all, of which CPU devices are made for the shape.

    Raises:
      SystemExit: there are fewer, or their ranks cannot have equally many experts.
    """
    on_cpu = max(1, shape.ranks // virtual_ranks)
    with contextlib.suppress(RuntimeError):  # whoever called may have made its CPU devices
        jax.config.update("jax_num_cpu_devices", wanted or on_cpu)
    devices = jax.devices()
    if wanted is None:
        wanted = on_cpu if devices[0].platform == "cpu" else len(devices)
    if len(devices) < wanted:
        raise SystemExit(f"--devices {wanted}: JAX finds {len(devices)} of {devices[0].platform}.")
    if shape.experts % (ranks := wanted * virtual_ranks):
        raise SystemExit(
            f"--devices {wanted} --virtual-ranks {virtual_ranks}: {shape.experts} experts cannot "
            f"be shared out evenly to {ranks} ranks; choose other numbers, or another --shape."
        )
    return devices[:wanted]


def conditions(devices: Sequence[Any], program: str, given: Sequence[str]) -> dict[str, str]:
    """What a reader needs to judge or repeat the run, in words."""
    first = devices[0]
    found = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _commit(),
        "command": f"{program} {shlex.join(given)}".rstrip(),
        "devices": f"{len(devices)} x {first.device_kind} ({first.platform})",
        "processes": str(jax.process_count()),
        "cpu": f"{_cpu_model()}, {len(os.sched_getaffinity(0))} cores usable",
        "memory": _memory(),
        "versions": f"jax {jax.__version__}, jaxlib {jaxlib.version.__version__}, "
        f"Python {platform.python_version()}, {platform.system()} {platform.machine()}",
        "load average": load_average(),
    }
    if first.platform != "cpu":
        found["driver"] = first.client.platform_version.replace("\n", " ")
    if os.environ.get("XLA_FLAGS"):
        found["XLA_FLAGS"] = os.environ["XLA_FLAGS"]
    return found


def load_average() -> str:
    """Processes that want to run, over the last 1, 5 and 15 minutes."""
    return " ".join(f"{load:.1f}" for load in os.getloadavg())


def _commit() -> str:
    """The commit of the source tree that runs, and whether the code differs from it."""
    source = pathlib.Path(jax_moe.__file__).parent

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(source), *arguments], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    try:
        commit = git("rev-parse", "--short=12", "HEAD")
        changed = git("status", "--porcelain", "--", ".", "../xla_ffi", "../ptx")
    except (OSError, subprocess.CalledProcessError):
        return "not in a git work tree"
    return f"{commit} (with uncommitted changes)" if changed else commit


def _cpu_model() -> str:
    for line in _lines("/proc/cpuinfo"):
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _memory() -> str:
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemTotal"):
            return f"{int(line.split()[1]) / 2**20:.0f} GiB"
    return "unknown"


def _lines(path: str) -> list[str]:
    try:
        return pathlib.Path(path).read_text().splitlines()
    except OSError:
        return []
