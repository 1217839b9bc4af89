"""Groups of rows for the Pallas kernels, and what these must make of them in float64."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import jax_moe


@dataclasses.dataclass(frozen=True)
class Groups:
    """Groups of rows: virtual ranks V, rows of one, and sizes [V*E]."""

    ranks: int
    num_rows: int
    sizes: tuple[int, ...]

    @property
    def spans(self) -> list[slice]:
        """The rows of each group."""
        by_rank = np.reshape(self.sizes, (self.ranks, -1))
        first = np.cumsum(by_rank, 1) - by_rank + np.arange(self.ranks)[:, None] * self.num_rows
        return [slice(a, a + n) for a, n in zip(first.ravel().tolist(), self.sizes, strict=True)]

    @property
    def real(self) -> np.ndarray:
        """Which rows belong to a group, bool [V*C]."""
        real = np.zeros(self.ranks * self.num_rows, bool)
        for span in self.spans:
            real[span] = True
        return real

    def draw(self, rng: np.random.Generator, width: int) -> jax.Array:
        """Random rows, bfloat16 [V*C, width], NaN outside the groups."""
        rows = rng.standard_normal((len(self.real), width))
        return jnp.asarray(np.where(self.real[:, None], rows, np.nan), jnp.bfloat16)

    @property
    def settings(self) -> dict:
        """For `grouped_matmul` and `grouped_swiglu`."""
        return {"group_sizes": jnp.array(self.sizes, jnp.int32), "virtual_ranks": self.ranks}


@functools.partial(jax.jit, static_argnames="virtual_ranks")  # sizes do not make another program
def _product_and_gradients(rows, weights, cotangent, group_sizes, virtual_ranks):
    settings = {"group_sizes": group_sizes, "virtual_ranks": virtual_ranks, "engine": "pallas"}
    multiply = functools.partial(jax_moe.grouped_matmul, **settings)
    out, pull = jax.vjp(multiply, rows, weights)
    return out, *pull(cotangent)


def check_product(groups: Groups, inner: int, outer: int, repetitions: int = 1) -> None:
    """Product and both gradients of `grouped_matmul` against float64, the same bits each time."""
    rng = np.random.default_rng(7)
    rows, cotangent = groups.draw(rng, inner), groups.draw(rng, outer)
    shape = len(groups.sizes), inner, outer
    weights = jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)
    run = functools.partial(_product_and_gradients, rows, weights, cotangent, **groups.settings)
    out, d_rows, d_weights = first = run()
    for _ in range(repetitions - 1):
        assert all(map(jnp.array_equal, run(), first))
    wants = np.zeros(out.shape), np.zeros(rows.shape), np.zeros(shape)
    on_host = [np.asarray(a) for a in (rows, cotangent, weights)]  # JAX compiles each slice
    for e, here in enumerate(groups.spans):
        x, dy, w = (np.float64(a[i]) for a, i in zip(on_host, (here, here, e), strict=True))
        wants[0][here], wants[1][here], wants[2][e] = x @ w, dy @ w.T, x.T @ dy
    for got, want in zip(first, wants, strict=True):
        # bfloat16's rounding of the result; the sums are exact enough in float32.
        scale = np.abs(want).max()
        np.testing.assert_allclose(np.float64(got), want, rtol=2**-8, atol=2e-3 * scale)
    assert not np.any(out[~groups.real]) and not np.any(d_rows[~groups.real])
    assert not np.any(d_weights[np.array(groups.sizes) == 0])


def swiglu_and_gradients(groups: Groups, hidden: int, width: int, engine: str) -> list[np.ndarray]:
    """`grouped_swiglu` and its gradients, of rows the real ones, with undefined tails."""
    rng = np.random.default_rng(8)
    rows, cotangent = groups.draw(rng, hidden), groups.draw(rng, hidden)
    factors = np.where(groups.real, rng.uniform(-1, 2, len(groups.real)), np.nan)
    experts = len(groups.sizes)
    gate_up = rng.standard_normal((experts, hidden, 2 * width)) / hidden**0.5
    down = rng.standard_normal((experts, width, hidden)) / width**0.5
    weights = (jnp.asarray(w, jnp.bfloat16) for w in (gate_up, down))
    swiglu = functools.partial(
        jax_moe.grouped_swiglu, tail="undefined", engine=engine, **groups.settings
    )
    operands = rows, jnp.asarray(factors, jnp.float32), *weights

    @jax.jit
    def run(cotangent, *operands):
        out, pull = jax.vjp(swiglu, *operands)
        return out, *pull(cotangent)

    out, d_rows, d_s, d_in, d_out = run(cotangent, *operands)
    assert not np.any(d_s[~groups.real])
    rows_of = [a[groups.real] for a in (out, d_rows, d_s)]
    return [np.asarray(a, np.float64) for a in (*rows_of, d_in, d_out)]


def check_swiglu(groups: Groups, hidden: int, width: int, other: str, interpreted) -> None:
    """The kernels' SwiGLU against another engine's; `interpreted` is a context for the kernels."""
    wants = swiglu_and_gradients(groups, hidden, width, other)
    with interpreted:
        gots = swiglu_and_gradients(groups, hidden, width, "pallas")
    for got, want in zip(gots, wants, strict=True):
        np.testing.assert_allclose(got, want, atol=2e-2 * np.abs(want).max())
