"""The run's folder: one run at a time trains there, and only ever the same one."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from train import config as configs
from train import processes
from train.config import Config

_LOCK = "lock"  # in the run's folder: the process that trains there
_TEXT = "text.sha256"  # in the run's folder: what it reads
_OWN = "--run-dir DIR, or make train RUN=DIR"


@contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """Makes the run's folder, and keeps other runs out of it until the block or the process ends.

    The leading process does, for all of the run. Who only reads is not kept out.

    Raises:
      ValueError: another run trains there, or the folder cannot be made or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / _LOCK).open("a+", encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"run_dir={folder} must be a folder that can be made and written to "
            f"({error.strerror}): give another one ({_OWN})."
        ) from error
    with file:
        if processes.leads():
            _lock(file, folder)
        yield


@contextmanager
def told_what_to_do(folder: Path) -> Iterator[None]:
    """Names the file that cannot be written, on a full disk say, and how the run goes on.

    Raises:
      RuntimeError: in place of an OSError of the block.
    """
    try:
        yield
    except OSError as error:
        raise RuntimeError(
            f"{error.filename or folder}: {error.strerror or error}. What {folder} holds stays: "
            "once that is mended (room, or rights to write), the same command goes on from the "
            f"last checkpoint; or give another folder ({_OWN})."
        ) from error


def _lock(file: TextIO, folder: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.seek(0)
        raise ValueError(
            f"run_dir={folder}: another run ({file.read() or 'of unknown pid'}) trains there: give "
            f"this one a folder of its own ({_OWN}), or stop that one."
        ) from error
    except OSError:
        pass  # a network file system without locks
    file.truncate(0)
    file.write(f"pid {os.getpid()} on {socket.gethostname()}")
    file.flush()


def check_folder(config: Config, digest: str) -> None:
    """Makes sure that the run's folder is new, or holds this run.

    Raises:
      ValueError: the folder holds a run of another configuration or on another text.
    """
    path, text = config.folder / "config.json", config.folder / _TEXT
    if text.exists() and text.read_text().strip() != digest:
        raise ValueError(
            f"{config.folder} holds a run on another text than {config.data.file or 'this'} holds "
            f"now: put the old one back, or give this one a folder of its own ({_OWN})."
        )
    if path.exists():
        changes = configs.differences(configs.load(path), config)
        if changes:
            raise ValueError(
                f"{config.folder} holds a run of another configuration ({'; '.join(changes)}): "
                f"give this one a folder of its own ({_OWN})."
            )


def claim_folder(config: Config, digest: str) -> None:
    """Writes into the run's folder what `check_folder` reads."""
    if processes.leads():
        configs.save(config, config.folder / "config.json")
        (config.folder / _TEXT).write_text(digest + "\n")
