"""Grouped matmul on Hopper's tensor cores: two Pallas kernels, for a product and for a gradient.

Both are one persistent kernel: a block a multiprocessor, which walks over tiles of the result. Of
its three warpgroups the last copies operands from global memory into a ring of slots in shared
memory; the other two multiply, 64 rows of the tile each, and write the result of a tile while the
tensor cores are at the next one's first step. What differs is the table of tiles, what a step
loads, and which part of a tile is stored: `product` stores a group's own rows alone, `outer`
zeroes foreign rows in shared memory before it adds up.

Pallas' words: a thread of it is a warpgroup; references (`.at[...]`) are views of memory, which
copies and multiplications take; `commit_smem` lets the asynchronous proxy (TMA, wgmma) see what the
warpgroup's threads wrote; a `Barrier` is an mbarrier, whose phase each warpgroup counts by itself.

A copy begins at a row that is a multiple of 8 (the tile of the shared memory's swizzle), so that a
group that begins elsewhere is read from up to 7 rows before its first.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu
from jaxtyping import Array

from jax_moe._implementation import cast_varying, varying_axes
from jax_moe._pallas_operands import ALIGNMENT, TILE_ROWS, local_gpu

plgpu: Any = mosaic_gpu  # whose annotations call its own classes abstract

HALF = TILE_ROWS // 2  # rows of a warpgroup's part of a tile: those of one wgmma
STEP = 64  # of the contracted dimension; 128 bytes of bfloat16, the widest swizzle
SLOTS = 4  # 48 KiB each with the widest tile
# Tiles that run at one time form a square of the result, so that operands come from the L2 cache.
PANEL = 16
PRODUCER = 2  # the warpgroup that copies


# Traced and lowered once for all layers of a model, of which each would take seconds.
@functools.partial(jax.jit, static_argnames=("transposed", "virtual_ranks", "zero_tail"))
def product(
    rows: Array,
    weights: Array,
    starts: Array,
    sizes: Array,
    *,
    transposed: bool,
    virtual_ranks: int,
    zero_tail: bool,
) -> Array:
    """Each group's rows times its matrix.

    Args:
      rows: bfloat16 [V*C, K].
      weights: bfloat16 [V*E, K, N]; with `transposed` [V*E, N, K], of which the transposes count.
      starts: int32 [V*E], first row of each group; groups lie in this order and do not overlap.
      sizes: int32 [V*E].
      transposed: see `weights`.
      virtual_ranks: V.
      zero_tail: write zeros past each virtual rank's last group; else those rows are undefined, as
        rows between groups are in any case.

    Returns:
      bfloat16 [V*C, N].
    """
    num_rows, inner = rows.shape
    width = weights.shape[1 if transposed else 2]
    columns = _columns(width)
    across, blocks = width // columns, _multiprocessors()
    table, num_tiles = _row_tiles(starts, sizes, num_rows, virtual_ranks, zero_tail)
    steps = inner // STEP

    def locate(refs, index):
        table, total = refs[:2]
        tiles = total[0] * across
        beyond = index - (tiles - _halved(tiles, blocks))
        is_half = beyond >= 0
        index = jnp.where(is_half, index - beyond + beyond // 2, index)
        row_tile, column_tile = _in_panels(index, total[0], across)
        group, first, low, high = (table[i, row_tile] for i in range(4))
        taken = jnp.where(is_half, lax.rem(beyond, 2) * HALF, 0)
        low = jnp.maximum(low, taken)
        high = jnp.maximum(low, jnp.minimum(high, taken + jnp.where(is_half, HALF, TILE_ROWS)))
        half = lax.axis_index("wg") * HALF
        own_low, own_high = (jnp.clip(edge - half, 0, HALF) for edge in (low, high))
        return _Tile(
            group=group,
            down=pl.multiple_of(first, ALIGNMENT),
            across=column_tile * columns,
            steps=jnp.where((group < 0) | (low == high), 0, steps),
            low=own_low,
            high=own_high,
            # A half without rows of its own need not multiply: the other one has all of the
            # tensor cores then.
            multiplies=(group >= 0) & (own_high > own_low),
        )

    def count(refs):
        tiles = refs[1][0] * across
        return tiles + _halved(tiles, blocks)

    def load(refs, tile, step, a, b, barrier):
        rows, weights = refs[2:4]
        inner = pl.ds(step * STEP, STEP)
        across = pl.ds(tile.across, columns)
        plgpu.copy_gmem_to_smem(rows.at[pl.ds(tile.down, TILE_ROWS), inner], a, barrier)
        at = (tile.group, across, inner) if transposed else (tile.group, inner, across)
        plgpu.copy_gmem_to_smem(weights.at[at], b, barrier)

    def multiply(total, refs, tile, step, a, b):
        del refs, tile, step
        own = a.at[pl.ds(lax.axis_index("wg") * HALF, HALF)]
        plgpu.wgmma(total, own, b.T if transposed else b)

    def store(refs, place, column, block):
        # A copy has a static size: any number of rows is a sum of powers of two.
        out, row, left, size = refs[4], place.low, place.high - place.low, HALF
        down = place.down + lax.axis_index("wg") * HALF
        while size:

            @pl.when(left & size != 0)
            def _():
                plgpu.copy_smem_to_gmem(
                    block.at[pl.ds(row, size)],  # noqa: B023 (called at once)
                    out.at[pl.ds(down + row, size), pl.ds(column, block.shape[1])],  # noqa: B023
                    commit_group=False,
                )

            row += left & size
            size //= 2

    return _call(
        _Kernel(
            name="grouped_product",
            locate=locate,
            load=load,
            multiply=multiply,
            store=store,
            count=count,
            a=(TILE_ROWS, STEP),
            b=(columns, STEP) if transposed else (STEP, columns),
            columns=columns,
            out_tile=1,
        ),
        (num_rows, width),
        (table, num_tiles, rows, weights),
    )


@jax.jit
def outer(left: Array, right: Array, starts: Array, sizes: Array) -> Array:
    """Each group's left^T right, added up over its rows.

    Args:
      left: bfloat16 [C, M].
      right: bfloat16 [C, N].
      starts: int32 [E], first row of each group; groups do not overlap.
      sizes: int32 [E].

    Returns:
      bfloat16 [E, M, N], zero for a group without rows. Rows outside every group have no effect,
      whatever they hold; a NaN in a group's row may spread to the groups beside it.
    """
    num_rows, height = left.shape
    width = right.shape[1]
    groups, tiles_down = len(sizes), height // TILE_ROWS
    columns = _columns(width)
    tiles_across = width // columns
    # A group without rows takes one step, of which nothing counts.
    first = jnp.minimum(starts // ALIGNMENT * ALIGNMENT, num_rows - ALIGNMENT)
    ends = starts + sizes
    steps = jnp.maximum((ends - first + STEP - 1) // STEP, 1)
    runs = _runs(starts, ends)
    table = jnp.stack([first, steps, *(edge - first for edge in (starts, ends, *runs))])

    def locate(refs, index):
        group = index // (tiles_down * tiles_across)
        index -= group * (tiles_down * tiles_across)
        row_tile, column_tile = _in_panels(index, tiles_down, tiles_across)
        first, steps, low, high, run_low, run_high = (refs[0][i, group] for i in range(6))
        return _Tile(
            group=group,
            down=row_tile * TILE_ROWS,
            across=column_tile * columns,
            steps=steps,
            low=low,
            high=high,
            first=pl.multiple_of(first, ALIGNMENT),
            run=(run_low, run_high),
        )

    def load(refs, tile, step, a, b, barrier):
        inner = pl.ds(tile.first + step * STEP, STEP)
        plgpu.copy_gmem_to_smem(refs[1].at[inner, pl.ds(tile.down, TILE_ROWS)], a, barrier)
        plgpu.copy_gmem_to_smem(refs[2].at[inner, pl.ds(tile.across, columns)], b, barrier)

    def multiply(total, refs, tile, step, a, b):
        half, part = lax.axis_index("wg"), columns // 2
        edges = tile.low, tile.high, *tile.run
        low, high, run_low, run_high = (edge - step * STEP for edge in edges)

        @pl.when((low > 0) | (high < STEP))
        def _():
            _zero_rows(a.at[:, pl.ds(half * HALF, HALF)], low, high)
            plgpu.commit_smem()

        # Rows of no group: zero times a NaN would be NaN.
        @pl.when((run_low > 0) | (run_high < STEP))
        def _():
            both = refs[-1]
            for column in range(0, part, HALF):
                _zero_rows(b.at[:, pl.ds(half * part + column, HALF)], low, high)
            plgpu.commit_smem()
            plgpu.barrier_arrive(both)
            plgpu.barrier_wait(both)

        plgpu.wgmma(total, a.at[:, pl.ds(half * HALF, HALF)].T, b)

    def store(refs, place, column, block):
        @pl.when(place.group >= 0)
        def _():
            first = pl.multiple_of(place.down, TILE_ROWS) + lax.axis_index("wg") * HALF
            down = pl.ds(first, HALF)
            out = refs[3].at[place.group, down, pl.ds(column, block.shape[1])]
            plgpu.copy_smem_to_gmem(block, out, commit_group=False)

    return _call(
        _Kernel(
            name="grouped_outer",
            locate=locate,
            load=load,
            multiply=multiply,
            store=store,
            count=lambda refs: groups * tiles_down * tiles_across,
            a=(STEP, TILE_ROWS),
            b=(STEP, columns),
            columns=columns,
            out_tile=8,
            more_scratch=(plgpu.Barrier(num_arrivals=2),),
        ),
        (groups, height, width),
        (table, left, right),
    )


def _zero_rows(ref: Any, low: Any, high: Any) -> None:
    """Zeroes the rows of a [64, 64] part of shared memory that do not lie in [low, high)."""
    # One layout for both: what a warp writes, it alone has read.
    row = plgpu.broadcasted_iota(jnp.int32, ref.shape, 0, layout=plgpu.Layout.WGMMA)
    values = plgpu.load(ref, layout=plgpu.Layout.WGMMA)
    ref[...] = jnp.where((row >= low) & (row < high), values, jnp.zeros_like(values))


def _runs(starts: Array, ends: Array) -> tuple[Array, Array]:
    """Of the groups that follow one another without a gap: the first row and the end, int32 [E]."""
    gap = starts[1:] != ends[:-1]
    begins = jnp.concatenate([jnp.ones(1, bool), gap])
    finishes = jnp.concatenate([gap, jnp.ones(1, bool)])
    low = lax.cummax(jnp.where(begins, starts, -1))
    high = lax.cummin(jnp.where(finishes, ends, jnp.iinfo(jnp.int32).max), reverse=True)
    return low, high


def _in_panels(index: Any, tiles_down: Any, tiles_across: int) -> tuple[Any, Any]:
    """The row and the column of a tile, counted down each column of a panel of PANEL rows."""
    panel = index // (PANEL * tiles_across)
    index -= panel * (PANEL * tiles_across)
    height = jnp.minimum(PANEL, tiles_down - panel * PANEL)
    return panel * PANEL + lax.rem(index, height), index // height


def _halved(tiles: Any, blocks: int) -> Any:
    """How many of the last tiles two multiprocessors share, with 64 rows for each.

    Those of the last wave, where they would leave half of the multiprocessors without any.
    """
    left = lax.rem(tiles, blocks)
    return jnp.where(2 * left <= blocks, left, 0)


def _columns(width: int) -> int:
    """Of a tile; the wider, the less is read for each product."""
    return 256 if width % 256 == 0 else 128


def _row_tiles(
    starts: Array, sizes: Array, num_rows: int, virtual_ranks: int, zero_tail: bool
) -> tuple[Array, Array]:
    """The table of tiles of rows, int32 [4, most], and [1], how many count.

    The four: group (-1 for rows that are to be zero), first row, and the first and end of the rows
    that count, both counted from there.
    """
    groups = jnp.arange(len(sizes), dtype=jnp.int32)
    if zero_tail:
        edge = jnp.arange(1, virtual_ranks + 1, dtype=jnp.int32) * (num_rows // virtual_ranks)
        end = (starts + sizes).reshape(virtual_ranks, -1)[:, -1]
        starts, sizes = jnp.concatenate([starts, end]), jnp.concatenate([sizes, edge - end])
        groups = jnp.concatenate([groups, jnp.full(virtual_ranks, -1, jnp.int32)])
    first = starts // ALIGNMENT * ALIGNMENT
    count = jnp.where(sizes > 0, (starts + sizes - first + TILE_ROWS - 1) // TILE_ROWS, 0)
    end = jnp.cumsum(count, dtype=jnp.int32)
    tile = jnp.arange(num_rows // TILE_ROWS + 2 * len(sizes), dtype=jnp.int32)
    of = jnp.searchsorted(end, tile, side="right", method="compare_all")
    of = jnp.minimum(of, len(sizes) - 1)
    begin = first[of] + (tile - (end - count)[of]) * TILE_ROWS
    low = jnp.maximum(starts[of] - begin, 0)
    high = jnp.minimum((starts + sizes)[of] - begin, TILE_ROWS)
    return jnp.stack([groups[of], begin, low, high]), end[-1:]


class _Place(NamedTuple):
    """Where a warpgroup's part of a tile of the result belongs; int32 scalars."""

    group: Any
    down: Any
    across: Any
    low: Any  # the first and the end of the rows that are stored
    high: Any

    @classmethod
    def of(cls, tile: _Tile) -> _Place:
        # The sums have no manual axes in their types, as the constants of the first tile have not.
        return cls(*(a + 0 for a in (tile.group, tile.down, tile.across, tile.low, tile.high)))


@dataclasses.dataclass(frozen=True)
class _Tile:
    """A tile of the result; int32 scalars."""

    group: Any
    down: Any
    across: Any
    low: Any  # the first and the end of the rows that count
    high: Any
    steps: Any
    first: Any = None  # row of the first step
    run: tuple[Any, Any] = (None, None)  # the first and the end of rows that hold numbers
    multiplies: Any = None  # None: always


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """What the two kernels do not share; every function gets the references to all operands."""

    name: str
    locate: Callable  # (refs, index) -> _Tile
    load: Callable  # (refs, tile, step, a, b, barrier): starts two copies
    multiply: Callable  # (total, refs, tile, step, a, b): starts a wgmma
    store: Callable  # (refs, place, column, block): starts copies of [64, 64] of the result
    count: Callable  # (refs) -> number of tiles
    a: tuple[int, int]  # shape of a slot's operands
    b: tuple[int, int]
    columns: int
    out_tile: int  # rows to a multiple of which a part that is stored begins
    more_scratch: tuple[Any, ...] = ()


def _call(kernel: _Kernel, shape: tuple[int, ...], operands: tuple[Array, ...]) -> Array:
    dtype = operands[-1].dtype
    blocks = _multiprocessors()
    call = plgpu.kernel(
        functools.partial(_body, kernel, len(operands), blocks),
        out_type=jax.ShapeDtypeStruct(shape, dtype),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=PRODUCER + 1,
        thread_name="wg",
        scratch_types=(
            plgpu.SMEM((SLOTS, *kernel.a), dtype, transforms=_swizzled(8)),
            plgpu.SMEM((SLOTS, *kernel.b), dtype, transforms=_swizzled(8)),
            plgpu.SMEM((2, 2, HALF, HALF), dtype, transforms=_swizzled(kernel.out_tile)),
            plgpu.Barrier(num_arrivals=2, num_barriers=SLOTS),  # full: both copies have come
            plgpu.Barrier(num_arrivals=2, num_barriers=SLOTS),  # empty: both warpgroups are done
            *kernel.more_scratch,
        ),
        # Pallas puts no barriers of its own around accesses to shared memory: no warp reads there
        # what another one writes, but past a barrier or a copy that stands here.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        kernel_name=kernel.name,
    )
    return cast_varying(call(*operands), varying_axes(operands[-1]))


def _swizzled(rows: int) -> tuple[Any, ...]:
    tile = (rows, 64) if rows > 1 else (64,)
    return plgpu.TilingTransform(tile), plgpu.SwizzleTransform(128)


def _multiprocessors() -> int:
    """Of the GPU; an H200's where there is none, so that the kernels can be lowered."""
    return getattr(local_gpu(), "core_count", None) or 132


def _body(kernel: _Kernel, num_operands: int, blocks: int, *refs: Any) -> None:
    refs, scratch = refs[: num_operands + 1], refs[num_operands + 1 :]
    a, b, out, full, empty = scratch[:5]
    refs += scratch[5:]
    block = lax.axis_index("block")
    mine = jnp.maximum((kernel.count(refs) - block + blocks - 1) // blocks, 0)

    def locate(i):
        return kernel.locate(refs, block + i * blocks)

    def slot_of(step):
        return lax.rem(step, jnp.int32(SLOTS))

    @pl.when(lax.axis_index("wg") == PRODUCER)
    def _produce():
        plgpu.set_max_registers(40, action="decrease")

        def walk(i, done):
            tile = locate(i)

            def load(step, done):
                slot = slot_of(done)

                @pl.when(done >= SLOTS)
                def _():
                    plgpu.barrier_wait(empty.at[slot])

                kernel.load(refs, tile, step, a.at[slot], b.at[slot], full.at[slot])
                return done + 1

            return lax.fori_loop(0, tile.steps, load, done)

        done = lax.fori_loop(0, mine, walk, jnp.int32(0))

        @pl.loop(0, jnp.minimum(done, SLOTS))
        def _(i):
            plgpu.barrier_wait(empty.at[slot_of(done - jnp.minimum(done, SLOTS) + i)])

    @pl.when(lax.axis_index("wg") < PRODUCER)
    def _consume():
        plgpu.set_max_registers(232, action="increase")

        def flush(place, value):
            for i in range(kernel.columns // HALF):
                block = out.at[lax.axis_index("wg"), i % 2]
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                block[...] = value[:, i * HALF : (i + 1) * HALF]
                plgpu.commit_smem()
                column = pl.multiple_of(place.across, HALF) + i * HALF
                kernel.store(refs, place, column, block)
                plgpu.commit_smem_to_gmem_group()

        def multiply(total, tile, step, done):
            slot = slot_of(done)
            plgpu.barrier_wait(full.at[slot])
            kernel.multiply(total, refs, tile, step, a.at[slot], b.at[slot])

        def release(done):
            plgpu.barrier_arrive(empty.at[slot_of(done)])

        def walk(i, carry):
            done, last, value = carry
            tile = locate(i)

            def work():
                def scope(total):
                    multiply(total, tile, 0, done)
                    flush(last, value)

                    @pl.loop(1, tile.steps)
                    def _(step):
                        multiply(total, tile, step, done + step)
                        plgpu.wgmma_wait(1)
                        release(done + step - 1)

                    result = total[...]
                    release(done + tile.steps - 1)
                    return result.astype(out.dtype)

                return pl.run_scoped(scope, plgpu.ACC((HALF, kernel.columns)))

            def idle():
                flush(last, value)

                @pl.loop(0, tile.steps)
                def _(step):
                    plgpu.barrier_wait(full.at[slot_of(done + step)])
                    release(done + step)

                return zeros()

            multiplies = tile.multiplies
            value = work() if multiplies is None else lax.cond(multiplies, work, idle)
            return done + tile.steps, _Place.of(tile), value

        def zeros():
            value = jnp.zeros((HALF, kernel.columns), out.dtype)
            return plgpu.layout_cast(value, plgpu.Layout.WGMMA)

        none = _Place(*map(jnp.int32, (-1, 0, 0, 0, 0)))
        _, last, value = lax.fori_loop(0, mine, walk, (jnp.int32(0), none, zeros()))
        flush(last, value)
        plgpu.wait_smem_to_gmem(0)
