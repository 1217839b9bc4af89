"""An expert-parallel MoE layer in Flax Linen, written on jax_moe's bare operations.

`jax_moe.MoE` is an nnx layer; a foreign layer needs only `route`, `plan`, `dispatch`,
`grouped_swiglu` and `combine` inside one `jax.shard_map`. Run it on eight CPU devices:

    JAX_NUM_CPU_DEVICES=8 python examples/linen_layer.py
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import jax_moe


class LinenMoE(nn.Module):
    """Routed SwiGLU experts: tokens [T, H] over all mesh axes, experts over the group's axes.

    T must be a multiple of the group's ranks. The routing bias lives in the collection
    "balance", outside "params"; move it with `jax_moe.update_bias` and the returned counts.
    """

    width: int
    config: jax_moe.RouterConfig
    group: jax_moe.ExpertGroup

    @nn.compact
    def __call__(self, x):
        """Returns y [T, H] and the load of every expert, int32 [E]."""
        num_experts, hidden = self.config.num_experts, x.shape[-1]
        init = nn.initializers.normal(0.02)
        experts = nn.with_partitioning(init, (self.group.axes, None, None))
        bias = self.variable("balance", "bias", jnp.zeros, num_experts)
        weights = (
            self.param("router", init, (hidden, num_experts)),
            bias.value,
            self.param("gate_up", experts, (num_experts, hidden, 2 * self.width)),
            self.param("down", experts, (num_experts, self.width, hidden)),
        )
        by_token, by_expert = P(self.group.mesh.axis_names), P(self.group.axes)
        return jax.shard_map(
            functools.partial(moe, self.config, self.group),
            mesh=self.group.mesh,
            in_specs=(by_token, P(), P(), by_expert, by_expert),
            out_specs=(by_token, P()),
        )(x, *weights)


def moe(config, group, x, router, bias, gate_up, down):
    """One device's part: its tokens [T, H], its experts."""
    routing = jax_moe.route(x @ router, bias, config)
    plan = jax_moe.plan(routing.expert_ids, group=group, num_experts=config.num_experts)
    rows, row_s = jax_moe.dispatch(x, routing.weights, plan)
    rows = jax_moe.grouped_swiglu(rows, row_s, gate_up, down, plan.group_sizes)
    y, _ = jax_moe.combine(rows, row_s, plan)
    chosen = jax.nn.one_hot(routing.expert_ids, config.num_experts, dtype=jnp.int32)
    return y, jax.lax.psum(chosen.sum((0, 1)), group.mesh.axis_names)


def main():
    """Takes one step of a small layer and prints what came out."""
    group = jax_moe.ExpertGroup(jax_moe.make_mesh(node=2))
    config = jax_moe.RouterConfig(num_experts=16, top_k=4).resolve(group.nodes)
    layer = LinenMoE(width=32, config=config, group=group)
    x = jax.random.normal(jax.random.key(0), (64 * group.num_ranks, 48))
    variables = jax.jit(layer.init)(jax.random.key(1), x)
    variables = nn.unbox(variables)

    @jax.jit
    def step(variables, x):
        (y, counts), grads = jax.value_and_grad(loss, has_aux=True)(variables["params"], variables)
        bias = jax_moe.update_bias(variables["balance"]["bias"], counts, 1e-3)
        return y, counts, grads, bias

    def loss(params, variables):
        y, counts = layer.apply(variables | {"params": params}, x)
        return (y**2).sum(), counts

    _, counts, grads, bias = step(variables, x)
    print("tokens per expert:", counts)
    print("new bias:", bias)
    print("gradient norms:", jax.tree.map(lambda g: float(jnp.linalg.norm(g.ravel())), grads))


if __name__ == "__main__":
    main()
