"""What remat policies keep: XLA's own accounting, and gradients that do not change."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_moe

SIZES = dict(tokens=64, top_k=2, num_experts=8, num_ranks=2, capacity=192, hidden=32)
POLICIES = ("save_plan", "save_rows")


@functools.cache
def setting():
    mesh = jax_moe.make_mesh(rank=2, devices=jax.devices()[:2])
    return jax_moe.ExpertGroup(mesh), jax_moe.RouterConfig(num_experts=8, top_k=2)


def objective(policy: str | None):
    """A loss of stacked layers, recomputed as the policy says."""

    def loss(x, graph, state):
        def block(x, state):
            y, _ = nnx.merge(graph, state)(x)
            return x + y, None

        how = jax.checkpoint_policies.nothing_saveable
        block = jax.checkpoint(block, policy=getattr(jax_moe, policy) if policy else how)
        return (jax.lax.scan(block, x, state)[0] ** 2).sum()

    return loss


def operands(num_layers: int, implementation: str):
    group, config = setting()

    @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: None})
    def create(rngs):
        return jax_moe.MoE(
            SIZES["hidden"], 16, config, group, num_shared=0, capacity=SIZES["capacity"],
            kernel_init=nnx.initializers.normal(0.3), implementation=implementation, rngs=rngs,
        )  # fmt: skip

    graph, state = nnx.split(nnx.eval_shape(lambda: create(nnx.Rngs(0).split(num_layers))))
    x = jax.ShapeDtypeStruct(
        (2, SIZES["tokens"], SIZES["hidden"]), jnp.float32,
        sharding=jax.NamedSharding(group.mesh, jax.P(group.axes)),
    )  # fmt: skip
    return x, graph, state


def compiled(policy, implementation, num_layers):
    x, graph, state = operands(num_layers, implementation)
    function = functools.partial(objective(policy), graph=graph)
    step = jax.jit(jax.grad(lambda x, state: function(x, state=state), argnums=(0, 1)))
    options = {"xla_backend_optimization_level": 0}
    return step.lower(x, state).compile(compiler_options=options), (x, state)


def temporaries(policy, implementation, num_layers):
    program, _ = compiled(policy, implementation, num_layers)
    return program.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("policy", POLICIES)
def test_saved_bytes_are_what_each_layer_adds(policy):
    """Beside what any remat keeps, which is the layer's input."""
    each = [(temporaries(p, "cpu", 6) - temporaries(p, "cpu", 2)) / 4 for p in (policy, None)]
    want = jax_moe.saved_bytes(policy, dtype=jnp.float32, implementation="cpu", **SIZES)
    assert each[1] == pytest.approx(SIZES["tokens"] * SIZES["hidden"] * 4, abs=64)
    assert each[0] - each[1] == pytest.approx(want, abs=64)  # buffers begin at multiples of 64


def test_policies_change_no_bit_of_the_gradients():
    results = []
    for policy in (None, *POLICIES):
        program, shapes = compiled(policy, "cpu", 2)
        rng = np.random.default_rng(0)
        values = jax.tree.map(
            lambda a, rng=rng: jax.device_put(
                jnp.asarray(rng.normal(size=a.shape) / 4, a.dtype), a.sharding
            ),
            shapes,
        )
        results.append(jax.tree.leaves(program(*values)))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(a, b)
    assert any(np.any(a) for a in results[0])


def test_ptx_keeps_the_arrivals_too():
    ours = [jax_moe.saved_bytes("save_plan", implementation=i, **SIZES) for i in ("ptx", "cpu")]
    assert ours[0] - ours[1] == 4 * 2 * 64 * 2


def test_an_unknown_policy_is_refused():
    with pytest.raises(ValueError, match=r"policy='everything': must be"):
        jax_moe.saved_bytes("everything", **SIZES)
