"""The record of a step, and where it goes."""

import json
import struct
from types import SimpleNamespace

import numpy as np
import pytest
import toy

from train.metrics import Meter, max_vio, scalars
from train.report import TensorBoard

pytestmark = pytest.mark.cpu

COUNTS = np.int32([[96, 0, 32, 64, 48, 48, 48, 48], [48] * 8])


def metrics(counts=COUNTS, **changes):
    loads = counts / counts.mean(axis=1, keepdims=True)
    stats = SimpleNamespace(
        counts=counts,
        dropped=np.int32([0, 3]),
        invalid=np.int32([0, 0]),
        aux_loss=np.float32([1, 2]),
        max_vio=loads.max(axis=1) - 1,
        min_load=loads.min(axis=1),
        router_entropy=np.float32([2, 1]),
        nodes_per_token=np.float32([1.5, 1.75]),
    )
    bias = np.float32([[-0.5, 0.5] * 4, [0.25] * 8])
    found = {"loss": np.float32(2), "grad_norm": np.float32(0.5), "learning_rate": np.float32(1e-3)}
    found |= {"finite": np.True_, "bias_step": np.float32(1e-2), "moe": stats, "bias": bias}
    return found | changes


@pytest.fixture
def device_get(monkeypatch):
    """Metrics that are on the host already, in a namespace that is no pytree."""
    monkeypatch.setattr("jax.device_get", lambda tree: tree)


def meter(mesh="2 replicas of 2 nodes of 2", waits=(), **changes):
    group = toy.group(mesh)
    if waits:
        iterator = iter(waits)
        group = SimpleNamespace(
            mesh=group.mesh, num_ranks=4, num_devices=4, waits=lambda: next(iterator)
        )
    return Meter(toy.changed(toy.CONFIG, **changes), group)


def test_record(device_get):
    record = meter(peak_tflops=100.0).record(7, metrics(), 0.5, 0.125)
    tokens = 8 * 24
    assert record["step"] == 7 and record["loss"] == 2.0 and record["skipped"] is False
    assert record["bits_per_byte"] == pytest.approx(2 / np.log(2))
    assert (record["step_s"], record["data_s"]) == (0.5, 0.125)
    assert record["tokens_per_s"] == tokens * 2 and record["tokens_per_s_device"] == tokens / 4
    # 6 for each of 13728 weights and 24 / 2 positions x 3 layers x 2 heads x (8 + 8 + 12).
    weights = record["tflops_device"] * 1e12 / (tokens / 4)
    assert record["mfu"] == pytest.approx(record["tflops_device"] / 100) and weights > 6 * 10_000
    assert record["peak_tflops"] == 100.0 and 0.01 < record["memory_gib"] < 100
    layers = record["layers"]
    assert all(len(values) == 2 for values in layers.values())
    assert layers["max_vio"] == [1.0, 0.0] == layers["max_vio_running"]
    assert record["max_vio"] == 1.0 and layers["min_load"] == [0.0, 1.0]
    assert layers["dead_experts"] == [1, 0] and layers["mean_load"] == [48.0, 48.0]
    # 4 ranks of 2 experts in each of 2 replicas.
    assert layers["rows_mean"] == [48.0, 48.0] and layers["rows_max"] == [48.0, 48.0]
    assert layers["bias_mean"] == [0.0, 0.25] and layers["bias_deviation"] == [0.5, 0.0]
    assert (layers["bias_min"], layers["bias_max"]) == ([-0.5, 0.25], [0.5, 0.25])
    assert layers["dropped"] == [0, 3] and "waits_ms" not in record
    json.dumps(record, allow_nan=False)


def test_running_max_vio_adds_the_loads_up(device_get):
    reader = meter()
    reader.record(1, metrics(), 1.0, 0.0)
    mirrored = COUNTS[:, [1, 0, *range(2, 8)]]
    record = reader.record(2, metrics(mirrored), 1.0, 0.0)
    assert record["layers"]["max_vio"][0] == 1.0
    assert record["layers"]["max_vio_running"][0] == pytest.approx(128 / 96 - 1)
    assert "mfu" not in record, "a CPU's peak is not known"
    assert max_vio(np.zeros((1, 8), np.int64)).tolist() == [0.0]


def test_a_step_that_is_not_finite_is_still_json(device_get):
    broken = metrics(loss=np.float32("nan"), grad_norm=np.float32("inf"), finite=np.False_)
    record = meter().record(1, broken, 1.0, 0.0)
    assert record["loss"] is None and record["grad_norm"] is None and record["skipped"] is True
    json.dumps(record, allow_nan=False)


def test_bits_per_byte_of_tokens_that_are_longer(device_get):
    record = meter(data__bytes_per_token=4.0).record(1, metrics(), 1.0, 0.0)
    assert record["bits_per_byte"] == pytest.approx(2 / np.log(2) / 4)


def test_waits_are_those_of_the_step(device_get):
    before = {"plan": np.zeros((2, 4, 4), np.int64), "dispatch": np.full((2, 4, 4), 5_000_000)}
    after = {name: array.copy() for name, array in before.items()}
    after["dispatch"][..., 2] += 8_000_000
    record = meter(waits=[before, after]).record(1, metrics(), 1.0, 0.0)
    assert record["waits_ms"] == {"dispatch": [0.0, 0.0, 8.0, 0.0]}


def test_scalars():
    record = {"step": 3, "loss": 1.5, "grad_norm": None, "skipped": False}
    record |= {"layers": {"max_vio": [0.5, 0.25]}, "waits_ms": {"plan": [1.0]}}
    assert scalars(record) == {
        "loss": 1.5,
        "skipped": 0.0,
        "layers/0/max_vio": 0.5,
        "layers/1/max_vio": 0.25,
        "waits_ms/plan/0": 1.0,
    }


def test_tensorboard_file(tmp_path):
    writer = TensorBoard(tmp_path, 0)
    writer.write({"step": 3, "loss": 1.5})
    writer.close()
    (path,) = (tmp_path / "tensorboard").iterdir()
    assert events(path.read_bytes())[-1] == (3, {"loss": 1.5})


def events(raw: bytes) -> list[tuple[int, dict[str, float]]]:
    """Steps and scalars of an event file: records of length, checksum, message, checksum."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    while raw:
        (length,) = struct.unpack("<Q", raw[:8])
        event = Event.FromString(raw[12 : 12 + length])
        found.append((event.step, {v.tag: v.simple_value for v in event.summary.value}))
        raw = raw[16 + length :]
    return found


def test_without_tensorboardx_the_message_names_the_way_out(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tensorboardX", None)
    with pytest.raises(ValueError, match="pip install"):
        TensorBoard(tmp_path, 0)
