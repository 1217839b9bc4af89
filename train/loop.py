"""The training loop: resume, step, report, validate, save."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import jax
import numpy as np
from jax.experimental.multihost_utils import reached_preemption_sync_point
from rich.console import Console

from train import processes
from train.checkpoint import Checkpoints
from train.config import Config
from train.data import Batch
from train.folder import check_folder, claim_folder, hold_folder, told_what_to_do
from train.profile import ProfileWindow
from train.report import Reporter
from train.sharding import make_group
from train.source import open_source
from train.step import Trainer, TrainState

_MOST_SKIPPED = 20  # steps in a row that are not finite, before even nan_guard="skip" stops


def validate(trainer: Trainer, state: TrainState, windows: Batch) -> float:
    """Returns the mean bits per byte of all `windows`, [windows, sequence + 1]."""
    batch = trainer.config.data.batch // trainer.config.micro_batches
    total = predictions = 0.0
    for start in range(0, len(jax.tree.leaves(windows)[0]), batch):
        part, weights = cut_batch(windows, start, batch)
        sums = trainer.evaluate(state, *spread((part, weights), trainer.batch_sharding))
        total, predictions = total + float(sums[0]), predictions + float(sums[1])
    return total / predictions / math.log(2) / trainer.config.data.bytes_per_token


def cut_batch(windows: Batch, start: int, batch: int) -> tuple[Batch, np.ndarray]:
    """Returns the windows from `start` on and their weights, float32 [batch].

    Filled up to the batch, because its size is compiled in; what is filled in weighs nothing.
    """
    part = jax.tree.map(lambda array: array[start : start + batch], windows)
    real = len(jax.tree.leaves(part)[0])
    part = jax.tree.map(lambda array: np.pad(array, ((0, batch - real), (0, 0))), part)
    return part, (np.arange(batch) < real).astype(np.float32)


def spread(arrays: Any, sharding: jax.sharding.Sharding) -> Any:
    """Puts the arrays of a batch on the devices of all processes."""
    return jax.tree.map(lambda array: processes.spread(array, sharding), arrays)


@contextmanager
def stop_on_signal() -> Iterator[Callable[[int], bool]]:
    """Turns the first SIGINT or SIGTERM into a request to stop; a second one interrupts at once.

    Yields a function of the step just done, to be called after every step: whether to stop. Among
    several processes a signal to one stops all after the same step, which JAX agrees on.
    """
    asked = []
    alone = processes.count() == 1

    def handle(number, _frame):
        asked.append(number)
        signal.signal(number, signal.default_int_handler)
        if not alone:
            os.kill(os.getpid(), signal.SIGTERM)  # for JAX, whose handler has been left in place

    numbers = (signal.SIGINT, signal.SIGTERM) if alone else (signal.SIGINT,)
    old = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield lambda step: bool(asked) if alone else reached_preemption_sync_point(step)
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


class Run:
    """One run: its data, its compiled functions, its checkpoints and its state.

    Args:
      config: the run.
      console: where to report.
    """

    def __init__(self, config: Config, console: Console):
        self.config, self.console = config, console
        with processes.leader_first("the text"):  # one download, into a folder that may be shared
            source = open_source(config)
        self.batches, self.windows = source.batches, source.validation
        self.group = make_group(config.mesh)
        self.trainer = Trainer(config, self.group)
        # Now that the configuration is known to be good.
        with told_what_to_do(config.folder), ExitStack() as held:
            held.enter_context(hold_folder(config.folder))
            check_folder(config, source.digest)
            self.checkpoints = Checkpoints(config.folder, config.keep_checkpoints)
            if self.reached <= config.steps:
                claim_folder(config, source.digest)
            self._held = held.pop_all()
        self.profile = ProfileWindow(config)
        self.skipped = 0  # steps in a row that were not finite
        console.print(
            f"{config.name}: {self.trainer.num_params / 1e6:.3f} M parameters, "
            f"{source.about}, {self.group}",
            highlight=False,
            soft_wrap=True,
        )

    @property
    def reached(self) -> int:
        """The step of the last checkpoint; 0 without any."""
        return self.checkpoints.latest or 0

    def train(self) -> bool:
        """Trains to `config.steps`; returns False where a signal stopped it before.

        Raises:
          RuntimeError: a fault on the devices, a step that is not finite, as `nan_guard` says, or a
            file that cannot be written.
        """
        with self._held, told_what_to_do(self.config.folder), self._saved_on_error():
            with stop_on_signal() as stopped:
                state, start = self._start()
                with Reporter(self.config, self.console, start, self.group) as reporter:
                    state = self._steps(state, start, reporter, stopped)
                    step = int(state.step)
                    processes.note(step, "saving and validating at the end")
                    self.checkpoints.save(state, self.batches.get_state())
                    if step == self.config.steps:
                        reporter.validation(step, validate(self.trainer, state, self.windows))
            self.profile.close()
            self.checkpoints.close()
            self.group.close()
        return step == self.config.steps

    @contextmanager
    def _saved_on_error(self) -> Iterator[None]:
        """Where a file cannot be written, waits for the checkpoint that is being written."""
        try:
            yield
        except OSError:
            with suppress(Exception):  # the first error is the one to tell
                self.checkpoints.close()
            raise

    def _start(self) -> tuple[TrainState, int]:
        if self.checkpoints.latest is None:
            self.console.print("initialising and compiling ...", highlight=False)
            return self.trainer.initialise(), 0
        state, data_state = self.checkpoints.restore(self.trainer.abstract_state)
        self.batches.set_state(data_state)
        self.console.print(
            f"going on from the checkpoint at step {int(state.step)}", highlight=False
        )
        return state, int(state.step)

    def _steps(
        self, state: TrainState, start: int, reporter: Reporter, stopped: Callable[[int], bool]
    ) -> TrainState:
        config = self.config
        if start >= config.steps:
            return state
        step_function = self._compile(reporter)
        for step in range(start + 1, config.steps + 1):
            processes.note(step, "waiting for data")
            before = self.batches.get_state()
            self.profile.before(step)
            begin = time.perf_counter()
            windows = spread(next(self.batches), self.trainer.batch_sharding)
            data_s = time.perf_counter() - begin
            processes.note(step, "running the step")
            state, metrics = step_function(state, windows)
            # Waits for the step: programs of one group must not overlap, and the host's own work
            # is a millisecond.
            reporter.step(step, metrics, data_s)
            self.group.check()
            self._guard(step, state, metrics, before, reporter)
            if stopped(step):
                reporter.say(f"asked to stop: saving step {step} ...")
                break
            if step == config.steps:
                break
            if step % config.eval_every == 0:
                processes.note(step, "validating")
                reporter.validation(step, validate(self.trainer, state, self.windows))
                reporter.skip_time()
            if step % config.save_every == 0:
                processes.note(step, "saving")
                self.checkpoints.save(state, self.batches.get_state())
                reporter.skip_time()
        return state

    def _guard(self, step: int, state: TrainState, metrics, before, reporter: Reporter) -> None:
        """Says what went wrong in a step that was not finite; `before` is the data's place then."""
        if metrics["finite"]:
            self.skipped = 0
            return
        self.skipped += 1
        what = f"step {step}: loss {metrics['loss']:.4g}, gradient norm {metrics['grad_norm']:.4g}"
        if self.config.nan_guard == "skip" and self.skipped < _MOST_SKIPPED:
            reporter.say(f"{what}: skipped, nothing was updated")
            return
        self.checkpoints.save(state._replace(step=state.step - 1), before)
        self.checkpoints.close()
        raise RuntimeError(
            f"{what}: nothing was updated, and the state of step {step - 1} is saved. The same "
            "command tries this batch again, with --nan-guard skip goes on past it (at most "
            f"{_MOST_SKIPPED - 1} in a row)."
        )

    def _compile(self, reporter: Reporter):
        """Compiles the step before the clock of the first one starts."""
        begin = time.perf_counter()
        compiled = self.trainer.compile_step()
        reporter.say(f"compiled in {time.perf_counter() - begin:.0f} s")
        reporter.skip_time()
        return compiled
