"""What a run tells: a JSONL log, TensorBoard's, a progress bar, and lines above it."""

from __future__ import annotations

import collections
import contextlib
import json
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import jax_moe
from train import processes
from train.config import Config
from train.metrics import Meter, scalars

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
        """Adds a record, at once; one that just repeats the last is left out.

        Raises:
          OSError: it cannot be written; names the file.
        """
        if self._file is None or record == self._last:
            return
        self._last = record
        try:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._file.name) from error

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # what was written is flushed, or was told
                self._file.close()


class TensorBoard:
    """The same records as scalars for TensorBoard, in the run's folder.

    Raises:
      ValueError: tensorboardX is not installed.
    """

    def __init__(self, folder: Path, start_step: int):
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise ValueError(
                "tensorboard=True needs tensorboardX: pip install 'jax_moe[train]', or leave it "
                "off (log.jsonl has the same figures)."
            ) from error
        # What a stopped run wrote past its checkpoint no longer counts.
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=start_step + 1)

    def write(self, record: dict[str, Any]) -> None:
        """Adds a record."""
        for name, value in scalars(record).items():
            self._writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        """Closes the file."""
        self._writer.close()


class Reporter:
    """Shows a run on the console and writes its log.

    Args:
      config: the run.
      console: where to; without a terminal only the lines are printed.
      start_step: the step from which the run goes on.
      group: the experts' group.
    """

    def __init__(
        self, config: Config, console: Console, start_step: int, group: jax_moe.ExpertGroup
    ):
        self._config, self._console = config, console
        self._meter = Meter(config, group)
        path = config.folder / "log.jsonl"
        self._logs: list[Log | TensorBoard] = [Log(path if processes.leads() else None, start_step)]
        if config.tensorboard and processes.leads():
            self._logs.append(TensorBoard(config.folder, start_step))
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
        for log in self._logs:
            log.close()

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
        record = self._meter.record(step, metrics, step_s, data_s)
        self._write(record)
        summary = self._summary(record)
        self._progress.update(self._task, completed=step, summary=summary)
        if step % self._config.print_every == 0 or step in (1, self._config.steps):
            self.say(f"step {step:>{len(str(self._config.steps))}}  {summary}")

    def _write(self, record: dict[str, Any]) -> None:
        for log in self._logs:
            log.write(record)

    def _summary(self, record: dict[str, Any]) -> str:
        speed = self._meter.tokens * len(self._times) / sum(self._times)
        text = "not finite"
        if not record["skipped"]:
            text = f"loss {record['loss']:.3f}  {record['bits_per_byte']:.3f} bits/byte"
        text += f"  {speed:,.0f} tokens/s"
        if "mfu" in record:
            mfu = record["mfu"] * speed / record["tokens_per_s"]
            text += f"  MFU {mfu:.1%} of {record['peak_tflops']:.4g} TFLOP/s"
        if "max_vio" in record:
            text += f"  MaxVio {record['max_vio']:.2f}"
        dropped = np.sum(record.get("layers", {}).get("dropped", 0))
        return text + (f"  dropped {dropped}" if dropped else "")

    def validation(self, step: int, bits: float) -> None:
        """Records the validation score."""
        self._write({"step": step, "val_bits_per_byte": bits})
        self.say(f"step {step}  val bits/byte {bits:.4f}")
