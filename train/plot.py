"""Plots a run's loss, load balance and speed: python -m train.plot RUN_FOLDER."""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib
import numpy as np

from train.report import read_log

matplotlib.use("Agg")  # needs no screen; before pyplot
from matplotlib import pyplot

_WINDOW = 50  # steps of the running mean


def running_mean(values: np.ndarray) -> np.ndarray:
    """Returns the mean of each value and up to _WINDOW - 1 before it."""
    sums = np.cumsum(np.concatenate([[0.0], values]))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - _WINDOW)
    return (sums[ends] - sums[starts]) / (ends - starts)


def plot(folder: Path) -> Path:
    """Draws loss, load balance and speed from the folder's log; returns the PNG's path.

    Raises:
      ValueError: the log has no step.
    """
    records = read_log(folder / "log.jsonl")
    # A step that was not finite has no number to draw.
    steps = [record for record in records if "loss" in record and not record["skipped"]]
    validations = [record for record in records if "val_bits_per_byte" in record]
    if not steps:
        raise ValueError(f"{folder / 'log.jsonl'} holds no step yet: nothing to plot.")
    figure, panels = pyplot.subplots(4, 1, sharex=True, figsize=(7, 11), layout="tight")
    loss, balance, norm, speed = panels
    x = np.array([record["step"] for record in steps])
    _draw_loss(loss, x, steps, validations)
    _draw_balance(balance, x, steps)
    _draw_line(norm, x, steps, "grad_norm", "norm of the gradient")
    norm.set_yscale("log")
    _draw_line(speed, x, steps, "tokens_per_s", "tokens per second")
    speed.set_xlabel("step")
    path = folder / "plot.png"
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
    return path


def _draw_loss(axes, x: np.ndarray, steps: list[dict], validations: list[dict]) -> None:
    bits = np.array([record["bits_per_byte"] for record in steps])
    axes.plot(x, bits, color="tab:blue", alpha=0.25, linewidth=0.7)
    axes.plot(x, running_mean(bits), color="tab:blue", label=f"training, mean of {_WINDOW} steps")
    if validations:
        val_x = [record["step"] for record in validations]
        val_y = [record["val_bits_per_byte"] for record in validations]
        axes.plot(val_x, val_y, "o-", color="tab:orange", markersize=4, label="validation")
        axes.annotate(
            f"{val_y[-1]:.3f}",
            (val_x[-1], val_y[-1]),
            (0, 8),
            textcoords="offset points",
            ha="right",
        )
    low = min(bits.min(), *(record["val_bits_per_byte"] for record in validations), np.inf)
    axes.set_ylim(low - 0.2, min(bits.max() + 0.2, low + 3))
    axes.set_ylabel("bits per byte")
    axes.grid(alpha=0.3)
    axes.legend()


def _draw_line(axes, x: np.ndarray, steps: list[dict], key: str, label: str) -> None:
    values = np.array([record[key] for record in steps])
    axes.plot(x, values, color="tab:blue", alpha=0.25, linewidth=0.7)
    axes.plot(x, running_mean(values), color="tab:blue")
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)


def _draw_balance(axes, x: np.ndarray, steps: list[dict]) -> None:
    """Draws how far the fullest expert is above the mean load, and the emptiest one."""
    if "layers" not in steps[0]:
        return
    lines = (
        ("max_vio", "fullest: max/mean - 1", "red"),
        ("min_load", "emptiest: min/mean", "blue"),
    )
    for key, label, colour in lines:
        layers = np.array([record["layers"][key] for record in steps]).T
        for values in layers:
            axes.plot(x, running_mean(values), color=f"tab:{colour}", alpha=0.4, linewidth=0.6)
        mean = running_mean(layers.mean(axis=0))
        label = f"{label}; MoE layers (thin: {len(layers)}) and their mean"
        axes.plot(x, mean, color=f"tab:{colour}", label=label)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("load of the experts")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def main() -> None:
    """Plots the folder named on the command line."""
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m train.plot RUN_FOLDER")
    try:
        print(plot(Path(sys.argv[1])))
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
