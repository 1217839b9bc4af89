"""Checkpoints: the training state and the data iterator's place, so that a run resumes exactly."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from train.step import TrainState


class Checkpoints:
    """The checkpoints of one run, written beside the training; a half-written one is never seen.

    Args:
      folder: the run's folder; checkpoints lie in its `checkpoints/`.
      keep: how many to keep.
    """

    def __init__(self, folder: Path, keep: int = 1):
        logging.getLogger("absl").setLevel(logging.ERROR)  # a page of notes per save
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=True)
        self._manager = ocp.CheckpointManager((folder / "checkpoints").resolve(), options=options)

    @property
    def latest(self) -> int | None:
        """The last saved step; None where there is none."""
        return self._manager.latest_step()

    def save(self, state: TrainState, data_state: dict[str, Any]) -> None:
        """Copies the state and writes it under its step, unless it is there already.

        Returns once the copy is made, so the state may be given away. An earlier write that failed
        raises here, or in `close`.

        Raises:
          OSError: of such a write.
        """
        step = int(state.step)
        if step == self.latest:
            return
        with _writing():
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(state), data=ocp.args.JsonSave(data_state)
                ),
            )

    def restore(self, abstract_state: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """Reads the last checkpoint.

        Args:
          abstract_state: shapes, types and shardings to restore to; the mesh may be another one.

        Returns:
          The state and the data iterator's state.

        Raises:
          ValueError: there is no checkpoint.
        """
        if self.latest is None:
            raise ValueError(f"No checkpoint in {self._manager.directory}: train first.")
        loaded = self._manager.restore(
            self.latest,
            args=ocp.args.Composite(
                state=ocp.args.StandardRestore(abstract_state), data=ocp.args.JsonRestore()
            ),
        )
        return loaded["state"], loaded["data"]

    def close(self) -> None:
        """Waits for the last checkpoint and gives up the folder.

        Raises:
          OSError: it could not be written.
        """
        with _writing():
            self._manager.close()


@contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except ValueError as error:  # what the library makes of a full disk too
        raise OSError(str(error)) from error
