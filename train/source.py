"""What a run reads: windows of a text, packed documents, or random tokens."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import grain
import numpy as np

from train import data, packing
from train.config import Config
from train.data import Batch, Packed


class Source(NamedTuple):
    """What a run reads.

    Attributes:
      batches: training batches for ever; a grain iterator, whose state is a small dict.
      validation: all windows that are scored.
      about: a few words.
      digest: of what is read, so that a run that goes on can tell whether it is the same.
    """

    batches: grain.DatasetIterator
    validation: Batch
    about: str
    digest: str


def open_source(config: Config) -> Source:
    """Opens what the configuration names.

    Raises:
      ValueError: there is no such text, it is too short, or it has ids outside the vocabulary.
      RuntimeError: the corpus could not be downloaded.
    """
    dtype = data.token_dtype(config.model.vocab_size)
    if config.data.synthetic:
        return _synthetic(config, dtype)
    if config.data.documents:
        return _documents(config, dtype)
    text = data.load_text(config.data)
    training, validation = data.split(text, config.data)
    _check_ids(text, config)
    return Source(
        data.training_batches(training, config.data, config.seed, dtype),
        data.validation_windows(validation, config.data).astype(dtype, copy=False),
        f"{len(text):,} {'ids' if data.has_ids(config.data) else 'bytes'} of text",
        _digest(text),
    )


def _documents(config: Config, dtype: np.dtype) -> Source:
    """Packs documents; the last ones validate."""
    documents = packing.read_documents(config.data)
    tokens = np.concatenate(documents)
    _check_ids(tokens, config)
    cut = int(len(documents) * (1 - config.data.validation_part))
    cut = min(max(cut, 1), len(documents) - 1)
    window, few = config.data.sequence + 1, config.data.validation_windows
    parts = (packing.pack(part, window) for part in (documents[:cut], documents[cut:]))
    training, validation = (Packed(p.tokens.astype(dtype), p.segments) for p in parts)
    filled = np.mean(training.segments > 0)
    return Source(
        packing.training_batches(training, config.data, config.seed),
        Packed(validation.tokens[:few], validation.segments[:few]),
        f"{len(documents):,} documents, {filled:.1%} of the windows filled",
        _digest(tokens),
    )


def _synthetic(config: Config, dtype: np.dtype) -> Source:
    shape = (config.data.batch, config.data.sequence + 1)

    def draw(number: int) -> np.ndarray:
        random = np.random.default_rng((config.seed, number))
        return random.integers(0, config.model.vocab_size, shape, dtype)

    batches = grain.MapDataset.range(1, 2**31).map(draw)
    return Source(data.read(batches), draw(0), "random tokens", "random")


def _check_ids(tokens: np.ndarray, config: Config) -> None:
    vocab_size, ends = config.model.vocab_size, (tokens.min(), tokens.max())
    wrong = [token for token in ends if not 0 <= token < vocab_size]
    if wrong:
        raise ValueError(
            f"data.file={config.data.file} has token id {wrong[0]}, but "
            f"model.vocab_size={vocab_size}: raise it, or use other ids."
        )


def _digest(tokens: np.ndarray, part: int = 1 << 25) -> str:
    """Of the length, and of the first and last 32 Mi tokens: quick for files of any size."""
    digest = hashlib.sha256(str(len(tokens)).encode())
    for piece in (tokens[:part], tokens[-part:]):
        digest.update(np.ascontiguousarray(piece).tobytes())
    return digest.hexdigest()
