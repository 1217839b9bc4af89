"""Documents packed into windows: whole where they fit, in pieces where they are longer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import grain
import numpy as np

from train.config import DataConfig
from train.data import Packed, is_jsonl, jsonl_texts, load_text, read

_OPEN = 32  # windows that are still filled; the fullest that has room takes the next piece


def read_documents(config: DataConfig) -> list[np.ndarray]:
    """Returns JSONL records, or the blocks of a text between blank lines, each uint8 [length]."""
    if config.file is not None and is_jsonl(Path(config.file)):
        texts = jsonl_texts(Path(config.file).read_bytes(), config.file)
        documents = [text.encode("utf-8") + b"\n" for text in texts]
    else:
        text = load_text(config)
        if text.dtype != np.uint8:
            raise ValueError(f"documents=True with {config.file}: token ids have no blank lines.")
        documents = re.split(rb"\n[ \t]*\n\s*", text.tobytes())
    found = [np.frombuffer(document, np.uint8) for document in documents if len(document) > 1]
    if len(found) < 2:
        raise ValueError(
            f"documents=True, but {config.file or 'the corpus'} has {len(found)} document: give "
            "JSONL, or a text with blank lines between its documents."
        )
    return found


def pieces(documents: Sequence[np.ndarray], window: int) -> list[np.ndarray]:
    """Cuts documents longer than a window; a piece begins with the last token of the one before.

    So every token but a document's first is predicted once.
    """
    found = []
    for document in documents:
        last = max(1, len(document) - 1)
        found += [document[start : start + window] for start in range(0, last, window - 1)]
    return found


def pack(documents: Sequence[np.ndarray], window: int) -> Packed:
    """Packs documents into windows [windows, window]; what is left of one is padding."""
    bins: list[list[np.ndarray]] = []
    room: dict[int, int] = {}  # of the open windows
    for piece in pieces(documents, window):
        fits = [number for number, left in room.items() if left >= len(piece)]
        if fits:
            number = min(fits, key=room.__getitem__)
        else:
            if len(room) == _OPEN:
                del room[min(room, key=room.__getitem__)]
            number = len(bins)
            bins.append([])
            room[number] = window
        bins[number].append(piece)
        room[number] -= len(piece)
    tokens = np.zeros((len(bins), window), documents[0].dtype)
    segments = np.zeros((len(bins), window), np.int32)
    for row, held in enumerate(bins):
        lengths = [len(piece) for piece in held]
        tokens[row, : sum(lengths)] = np.concatenate(held)
        segments[row, : sum(lengths)] = np.repeat(np.arange(1, len(held) + 1), lengths)
    return Packed(tokens, segments)


def training_batches(windows: Packed, config: DataConfig, seed: int) -> grain.DatasetIterator:
    """Iterates over batches of windows in random order, each once an epoch, for ever."""
    order = grain.MapDataset.range(len(windows.tokens)).shuffle(seed=seed).repeat()
    return read(
        order.batch(config.batch).map(
            lambda rows: Packed(windows.tokens[rows], windows.segments[rows])
        )
    )
