"""The run's folder: who may train there, and places that can hold no run."""

import errno
import fcntl
from types import SimpleNamespace

import pytest
import toy

from train import config as configs
from train import launch_local, processes
from train.checkpoint import Checkpoints
from train.folder import check_folder, claim_folder, hold_folder, told_what_to_do

pytestmark = pytest.mark.cpu


def test_a_folder_is_held_by_one_run(tmp_path):
    folder = tmp_path / "new" / "run"
    refusal = rf"run_dir={folder}: another run \(pid \d+ on .*\) trains there: .*--run-dir.*stop"
    for _ in range(2):
        with hold_folder(folder):
            for _ in range(2):
                with pytest.raises(ValueError, match=refusal), hold_folder(folder):
                    pass


def test_only_the_leading_process_holds_it(tmp_path, monkeypatch):
    with hold_folder(tmp_path):
        monkeypatch.setattr(processes, "leads", lambda: False)
        with hold_folder(tmp_path):
            pass


def test_a_file_system_without_locks_is_no_error(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", fail)
    with hold_folder(tmp_path):
        pass


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/run"])
def test_a_place_that_can_hold_no_run_is_refused_by_name(tmp_path, place):
    (tmp_path / "file").touch()
    folder = tmp_path / place
    refusal = rf"^run_dir={folder} must be a folder .*--run-dir.*\.$"
    with pytest.raises(ValueError, match=refusal), hold_folder(folder):
        pass


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    config = toy.changed(toy.CONFIG, run_dir=str(tmp_path))
    (tmp_path / "config.part").mkdir()
    told = rf"^{tmp_path}/config.part: Is a directory\. What {tmp_path} holds stays: once that"
    with pytest.raises(RuntimeError, match=told), told_what_to_do(tmp_path):
        claim_folder(config, "a text")


def test_a_checkpoint_that_cannot_be_written_is_told_as_a_file(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise ValueError("RESOURCE_EXHAUSTED: no space")  # as of tensorstore

    checkpoints = Checkpoints(tmp_path)
    for name in ("save", "close"):
        monkeypatch.setattr(checkpoints._manager, name, fail)
    told = rf"^{tmp_path}: RESOURCE_EXHAUSTED: no space\. What"
    for write in (lambda: checkpoints.save(SimpleNamespace(step=1), {}), checkpoints.close):
        with pytest.raises(RuntimeError, match=told), told_what_to_do(tmp_path):
            write()


def test_the_launcher_leaves_the_logs_of_a_run_alone(tmp_path):
    log = tmp_path / "logs" / "process-0.log"
    log.parent.mkdir()
    log.write_text("step 1")
    with hold_folder(tmp_path), pytest.raises(ValueError, match="another run"):
        launch_local.launch(launch_local.Options(1), ["tiny", "--run-dir", str(tmp_path)])
    assert log.read_text() == "step 1"


def test_a_folder_keeps_to_one_configuration(tmp_path):
    config = toy.changed(toy.CONFIG, run_dir=str(tmp_path))
    check_folder(config, "a text")
    claim_folder(config, "a text")
    longer = toy.changed(config, steps=30)
    check_folder(longer, "a text")
    claim_folder(longer, "a text")
    assert configs.load(tmp_path / "config.json").steps == 30
    with pytest.raises(ValueError, match=r"seed: 0 -> 1.*--run-dir"):
        check_folder(toy.changed(config, seed=1), "a text")
    with pytest.raises(ValueError, match=r"another text.*--run-dir"):
        check_folder(config, "an edited text")
