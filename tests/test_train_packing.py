"""Documents in windows: who is packed where, what counts, and that none sees another."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from train import packing
from train.data import Packed
from train.model import find_places
from train.source import open_source
from train.step import Trainer, real_predictions, token_losses

pytestmark = pytest.mark.cpu


def documents(*lengths: int) -> list[np.ndarray]:
    """Documents whose bytes tell the document and the place."""
    return [(np.arange(n) + 40 * i).astype(np.uint8) for i, n in enumerate(lengths, 1)]


def test_every_token_but_a_documents_first_is_predicted_once():
    lengths = np.random.default_rng(0).integers(2, 60, 50)
    texts = [np.arange(n, dtype=np.int32) + 100 * i for i, n in enumerate(lengths)]
    windows = packing.pack(texts, 25)
    real = np.asarray(real_predictions(jnp.asarray(windows.segments))) > 0
    found = sorted(windows.tokens[:, 1:][real])
    assert found == sorted(token for text in texts for token in text[1:])
    before = windows.tokens[:, :-1][real]
    np.testing.assert_array_equal(before + 1, windows.tokens[:, 1:][real])


def test_windows_are_filled_where_pieces_fit():
    windows = packing.pack(documents(10, 6, 4, 7, 30), 10)
    assert windows.segments[0].tolist() == [1] * 10
    assert windows.segments[1].tolist() == [1] * 6 + [2] * 4
    assert windows.tokens[1].tolist() == [*range(80, 86), *range(120, 124)]
    # 30 tokens: three pieces of 10, each from the last token of the one before, and one of 3.
    assert (windows.segments > 0).sum() == 10 + 10 + 7 + 33
    assert windows.tokens.shape == (6, 10)


def test_places():
    segments = jnp.asarray([[1, 1, 1, 2, 2, 0], [1, 2, 3, 3, 3, 3]])
    places = find_places(6, segments)
    assert places.positions.tolist() == [[0, 1, 2, 0, 1, 0], [0, 0, 0, 1, 2, 3]]
    assert places.real.tolist() == [[True] * 5 + [False], [True] * 6]
    assert places.visible.shape == (2, 1, 6, 6)
    assert places.visible[0, 0, 4].tolist() == [False, False, False, True, True, False]


def test_a_document_does_not_see_its_neighbours_and_padding_counts_nowhere():
    texts = documents(9, 11, 5, 20)
    rows = [packing.pack(part, 25) for part in (texts[:3], texts[1:3], texts[2:3], texts[3:])]
    batch = Packed(*(np.concatenate(arrays) for arrays in zip(*rows, strict=True)))
    config = toy.changed(toy.CONFIG, model__num_layers=1, model__num_dense_layers=0)
    trainer = Trainer(config, toy.group("2 devices, 4 virtual ranks"))
    state = toy.first_state(trainer)

    def run(batch):
        return token_losses(trainer.model(state.params, state.biases), batch)

    compiled = jax.jit(run).lower(batch).compile(compiler_options=toy.FAST_COMPILE)
    losses, real, stats = compiled(batch)
    assert real.sum(axis=1).tolist() == [8 + 10 + 4, 10 + 4, 4, 19]
    np.testing.assert_allclose(losses[0, 9:19], losses[1, :10], rtol=1e-5)
    np.testing.assert_allclose(losses[0, 20:24], losses[2, :4], rtol=1e-5)
    # The last token of a full window is predicted only.
    tokens = (24 + 16 + 5 + 20) * toy.CONFIG.model.top_k
    assert stats.counts.sum(axis=1).tolist() == [tokens]


def test_documents_of_a_file(tmp_path):
    text, records = tmp_path / "a.txt", tmp_path / "a.jsonl"
    text.write_text("one\ntwo\n\nthree\n  \n\nfour\n")
    records.write_text("".join(json.dumps({"text": t}) + "\n" for t in ("one\n\ntwo", "three")))

    def read(path):
        config = toy.changed(toy.CONFIG.data, file=str(path), documents=True)
        return [bytes(document) for document in packing.read_documents(config)]

    assert read(text) == [b"one\ntwo", b"three", b"four\n"]
    assert read(records) == [b"one\n\ntwo\n", b"three\n"]
    text.write_text("one")
    with pytest.raises(ValueError, match="has 1 document"):
        read(text)


def test_packed_batches_go_on_from_their_state(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("\n\n".join(f"number {i} is {i * i}" for i in range(300)))
    config = toy.changed(toy.CONFIG, data__file=str(path), data__documents=True)
    first, again = open_source(config), open_source(config)
    assert first.about.startswith("300 documents, 72.4% of the windows")
    for _ in range(3):
        next(first.batches)
    again.batches.set_state(json.loads(json.dumps(first.batches.get_state())))
    for _ in range(3):
        jax.tree.map(np.testing.assert_array_equal, next(first.batches), next(again.batches))
    assert next(first.batches).tokens.shape == (8, 25)
    assert len(first.validation.tokens) == len(first.validation.segments) > 0


@pytest.mark.parametrize("part", [0.01, 0.5, 0.99])
def test_two_documents_train_and_validate(tmp_path, part):
    path = tmp_path / "a.txt"
    path.write_text("to train on\n\nto validate")
    config = toy.changed(toy.CONFIG, data__file=str(path), data__documents=True)
    source = open_source(toy.changed(config, data__validation_part=part))
    assert bytes(next(source.batches).tokens[0, :11]) == b"to train on"
    assert bytes(source.validation.tokens[0, :11]) == b"to validate"


def test_token_ids_and_random_tokens(tmp_path):
    path = tmp_path / "ids.npy"
    np.save(path, np.arange(3000, dtype=np.uint16) % 700)
    config = toy.changed(toy.CONFIG, model__vocab_size=700, data__file=str(path))
    batch = next(open_source(config).batches)
    assert batch.dtype == np.int32 and batch.max() > 255
    np.testing.assert_array_equal((batch[:, :-1] + 1) % 700, batch[:, 1:])
    with pytest.raises(ValueError, match=r"token id 699, but model\.vocab_size=500"):
        open_source(toy.changed(config, model__vocab_size=500))
    np.save(path, np.arange(3000) % 700 - 1)
    with pytest.raises(ValueError, match=r"token id -1, but model\.vocab_size=700"):
        open_source(config)
    path = tmp_path / "a.txt"
    path.write_text("one\n\ntwo")
    config = toy.changed(config, data__file=str(path), data__documents=True)
    with pytest.raises(ValueError, match=r"token id 119, but model\.vocab_size=119"):
        open_source(toy.changed(config, model__vocab_size=119))

    synthetic = toy.changed(toy.CONFIG, data__synthetic=True)
    one, two = (next(open_source(synthetic).batches) for _ in range(2))
    np.testing.assert_array_equal(one, two)
    other = next(open_source(toy.changed(synthetic, seed=1)).batches)
    assert one.shape == (8, 25) and (one != other).mean() > 0.9
