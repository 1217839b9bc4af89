"""Optional columns: DeepEP V1 of PyTorch, on the same routing, in processes of its own.

Its ranks are processes (`_deepep_rank.py`), since JAX holds the GPUs of this one. They get ids and
operands in files, write results, which are checked here as all columns' are, and their times.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_moe
from jax_moe import _ffi
from jax_moe.bench._clock import LEAST
from jax_moe.bench._problem import Inputs, Problem

KIND = "deepep"
SMS = 20  # its own default
PROGRAM = Path(__file__).with_name("_deepep_rank.py")
MEASURES = ("plan+dispatch+combine", "plan+dispatch", "combine")  # of the bench's, those it has
BARE = {"plan+dispatch": "bare plan+dispatch", "combine": "bare combine"}
RANKS = (2, 4, 8)  # for which it has configurations on one host
SECONDS = 15.0  # about what the repetitions of one setting may take
LIMIT_S = 150.0  # after which a setting's processes are killed
_GRACE_S = 5.0  # for the other ranks, when one has failed


class Failed(RuntimeError):
    """The processes did not come to an end with results."""


def sms(name: str) -> int:
    """SMs of the column called "deepep" or "deepep:N"."""
    return int(name.partition(":")[2] or SMS)


def title(name: str) -> str:
    """What the column is, in words."""
    return (
        f"DeepEP V1 on PyTorch, intranode, {sms(name)} SMs, the host never waits; to expert rows "
        "and back by Triton kernels, a token read once; after the other columns, in processes of "
        "its own, by CUDA events, the slowest rank; bare: one row a token and rank, no expert rows"
    )


def obstacle(name: str, group: jax_moe.ExpertGroup, dtype: str, share_gpus: bool) -> str | None:
    """Why the column cannot run here, or None."""
    packages = ("torch", "triton", "deep_ep")
    missing = [package for package in packages if not importlib.util.find_spec(package)]
    first = group.devices[0]
    if first.platform != "gpu":
        return "DeepEP runs on NVIDIA GPUs"
    if missing:
        return f"no Python package {', '.join(missing)}: pip install torch tokenspeed_deepep"
    if dtype != "bfloat16":
        return f"DeepEP takes bfloat16, not {dtype}"
    if jax.process_count() > 1:
        return "it needs all GPUs in one process of JAX's"
    if group.num_ranks not in RANKS:
        return f"DeepEP has a configuration for {RANKS} ranks of one host, not {group.num_ranks}"
    if group.virtual_ranks > 1 and not share_gpus:
        return (
            f"{group.num_ranks} ranks on {group.num_devices} GPU(s): with --share-gpus its "
            "processes share them, under MPS or in turns"
        )
    if (needed := sms(name) * group.virtual_ranks) > (there := _num_sms(first)):
        return f"its ranks would need {needed} SMs of a GPU that has {there}"
    return None


def _num_sms(device: Any) -> int:
    return _ffi.cuda.describe_gpu(device.local_hardware_id)["num_sms"]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What the processes gave, by column and measure.

    Args:
      seconds: of each repetition, at the slowest rank.
      memory: bytes of one rank, by "temp" and "output".
      own_bytes: of DeepEP's buffer on one GPU, by column.
    """

    seconds: dict[tuple[str, str], tuple[float, ...]]
    memory: dict[tuple[str, str], dict[str, int]]
    own_bytes: dict[str, int]


def run(
    columns: Sequence[str],
    problem: Problem,
    inputs: Inputs,
    check,
    *,
    measures: Sequence[str],
    calls: int,
    repetitions: int,
) -> Outcome:
    """Verifies and times some DeepEP columns.

    Args:
      columns: their names.
      problem: sizes and group.
      inputs: operands of all ranks.
      check: called with (column, measure, rank, results) of each; raises where they are wrong.
      measures: of the bench; with each comes the bare one.
      calls: in one timed region.
      repetitions: at most, but `LEAST` at the least.

    Raises:
      Failed: with what the processes said.
    """
    wanted = [measure for measure in MEASURES if measure in measures]
    wanted += [BARE[measure] for measure in wanted if measure in BARE]
    settings = {
        "ranks": problem.group.num_ranks,
        "experts": problem.shape.experts,
        "gpus": [
            problem.group.devices[rank // problem.group.virtual_ranks].local_hardware_id
            for rank in range(problem.group.num_ranks)
        ],
        "sms": [sms(name) for name in columns],
        "measures": wanted,
        "calls": calls,
        "least": LEAST,
        "repetitions": max(LEAST, repetitions),
        "seconds": SECONDS,
        "limit_s": 0.9 * LIMIT_S,
    }
    with tempfile.TemporaryDirectory(prefix="jax_moe_deepep_") as name:
        folder = Path(name)
        _hand_over(folder, settings, inputs)
        _run_ranks(folder, settings["ranks"])
        _check_results(folder, columns, settings["ranks"], check)
        return _parse(json.loads((folder / "outcome.json").read_text()), columns, wanted)


def _hand_over(folder: Path, settings: dict[str, Any], inputs: Inputs) -> None:
    (folder / "settings.json").write_text(json.dumps(settings))
    for rank in range(settings["ranks"]):
        np.savez(
            folder / f"{rank}.npz",
            ids=inputs.ids[rank],
            s=inputs.s[rank],
            x=inputs.x[rank].view(np.uint16),
            rows=inputs.rows[rank].view(np.uint16),
        )


def _environment() -> dict[str, str]:
    """DeepEP is linked against NVSHMEM's library, although it does not use it on one host."""
    found = importlib.util.find_spec("nvidia")
    folders = [f"{path}/nvshmem/lib" for path in (found and found.submodule_search_locations) or ()]
    old = os.environ.get("LD_LIBRARY_PATH", "")
    return os.environ | {
        "LD_LIBRARY_PATH": ":".join([*filter(os.path.isdir, folders), *filter(None, [old])]),
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONUNBUFFERED": "1",
    }


def _run_ranks(folder: Path, ranks: int) -> None:
    """Runs the processes; whatever happens, none of them or of their children is left."""
    environment, started = _environment(), []
    try:
        for rank in range(ranks):
            command = [sys.executable, "-P", str(PROGRAM), str(folder), str(rank)]
            with (folder / f"{rank}.log").open("wb") as log:
                started.append(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        env=environment,
                        start_new_session=True,
                    )
                )
        wrong, how = _wait(started)
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if wrong is not None:
        end = (folder / f"{wrong}.log").read_text(errors="replace").strip().splitlines()[-12:]
        raise Failed(f"rank {wrong}: {how}; it said: {' / '.join(end) or 'nothing'}")


def _wait(started: list[subprocess.Popen]) -> tuple[int | None, str]:
    """Waits for all; the rank that failed first, or has not ended in time, and how."""
    end, wrong, how = time.monotonic() + LIMIT_S, None, ""
    while True:
        codes = [process.poll() for process in started]
        if wrong is None and (failed := [rank for rank, code in enumerate(codes) if code]):
            wrong, how = failed[0], f"status {codes[failed[0]]}"
            end = min(end, time.monotonic() + _GRACE_S)
        if None not in codes or (wrong is not None and time.monotonic() > end):
            return wrong, how
        if time.monotonic() > end:
            wrong, how = codes.index(None), f"not done after {LIMIT_S:g} s"
        else:
            time.sleep(0.05)


def _check_results(folder: Path, columns: Sequence[str], ranks: int, check) -> None:
    """Equal results of several columns are one file, which is checked once."""
    checked = set()
    for column in columns:
        for rank in range(ranks):
            path = folder / f"{rank}-{sms(column)}.npz"
            if path.stat().st_ino in checked:
                continue
            checked.add(path.stat().st_ino)
            with np.load(path) as results:
                for measure in MEASURES:
                    names = [n for n in results.files if n.rpartition(" ")[0] == measure]
                    check(column, measure, rank, [_typed(results[name]) for name in names])


def _typed(bits: np.ndarray) -> np.ndarray:
    return bits.view({2: jnp.bfloat16, 4: np.float32}[bits.dtype.itemsize])


def _parse(outcome: dict[str, Any], columns: Sequence[str], measures: Sequence[str]) -> Outcome:
    keys = {(c, m): f"{sms(c)} {m}" for c in columns for m in measures}
    return Outcome(
        {key: tuple(outcome["seconds"][name]) for key, name in keys.items()},
        {key: outcome["memory"][name] for key, name in keys.items()},
        {column: outcome["own_bytes"][str(sms(column))] for column in columns},
    )
