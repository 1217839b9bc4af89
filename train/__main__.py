"""Trains: python -m train CONFIG [--key value ...]; --help lists all keys."""

from __future__ import annotations

import os
import re
import shlex
import sys

import jax
import tyro
from rich.console import Console

from train.config import Config
from train.presets import CONFIGS


def use_devices(cpu_devices: int) -> None:
    """Sets JAX to so many CPU devices, where any are asked for; before its first use."""
    if not cpu_devices:
        return
    # JAX refuses its own option beside the older flag.
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = re.sub(r"--xla_force_host_platform_device_count=\d+", "", flags)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", cpu_devices)


def parse(arguments: list[str] | None = None) -> Config:
    """Returns the named configuration with the command line's changes; exits on unknown keys."""
    return tyro.extras.overridable_config_cli(
        CONFIGS, prog="python -m train", args=arguments, description=__doc__
    )


def command() -> str:
    """Returns the command that goes on with this run."""
    typed = [os.path.relpath(sys.executable), "-m", "train", *sys.argv[1:]]
    return os.environ.get("TRAIN_COMMAND") or shlex.join(typed)


def main() -> int:
    """Runs the command line; returns its exit status."""
    config = parse()
    use_devices(config.mesh.cpu_devices)
    from train.loop import Run  # after the devices are set
    from train.plot import plot

    console = Console()
    try:
        run = Run(config, console)
        done = run.train()
    except (ValueError, RuntimeError) as error:
        console.print(f"[red]error:[/red] {error}", highlight=False, soft_wrap=True)
        return 1
    if not done:
        console.print(
            f"stopped and saved; go on with: {command()}", highlight=False, soft_wrap=True
        )
        return 130
    folder = config.folder
    console.print(
        f"checkpoint {folder / 'checkpoints'}, log {folder / 'log.jsonl'}, plot {plot(folder)}",
        highlight=False,
        soft_wrap=True,
    )
    if config.steps < config.optimizer.total_steps:
        console.print(
            f"The schedule has {config.optimizer.total_steps} steps: run on with make train "
            f"STEPS={config.optimizer.total_steps}.",
            highlight=False,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
