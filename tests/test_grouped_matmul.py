"""Grouped matmul and SwiGLU against loops in float64, with NaN in the rows past the groups."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_moe
from jax_moe import _pallas_matmul

ENGINES = ("blocks", "large_blocks", "ragged_dot")
# virtual ranks, rows of one, sizes of the groups
LAYOUTS = {
    "one_expert": (1, 200, [130]),
    "empty_first_middle_last": (1, 150, [0, 70, 0, 75, 0]),
    "full": (1, 128, [64, 64]),
    "few_rows": (1, 5, [2, 1]),
    "no_row": (1, 90, [0, 0]),
    "three_ranks": (3, 100, [70, 30, 0, 0, 1, 98]),
    "many_blocks": (1, 2600, [1030, 0, 1500]),
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


def swiglu_in_float64(name: str, rows, row_s, gate_up, down, cotangent):
    """The result and the gradients of all four operands, group by group."""
    arrays = [np.float64(a) for a in (rows, row_s, gate_up, down, cotangent)]
    rows, row_s, gate_up, down, cotangent = arrays
    out = np.zeros_like(rows)
    d_rows, d_s, d_in, d_out = (np.zeros_like(a) for a in arrays[:4])
    for e, start, size in groups(name):
        here = slice(start, start + size)
        gate, up = np.hsplit(rows[here] @ gate_up[e], 2)
        sigmoid = 1 / (1 + np.exp(-gate))
        product, s = gate * sigmoid * up, row_s[here, None]
        out[here] = (product * s) @ down[e]
        d_hidden = cotangent[here] @ down[e].T
        d_gate = d_hidden * s * up * sigmoid * (1 + gate * (1 - sigmoid))
        d_inner = np.hstack([d_gate, d_hidden * s * gate * sigmoid])
        d_rows[here] = d_inner @ gate_up[e].T
        d_s[here] = (d_hidden * product).sum(1)
        d_in[e] = rows[here].T @ d_inner
        d_out[e] = (product * s).T @ cotangent[here]
    return out, d_rows, d_s, d_in, d_out


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["empty_first_middle_last", "few_rows", "three_ranks"])
def test_swiglu_and_gradients(name, engine):
    rows, gate_up, sizes, _, real = operands(name, inner=7, outer=10)
    _, down, _, cotangent, _ = operands(name, inner=5, outer=7)
    row_s = np.where(real, np.linspace(-1, 2, len(rows)), np.nan).astype(np.float32)

    @jax.jit
    def run(cotangent, *arguments):
        out, pull = jax.vjp(
            functools.partial(
                jax_moe.grouped_swiglu,
                group_sizes=jnp.asarray(sizes),
                virtual_ranks=LAYOUTS[name][0],
                engine=engine,
            ),
            *arguments,
        )
        return out, *pull(cotangent)

    got = [np.asarray(a) for a in run(cotangent, rows, row_s, gate_up, down)]
    want = swiglu_in_float64(name, rows, row_s, gate_up, down, cotangent)
    for name_of, g, w in zip(("out", "rows", "row_s", "in", "down"), got, want, strict=True):
        if name_of in ("out", "rows", "row_s"):
            g, w = g[real], w[real]
        scale = np.abs(w).max(initial=0)
        np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-6 * scale, err_msg=name_of)
    assert not got[0][~real].any()
    assert not got[3][sizes == 0].any() and not got[4][sizes == 0].any()


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


@pytest.fixture
def hopper_host(monkeypatch):
    """A host with a Hopper GPU, whose programs run on CPU devices all the same."""
    gpu = types.SimpleNamespace(platform="gpu", compute_capability="9.0", core_count=132)
    monkeypatch.setattr(jax, "local_devices", lambda **_: [gpu])
    monkeypatch.setattr(_pallas_matmul, "COUNTS", range(256, 257))  # less to lower


def result_and_gradients(operation, operands, sizes):
    def loss(*operands):
        return operation(*operands, sizes).sum()

    return operation(*operands, sizes), jax.grad(loss, range(len(operands)))(*operands)


@pytest.mark.parametrize("operation", [jax_moe.grouped_matmul, jax_moe.grouped_swiglu])
def test_the_engine_is_that_of_the_platform_that_runs(operation, hopper_host):
    shapes = [(16, 128), (16,), (2, 128, 256), (2, 128, 128)]
    rows, row_s, gate_up, down = (jnp.ones(shape, jnp.bfloat16) for shape in shapes)
    swiglu = operation is jax_moe.grouped_swiglu
    operands = (rows, row_s, gate_up, down) if swiglu else (rows, gate_up)
    sizes = jnp.array([7, 9], jnp.int32)

    blocks = functools.partial(operation, engine="blocks")
    want = jax.tree.map(np.asarray, result_and_gradients(blocks, operands, sizes))
    got = result_and_gradients(operation, operands, sizes)
    jax.tree.map(np.testing.assert_array_equal, got, want)

    mesh = jax_moe.make_mesh(rank=1, devices=jax.devices()[:1])
    function = functools.partial(result_and_gradients, operation)
    mapped = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=P("rank"), out_specs=P("rank")))
    jax.tree.map(np.testing.assert_array_equal, mapped(operands, sizes), want)
    traced = mapped.trace(operands, sizes)
    on_cpu, on_gpu = (
        traced.lower(lowering_platforms=(platform,)).as_text() for platform in ("cpu", "cuda")
    )
    assert "mosaic_gpu" not in on_cpu and "stablehlo.while" in on_cpu
    assert "mosaic_gpu" in on_gpu and "stablehlo.while" not in on_gpu


def test_takes_numpy_arrays_outside_of_jit():
    rows, weights = np.ones((4, 2), np.float32), np.ones((2, 2, 6), np.float32)
    down, sizes = np.ones((2, 3, 2), np.float32), np.int32([1, 2])
    out = jax_moe.grouped_matmul(rows, weights, sizes)
    np.testing.assert_array_equal(out, [[2] * 6] * 3 + [[0] * 6])
    out = jax_moe.grouped_swiglu(rows, rows[:, 0], weights, down, sizes)
    assert out.shape == (4, 2) and np.all(out[:3] > 0)


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


def test_swiglu_refuses_other_shapes_and_tails():
    rows, sizes = jnp.zeros((8, 4)), jnp.zeros(2, jnp.int32)
    fits = jnp.zeros((2, 4, 6)), jnp.zeros((2, 3, 4))
    with pytest.raises(ValueError, match=r"down .*2, 4, 3"):
        jax_moe.grouped_swiglu(rows, jnp.zeros(8), fits[0], jnp.zeros((2, 4, 3)), sizes)
    with pytest.raises(ValueError, match=r"row_s has shape \(7,\)"):
        jax_moe.grouped_swiglu(rows, jnp.zeros(7), *fits, sizes)
    with pytest.raises(ValueError, match="tail='poison'"):
        jax_moe.grouped_swiglu(rows, jnp.zeros(8), *fits, sizes, tail="poison")
