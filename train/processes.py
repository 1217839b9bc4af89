"""The processes of one run: how they join, what each of them holds, how one leaves."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import jax
import numpy as np
from jax._src.distributed import global_state  # no public name tells these before JAX's first use
from jax.experimental import multihost_utils

from train.watch import Watch

# What a launcher that JAX does not know sets, as train.launch_local does.
ADDRESS, COUNT, INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
LAUNCHER = "TRAIN_LAUNCHER_PID"  # of a launcher without which its processes are not to go on
# What lets XLA's collectives run between two processes on one GPU. NCCL refuses them on one host,
# so they look like two hosts to it, and talk over the loopback interface. {} is the process.
SHARING_A_GPU = {
    "NCCL_HOSTID": "process{}",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
}
_NO_LAUNCHER = "coordinator_address should be defined."
_PR_SET_PDEATHSIG = 1  # of Linux's prctl

_watch: Watch | None = None  # of the one run that a process can be part of


def end_with_launcher() -> None:
    """Has the kernel kill this process when the launcher that set LAUNCHER is gone.

    Raises:
      RuntimeError: it is gone already.
    """
    if LAUNCHER not in os.environ:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ[LAUNCHER]):
        raise RuntimeError(f"The launcher, process {os.environ[LAUNCHER]}, is gone.")


def join() -> None:
    """Joins the run's other processes, if a launcher started some; before JAX's first use.

    JAX itself detects Slurm, Open MPI and Kubernetes. Else the three variables tell, or a part of
    them what is not to be detected. With one set, a run that finds no launcher is an error: the
    processes would all train alone, in one folder.

    Raises:
      ValueError: a variable is no number, or there is no launcher although one was announced.
      RuntimeError: the others did not come.
    """
    given = {}
    for name, argument in ((COUNT, "num_processes"), (INDEX, "process_id")):
        if name in os.environ:
            if not os.environ[name].isdecimal():
                raise ValueError(f"{name}={os.environ[name]!r} must be a number.")
            given[argument] = int(os.environ[name])
    announced = bool(given) or ADDRESS in os.environ
    if len(given) == 2 and ADDRESS in os.environ:
        given["cluster_detection_method"] = "deactivate"
    try:
        jax.distributed.initialize(**given)
    except ValueError as error:
        if str(error) != _NO_LAUNCHER:
            raise
        if announced:
            raise ValueError(
                f"{COUNT}, {INDEX} or {ADDRESS} is set, but JAX detects no launcher: set all "
                "three (python -m train.launch_local does), or see docs/launch.md."
            ) from error


def sharing_a_gpu(process: int) -> dict[str, str]:
    """The environment of a process that shares its GPU with another one of the run."""
    return {name: value.format(process) for name, value in SHARING_A_GPU.items()}


def count() -> int:
    """How many processes train together."""
    return global_state.num_processes


def index() -> int:
    """Which of them this is."""
    return global_state.process_id


def leads() -> bool:
    """Whether this is the one that prints, logs and plots."""
    return index() == 0


@contextmanager
def joined(*, dead_s: float, stall_s: float) -> Iterator[None]:
    """Joins, and on an error among several processes prints it and ends this one at once.

    Python's ordinary end would wait minutes for the others, who wait for this one.

    Args:
      dead_s: seconds after which a process that gives no sign of life counts as dead.
      stall_s: seconds after which a run in which no process gets on counts as stuck.
    """
    global _watch
    end_with_launcher()
    join()
    if count() == 1:
        yield
        return
    try:
        coordinator = (global_state.coordinator_address or "").rpartition(":")[0].strip("[]")
        _watch = Watch(index(), global_state.client, coordinator, dead_s, stall_s)
        yield
        _watch.close()
        _watch = None
    except BaseException as error:
        if isinstance(error, ValueError | RuntimeError):
            print(f"error: process {index()} of {count()}: {error}", file=sys.stderr)
        else:
            traceback.print_exc()
        sys.stderr.flush()
        if _watch is not None:
            what = f"{type(error).__name__}: {error}".splitlines()[0]
            _watch.fail(f"failed: {what}", lost=isinstance(error, jax.errors.JaxRuntimeError))
        sys.stdout.flush()
        os._exit(1)


def note(step: int, operation: str) -> None:
    """Lets the other processes know what this one does now, if there are any.

    All say the same in the same order; who has not said a thing that others have is behind.
    """
    if _watch is not None:
        _watch.note(step, operation)


@contextmanager
def leader_first(name: str) -> Iterator[None]:
    """Runs its body in process 0, and only then in the others."""
    if count() > 1 and not leads():
        multihost_utils.sync_global_devices(name)
    yield
    if count() > 1 and leads():
        multihost_utils.sync_global_devices(name)


def spread(array: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    """Makes the global array of which each process knows all, and holds its devices' parts."""
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
