"""A trace of a few steps, for TensorBoard's profiler or Perfetto."""

from __future__ import annotations

import jax

from train.config import Config


class ProfileWindow:
    """Records the steps from `config.profile_at` on with jax.profiler, into the run's folder."""

    def __init__(self, config: Config):
        self._first, self._steps = config.profile_at, config.profile_steps
        self._folder = config.folder / "profile"
        self._running = False

    def before(self, step: int) -> None:
        """Starts or ends the trace where this step asks for it."""
        if step == self._first:
            jax.profiler.start_trace(str(self._folder))
            self._running = True
        elif self._first is not None and step == self._first + self._steps:
            self.close()

    def close(self) -> None:
        """Ends a trace that still runs."""
        if self._running:
            jax.profiler.stop_trace()
            self._running = False
