"""Bytes: what a column sends over links, and what no implementation can avoid moving."""

from __future__ import annotations

import numpy as np

SCALAR_BYTES = 4  # s and row_s are float32, ids int32


class Traffic:
    """Counts for one problem; every result is the largest over the ranks, in bytes.

    Args:
      ids: int32 [R, T, K], every one in 0..E-1.
      experts: E.
      capacity: rows C of one rank.
      row_bytes: bytes of one token or row.
    """

    def __init__(self, ids: np.ndarray, *, experts: int, capacity: int, row_bytes: int):
        self.ranks, self.tokens, self.top_k = ids.shape
        self.capacity, self.row_bytes = capacity, row_bytes
        rank = ids // (experts // self.ranks)
        there = rank[..., None] == np.arange(self.ranks)  # [source, T, K, destination]
        self.rows = there.sum((1, 2))  # [source, destination]
        self.packets = there.any(2).sum(1)

    def _received(self, pairs: np.ndarray) -> int:
        return int((pairs.sum(0) - np.diag(pairs)).max())

    def link(self, column: str) -> dict[str, int]:
        """Payload bytes (ids, scalars and headers apart) that one rank gets from the others."""
        gathered = (self.ranks - 1) * self.tokens * self.row_bytes
        blocks = (self.ranks - 1) * (self.capacity // self.ranks) * self.row_bytes
        rows_in = self._received(self.rows) * self.row_bytes
        rows_back = self._received(self.rows.T) * self.row_bytes
        packets_in = self._received(self.packets) * self.row_bytes
        packets_back = self._received(self.packets.T) * self.row_bytes
        dispatch, combine = {
            "cpu": (rows_in, rows_back),  # each row is read where it lies
            "ptx": (packets_in, packets_back),
            "deepep": (packets_in, packets_back),
            "xla": (gathered, gathered),
            "reference": (gathered, (self.ranks - 1) * self.capacity * self.row_bytes),
            "all_gather": (gathered, gathered),
            "all_to_all": (blocks, blocks),
            "ragged_all_to_all": (rows_in, rows_back),
        }[column]
        return {
            "plan": 0,
            "dispatch": dispatch,
            "combine": combine,
            "dispatch+combine": dispatch + combine,
            "plan+dispatch+combine": dispatch + combine,
            "plan+dispatch": dispatch,
            "forward+backward": 2 * (dispatch + combine),
        }

    def necessary(self, *, packets: bool) -> dict[str, int]:
        """Bytes that one rank must read and write: tokens and rows once each.

        Args:
          packets: count each packet to another rank, one per (token, destination rank), as
            written into that rank's memory and read there, as on GPUs.
        """
        here = self.tokens + self.rows.sum(0)  # tokens and rows of a rank
        passing = 2 * (self.packets - np.diag(np.diag(self.packets))) * packets
        dispatch = int((here + passing.sum(0)).max()) * self.row_bytes
        combine = int((here + passing.sum(1)).max()) * self.row_bytes  # they go back
        ids = self.tokens * self.top_k * SCALAR_BYTES
        return {
            "plan": 2 * ids,  # at least: the ids in, the positions out
            "dispatch": dispatch,
            "combine": combine,
            "dispatch+combine": dispatch + combine,
            "plan+dispatch+combine": dispatch + combine + 2 * ids,
            "plan+dispatch": dispatch + 2 * ids,
            "forward+backward": 2 * (dispatch + combine) + 2 * ids,
        }
