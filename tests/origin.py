"""Values that say where they come from, and comparisons that say who went where.

Column h of a token's payload holds one of four digits (low half of the token number, source rank,
high half of the token number, column number), scaled by a power of two that depends on the column:
exact in bfloat16 too, never zero, and different in every row and in neighbouring columns.
"""

from collections.abc import Callable

import numpy as np

_HALF = 128


def payload(groups: int, ranks: int, tokens: int, hidden: int, dtype: np.dtype) -> np.ndarray:
    """x [groups, R, T, H]; the group is the sign pattern's seed, so groups cannot be mixed up."""
    group, rank, token, column = np.indices((groups, ranks, tokens, hidden), sparse=True)
    digit = column % 4
    value = np.where(
        digit == 0,
        1 + rank + 0 * token,
        np.where(
            digit == 1,
            1 + rank,
            np.where(digit == 2, 1 + token // _HALF, 1 + column // 4 % _HALF),
        ),
    )
    sign = np.where((group >> digit) % 2 == 1, -1.0, 1.0)
    return (value * sign * np.exp2(column // 4 % 16 - 8.0)).astype(dtype)


def weights(groups: int, ranks: int, tokens: int, topk: int) -> np.ndarray:
    """s [groups, R, T, K] float32: 1 + the flat index, which float32 holds exactly."""
    count = groups * ranks * tokens * topk
    assert count < 2**24
    flat = np.arange(1, 1 + count, dtype=np.float32)
    return flat.reshape(groups, ranks, tokens, topk)


def who_is(row: np.ndarray) -> str:
    """Names the (rank, token) whose payload a row looks like."""
    v = np.abs(row.astype(np.float64)) * 256.0
    if not np.any(v):
        return "zeros"
    if v.size < 3 or not np.all(np.isfinite(v[:3])):
        return f"values {row[:4]}"
    return f"rank {v[1] - 1:g} token {(v[2] - 1) * _HALF + v[0] - 1:g}"


def bits(a: np.ndarray) -> np.ndarray:
    """The bit patterns, with every NaN made the same one."""
    a = np.ascontiguousarray(a)
    if a.dtype.kind in "iub":
        return a
    unsigned = a.view(f"u{a.dtype.itemsize}")
    return np.where(np.isnan(a.astype(np.float32)), np.iinfo(unsigned.dtype).max, unsigned)


def assert_same_bits(
    got: np.ndarray,
    want: np.ndarray,
    what: str,
    *,
    who: Callable[[tuple[int, ...]], str] = str,
    keep: np.ndarray | None = None,
) -> None:
    """Compares bits, NaN equal to NaN; a failure lists the first entries that differ.

    Args:
        got, want: arrays of one shape and dtype.
        what: name of the array.
        who: turns the index of an entry into words.
        keep: bool, over the leading axes of `want`; entries to compare (None compares all).
    """
    assert got.shape == want.shape, f"{what}: shape {got.shape}, expected {want.shape}"
    assert got.dtype == want.dtype, f"{what}: dtype {got.dtype}, expected {want.dtype}"
    wrong = bits(got) != bits(want)
    if keep is not None:
        wrong &= keep.reshape(keep.shape + (1,) * (wrong.ndim - keep.ndim))
    if not wrong.any():
        return
    lines = [
        f"  {who(index)}: got {got[index]!r}, expected {want[index]!r}"
        for index in map(tuple, np.argwhere(wrong)[:8].tolist())
    ]
    raise AssertionError(
        f"{what}: {wrong.sum()} of {wrong.size} entries differ\n" + "\n".join(lines)
    )


def assert_same_rows(got: np.ndarray, want: np.ndarray, what: str, *, keep: np.ndarray) -> None:
    """As assert_same_bits for [groups, R, C, H], naming the owner that each wrong row shows."""
    assert got.shape == want.shape, f"{what}: shape {got.shape}, expected {want.shape}"
    wrong = (bits(got) != bits(want)).any(-1) & keep
    lines = [
        f"  group {g} rank {r} row {c}: got {who_is(got[g, r, c])}, "
        f"expected {who_is(want[g, r, c])}"
        for g, r, c in np.argwhere(wrong)[:8].tolist()
    ]
    if lines:
        raise AssertionError(f"{what}: {wrong.sum()} rows differ\n" + "\n".join(lines))
