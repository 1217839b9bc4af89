"""What each step is measured by: learning, speed, memory, and the balance of the experts."""

from __future__ import annotations

import collections
import math
import resource
from typing import Any

import jax
import numpy as np

import jax_moe
from train.config import Config
from train.flops import flops_per_token, peak_tflops

_RUNNING = 100  # steps over which the running MaxVio adds up the loads
_STATS = ("min_load", "router_entropy", "nodes_per_token", "aux_loss", "dropped")


class Meter:
    """Turns what a step returns, and its times, into a record of plain numbers.

    Args:
      config: the run.
      group: its experts' group, whose waits are read.
    """

    def __init__(self, config: Config, group: jax_moe.ExpertGroup):
        self._config, self._group = config, group
        self._devices = group.mesh.size
        self.tokens = config.data.batch * config.data.sequence  # of a step
        self._flops = flops_per_token(config.model, config.data.sequence)
        self.peak = config.peak_tflops or peak_tflops(jax.devices()[0].device_kind)
        self._counts: collections.deque[np.ndarray] = collections.deque(maxlen=_RUNNING)
        self._waits = group.waits()

    def record(
        self, step: int, metrics: dict[str, Any], step_s: float, data_s: float
    ) -> dict[str, Any]:
        """Returns the record of a step.

        Args:
          step: optimizer steps done, this one included.
          metrics: what the step returned; waits for it.
          step_s: seconds since the step before was done.
          data_s: seconds of them spent waiting for data.
        """
        metrics = jax.device_get(metrics)
        found = {"step": step} | self._learning(metrics) | self._speed(step_s, data_s)
        if "moe" in metrics:
            found["layers"] = self._layers(metrics)
            found["max_vio"] = max(found["layers"]["max_vio"])
            found["bias_step"] = float(metrics["bias_step"])
            found |= self._waited()
        return found

    def _learning(self, metrics: dict[str, Any]) -> dict[str, Any]:
        loss, norm = float(metrics["loss"]), float(metrics["grad_norm"])
        bits = loss / math.log(2) / self._config.data.bytes_per_token
        return {
            # JSON has no NaN.
            "loss": loss if math.isfinite(loss) else None,
            "bits_per_byte": bits if math.isfinite(loss) else None,
            "grad_norm": norm if math.isfinite(norm) else None,
            "learning_rate": float(metrics["learning_rate"]),
            "skipped": not metrics["finite"],
        }

    def _speed(self, step_s: float, data_s: float) -> dict[str, Any]:
        per_device = self.tokens / step_s / self._devices
        tflops = per_device * self._flops / 1e12
        found = {
            "step_s": step_s,
            "data_s": data_s,
            "tokens_per_s": self.tokens / step_s,
            "tokens_per_s_device": per_device,
            "tflops_device": tflops,
            "memory_gib": memory_bytes() / 2**30,
        }
        return found | ({"mfu": tflops / self.peak, "peak_tflops": self.peak} if self.peak else {})

    def _layers(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Lists by name with one entry for each MoE layer; loads are tokens of an expert."""
        stats, bias = metrics["moe"], metrics["bias"]
        counts = np.asarray(stats.counts, np.int64)
        self._counts.append(counts)
        instances = self._devices // self._group.num_devices
        rows = counts.reshape(len(counts), self._group.num_ranks, -1).sum(-1) / instances
        found = {name: getattr(stats, name) for name in _STATS} | {
            "max_vio": stats.max_vio,
            "max_vio_running": max_vio(np.sum(list(self._counts), axis=0)),
            "mean_load": counts.mean(axis=1),
            "dead_experts": (counts == 0).sum(axis=1),
            "rows_mean": rows.mean(axis=1),
            "rows_max": rows.max(axis=1),
            "bias_mean": bias.mean(axis=1),
            "bias_min": bias.min(axis=1),
            "bias_max": bias.max(axis=1),
            "bias_deviation": bias.std(axis=1),
        }
        return {name: np.asarray(values).tolist() for name, values in found.items()}

    def _waited(self) -> dict[str, Any]:
        """By operation: milliseconds that each rank was waited for, a mean over all ranks."""
        before, self._waits = self._waits, self._group.waits()
        found = {}
        for name, total in self._waits.items():
            passed = (total - before[name]).astype(np.float64) / 1e6
            if passed.any():
                found[name] = passed.mean(axis=(0, 1)).tolist()
        return {"waits_ms": found} if found else {}


def max_vio(counts: np.ndarray) -> np.ndarray:
    """Returns by layer how far the fullest expert is above the mean load, as a part of it."""
    mean = counts.mean(axis=1)
    return counts.max(axis=1) / np.where(mean > 0, mean, 1) - (mean > 0)


def memory_bytes() -> int:
    """Returns the most memory in use so far: of the fullest device, or of the process on CPU."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peak = max(each.get("peak_bytes_in_use", 0) for each in stats)
    return peak or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def scalars(record: dict[str, Any]) -> dict[str, float]:
    """Flattens a record to names and numbers: "layers/0/max_vio", "waits_ms/dispatch/3"."""
    found = {}
    for name, value in record.items():
        if name == "layers":
            for stat, values in value.items():
                found |= {f"layers/{layer}/{stat}": v for layer, v in enumerate(values)}
        elif isinstance(value, dict):
            for part, values in value.items():
                found |= {f"{name}/{part}/{rank}": v for rank, v in enumerate(values)}
        elif name != "step" and value is not None:
            found[name] = float(value)
    return found
