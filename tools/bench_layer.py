"""Times jax_moe.MoE against a dense layer in GShard's style: forward and backward on CPU devices.

The dense layer sends tokens with one-hot einsums into a buffer of fixed capacity per (device,
expert), wide enough here that nothing is dropped, and lets the partitioner exchange the buffers.
Both have the same weights; outputs and gradients are compared before anything is timed.

    python tools/bench_layer.py --tokens 2048 --hidden 96 --width 96 --experts 8 --top-k 2
"""

import argparse
import time

import jax

parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
for name, value in {
    "devices": 8, "nodes": 4, "tokens": 2048, "hidden": 96, "width": 96, "experts": 8,
    "top-k": 2, "groups": 4, "top-groups": 2, "calls": 10, "rounds": 7,
}.items():  # fmt: skip
    parser.add_argument(f"--{name}", type=int, default=value)
ARGS = parser.parse_args()
jax.config.update("jax_num_cpu_devices", ARGS.devices)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from flax import nnx  # noqa: E402

import jax_moe  # noqa: E402


def make_layer() -> jax_moe.MoE:
    """The layer under test, weights large enough for uneven loads."""
    ranks = ARGS.devices // ARGS.nodes
    group = jax_moe.ExpertGroup(jax_moe.make_mesh(node=ARGS.nodes, rank=ranks))
    config = jax_moe.RouterConfig(
        num_experts=ARGS.experts,
        top_k=ARGS.top_k,
        num_groups=ARGS.groups,
        top_groups=ARGS.top_groups,
    )
    init = nnx.initializers.normal(0.1)
    return nnx.jit(
        lambda: jax_moe.MoE(
            ARGS.hidden, ARGS.width, config, group, kernel_init=init, rngs=nnx.Rngs(0)
        )
    )()


def swiglu(x, gate_up, down, s=1.0):
    """The experts' function."""
    gate, up = jnp.split(x @ gate_up, 2, axis=-1)
    return (jax.nn.silu(gate) * up * s) @ down


def send_masks(layer, weights, x, capacity):
    """One-hot [G, S, E, C] of every chosen (token, expert), and the same times its gate weight."""
    config = layer.config
    routing = jax_moe.route(x @ weights["router"], None, config)
    one_hot = jax.nn.one_hot(routing.expert_ids, config.num_experts, dtype=x.dtype)
    chosen = one_hot.sum(2)
    gates = (one_hot * routing.weights[..., None]).sum(2)
    place = (jnp.cumsum(chosen, axis=1) - chosen).astype(jnp.int32)
    send = chosen[..., None] * jax.nn.one_hot(place, capacity, dtype=x.dtype)
    return send, gates[..., None] * send


def dense_layer(layer, weights, x, capacity):
    """Tokens [G, S, H], one group of tokens a device; nothing is dropped."""
    mesh = layer.settings.group.mesh

    def by(axis, array):
        spec = [None] * array.ndim
        spec[axis] = mesh.axis_names
        return jax.lax.with_sharding_constraint(array, jax.NamedSharding(mesh, jax.P(*spec)))

    send, receive = send_masks(layer, weights, x, capacity)
    rows = by(0, jnp.einsum("gsec,gsh->egch", send, x))
    rows = rows.reshape(ARGS.experts, -1, ARGS.hidden)
    rows = swiglu(rows, weights["gate_up"], weights["down"])
    rows = by(1, rows.reshape(ARGS.experts, ARGS.devices, capacity, ARGS.hidden))
    routed = jnp.einsum("gsec,egch->gsh", receive, rows)
    return routed + swiglu(x, weights["shared_gate_up"], weights["shared_down"])


def time_both(functions, *arguments):
    """Best wall and CPU time of one call, milliseconds, taking turns."""
    best = {name: [np.inf, np.inf] for name in functions}
    for _ in range(ARGS.rounds):
        for name, function in functions.items():
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(ARGS.calls):
                jax.block_until_ready(function(*arguments))
            spent = time.perf_counter() - wall, time.process_time() - cpu
            best[name] = [
                min(b, s / ARGS.calls * 1e3) for b, s in zip(best[name], spent, strict=True)
            ]
    return best


def main():
    layer = make_layer()
    mesh = layer.settings.group.mesh
    graph, params, rest = nnx.split(layer, nnx.Param, ...)
    shape = (ARGS.devices, ARGS.tokens // ARGS.devices, ARGS.hidden)
    x, dy = np.random.default_rng(0).normal(size=(2, *shape)).astype(np.float32)
    place = jax.NamedSharding(mesh, jax.P(mesh.axis_names))
    x, dy = jax.device_put((x, dy), place)

    def ours(params, x):
        return nnx.merge(graph, params, rest)(x)

    _, stats = jax.jit(ours)(params, x)
    send, _ = send_masks(layer, nnx.to_pure_dict(params), x, shape[1])
    capacity = int(jnp.max(send.sum((1, 3))))  # exactly what this input needs

    def gradients(apply):
        def objective(params, x):
            y = apply(params, x)
            return (y * dy).sum(), y

        return jax.jit(jax.grad(objective, argnums=(0, 1), has_aux=True))

    functions = {
        "jax_moe": gradients(lambda params, x: ours(params, x)[0]),
        "dense": gradients(
            lambda params, x: dense_layer(layer, nnx.to_pure_dict(params), x, capacity)
        ),
    }
    got, want = (f(params, x) for f in functions.values())
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.abs(a - b).max() <= 1e-5 * np.abs(b).max(), "the layers disagree"
    print(
        f"{ARGS.tokens} tokens, hidden {ARGS.hidden}, width {ARGS.width}, top {ARGS.top_k} of "
        f"{ARGS.experts}, {ARGS.devices} devices; MaxVio {float(stats.max_vio):.2f}, dense "
        f"capacity {capacity} rows per (device, expert); outputs and gradients equal to 1e-5"
    )
    best = time_both(functions, params, x)
    for name, (wall, cpu) in best.items():
        print(f"{name:8} {wall:8.2f} ms wall, {cpu:8.2f} ms CPU, forward + backward")
    print(f"dense / jax_moe: {best['dense'][0] / best['jax_moe'][0]:.2f} in wall time")


if __name__ == "__main__":
    main()
