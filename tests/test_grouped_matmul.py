"""Grouped matmul and gate against loops in numpy float64, with NaN in every row past the groups."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_moe

ENGINES = ("blocks", "ragged_dot")
# virtual ranks, rows of one, sizes of the groups
LAYOUTS = {
    "one_expert": (1, 200, [130]),
    "empty_first_middle_last": (1, 150, [0, 70, 0, 75, 0]),
    "full": (1, 128, [64, 64]),
    "few_rows": (1, 5, [2, 1]),
    "no_row": (1, 90, [0, 0]),
    "three_ranks": (3, 100, [70, 30, 0, 0, 1, 98]),
}


@functools.cache
def operands(name: str, inner=7, outer=6):
    """Rows, weights, sizes, cotangent, and which rows are real; float32, NaN outside."""
    ranks, num_rows, sizes = LAYOUTS[name]
    rng = np.random.default_rng(len(name))
    rows = rng.normal(size=(ranks * num_rows, inner)).astype(np.float32)
    weights = rng.normal(size=(len(sizes), inner, outer)).astype(np.float32)
    cotangent = rng.normal(size=(ranks * num_rows, outer)).astype(np.float32)
    real = np.zeros(len(rows), bool)
    for _, start, size in groups(name):
        real[start : start + size] = True
    rows[~real], cotangent[~real] = np.nan, np.nan
    return rows, weights, np.array(sizes, np.int32), cotangent, real


def groups(name: str):
    """(expert, first row, rows) of every group."""
    ranks, num_rows, sizes = LAYOUTS[name]
    local = len(sizes) // ranks
    for e, size in enumerate(sizes):
        first = e // local * local
        yield e, e // local * num_rows + sum(sizes[first:e]), size


def product(name: str, rows, weights):
    out = np.zeros((len(rows), weights.shape[2]))
    for e, start, size in groups(name):
        out[start : start + size] = np.float64(rows[start : start + size]) @ weights[e]
    return out


def outer_product(name: str, left, right):
    experts = len(LAYOUTS[name][2])
    out = np.zeros((experts, left.shape[1], right.shape[1]))
    for e, start, size in groups(name):
        here = slice(start, start + size)
        out[e] = np.float64(left[here]).T @ right[here]
    return out


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_product_and_gradients(name, engine):
    rows, weights, sizes, cotangent, real = operands(name)

    @jax.jit
    def run(rows, weights, cotangent):
        multiply = functools.partial(
            jax_moe.grouped_matmul,
            group_sizes=jnp.asarray(sizes),
            virtual_ranks=LAYOUTS[name][0],
            engine=engine,
        )
        out, pull = jax.vjp(multiply, rows, weights)
        return out, *pull(cotangent)

    out, d_rows, d_weights = map(np.asarray, run(rows, weights, cotangent))
    np.testing.assert_allclose(out, product(name, rows, weights), rtol=1e-5, atol=1e-5)
    transposed = np.swapaxes(weights, 1, 2)
    np.testing.assert_allclose(d_rows, product(name, cotangent, transposed), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        d_weights, outer_product(name, rows, cotangent), rtol=1e-5, atol=1e-5
    )
    assert not out[~real].any() and not d_rows[~real].any()
    assert not d_weights[sizes == 0].any()


@pytest.mark.parametrize("name", ["empty_first_middle_last", "three_ranks"])
def test_gate_and_gradients(name):
    rows, _, sizes, cotangent, real = operands(name, inner=8, outer=4)
    row_s = np.where(real, np.linspace(-1, 2, len(rows)), np.nan).astype(np.float32)

    @functools.partial(jax.jit, static_argnames="engine")
    def run(rows, row_s, cotangent, engine):
        gate = functools.partial(
            jax_moe.grouped_swiglu,
            group_sizes=jnp.asarray(sizes),
            virtual_ranks=LAYOUTS[name][0],
            engine=engine,
        )
        out, pull = jax.vjp(gate, rows, row_s)
        return out, *pull(cotangent)

    gate, up = np.float64(rows[real, :4]), np.float64(rows[real, 4:])
    sigmoid, s = 1 / (1 + np.exp(-gate)), row_s[real, None]
    d_gate = cotangent[real] * up * s * sigmoid * (1 + gate * (1 - sigmoid))
    d_up = cotangent[real] * gate * sigmoid * s
    d_s = (cotangent[real] * gate * sigmoid * up).sum(1)
    for engine in ENGINES:
        out, d_rows, d_row_s = (np.asarray(a)[real] for a in run(rows, row_s, cotangent, engine))
        np.testing.assert_allclose(out, gate * sigmoid * up * s, rtol=2e-5, atol=1e-6)
        np.testing.assert_allclose(d_rows, np.hstack([d_gate, d_up]), rtol=2e-5, atol=1e-6)
        np.testing.assert_allclose(d_row_s, d_s, rtol=2e-5, atol=2e-6)


def test_bfloat16_adds_in_float32():
    # 512 equal terms: partial sums rounded to bfloat16 would stop growing on the way.
    rows = jnp.full((64, 512), 1.0, jnp.bfloat16)
    weights = jnp.full((1, 512, 1), 0.25 + 2**-8, jnp.bfloat16)
    out = jax_moe.grouped_matmul(rows, weights, jnp.array([64], jnp.int32))
    assert out.dtype == jnp.bfloat16
    exact = float(weights[0, 0, 0]) * 512
    np.testing.assert_array_equal(np.float32(out), np.float32(jnp.bfloat16(exact)))


def test_second_derivatives_exist():
    rows, weights, sizes, _, _ = operands("few_rows")
    rows = np.nan_to_num(rows)

    def norm(weights, multiply):
        return (multiply(jnp.asarray(rows), weights) ** 2).sum()

    def grouped(rows, weights):
        return jax_moe.grouped_matmul(rows, weights, jnp.asarray(sizes))

    def plain(rows, weights):
        expert = jnp.array([0, 0, 1, 1, 1])
        return jnp.einsum("ck,ckn->cn", rows, weights[expert])

    def curvature(multiply):
        def slope(weights):
            return (jax.grad(norm)(weights, multiply) ** 3).sum()

        return jax.jit(jax.grad(slope))(jnp.asarray(weights))

    np.testing.assert_allclose(curvature(grouped), curvature(plain), rtol=1e-4, atol=1e-3)


def test_other_group_sizes_need_no_other_program():
    rows, weights, _, _, _ = operands("full")
    compiled = jax.jit(jax_moe.grouped_matmul)
    for sizes in ([64, 64], [0, 3], [128, 0]):
        out = compiled(rows, weights, jnp.array(sizes, jnp.int32))
        assert np.isfinite(out).all()
    assert compiled._cache_size() == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": jnp.zeros((8, 5))}, "with one K"),
        ({"rows": jnp.zeros((8, 4), jnp.bfloat16)}, "one floating-point dtype"),
        ({"group_sizes": jnp.zeros(3, jnp.int32)}, "one for each of the weights"),
        ({"virtual_ranks": 3}, "must divide"),
        ({"engine": "fastest"}, "must be"),
    ],
)
def test_refusals_name_the_values(change, message):
    arguments = {
        "rows": jnp.zeros((8, 4)),
        "weights": jnp.zeros((2, 4, 3)),
        "group_sizes": jnp.zeros(2, jnp.int32),
    }
    with pytest.raises(ValueError, match=message):
        jax_moe.grouped_matmul(**(arguments | change))
