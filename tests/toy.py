"""A run small enough to compile in seconds, and a text for it."""

import dataclasses
import os
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np

import jax_moe
from train.config import Config, DataConfig, MeshConfig, ModelConfig, OptimizerConfig
from train.step import Trainer

CONFIG = Config(
    name="toy",
    model=ModelConfig(
        vocab_size=256,
        hidden=32,
        num_layers=3,
        num_dense_layers=1,
        dense_width=48,
        num_heads=2,
        kv_rank=16,
        nope_dim=8,
        rope_dim=8,
        value_dim=12,
        num_experts=8,
        expert_width=16,
        top_k=2,
        num_groups=4,
        top_groups=2,
    ),
    optimizer=OptimizerConfig(
        peak_rate=1e-2, final_rate=1e-3, total_steps=40, warmup_steps=5, bias_step=1e-2
    ),
    data=DataConfig(batch=8, sequence=24, validation_windows=10),
    mesh=MeshConfig(node=4, rank=2, cpu_devices=8),
    steps=20,
)

# data, node, rank, virtual ranks, nodes of the topology
MESHES = {
    "8 devices": (1, 4, 2, 1, None),
    "4 devices, 2 virtual ranks": (1, 4, 1, 2, None),
    "2 devices, 4 virtual ranks": (1, 2, 1, 4, 4),
    "1 device, 8 virtual ranks": (1, 1, 1, 8, 4),
    "1 device, 1 rank": (1, 1, 1, 1, None),
    "2 replicas of 2 nodes of 2": (2, 2, 2, 1, None),
}


def changed(config, **values):
    """The configuration with some values replaced; "model.remat" goes as model__remat."""
    for key, value in values.items():
        part, _, name = key.rpartition("__")
        if part:
            value = dataclasses.replace(getattr(config, part), **{name: value})
        config = dataclasses.replace(config, **{part or name: value})
    return config


def group(mesh: str = "8 devices") -> jax_moe.ExpertGroup:
    data, node, rank, virtual_ranks, num_nodes = MESHES[mesh]
    devices = jax.devices()[: data * node * rank]
    made = jax_moe.make_mesh(data=data, node=node, rank=rank, devices=devices)
    return jax_moe.ExpertGroup(made, virtual_ranks=virtual_ranks, num_nodes=num_nodes)


def windows(steps: int, config: Config = CONFIG) -> np.ndarray:
    """Batches [steps, batch, sequence + 1] of a text that can be learned: counting, with gaps."""
    random = np.random.default_rng(0)
    starts = random.integers(0, 200, (steps, config.data.batch, 1))
    return ((starts + np.arange(config.data.sequence + 1)) % 97 + 20).astype(np.uint8)


FAST_COMPILE = {"xla_backend_optimization_level": 0}  # halves the tests' time


def first_state(trainer: Trainer):
    """What `trainer.initialise` returns."""
    return trainer.initialise.lower().compile(compiler_options=FAST_COMPILE)()


def gradients(state) -> dict[str, np.ndarray]:
    """Those of the first step but for one factor: what AdamW's means then hold."""
    assert state.step == 1
    return jax.device_get(state.optimizer[1][0].mu)


def assert_gradients_near(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """Each array within 1e-5 of its largest entry."""
    assert found.keys() == expected.keys()
    for path, gradient in expected.items():
        bound = 1e-5 * np.abs(gradient).max()
        np.testing.assert_allclose(found[path], gradient, rtol=0, atol=bound, err_msg=path)


def command(module: str, *arguments: str, before: str = "") -> list[str]:
    """The command line of a module of the trainer, with the toy configuration among the named ones.

    `before` is run first.

    This tree's folders go last, so that an installed jax_moe is found before the tree's.
    """
    tests = Path(__file__).parent
    program = (
        f"import runpy, sys; sys.path += [{str(tests.parent)!r}, {str(tests)!r}]; import toy; "
        "from train import presets; presets.CONFIGS['toy'] = ('for the tests', toy.CONFIG); "
        f"exec({before!r}); runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    )
    return [sys.executable, "-P", "-c", program, *arguments]


_CACHE = tempfile.TemporaryDirectory(prefix="jax_moe_compiled_")


def environment(**changes: str) -> dict[str, str]:
    """The environment of such a command: it chooses its own devices, and compiles quickly."""
    kept = {key: value for key, value in os.environ.items() if key != "JAX_NUM_CPU_DEVICES"}
    added = {
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
        # What one command compiled the next ones load.
        "JAX_COMPILATION_CACHE_DIR": _CACHE.name,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
    }
    return kept | added | changes


def write_text(path: Path, length: int = 6000) -> Path:
    """A text file of that many bytes, in which every byte depends on its place."""
    lines = [f"{i} times {i % 7} is {i * (i % 7)}.\n" for i in range(length // 10)]
    path.write_bytes("".join(lines).encode()[:length])
    return path
