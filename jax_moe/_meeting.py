"""Where the processes of one job meet: messages through JAX's coordination service.

Not through collectives on the devices: those wait without a limit and without names, and NCCL
refuses two processes on one GPU. A meeting has a deadline, says who is missing, and can be held
while a program is lowered.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

import jax
from jax._src import distributed  # its client has no public name

_LONGEST_PAUSE_S = 0.1
_attempts: dict[str, int] = {}  # by place


class Meeting:
    """One attempt of several processes to do something together; a context manager.

    The processes make the same attempts at a place in the same order. One that gives up withdraws:
    those in its attempt fail at once, and those that come later go on to the next attempt, so that
    nobody meets messages of a failed one.

    Args:
      place: name of the place, the same in all processes.
      what: what is to be done, the same in all processes; for messages too.
      processes: numbers of the processes that take part, this one included.
      timeout_s: seconds to wait for the others in each phase.
      process: number of this process.
      client: the store; by default the coordination service's.
    """

    def __init__(
        self,
        place: str,
        what: str,
        processes: Sequence[int],
        timeout_s: float,
        *,
        process: int,
        client=None,
    ):
        self._place = f"jax_moe/{place}"
        self._what = what
        self._processes = sorted(processes)
        self._timeout_s = timeout_s
        self._process = process
        self._client = client or _service(what)
        self._attempt: str | None = None
        self._given_up: dict[int, str] = {}  # by process: why it withdrew earlier

    def __enter__(self) -> Meeting:
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if error is not None and self._attempt is not None:
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # the service may be gone
                self._tell("withdrawn", str(error))

    def _begin(self) -> None:
        """Finds the attempt to join; only now, since a call with nothing to gather is none."""
        key = f"{self._place} {self._process}"
        number = _attempts.get(key, 0)
        self._attempt = f"{self._place}/{number}"
        while withdrawn := self._found("withdrawn"):
            self._given_up |= {p: text.split("\n", 1)[1] for p, text in withdrawn.items()}
            number += 1
            self._attempt = f"{self._place}/{number}"
        _attempts[key] = number + 1
        self._tell("here", "")

    def gather(self, phase: str, message: str) -> list[str]:
        """Hands in a message for a phase and waits for everybody's.

        Returns:
          Messages in ascending order of the processes, this one's included.

        Raises:
          RuntimeError: a process did not come in time, gave up, or is doing something else.
        """
        if self._attempt is None:
            self._begin()
        self._tell(phase, message)
        start, pause = time.monotonic(), 0.001
        while True:
            found = self._found(phase)
            missing = [p for p in self._processes if p not in found]
            if not missing:
                self._refuse_others(found)
                return [found[p].split("\n", 1)[1] for p in self._processes]
            self._refuse_trouble(missing)
            if time.monotonic() - start > self._timeout_s:
                raise RuntimeError(self._late(phase, missing))
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def gather_bytes(self, phase: str, message: bytes) -> list[bytes]:
        """As `gather`."""
        return [bytes.fromhex(text) for text in self.gather(phase, message.hex())]

    def _tell(self, phase: str, message: str) -> None:
        text = f"{self._what}\n{message}"
        self._client.key_value_set(f"{self._attempt}/{phase}/{self._process}", text)

    def _found(self, phase: str) -> dict[int, str]:
        pairs = self._client.key_value_dir_get(f"{self._attempt}/{phase}/")
        return {int(key.rsplit("/", 1)[1]): value for key, value in pairs}

    def _refuse_trouble(self, missing: list[int]) -> None:
        for process, text in self._found("withdrawn").items():
            if process in missing:
                why = text.split("\n", 1)[1]
                raise RuntimeError(f"{self._what}: process {process} gave up: {why}")
        self._refuse_others(self._found("here"))

    def _refuse_others(self, found: dict[int, str]) -> None:
        for process, text in found.items():
            what = text.split("\n", 1)[0]
            if what != self._what:
                raise RuntimeError(
                    f"{self._what}: meanwhile process {process} came to {what}; all processes of "
                    "a group must make the same calls in the same order."
                )

    def _late(self, phase: str, missing: list[int]) -> str:
        names = ", ".join(map(str, missing))
        earlier = "".join(
            f" Process {process} had given up before: {why}"
            for process, why in self._given_up.items()
            if process in missing
        )
        return (
            f"{self._what}: process(es) {names} did not come within {self._timeout_s:g} s (phase "
            f"{phase}). All processes whose GPUs are in the group's mesh must do this, none alone; "
            f"if one is slower than that, give the group a larger timeout_s.{earlier}"
        )


def _service(what: str):
    client = distributed.global_state.client
    if client is None:
        raise RuntimeError(f"{what}: call jax.distributed.initialize() first.")
    return client
