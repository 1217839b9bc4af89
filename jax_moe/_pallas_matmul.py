"""Grouped matmul on Hopper's tensor cores: two Pallas kernels, for a product and for a gradient.

Both are one persistent kernel: a block a multiprocessor, which walks over tiles of the result. Of
its three warpgroups the last copies operands from global memory into a ring of slots in shared
memory; the other two multiply, 64 rows of the accumulators each, and write the result of a tile
while the tensor cores are at the next one's first two steps. What differs is the table of tiles,
what a step loads, and which part of a tile is stored.

`product` has the transposed result in its accumulators, the rows of a group across: a wgmma takes
any multiple of 8 of them there, but always 64 down, and groups have any number of rows. A tile is
128 columns of the result and up to 256 rows, of groups that are cut evenly. `outer` zeroes foreign
rows in shared memory before it adds up.

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
from jax_moe._pallas_operands import ALIGNMENT, TILE, local_gpu
from jax_moe._pallas_tiles import (
    COUNTS,
    MOST_ROWS,
    in_panels,
    rounded_up,
    row_tiles,
    runs,
    shared_tiles,
)

plgpu: Any = mosaic_gpu  # whose annotations call its own classes abstract

HALF = TILE // 2  # of a tile, for each of two warpgroups: the rows of one wgmma
STEP = 64  # of the contracted dimension; 128 bytes of bfloat16, the widest swizzle
SLOTS = 4  # 48 KiB each with the widest tile
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
    across, steps = width // TILE, inner // STEP
    table, tiles_down = row_tiles(starts, sizes, num_rows, virtual_ranks, zero_tail)
    shared = shared_tiles(tiles_down, across, _multiprocessors())

    def locate(refs, index):
        table, (tiles_down, whole, parts) = refs[0], _scalars(refs[1])
        beyond = jnp.maximum(index - whole, 0)
        part = lax.rem(beyond, parts)
        row_tile, column_tile = in_panels(index - beyond + beyond // parts, tiles_down, across)
        group, down, low, high = (table[i, row_tile] for i in range(4))
        rows_each = jnp.where(index < whole, high, rounded_up(high, parts * COUNTS.step) // parts)
        high = jnp.clip(high - part * rows_each, 0, rows_each)
        low = jnp.clip(low - part * rows_each, 0, high)
        multiplies = (group >= 0) & (low < high)
        return _Tile(
            group=group,
            down=pl.multiple_of(down + part * rows_each, ALIGNMENT),
            across=column_tile * TILE,
            steps=jnp.where(multiplies, steps, 0),
            low=low,
            high=high,
            multiplies=multiplies,
        )

    def count(refs):
        tiles_down, whole, parts = _scalars(refs[1])
        return whole + (tiles_down * across - whole) * parts

    def load(refs, tile, step, a, b, barrier):
        rows, weights = refs[2:4]
        inner = pl.ds(step * STEP, STEP)
        across = pl.ds(tile.across, TILE)
        at = (tile.group, across, inner) if transposed else (tile.group, inner, across)
        plgpu.copy_gmem_to_smem(weights.at[at], a, barrier)

        def copy(count):
            own = b.at[pl.ds(0, count)]
            plgpu.copy_gmem_to_smem(rows.at[pl.ds(tile.down, count), inner], own, barrier)

        counts = range(HALF, MOST_ROWS + 1, HALF)
        lax.switch((tile.high - 1) // HALF, [functools.partial(copy, n) for n in counts])

    def multiply(total, refs, tile, step, a, b, count):
        del refs, tile, step
        own = pl.ds(lax.axis_index("wg") * HALF, HALF)
        total = total if count == MOST_ROWS else total.at[:, pl.ds(0, count)]
        rows = b.at[pl.ds(0, count)]
        plgpu.wgmma(total, a.at[own] if transposed else a.at[:, own].T, rows.T)

    def store(refs, place, part, block, value):
        # A copy has a static size: any number of rows is a sum of powers of two.
        low, high = (jnp.clip(edge - part * HALF, 0, HALF) for edge in (place.low, place.high))

        @pl.when(low < high)
        def _():
            # Of an odd number of parts the last one was in the block that the first one takes next.
            plgpu.wait_smem_to_gmem(1 if part else 0, wait_read_only=True)
            block.T[...] = value
            plgpu.commit_smem()
            down = place.down + part * HALF
            column = pl.multiple_of(place.across, HALF) + lax.axis_index("wg") * HALF
            row, left, size = low, high - low, HALF
            while size:

                @pl.when(left & size != 0)
                def _():
                    plgpu.copy_smem_to_gmem(
                        block.at[pl.ds(row, size)],  # noqa: B023 (called at once)
                        refs[4].at[pl.ds(down + row, size), pl.ds(column, HALF)],  # noqa: B023
                        commit_group=False,
                    )

                row += left & size
                size //= 2
            plgpu.commit_smem_to_gmem_group()

    return _call(
        _Kernel(
            name="grouped_product",
            locate=locate,
            load=load,
            multiply=multiply,
            store=store,
            count=count,
            a=(TILE, STEP) if transposed else (STEP, TILE),
            b=(MOST_ROWS, STEP),
            across=MOST_ROWS,
            counts=COUNTS,
            out_tile=1,
        ),
        (num_rows, width),
        (table, shared, rows, weights),
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
    groups, tiles_down = len(sizes), height // TILE
    columns = _columns(width)
    tiles_across = width // columns
    # A group of few rows or none takes two steps too, of which the rest does not count.
    first = jnp.minimum(starts // ALIGNMENT * ALIGNMENT, num_rows - ALIGNMENT)
    ends = starts + sizes
    steps = jnp.maximum((ends - first + STEP - 1) // STEP, 2)
    edges = starts, ends, *runs(starts, ends)
    table = jnp.stack([first, steps, *(edge - first for edge in edges)])

    def locate(refs, index):
        group = index // (tiles_down * tiles_across)
        index -= group * (tiles_down * tiles_across)
        row_tile, column_tile = in_panels(index, tiles_down, tiles_across)
        first, steps, low, high, run_low, run_high = (refs[0][i, group] for i in range(6))
        return _Tile(
            group=group,
            down=row_tile * TILE,
            across=column_tile * columns,
            steps=steps,
            low=low,
            high=high,
            first=pl.multiple_of(first, ALIGNMENT),
            run=(run_low, run_high),
        )

    def load(refs, tile, step, a, b, barrier):
        inner = pl.ds(tile.first + step * STEP, STEP)
        plgpu.copy_gmem_to_smem(refs[1].at[inner, pl.ds(tile.down, TILE)], a, barrier)
        plgpu.copy_gmem_to_smem(refs[2].at[inner, pl.ds(tile.across, columns)], b, barrier)

    def multiply(total, refs, tile, step, a, b, count):
        del count
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

    def store(refs, place, part, block, value):
        @pl.when(place.group >= 0)
        def _():
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            block[...] = value
            plgpu.commit_smem()
            column = pl.multiple_of(place.across, HALF) + part * HALF
            first = pl.multiple_of(place.down, TILE) + lax.axis_index("wg") * HALF
            down = pl.ds(first, HALF)
            plgpu.copy_smem_to_gmem(block, refs[3].at[place.group, down, pl.ds(column, HALF)])

    return _call(
        _Kernel(
            name="grouped_outer",
            locate=locate,
            load=load,
            multiply=multiply,
            store=store,
            count=lambda refs: groups * tiles_down * tiles_across,
            a=(STEP, TILE),
            b=(STEP, columns),
            across=columns,
            counts=range(columns, columns + 1),
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


def _columns(width: int) -> int:
    """Of a tile; the wider, the less is read for each product."""
    return 256 if width % 256 == 0 else 128


def _scalars(ref: Any) -> tuple[Any, ...]:
    return tuple(ref[i] for i in range(ref.shape[0]))


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
    multiply: Callable  # (total, refs, tile, step, a, b, count): starts a wgmma
    store: Callable  # (refs, place, part, block, value): starts copies of [64, 64] of the result
    count: Callable  # (refs) -> number of tiles
    a: tuple[int, int]  # shape of a slot's operands
    b: tuple[int, int]
    across: int  # columns of a warpgroup's accumulators
    counts: range  # of them that a wgmma takes: the only one, or the least not below tile.high
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
    tile = (rows, 64)
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

        parts = range(kernel.across // HALF)

        def flush(place, value, parts):
            for i in parts:
                block = out.at[lax.axis_index("wg"), i % 2]
                kernel.store(refs, place, i, block, value[:, i * HALF : (i + 1) * HALF])

        def multiply(total, tile, step, done, count=kernel.across):
            slot = slot_of(done)
            plgpu.barrier_wait(full.at[slot])
            kernel.multiply(total, refs, tile, step, a.at[slot], b.at[slot], count)

        def release(done):
            plgpu.barrier_arrive(empty.at[slot_of(done)])

        def walk(i, carry):
            done, last, value = carry
            tile = locate(i)

            def work():
                def scope(total):
                    multiply(total, tile, 0, done)
                    flush(last, value, parts[: len(parts) // 2])
                    multiply(total, tile, 1, done + 1)
                    flush(last, value, parts[len(parts) // 2 :])
                    plgpu.wgmma_wait(1)
                    release(done)

                    def other_steps(count):
                        @pl.loop(2, tile.steps)
                        def _(step):
                            multiply(total, tile, step, done + step, count)
                            plgpu.wgmma_wait(1)
                            release(done + step - 1)

                    branches = [functools.partial(other_steps, n) for n in kernel.counts]
                    missing = jnp.maximum(tile.high - kernel.counts.start, 0)
                    lax.switch((missing + kernel.counts.step - 1) // kernel.counts.step, branches)
                    result = total[...]
                    release(done + tile.steps - 1)
                    return result.astype(out.dtype)

                return pl.run_scoped(scope, plgpu.ACC((HALF, kernel.across)))

            def idle():
                flush(last, value, parts)
                return zeros()

            multiplies = tile.multiplies
            value = work() if multiplies is None else lax.cond(multiplies, work, idle)
            return done + tile.steps, _Place.of(tile), value

        def zeros():
            value = jnp.zeros((HALF, kernel.across), out.dtype)
            return plgpu.layout_cast(value, plgpu.Layout.WGMMA)

        none = _Place(*map(jnp.int32, (-1, 0, 0, 0, 0)))
        _, last, value = lax.fori_loop(0, mine, walk, (jnp.int32(0), none, zeros()))
        flush(last, value, parts)
        plgpu.wait_smem_to_gmem(0)
