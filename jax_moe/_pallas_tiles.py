"""Which tiles of a result the kernels of `_pallas_matmul` compute, and in which order."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jax_moe._pallas_operands import ALIGNMENT

MOST_ROWS = 256  # of a tile of `product`
# Rows that a wgmma of `product` takes, each in code of its own: with fewer than the least, the
# copies of a step take longer than the tensor cores.
COUNTS = range(96, MOST_ROWS + 1, 16)
MOST_PARTS = 4  # of a tile that several multiprocessors share
PANEL = 8


def row_tiles(
    starts: Array, sizes: Array, num_rows: int, virtual_ranks: int, zero_tail: bool
) -> tuple[Array, Array]:
    """The table of tiles of rows, int32 [4, most], and how many count, int32.

    The four: group (-1 for rows that are to be zero), first row, and the first and end of the rows
    that count, both counted from there. Groups with the longest tiles come first, so that those
    that run at one time differ little and the last ones are short.
    """
    groups = jnp.arange(len(sizes), dtype=jnp.int32)
    if zero_tail:
        edge = jnp.arange(1, virtual_ranks + 1, dtype=jnp.int32) * (num_rows // virtual_ranks)
        end = (starts + sizes).reshape(virtual_ranks, -1)[:, -1]
        starts, sizes = jnp.concatenate([starts, end]), jnp.concatenate([sizes, edge - end])
        groups = jnp.concatenate([groups, jnp.full(virtual_ranks, -1, jnp.int32)])
    first = starts // ALIGNMENT * ALIGNMENT
    rows = jnp.where(sizes > 0, starts + sizes - first, 0)
    count = (rows + MOST_ROWS - 1) // MOST_ROWS
    unit = jnp.maximum(count, 1)
    length = rounded_up(rows, unit * COUNTS.step) // unit
    work = jnp.where(groups >= 0, length, 0)
    place = jnp.arange(len(groups))
    ahead = (work > work[:, None]) | ((work == work[:, None]) & (place < place[:, None]))
    begin = jnp.sum(jnp.where(ahead, count, 0), axis=1, dtype=jnp.int32)
    tile = jnp.arange(num_rows // MOST_ROWS + 2 * len(groups), dtype=jnp.int32)
    of = jnp.argmax((begin <= tile[:, None]) & (tile[:, None] < begin + count), axis=1)
    down = first[of] + (tile - begin[of]) * length[of]
    low = jnp.maximum(starts[of] - down, 0)
    high = jnp.clip((starts + sizes)[of] - down, 0, length[of])
    return jnp.stack([groups[of], down, low, high]), jnp.sum(count, dtype=jnp.int32)


def shared_tiles(tiles_down: Array, across: int, blocks: int) -> Array:
    """How tiles of the result are shared, int32 [3].

    The three: tiles down; tiles that are one multiprocessor's each; and the parts of each other
    tile, of those of a last wave that would leave half of the multiprocessors without any.
    """
    tiles = tiles_down * across
    left = lax.rem(tiles, jnp.int32(blocks))
    parts = jnp.clip(blocks // jnp.maximum(left, 1), 1, MOST_PARTS)
    return jnp.stack([tiles_down, jnp.where(parts > 1, tiles - left, tiles), parts])


def runs(starts: Array, ends: Array) -> tuple[Array, Array]:
    """Of the groups that follow one another without a gap: the first row and the end, int32 [E]."""
    gap = starts[1:] != ends[:-1]
    begins = jnp.concatenate([jnp.ones(1, bool), gap])
    finishes = jnp.concatenate([gap, jnp.ones(1, bool)])
    low = lax.cummax(jnp.where(begins, starts, -1))
    high = lax.cummin(jnp.where(finishes, ends, jnp.iinfo(jnp.int32).max), reverse=True)
    return low, high


def in_panels(index: Any, tiles_down: Any, tiles_across: int) -> tuple[Any, Any]:
    """The row and the column of a tile, counted down each column of a panel of PANEL rows.

    So tiles that run at one time lie together, and what several of them read comes from the L2
    cache.
    """
    panel = index // (PANEL * tiles_across)
    index -= panel * (PANEL * tiles_across)
    height = jnp.minimum(PANEL, tiles_down - panel * PANEL)
    return panel * PANEL + lax.rem(index, height), index // height


def rounded_up(number: Any, unit: Any) -> Any:
    return (number + unit - 1) // unit * unit
