"""Stands beside one process of a run, and tells the others when that one dies or stands still.

A program of its own, of the standard library alone: it outlives the process (which JAX ends within
milliseconds once process 0 is gone), and sees when the process was stopped. Every process has one;
that of process 0 is the hub, to which the others are connected. Started by train/watch.py, which
has the protocol of standard input and output; between watchers go JSON objects, one a line.

The hub's verdict on what went wrong goes to all; each prints it, with where its own process was,
and ends that process. docs/launch.md says what can be seen and what cannot.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import selectors
import signal
import socket
import sys
import time
from typing import Any

BEAT_S = 0.5  # between two signs of life
SETTLE_S = 1.0  # from the first event to the verdict: what failed together is named together
END_S = 5.0  # for a process to end by itself after the verdict
START_FACTOR = 10  # compiling may take so many times longer than a step
START = "starting"


@dataclasses.dataclass(frozen=True)
class Options:
    """What train/watch.py passes on the command line, as JSON."""

    index: int
    host: str
    pid: int
    token: str
    hub: str
    port: int
    dead_s: float
    stall_s: float


@dataclasses.dataclass
class Place:
    """Where a process is in its run, as far as its notes have come."""

    index: int
    host: str
    pid: int
    number: int = 0
    step: int = 0
    operation: str = START
    heard: float = dataclasses.field(default_factory=time.monotonic)
    changed: float = dataclasses.field(default_factory=time.monotonic)

    def move(self, message: dict[str, Any]) -> None:
        """Takes a note: its number among the notes, step and operation."""
        self.heard = time.monotonic()
        if message["number"] != self.number:
            self.changed = self.heard
        self.number, self.step = message["number"], message["step"]
        self.operation = message["operation"]

    @property
    def where(self) -> str:
        """Step and operation, in words."""
        return f"step {self.step}, {self.operation}"

    def __str__(self) -> str:
        return f"process {self.index} (host {self.host}, pid {self.pid})"


class Lines:
    """JSON objects, one a line, over a socket or pipe; a peer that is gone is no error."""

    def __init__(self, descriptor: int):
        self._descriptor, self._unsent, self._rest = descriptor, b"", b""
        os.set_blocking(descriptor, False)

    def send(self, **message: Any) -> None:
        """Sends a message, or drops it where nobody has read the last ones."""
        line = self._unsent + json.dumps(message).encode() + b"\n"
        with contextlib.suppress(OSError):
            self._unsent = line[os.write(self._descriptor, line) :]

    def receive(self) -> tuple[list[dict[str, Any]], bool]:
        """Returns the messages that have come, and whether more may come."""
        try:
            data = os.read(self._descriptor, 65536)
        except BlockingIOError:
            return [], True
        except OSError:
            data = b""
        *lines, self._rest = (self._rest + data).split(b"\n")
        messages = []
        for line in lines:
            try:
                messages.append(dict(json.loads(line)))
            except (ValueError, TypeError):
                return messages, False  # not one of us
        return messages, bool(data)


class Watcher:
    """What the watchers of all processes do: watch their own, and carry out a verdict."""

    def __init__(self, options: Options):
        self.options, self.pid = options, options.pid
        self.own = Place(options.index, options.host, self.pid)
        self.selector = selectors.DefaultSelector()
        self.process, self.answer = Lines(sys.stdin.fileno()), Lines(sys.stdout.fileno())
        self.selector.register(sys.stdin, selectors.EVENT_READ, self.hear_process)
        self.over = self.said = False
        self._stopped_since: float | None = None

    def run(self) -> None:
        """Watches until the process is done or a verdict has come."""
        last = 0.0
        while not self.over:
            for key, _ in self.selector.select(BEAT_S / 2):
                key.data()
            if not self.over and time.monotonic() - last >= BEAT_S:
                last = time.monotonic()
                self.look_at_process()
                self.beat()

    def hear_process(self) -> None:
        """Takes the process's notes; the end of them without a word is its death."""
        messages, more = self.process.receive()
        for message in messages:
            if "number" in message:
                self.own.move(message)
            elif "done" in message:
                self.done()
            else:
                self.said = True
                self.report(message["failed"], because_of_other=message["lost"])
        if not more and not self.over:
            self.selector.unregister(sys.stdin)
            if not self.said:
                self.report("died")

    def look_at_process(self) -> None:
        """Reports a process that has been stopped for too long."""
        try:
            with open(f"/proc/{self.pid}/stat", encoding="utf-8", errors="replace") as stat:
                state = stat.read().rpartition(")")[2].split()[0]
        except OSError:
            return  # gone: the end of its notes tells
        if state not in "Tt":
            self._stopped_since = None
        elif self._stopped_since is None:
            self._stopped_since = time.monotonic()
        elif time.monotonic() - self._stopped_since > self.options.dead_s and not self.said:
            self.said = True
            self.report("has been stopped by a signal (SIGSTOP)")

    def carry_out(self, verdict: str) -> None:
        """Prints the verdict and ends the process."""
        print(
            f"error: process {self.own.index}, {self.own.where}: {verdict}. This process ends; "
            "started again, the run goes on from its last checkpoint.",
            file=sys.stderr,
            flush=True,
        )
        self.over = True
        self.answer.send(end=True)
        deadline = time.monotonic() + END_S
        while os.getppid() == self.pid and time.monotonic() < deadline:
            time.sleep(0.05)
        if os.getppid() == self.pid:
            os.kill(self.pid, signal.SIGKILL)

    def report(self, what: str, because_of_other: bool = False) -> None:
        """Brings an event of the own process before the hub."""
        raise NotImplementedError

    def beat(self) -> None:
        """Gives signs of life, and looks for those of others."""
        raise NotImplementedError

    def done(self) -> None:
        """The process has come to its end in good order."""
        raise NotImplementedError


class Spoke(Watcher):
    """The watcher of a process other than 0."""

    def __init__(self, options: Options):
        super().__init__(options)
        address = (options.hub, options.port)
        try:
            self.socket = socket.create_connection(address, options.dead_s)
        except OSError as error:
            sys.exit(f"The watcher of process 0 does not answer at {address}: {error}.")
        self.hub = Lines(self.socket.fileno())
        self.heard = time.monotonic()
        self.selector.register(self.socket, selectors.EVENT_READ, self.hear_hub)
        self.hub.send(token=options.token, index=options.index, host=options.host, pid=self.pid)
        self.answer.send(ready=options.port)

    def hear_hub(self) -> None:
        """Takes signs of life and the verdict."""
        messages, more = self.hub.receive()
        self.heard = time.monotonic()
        for message in messages:
            if "verdict" in message:
                return self.carry_out(message["verdict"])
            if "done" in message:
                self.over = True
        if not more and not self.over:
            self.carry_out("process 0 and its watcher died")

    def beat(self) -> None:
        """Tells where the process is."""
        own = self.own
        self.hub.send(number=own.number, step=own.step, operation=own.operation)
        silent = time.monotonic() - self.heard
        if silent > self.options.dead_s:
            self.carry_out(f"nothing has come from process 0 for {silent:.0f} s")

    def report(self, what: str, because_of_other: bool = False) -> None:
        """Sends the event to the hub."""
        self.beat()
        self.hub.send(event=what, because_of_other=because_of_other)

    def done(self) -> None:
        """Takes leave of the hub."""
        self.hub.send(done=True)
        self.over = True


class Hub(Watcher):
    """The watcher of process 0, which hears all others and judges."""

    def __init__(self, options: Options):
        super().__init__(options)
        self.listener = socket.create_server(("", 0), backlog=1024)
        self.answer.send(ready=self.listener.getsockname()[1])
        self.selector.register(self.listener, selectors.EVENT_READ, self.accept)
        self.sockets: dict[int, tuple[socket.socket, Lines]] = {}  # by process
        self.places = {0: self.own}
        self.events: list[tuple[float, bool, str]] = []  # when, because of another, what

    def accept(self) -> None:
        """Takes a connection; who it is, its first line says."""
        connection, _ = self.listener.accept()
        lines = Lines(connection.fileno())
        index: list[int] = []
        self.selector.register(
            connection, selectors.EVENT_READ, lambda: self.hear(connection, lines, index)
        )

    def hear(self, connection: socket.socket, lines: Lines, index: list[int]) -> None:
        """Takes what a process's watcher says; `index` holds its number once it is known."""
        messages, more = lines.receive()
        for message in messages:
            if message.get("token") == self.options.token:
                index.append(message["index"])
                place = Place(message["index"], message["host"], message["pid"])
                self.places[index[0]], self.sockets[index[0]] = place, (connection, lines)
            elif not index:
                more = False  # a stranger
            elif index[0] not in self.places:
                pass  # its news has come already
            elif "number" in message:
                self.places[index[0]].move(message)
            elif "event" in message:
                self.add(self.places[index[0]], message["event"], message["because_of_other"])
            elif "done" in message:
                del self.places[index[0]]
        if not more:
            self.selector.unregister(connection)
            connection.close()
            if index:
                del self.sockets[index[0]]
                if index[0] in self.places:
                    self.add(self.places[index[0]], "and its watcher died")

    def add(self, place: Place, what: str, because_of_other: bool = False) -> None:
        """Notes an event of a process, which is not looked at any more."""
        self.places.pop(place.index, None)
        self.events.append((time.monotonic(), because_of_other, f"{place} {what} ({place.where})"))

    def report(self, what: str, because_of_other: bool = False) -> None:
        """Notes an event of process 0."""
        self.add(self.own, what, because_of_other)

    def beat(self) -> None:
        """Gives signs of life, looks for silence and standstill, and judges in the end."""
        for _, lines in self.sockets.values():
            lines.send(beat=True)
        now = time.monotonic()
        self.own.heard = now
        for place in list(self.places.values()):
            if now - place.heard > self.options.dead_s:
                self.add(place, f"has not been heard of for {now - place.heard:.0f} s")
        if not self.events:
            self.look_for_standstill(now)
        causes = [event for event in self.events if not event[1]]
        # What only looks like another's fault waits for the other's own news.
        if causes and now - causes[0][0] > SETTLE_S:
            self.judge("; then ".join(what for _, _, what in causes))
        elif self.events and now - self.events[0][0] > self.options.dead_s:
            self.judge("; then ".join(what for _, _, what in self.events))

    def look_for_standstill(self, now: float) -> None:
        """Judges where no process has got on for too long, and names those that are behind."""
        places = list(self.places.values())
        limit = self.options.stall_s
        if any(place.operation == START for place in places):
            limit *= START_FACTOR
        still = now - max((place.changed for place in places), default=now)
        if still <= limit:
            return
        behind = min(place.number for place in places)
        slowest = [place for place in places if place.number == behind]
        if len(slowest) == len(places):
            names = f"all {len(places)} processes stand at the same place"
        else:
            names = "behind the others: " + ", ".join(f"{p} ({p.where})" for p in slowest)
        self.judge(f"no process has got on for {still:.0f} s; {names}")

    def judge(self, verdict: str) -> None:
        """Sends the verdict to all and carries it out."""
        for _, lines in self.sockets.values():
            lines.send(verdict=verdict)
        self.carry_out(verdict)

    def done(self) -> None:
        """Takes leave of all."""
        for _, lines in self.sockets.values():
            lines.send(done=True)
        self.over = True


def main() -> None:
    """Runs the watcher that the command line describes."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the process decides what they mean
    options = Options(**json.loads(sys.argv[1]))
    (Spoke if options.index else Hub)(options).run()


if __name__ == "__main__":
    main()
