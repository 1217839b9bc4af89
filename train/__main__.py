"""Trains: python -m train CONFIG [--key value ...]; --help lists all keys."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

import jax
import tyro
from rich.console import Console
from rich.text import Text

from train import config as configs
from train import processes
from train.config import Config
from train.folder import told_what_to_do
from train.presets import CONFIGS


def use_devices(cpu_devices: int) -> None:
    """Sets JAX to so many CPU devices, where any are asked for; before its first use.

    Raises:
      ValueError: they cannot be shared out evenly among the run's processes.
    """
    if not cpu_devices:
        return
    if cpu_devices % processes.count():
        raise ValueError(
            f"mesh.cpu_devices={cpu_devices} are those of all {processes.count()} processes "
            "together: give a multiple."
        )
    # JAX refuses its own option beside the older flag.
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = re.sub(r"--xla_force_host_platform_device_count=\d+", "", flags)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", cpu_devices // processes.count())


def parse(arguments: list[str] | None = None) -> Config:
    """Returns the configuration with the command line's changes; exits on unknown keys.

    CONFIG is a name, or the JSON file of a configuration (a run leaves one).
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    name = arguments[0] if arguments else ""
    if name.endswith(".json"):
        meaning, config = f"What {name} says", configs.load(Path(name))
    elif name in CONFIGS:
        meaning, config = CONFIGS[name]
    else:  # which says what names there are
        return tyro.extras.overridable_config_cli(
            CONFIGS, prog="python -m train", args=arguments, description=__doc__
        )
    # No subcommand: messages about the values in one bear a name of tyro's own.
    return tyro.cli(
        Config,
        default=config,
        prog=f"python -m train {name}",
        args=arguments[1:],
        description=meaning,
        config=(tyro.conf.AvoidSubcommands,),
    )


def command(steps: int | None = None) -> str:
    """Returns the command that goes on with this run, to the same or to another step."""
    typed = [os.path.relpath(sys.executable), "-m", "train", *sys.argv[1:]]
    line = os.environ.get("TRAIN_COMMAND") or shlex.join(typed)
    if steps is None:
        return line
    changed, found = re.subn(r"(\bSTEPS=|--steps[ =])\d+", rf"\g<1>{steps}", line)
    return changed if found else f"{line} --steps {steps}"


def sample_command(folder: Path) -> str:
    """Returns the command that writes text from this run."""
    if os.environ.get("TRAIN_COMMAND", "").startswith("make "):
        return f"make sample RUN={shlex.quote(str(folder))}"
    return shlex.join([os.path.relpath(sys.executable), "-m", "train.sample", str(folder)])


def main() -> int:
    """Runs the command line; returns its exit status."""
    console = Console(markup=False, highlight=False, soft_wrap=True)
    try:
        config = parse()
        with processes.joined(dead_s=config.dead_s, stall_s=config.stall_s):
            use_devices(config.mesh.cpu_devices)
            if not processes.leads():
                console.quiet = True
            return train(config, console)
    except (ValueError, RuntimeError, OSError) as error:
        console.print(Text.assemble(("error: ", "red"), str(error)))
        return 1


def train(config: Config, console: Console) -> int:
    """Trains, and says what there is now; returns the exit status."""
    from train.loop import Run  # after the devices are set
    from train.plot import plot

    run = Run(config, console)
    if run.reached > config.steps:
        console.print(
            f"{config.folder} is at step {run.reached} already: nothing to do for {config.steps} "
            "steps."
        )
        return 0
    if not run.train():
        console.print(f"stopped and saved; go on with: {command()}")
        return 130
    if not processes.leads():
        return 0
    folder = config.folder
    with told_what_to_do(folder):
        picture = plot(folder)
    console.print(
        f"checkpoint {folder / 'checkpoints'}, log {folder / 'log.jsonl'}, plot {picture}"
    )
    console.print(f"text from it: {sample_command(folder)}")
    total = config.optimizer.total_steps
    if config.steps < total:
        console.print(f"The schedule has {total} steps: run on with: {command(total)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
