"""Times programs in turns, so that noise and throttling hit all columns alike."""

from __future__ import annotations

import dataclasses
import gc
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

_FLUSH_BYTES = 256 << 20  # more than any GPU's L2 cache
LEAST = 3  # repetitions of a program
LEAST_SECONDS = 0.5  # for all its repetitions, if `most` does not end them before


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timed:
    """A program's repetitions, microseconds: median, mean, standard deviation, least."""

    median_us: float
    mean_us: float
    deviation_us: float
    least_us: float
    repetitions: int


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of each repetition of one program, each that of the slowest rank."""

    seconds: tuple[float, ...]

    def per_call(self, calls: int) -> Times:
        """Each of `calls` equal calls' share."""
        return Times(tuple(seconds / calls for seconds in self.seconds))

    @property
    def summary(self) -> dict[str, Any]:
        """The fields of `Timed`."""
        us = np.array(self.seconds) * 1e6
        return {
            "median_us": float(np.median(us)),
            "mean_us": float(us.mean()),
            "deviation_us": float(us.std()),
            "least_us": float(us.min()),
            "repetitions": us.size,
        }


class Preparation:
    """What happens before each timed call, outside the timed region.

    On GPUs the L2 cache is flushed, by writing more than it holds, and the devices meet at a
    barrier. Between CPU devices, which start together anyway, the other columns' calls displace
    what a call left in the caches. Several processes meet at a barrier too.
    """

    def __init__(self, mesh: Mesh, flush_bytes: int | None = None):
        is_gpu = mesh.devices.flat[0].platform != "cpu"
        size = (_FLUSH_BYTES if is_gpu else 0) if flush_bytes is None else flush_bytes
        self._flush = self._meet = None
        spread = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        if size:
            words = mesh.size * (size // 4)
            self._buffer = jax.device_put(jnp.zeros(words, jnp.int32), spread)
            self._flush = jax.jit(lambda a: a + 1, donate_argnums=0)
        if is_gpu or jax.process_count() > 1:
            self._ones = jax.device_put(jnp.ones(mesh.size, jnp.int32), spread)
            self._meet = jax.jit(jnp.sum)

    @property
    def words(self) -> str:
        """For the report."""
        steps = ["L2 flush"] * bool(self._flush) + ["barrier of all devices"] * bool(self._meet)
        return ", ".join(steps) or "nothing (the other columns' calls displace the caches)"

    def __call__(self) -> None:
        if self._flush:
            self._buffer = jax.block_until_ready(self._flush(self._buffer))
        if self._meet:
            jax.block_until_ready(self._meet(self._ones))


def time_once(program: Callable, prepare: Callable[[], None]) -> float:
    """Seconds from the call to all local devices' results."""
    prepare()
    begin = time.perf_counter()
    result = jax.block_until_ready(program())
    seconds = time.perf_counter() - begin
    del result
    return seconds


def time_in_turns(
    programs: Sequence[Callable], prepare: Callable[[], None], *, until: float, most: int
) -> list[Times]:
    """Runs all programs in turns, in random order.

    A first round shows how long each takes. In the time left the quick ones then run more often
    than the slow ones, all spread evenly over that time.

    Args:
      programs: what to time.
      prepare: called before each timed call.
      until: `time.monotonic()` at which to be done, but every program runs `LEAST` times, and
        more if that takes it no longer than `LEAST_SECONDS`.
      most: most repetitions of a program.
    """
    seconds: list[list[float]] = [[] for _ in programs]
    enabled = gc.isenabled()
    gc.disable()
    try:
        _run_all([1] * len(programs), programs, prepare, seconds)
        share = max(LEAST_SECONDS, (until - time.monotonic()) / max(1, len(programs)))
        counts = [max(LEAST - 1, int(min(share / s[0], most - 1))) for s in seconds]
        _run_all(_agreed(counts), programs, prepare, seconds)
    finally:
        if enabled:
            gc.enable()
    return [Times(tuple(taken)) for taken in _slowest(seconds)]


def _run_all(counts: Sequence[int], programs, prepare, seconds: list[list[float]]) -> None:
    """Runs program i counts[i] times; each program's runs lie in equal parts of the whole."""
    rng = random.Random(0)
    slots = [((k + rng.random()) / n, i) for i, n in enumerate(counts) for k in range(n)]
    for _, i in sorted(slots):
        seconds[i].append(time_once(programs[i], prepare))


def _agreed(counts: list[int]) -> list[int]:
    """The first process's counts, which all must follow."""
    if jax.process_count() == 1:
        return counts
    return np.asarray(multihost_utils.broadcast_one_to_all(np.array(counts, np.int32))).tolist()


def _slowest(seconds: list[list[float]]) -> list[list[float]]:
    """Each repetition's time at the slowest process."""
    if jax.process_count() == 1:
        return seconds
    gathered = (np.array(taken, np.float32) for taken in seconds)
    return [np.asarray(multihost_utils.process_allgather(a)).max(0).tolist() for a in gathered]
