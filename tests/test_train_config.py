"""Configurations: named ones, changes by the command line, JSON, and what a run may change."""

import json
import re
import subprocess
from pathlib import Path

import pytest
import toy

from train import config as configs
from train.__main__ import command, parse, sample_command
from train.presets import TINY

pytestmark = pytest.mark.cpu


def test_tiny_is_as_published():
    tiny = parse(["tiny"])
    model, optimizer, data = tiny.model, tiny.optimizer, tiny.data
    assert (model.vocab_size, model.hidden, model.num_layers, model.num_dense_layers) == (
        256,
        96,
        3,
        1,
    )
    assert (model.num_heads, model.kv_rank, model.q_rank) == (4, 64, None)
    assert (model.nope_dim, model.rope_dim, model.value_dim) == (16, 16, 32)
    assert (model.num_experts, model.top_k, model.num_groups, model.top_groups) == (8, 2, 4, 2)
    assert (model.num_shared, model.expert_width, model.dense_width) == (1, 96, 256)
    assert (model.rope_theta, model.init_std) == (1e4, 0.02)
    assert (data.batch, data.sequence, data.validation_windows) == (16, 128, 512)
    assert (optimizer.b1, optimizer.b2, optimizer.weight_decay) == (0.9, 0.95, 0.1)
    assert (optimizer.peak_rate, optimizer.final_rate) == (3e-3, 3e-4)
    assert (optimizer.total_steps, optimizer.warmup_steps, optimizer.clip_norm) == (2500, 100, 1.0)
    assert (optimizer.bias_step, optimizer.aux_loss_weight) == (1e-3, 0.0)


def test_command_line_changes_one_value():
    changed = parse(["tiny", "--model.hidden", "64", "--steps", "7"])
    assert changed == toy.changed(TINY, model__hidden=64, steps=7)


@pytest.mark.parametrize(
    "arguments", [["tiny", "--model.hiden", "64"], ["tiny", "--steps", "many"], ["huge"], []]
)
def test_command_line_refuses(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        parse(arguments)
    assert stop.value.code == 2
    capsys.readouterr()


def test_a_value_is_refused_by_the_name_of_its_option(tmp_path, capsys):
    path = tmp_path / "toy.json"
    configs.save(toy.CONFIG, path)
    for name in ("tiny", str(path)):
        with pytest.raises(SystemExit):
            parse([name, "--model.rope-dim", "7"])
        printed = capsys.readouterr().err
        assert "Error parsing model: model.rope_dim=7 must be even" in printed
        assert "tyro" not in printed


@pytest.mark.parametrize(
    "program",
    ["train", "train.lower 8", "train.launch_local --processes 2 --", "train.plot", "train.sample"],
)
def test_a_file_that_is_not_there_is_an_error_and_no_traceback(program):
    done = subprocess.run(
        toy.command(*program.split(), "nowhere.json"),
        env=toy.environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert re.fullmatch("error: .*nowhere.json.*\n", done.stdout + done.stderr)


def test_the_program_refuses_before_it_starts(tmp_path):
    command = toy.command("train", "tiny", "--run-dir", str(tmp_path / "run"), "--stps", "3")
    done = subprocess.run(command, env=toy.environment(), capture_output=True, text=True)
    assert done.returncode == 2
    assert "--stps" in done.stdout + done.stderr
    assert not (tmp_path / "run").exists()


def test_json_round_trip(tmp_path):
    configs.save(toy.CONFIG, tmp_path / "config.json")
    assert configs.load(tmp_path / "config.json") == toy.CONFIG


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"cannot be read \(No such file or directory\): give .*config\.json"),
        ('{"name": ', r"must be JSON \(.*line 1 column 10.*\): mend it"),
        ("\N{LATIN SMALL LETTER E WITH ACUTE}", r"must be JSON \(.*utf-8.*\): mend it"),
        ('{"stepz": 3}', "unknown key stepz"),
        ("{}", "missing .* arguments"),
    ],
)
def test_a_bad_configuration_file_is_named(tmp_path, text, message):
    path = tmp_path / "own.json"
    if text is not None:
        path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=rf"^{path}:? .*{message}"):
        parse([str(path)])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["model"].update(hiden=3), r"model\.hiden"),
        (lambda d: d.update(stepz=3), "stepz"),
        (lambda d: d["model"].update(hidden="96"), r"model\.hidden='96'"),
        (lambda d: d["model"].update(dtype="float16"), r"model\.dtype='float16'"),
        (lambda d: d["model"].update(remat=1), r"model\.remat=1"),
        (lambda d: d["model"].pop("hidden"), "hidden"),
        (lambda d: d.update(model=5), "model=5 has no keys"),
        (lambda d: d.update(steps=10**6), "steps=1000000 must be 1..40"),
    ],
)
def test_json_refuses(change, message):
    values = json.loads(json.dumps(configs.to_dict(toy.CONFIG)))
    change(values)
    with pytest.raises(ValueError, match=message):
        configs.from_dict(values)


@pytest.mark.parametrize(
    "values",
    [
        {"model__rope_dim": 7},
        {"model__num_dense_layers": 4},
        {"model__num_heads": 0},
        {"data__batch": 0},
        {"data__sequence": -1},
        {"eval_every": 0},
        {"keep_checkpoints": 0},
        {"profile_steps": 0},
        {"mesh__cpu_devices": -8},
        {"steps": 0},
        {"optimizer__total_steps": 0},
        {"data__validation_part": 1.0},
        {"optimizer__decay_steps": 41},
        {"optimizer__bias_frozen_steps": -1},
        {"micro_batches": 3},
        {"data__bytes_per_token": 0.0},
        {"attention": "cudnn"},  # float32
        {"attention": "cudnn", "model__dtype": "bfloat16", "data__documents": True},
        {"attention": "cudnn", "model__dtype": "bfloat16", "model__value_dim": 17},
    ],
)
def test_impossible_values(values):
    option, value = next(iter(values.items()))
    option = option.replace("__", ".")
    with pytest.raises(ValueError, match=rf"^{re.escape(option)}=.?{value}"):
        toy.changed(toy.CONFIG, **values)


def test_what_a_continued_run_may_change():
    same = toy.changed(toy.CONFIG, steps=30, mesh__node=2, implementation="xla", eval_every=3)
    assert configs.differences(toy.CONFIG, same) == []
    other = toy.changed(toy.CONFIG, seed=1, model__hidden=64)
    assert configs.differences(toy.CONFIG, other) == ["model.hidden: 32 -> 64", "seed: 0 -> 1"]


def test_the_command_that_goes_on(monkeypatch):
    monkeypatch.setenv("TRAIN_COMMAND", "make train STEPS=500 DATA=a.txt")
    assert command() == "make train STEPS=500 DATA=a.txt"
    assert command(2500) == "make train STEPS=2500 DATA=a.txt"
    assert sample_command(Path("runs/tiny-a")) == "make sample RUN=runs/tiny-a"
    monkeypatch.delenv("TRAIN_COMMAND")
    monkeypatch.setattr("sys.argv", ["-m", "tiny", "--steps", "5", "--run-dir", "a b"])
    assert command(7).endswith("-m train tiny --steps 7 --run-dir 'a b'")
    assert sample_command(Path("a b")).endswith("-m train.sample 'a b'")
    monkeypatch.setattr("sys.argv", ["-m", "tiny"])
    assert command(7).endswith("-m train tiny --steps 7")


def test_runs_on_other_texts_have_other_folders():
    assert toy.CONFIG.folder == Path("runs/toy")
    assert toy.changed(toy.CONFIG, data__file="/a/b.txt").folder == Path("runs/toy-b")
    assert toy.changed(toy.CONFIG, run_dir="c").folder == Path("c")
