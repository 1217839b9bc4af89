"""Gradients: VJPs byte for byte, and what a training step makes of them."""

import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import origin
import pytest
import runs

import jax_moe
from jax_moe import _reference

EVERY = pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS)
VJPS = [pair for pair in runs.pairs() if runs.shows_vjps(*pair.values)]


@pytest.mark.parametrize(("case", "implementation"), VJPS)
def test_dispatch_vjp_is_combine(case, implementation):
    dx, ds = runs.run(case, implementation)["dispatch_vjp"]
    given = runs.inputs(case)
    want = [
        oracle.combine(rows, row_s, p, num_nodes=case.nodes)
        for rows, row_s, p in zip(given.d_rows, given.d_row_s, runs.plans(case), strict=True)
    ]
    origin.assert_same_bits(dx, np.stack([y for y, _ in want]), "dx")
    origin.assert_same_bits(ds, np.stack([s for _, s in want]), "ds")


@pytest.mark.parametrize(("case", "implementation"), VJPS)
def test_combine_vjp_is_dispatch(case, implementation):
    d_rows, d_row_s = runs.run(case, implementation)["combine_vjp"]
    given, keep = runs.inputs(case), runs.specified(case)
    want = [
        oracle.dispatch(dy, ds, p)
        for dy, ds, p in zip(given.dy, given.ds, runs.plans(case), strict=True)
    ]
    origin.assert_same_bits(d_rows, np.stack([rows for rows, _ in want]), "d_rows", keep=keep)
    origin.assert_same_bits(d_row_s, np.stack([s for _, s in want]), "d_row_s", keep=keep)


# A little expert layer. Expert e multiplies by a[e] and bends by tanh, so that every gradient
# depends on what the others are; nodes, overflow, invalid ids and repeats are all in.
LAYER = cases.Case(
    "layer", tokens=6, experts=16, topk=3, hidden=4, mesh=(1, 2, 2), virtual_ranks=2,
    routing="invalid", capacity=10, alignment=2,
)  # fmt: skip


def _experts_of_rows(plan: jax_moe.Plan, a: jax.Array) -> jax.Array:
    """a [V*E/R] of the local experts, spread over the rows [V*C]; 0 for the tail."""
    at, virtual = plan.spec, plan.spec.group.virtual_ranks
    ends = jnp.cumsum(plan.padded_group_sizes.reshape(virtual, -1), axis=1)
    row = jnp.arange(at.capacity, dtype=jnp.int32)
    local = (row[None, :, None] >= ends[:, None, :]).sum(-1)
    padded = jnp.concatenate([a.reshape(virtual, -1), jnp.zeros((virtual, 1), a.dtype)], axis=1)
    return jnp.take_along_axis(padded, local, axis=1).reshape(-1)


def _loss_parts(at: runs.Setting, implementation: str):
    """Per device: the loss of its tokens [1]."""

    def program(ids, x, s, a, target):
        plan = at.plan(ids, implementation)
        rows, row_s = jax_moe.dispatch(x, s, plan)
        hidden = jnp.tanh(rows * _experts_of_rows(plan, a)[:, None]) * row_s[:, None]
        y, _ = jax_moe.combine(hidden, row_s, plan)
        return jnp.sum(y * y * target).reshape(1)

    return program


@functools.cache
def _layer_operands(dtype: str = "float64"):
    """x [R*T, H], s [R*T, K], a [E], target [R*T, H], of ordinary size."""
    rng = LAYER.rng("layer")
    owned = LAYER.ranks * LAYER.tokens
    return tuple(
        rng.uniform(0.3, 1.2, size=shape).astype(dtype)
        for shape in [
            (owned, LAYER.hidden),
            (owned, LAYER.topk),
            (LAYER.experts,),
            (owned, LAYER.hidden),
        ]
    )


def _dense_loss(x, s, a, target):
    """The same loss without any exchange: every kept (token, k) by itself, in float64."""
    (p,) = runs.plans(LAYER)
    ids = p.expert_ids.reshape(-1, LAYER.topk)
    kept = jnp.asarray(p.positions.reshape(-1, LAYER.topk) >= 0)
    scaled = jnp.tanh(x[:, None, :] * a[np.maximum(ids, 0)][:, :, None]) * s[:, :, None]
    y = jnp.where(kept[:, :, None], scaled, 0.0).sum(1)
    return jnp.sum(y * y * target)


@functools.cache
def _layer_function(implementation: str):
    """x, s, a and target to the loss and its gradients in x, s and a."""
    at = runs.setting(LAYER)
    parts = at.shard_map(_loss_parts(at, implementation))

    def loss(x, s, a, target):
        ids = cases.expert_ids(LAYER).reshape(-1, LAYER.topk)
        return parts(ids, x, s, a, target).sum()

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))


@EVERY
def test_gradients_agree_with_a_float64_restatement(implementation):
    assert runs.plans(LAYER)[0].dropped.sum() > 0
    with jax.enable_x64(True):
        dense = jax.jit(jax.value_and_grad(_dense_loss, argnums=(0, 1, 2)))
        want_loss, want = dense(*_layer_operands())
        want_loss, want = float(want_loss), [np.asarray(g) for g in want]
    loss, got = _layer_function(implementation)(*_layer_operands("float32"))
    np.testing.assert_allclose(loss, want_loss, rtol=2e-6)
    for name, g, w in zip(("x", "s", "a"), got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=2e-5, atol=2e-6, err_msg=name)


@EVERY
def test_gradients_agree_with_finite_differences(implementation):
    """Of the layer's own loss, in a random direction of each operand."""
    function, operands = _layer_function(implementation), _layer_operands("float32")
    _, gradients = function(*operands)
    for i, gradient in enumerate(gradients):
        direction = LAYER.rng(f"direction {i}").standard_normal(gradient.shape).astype(np.float32)
        step = np.float32(2.0**-7)
        values = []
        for sign in (-1, 1):
            moved = list(operands)
            moved[i] = operands[i] + np.float32(sign) * step * direction
            values.append(float(function(*moved)[0]))
        slope = (values[1] - values[0]) / (2 * float(step))
        want = np.vdot(np.asarray(gradient, np.float64), direction)
        np.testing.assert_allclose(slope, want, rtol=5e-3, err_msg=f"operand {i}")


@EVERY
def test_gradients_of_a_linear_layer_in_closed_form(implementation):
    """y[t] = sum_k s a[e] x[t] and the loss <y, g>, with small whole numbers: exact."""
    at, (p,) = runs.setting(LAYER), runs.plans(LAYER)
    rng = LAYER.rng("closed form")
    owned = LAYER.ranks * LAYER.tokens
    whole = [
        rng.integers(-3, 4, size=shape).astype(np.float32)
        for shape in [
            (owned, LAYER.hidden),
            (owned, LAYER.topk),
            (LAYER.experts,),
            (owned, LAYER.hidden),
        ]
    ]
    x, s, a, g = whole

    def program(ids, x, s, a, g):
        plan = at.plan(ids, implementation)
        rows, row_s = jax_moe.dispatch(x, s, plan)
        y, _ = jax_moe.combine(rows * (_experts_of_rows(plan, a) * row_s)[:, None], row_s, plan)
        return jnp.sum(y * g).reshape(1)

    parts = at.shard_map(program)
    ids = cases.expert_ids(LAYER).reshape(-1, LAYER.topk)
    gradient = jax.jit(jax.grad(lambda *v: parts(ids, *v).sum(), argnums=(0, 1, 2)))
    dx, ds, da = gradient(x, s, a, g)

    kept = p.positions.reshape(owned, LAYER.topk) >= 0
    experts = np.maximum(p.expert_ids.reshape(owned, LAYER.topk), 0)
    weight = np.where(kept, s * a[experts], 0)
    along = (x * g).sum(1)
    np.testing.assert_array_equal(dx, weight.sum(1)[:, None] * g)
    np.testing.assert_array_equal(ds, np.where(kept, a[experts] * along[:, None], 0))
    want = np.zeros(LAYER.experts, np.float32)
    np.add.at(want, experts[kept], (s * along[:, None])[kept])
    np.testing.assert_array_equal(da, want)


def test_the_transposes_agree_with_autodiff_of_the_specification():
    """In float64, where JAX can transpose the reference functions by itself."""
    (p,) = runs.plans(LAYER)
    rng = LAYER.rng("transpose")
    x, s = rng.standard_normal(p.positions.shape[:2] + (3,)), rng.standard_normal(p.positions.shape)
    rows, row_s = rng.standard_normal(p.sources.shape + (3,)), rng.standard_normal(p.sources.shape)
    combine = functools.partial(
        _reference.combine, num_experts=LAYER.experts, num_nodes=LAYER.nodes
    )

    @jax.jit
    def transposes(x, s, rows, row_s):
        _, dispatch_vjp = jax.vjp(lambda x, s: _reference.dispatch(x, s, p.sources), x, s)
        combined, combine_vjp = jax.vjp(
            lambda rows, row_s: combine(rows, row_s, p.expert_ids, p.positions), rows, row_s
        )
        return dispatch_vjp((rows, row_s)), combined, combine_vjp((x, s))

    with jax.enable_x64(True):
        of_dispatch, combined, of_combine = transposes(x, s, rows, row_s)
    for got, want in zip(of_dispatch, combined, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)
    for got, want in zip(of_combine, oracle.dispatch(x, s, p), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)
        assert (np.asarray(got)[p.sources < 0] == 0).all()


def test_second_derivatives():
    """A gradient can be differentiated again: the Hessian of <y, y> along a direction."""
    at = runs.setting(LAYER)
    x, s, _, _ = _layer_operands("float32")
    ids = cases.expert_ids(LAYER).reshape(-1, LAYER.topk)

    def program(ids, x, s):
        plan = at.plan(ids, None)
        rows, row_s = jax_moe.dispatch(x, s, plan)
        y, _ = jax_moe.combine(rows * rows * row_s[:, None], row_s, plan)
        return jnp.sum(y).reshape(1)

    parts = at.shard_map(program)

    def slope(x):
        return jnp.sum(jax.grad(lambda x: parts(ids, x, s).sum())(x) ** 2)

    (p,) = runs.plans(LAYER)
    kept_s = np.where(p.positions.reshape(s.shape) >= 0, s, 0).sum(1, keepdims=True)
    # y = sum_k s x^2, so its gradient is 2 x sum_k s, and that of the square 8 x (sum_k s)^2.
    np.testing.assert_allclose(jax.jit(jax.grad(slope))(x), 8 * x * kept_s**2, rtol=1e-5, atol=1e-6)
