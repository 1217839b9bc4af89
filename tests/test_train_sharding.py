"""Meshes by axis sizes, how parameters are cut over them, and a step for absent devices."""

import re

import jax
import pytest
import toy
from jax.sharding import PartitionSpec

from jax_moe import _pallas_matmul
from train import lower
from train.config import MeshConfig
from train.presets import V3
from train.sharding import axis_sizes, make_group
from train.step import Trainer

pytestmark = pytest.mark.cpu

FSDP = MeshConfig(data=1, fsdp=2, node=2, rank=-1, shard_dense=True)


@pytest.mark.parametrize(
    ("sizes", "found"),
    [
        ({"rank": -1}, (1, 1, 1, 8)),
        ({"data": -1, "node": 2, "rank": 2}, (2, 1, 2, 2)),
        ({"fsdp": -1, "data": 2, "rank": 1}, (2, 4, 1, 1)),
        ({"fsdp": 2, "node": -1, "rank": 4}, (1, 2, 1, 4)),
    ],
)
def test_one_axis_takes_what_is_left(sizes, found):
    assert axis_sizes(MeshConfig(**sizes), 8) == found


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"data": -1, "rank": -1}, "data=-1.*at most one"),
        ({"data": 0}, "data=0.*sizes are >= 1"),
        ({"data": 3}, "multiply to 3, which does not fit 8"),
        ({"rank": 4}, "multiply to 4, which does not fit 8 devices; set one axis to -1"),
    ],
)
def test_sizes_that_do_not_fit(sizes, message):
    with pytest.raises(ValueError, match=message):
        axis_sizes(MeshConfig(**sizes), 8)


def state_of(mesh: MeshConfig, **changes):
    trainer = Trainer(toy.changed(toy.CONFIG, mesh=mesh, **changes), make_group(mesh))
    return trainer, trainer.abstract_state


@pytest.mark.parametrize("scan_layers", [False, True])
def test_parameters_are_cut_over_fsdp_and_what_is_no_expert_over_all(scan_layers):
    config = {"model__hidden": 512, "model__scan_layers": scan_layers}
    _, state = state_of(FSDP, **config)
    layer = (None,) * scan_layers
    name = "moe_blocks" if scan_layers else "moe_blocks/0"
    for arrays in (state.params, state.optimizer[1][0].mu):
        specs = {path: leaf.sharding.spec for path, leaf in arrays.items()}
        assert specs[f"{name}/mlp/down"] == PartitionSpec(*layer, ("node", "rank"), None, "fsdp")
        # 512 x 40: three halvings of the longer side.
        assert specs[f"{name}/attention/q/kernel"] == PartitionSpec(
            *layer, ("fsdp", "node", "rank"), None
        )
        assert specs[f"{name}/mlp_norm/scale"] == PartitionSpec()
    _, whole = state_of(MeshConfig(data=2, node=2), **config)
    assert lower.shard_bytes(state.params) < 0.4 * lower.shard_bytes(whole.params)


def test_deepseek_v3_lowers_for_2048_absent_devices(monkeypatch):
    lowered = []
    lower_step = Trainer.lower_step
    monkeypatch.setattr(
        Trainer, "lower_step", lambda *a: lowered.append(lower_step(*a)) or lowered[0]
    )
    monkeypatch.setattr(_pallas_matmul, "COUNTS", range(256, 257))  # less to lower
    text = lower.report(V3, 2048)
    assert "671.026 B parameters on 2048 devices, data=1 x fsdp=32 x node=8 x rank=8" in text
    sizes = {
        name.strip(): float(size)
        for name, size in re.findall(r"^  (.*?) +([\d.]+) GiB$", text, re.MULTILINE)
    }
    even = 671.026e9 * 4 / 2048 / 2**30
    assert even <= sizes["parameters, float32"] < 1.01 * even
    assert 2 * even <= sizes["optimizer"] < 2.02 * even
    assert sizes["pools of the exchange"] > 0.1
    assert len(jax.devices()) < 2048
    code = lowered[0].as_text()
    # Forward and as each other's backward pass; dispatch is recomputed too.
    assert code.count("@jax_moe_dispatch(") == 3 and code.count("@jax_moe_combine(") == 2
    assert "mhlo.num_partitions = 2048" in code
    # Two products, the first of them again, and each one's two gradients.
    assert code.count("custom_call @mosaic_gpu") == 7


@pytest.mark.parametrize("devices", ["0", "100"])
def test_the_program_refuses_a_mesh_that_does_not_fit(devices, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["lower", devices, "deepseek-v3-671b"])
    assert lower.main() == 1
    assert f"does not fit {devices} devices" in capsys.readouterr().err


def test_the_program_says_what_this_machine_lacks(capsys, monkeypatch):
    def report(config, num_devices):
        raise RuntimeError(f"no {config.attention} for {num_devices}")

    monkeypatch.setattr(lower, "report", report)
    monkeypatch.setattr("sys.argv", ["lower", "8", "debug", "--attention", "cudnn"])
    assert lower.main() == 1
    assert capsys.readouterr().err == "error: no cudnn for 8\n"
