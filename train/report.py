"""What a run tells: a JSONL log, a progress bar, and lines above it."""

from __future__ import annotations

import collections
import json
import math
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from train import processes
from train.config import Config

_SPEED_WINDOW = 20  # steps over which tokens/s is averaged


def read_log(path: Path) -> list[dict[str, Any]]:
    """Reads a JSONL log; a last line torn by a kill is left out."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records


class Log:
    """The run's log, one JSON object a line, cut back to the step from which the run goes on.

    Args:
      path: its file; None keeps nothing.
      start_step: the step from which the run goes on.
    """

    def __init__(self, path: Path | None, start_step: int):
        self._file = self._last = None
        if path is None:
            return
        kept = []
        if path.exists():
            kept = [record for record in read_log(path) if record["step"] <= start_step]
        partial = path.with_suffix(".part")
        partial.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
        partial.replace(path)
        self._file = path.open("a", encoding="utf-8")
        self._last = kept[-1] if kept else None

    def write(self, record: dict[str, Any]) -> None:
        """Adds a record, at once; one that just repeats the last is left out."""
        if self._file is None or record == self._last:
            return
        self._last = record
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()


def to_record(step: int, metrics: dict[str, Any], step_s: float, data_s: float, tokens: int):
    """Turns a step's metrics into a log record.

    Args:
      step: optimizer steps done, this one included.
      metrics: what the step returned; waits for it.
      step_s: seconds since the step before was done.
      data_s: seconds of them spent waiting for data.
      tokens: tokens of the step.
    """
    metrics = jax.device_get(metrics)
    record = {
        "step": step,
        "loss": float(metrics["loss"]),
        "bits_per_byte": float(metrics["loss"]) / math.log(2),
        "grad_norm": float(metrics["grad_norm"]),
        "learning_rate": float(metrics["learning_rate"]),
        "step_s": step_s,
        "data_s": data_s,
        "tokens_per_s": tokens / step_s,
    }
    if "moe" in metrics:
        stats = metrics["moe"]
        record["max_vio"] = float(np.max(stats.max_vio))
        names = ("max_vio", "min_load", "dropped", "router_entropy", "nodes_per_token", "aux_loss")
        record["layers"] = {name: np.asarray(getattr(stats, name)).tolist() for name in names}
    return record


class Reporter:
    """Shows a run on the console and writes its log.

    Args:
      config: the run.
      console: where to; without a terminal only the lines are printed.
      start_step: the step from which the run goes on.
    """

    def __init__(self, config: Config, console: Console, start_step: int):
        self._config, self._console = config, console
        path = config.folder / "log.jsonl"
        self._log = Log(path if processes.leads() else None, start_step)
        self._times = collections.deque(maxlen=_SPEED_WINDOW)
        self._progress = Progress(
            TextColumn("[bold]{task.fields[name]}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[summary]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task(
            "", total=config.steps, completed=start_step, name=config.name, summary=""
        )

    def __enter__(self) -> Reporter:
        self._progress.start()
        self._last = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
        self._log.close()

    def say(self, text: str) -> None:
        """Prints a line above the bar."""
        self._console.print(text, highlight=False, soft_wrap=True)

    def skip_time(self) -> None:
        """Leaves the time since the last step (spent on saving, validating) out of the next."""
        self._last = time.perf_counter()

    def step(self, step: int, metrics: dict[str, Any], data_s: float) -> None:
        """Records one step; waits for its metrics."""
        jax.block_until_ready(metrics)
        now = time.perf_counter()
        step_s, self._last = now - self._last, now
        self._times.append(step_s)
        tokens = self._config.data.batch * self._config.data.sequence
        record = to_record(step, metrics, step_s, data_s, tokens)
        self._log.write(record)
        summary = self._summary(record, tokens)
        self._progress.update(self._task, completed=step, summary=summary)
        if step % self._config.print_every == 0 or step in (1, self._config.steps):
            self.say(f"step {step:>{len(str(self._config.steps))}}  {summary}")

    def _summary(self, record: dict[str, Any], tokens: int) -> str:
        speed = tokens * len(self._times) / sum(self._times)
        text = f"loss {record['loss']:.3f}  {record['bits_per_byte']:.3f} bits/byte"
        text += f"  {speed:,.0f} tokens/s"
        if "max_vio" in record:
            text += f"  MaxVio {record['max_vio']:.2f}"
        dropped = np.sum(record.get("layers", {}).get("dropped", 0))
        return text + (f"  dropped {dropped}" if dropped else "")

    def validation(self, step: int, bits: float) -> None:
        """Records the validation score."""
        self._log.write({"step": step, "val_bits_per_byte": bits})
        self.say(f"step {step}  val bits/byte {bits:.4f}")
