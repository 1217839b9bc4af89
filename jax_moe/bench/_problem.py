"""One setting of the bench, and the random arrays that go in."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import jax_moe
from jax_moe.bench._plain import Sizes
from jax_moe.bench._shapes import Routing, Shape


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Host arrays with a leading axis of ranks; `rows` past a rank's real ones are NaN."""

    ids: np.ndarray  # int32 [R, T, K]
    x: np.ndarray  # [R, T, H]
    s: np.ndarray  # f32 [R, T, K]
    rows: np.ndarray  # [R, C, H], not what x would give
    row_s: np.ndarray  # f32 [R, C]
    dy: np.ndarray  # [R, T, H]
    ds: np.ndarray  # f32 [R, T, K]


@dataclasses.dataclass(frozen=True)
class Problem:
    """A shape with its routing, type of payload, group and capacity."""

    shape: Shape
    routing: Routing
    dtype: str
    group: jax_moe.ExpertGroup
    capacity: int  # rows of one rank

    @property
    def sizes(self) -> Sizes:
        """What the ways need to know."""
        return Sizes(
            axis=self.group.axes[0],
            num_ranks=self.group.num_ranks,
            num_experts=self.shape.experts,
            tokens=self.shape.tokens,
            top_k=self.shape.top_k,
            capacity=self.capacity,
        )

    @property
    def spec(self) -> PartitionSpec:
        """Every array's first axis is split over the group's devices."""
        return PartitionSpec(self.group.axes)

    def place(self, stacked: np.ndarray) -> jax.Array:
        """[R, N, ...] on the host as [R*N, ...] over the group's devices."""
        flat = stacked.reshape(-1, *stacked.shape[2:])
        sharding = NamedSharding(self.group.mesh, self.spec)
        return jax.make_array_from_callback(flat.shape, sharding, lambda index: flat[index])

    def inputs(self, ids: np.ndarray, seed: int = 0) -> Inputs:
        """Random operands for these ids."""
        rng = np.random.default_rng((seed, 1))
        ranks, tokens, top_k = ids.shape
        shape, dtype = self.shape, self.dtype
        rows = random_values(rng, (ranks, self.capacity, shape.hidden), dtype)
        row_s = random_values(rng, (ranks, self.capacity))
        real = np.bincount((ids // (shape.experts // ranks)).reshape(-1), minlength=ranks)
        unused = np.arange(self.capacity) >= real[:, None]
        rows[unused], row_s[unused] = np.nan, np.nan
        return Inputs(
            ids=ids,
            x=random_values(rng, (ranks, tokens, shape.hidden), dtype),
            s=random_values(rng, (ranks, tokens, top_k)),
            rows=rows,
            row_s=row_s,
            dy=random_values(rng, (ranks, tokens, shape.hidden), dtype),
            ds=random_values(rng, (ranks, tokens, top_k)),
        )


def random_values(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: str = "float32"
) -> np.ndarray:
    """Random bits in sign and mantissa, magnitudes in [0.5, 2); quick where gigabytes are made."""
    itemsize = jnp.dtype(dtype).itemsize
    word, shift = np.dtype(f"u{itemsize}"), 8 * itemsize - 16
    count = math.prod(shape)
    bits = rng.bit_generator.random_raw(-(-count * itemsize // 8)).view(word)[:count]
    bits &= word.type(~(0x7F00 << shift) % 2 ** (8 * itemsize))
    bits |= word.type(0x3F00 << shift)
    return bits.view(jnp.dtype(dtype)).reshape(shape)
