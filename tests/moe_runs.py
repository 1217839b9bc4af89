"""Layers and compiled training steps that several test files share."""

import dataclasses
import functools
import math

import dense_moe
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jax_moe

AUX_WEIGHT = 0.1


@dataclasses.dataclass(frozen=True)
class Layout:
    """Devices of the mesh (data, node, rank), virtual ranks, and who carries the tokens."""

    mesh: tuple[int, int, int]
    virtual_ranks: int = 1
    num_nodes: int | None = None
    implementation: str | None = None

    def __str__(self) -> str:
        sizes = "x".join(map(str, self.mesh))
        return f"{sizes}_v{self.virtual_ranks}_{self.implementation or 'default'}"

    @functools.cached_property
    def group(self) -> jax_moe.ExpertGroup:
        data, node, rank = self.mesh
        devices = jax.devices()[: math.prod(self.mesh)]
        mesh = jax_moe.make_mesh(data=data, node=node, rank=rank, devices=devices)
        return jax_moe.ExpertGroup(mesh, virtual_ranks=self.virtual_ranks, num_nodes=self.num_nodes)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one training step gives; arrays in numpy, gradients by weight name and "x"."""

    y: np.ndarray
    stats: jax_moe.MoEStats
    grads: dict[str, np.ndarray]


def make(config, layout: Layout, *, hidden=12, width=10, seed=0, **options) -> jax_moe.MoE:
    """A layer whose weights, drawn by numpy (quicker to compile), make scores and gates differ."""
    layer = nnx.eval_shape(
        lambda: jax_moe.MoE(
            hidden,
            width,
            config,
            layout.group,
            implementation=layout.implementation,
            rngs=nnx.Rngs(0),
            **options,
        )
    )
    return fill(layer, seed)


def fill(layer: jax_moe.MoE, seed: int) -> jax_moe.MoE:
    """Gives an abstract layer its values."""
    rng = np.random.default_rng(seed)
    for _, param in sorted(nnx.state(layer, nnx.Param).items()):
        value = 0.5 * rng.standard_normal(param.shape, np.float32)
        param.set_value(jnp.asarray(value, param.dtype))
    layer.bias.set_value(jnp.zeros(layer.bias.shape, jnp.float32))
    return layer


@dataclasses.dataclass(frozen=True)
class Step:
    """A compiled forward and backward pass of one layer, for any weights, bias and tokens."""

    layer: jax_moe.MoE

    @functools.cached_property
    def _compiled(self):
        graph, _, _ = nnx.split(self.layer, nnx.Param, ...)

        @jax.jit
        def step(params, bias, x, mask, dy, aux_weight):
            def objective(params, x):
                layer = nnx.merge(graph, params, bias)
                y, stats = layer(x, mask)
                loss = (y.astype(jnp.float32) * dy).sum() + aux_weight * stats.aux_loss
                return loss, (y, stats)

            return jax.grad(objective, argnums=(0, 1), has_aux=True)(params, x)

        return step

    def weights(self) -> dict[str, np.ndarray]:
        params = nnx.to_pure_dict(nnx.state(self.layer, nnx.Param))
        return {name: np.asarray(value) for name, value in params.items()}

    def __call__(self, x, mask, dy, *, bias=None, aux_weight=AUX_WEIGHT, **changed) -> Outcome:
        """Runs with the layer's weights and bias, except for those given."""
        # Mapped, so that the layer keeps its own variables.
        params, rest = jax.tree.map(jnp.asarray, nnx.split(self.layer, nnx.Param, ...)[1:])
        if bias is not None:
            rest["bias"].set_value(jnp.asarray(bias, jnp.float32))
        for name, value in changed.items():
            params[name].set_value(jnp.asarray(value))
        (grads, dx), (y, stats) = self._compiled(params, rest, x, mask, dy, aux_weight)
        grads = {name: np.asarray(g) for name, g in nnx.to_pure_dict(grads).items()}
        return Outcome(np.asarray(y), stats, grads | {"x": np.asarray(dx)})


def assert_close(got, want, name: str, tolerance: float = 1e-5) -> None:
    """Equal to within `tolerance` of the largest magnitude; exact zeros where all is zero."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, f"{name}: shape {got.shape} instead of {want.shape}"
    scale = np.abs(want).max(initial=0)
    worst = np.abs(got - want).max(initial=0)
    assert worst <= tolerance * scale, f"{name}: off by {worst:.3g}, largest value {scale:.3g}"


def assert_agrees(got: Outcome, want: dense_moe.Result, tolerance: float = 1e-5) -> None:
    """Output, all gradients and all statistics against the dense restatement."""
    assert_close(got.y, want.y, "y", tolerance)
    assert set(got.grads) == set(want.grads)
    for name, grad in want.grads.items():
        assert_close(got.grads[name], grad, f"gradient of {name}", tolerance)
    stats = got.stats
    np.testing.assert_array_equal(stats.counts, want.counts)
    for name in ("aux_loss", "router_entropy", "nodes_per_token"):
        np.testing.assert_allclose(getattr(stats, name), getattr(want, name), 1e-5, err_msg=name)
    total = want.counts.sum()
    loads = want.counts * len(want.counts) / total if total else np.ones(1)
    np.testing.assert_allclose(stats.max_vio, loads.max() - 1, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(stats.min_load, loads.min(), rtol=1e-5)
