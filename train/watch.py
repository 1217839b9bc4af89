"""The process's side of train/watcher.py: starts it, tells it every step, ends when it says so.

To the watcher's standard input go JSON objects, one a line: {number, step, operation} before each
thing that may take long, {failed, lost} for an error, {done} at the end. Its standard output gives
{ready}, the hub's port, and {end} once the verdict is printed and this process is to end.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from train import watcher

LOST_PEER = 75  # exit status of a process that ends because another has failed (EX_TEMPFAIL)
_KEY = "train/watch"
_START_TIMEOUT_S = 60


class Watch:
    """This process's watcher.

    Args:
      index: which process of the run this is.
      client: JAX's client of the coordination service; it carries the hub's address.
      coordinator: host of process 0, as the others reach it.
      dead_s: seconds after which a process that gives no sign of life counts as dead.
      stall_s: seconds after which a run in which no process gets on counts as stuck.

    Raises:
      RuntimeError: the watcher did not start.
    """

    def __init__(self, index: int, client: Any, coordinator: str, dead_s: float, stall_s: float):
        self._number, self._patience_s = 0, 2 * dead_s + watcher.SETTLE_S
        port, token = 0, secrets.token_hex(8)
        if index:
            timeout_ms = _START_TIMEOUT_S * 1000
            port, token = json.loads(client.blocking_key_value_get(_KEY, timeout_ms))
        own = (index, socket.gethostname(), os.getpid())
        options = watcher.Options(*own, token, coordinator, port, dead_s, stall_s)
        program = str(Path(watcher.__file__))
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", program, json.dumps(vars(options))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdin and self._process.stdout
        self._input, self._output = self._process.stdin, self._process.stdout
        ready = self._output.readline()
        if not ready:
            raise RuntimeError("The watcher did not start; what it said stands above.")
        if index == 0:
            client.key_value_set(_KEY, json.dumps([json.loads(ready)["ready"], token]))
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        """Ends this process when its watcher says so."""
        if b"end" in self._output.readline():
            sys.stdout.flush()
            os._exit(LOST_PEER)

    def _tell(self, **message: Any) -> None:
        try:
            self._input.write(json.dumps(message).encode() + b"\n")
            self._input.flush()
        except OSError:
            pass  # the watcher is gone; the run is not the worse for it

    def note(self, step: int, operation: str) -> None:
        """Says what comes now; all processes of a run say the same in the same order."""
        self._number += 1
        self._tell(number=self._number, step=step, operation=operation)

    def fail(self, what: str, lost: bool) -> None:
        """Tells the others of an error.

        Args:
          what: the error, in one line.
          lost: whether it is likely another's fault. Then this waits for the verdict, with which
            the process ends; it returns if none comes.
        """
        self._tell(failed=what, lost=lost)
        if lost:
            time.sleep(self._patience_s)

    def close(self) -> None:
        """Says that all went well."""
        self._tell(done=True)
        self._process.wait()
