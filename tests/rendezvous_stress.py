"""Program: many independent calls at once, mixed with matmuls and psums, on N CPU devices.

Arguments: DEVICES REPETITIONS THREADS. Prints "ok" when every repetition gave the bits that single
calls over JAX's collectives give. A deadlock shows as the caller's timeout.
"""

import functools
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import jax_moe

NUM_DEVICES, REPETITIONS, NUM_THREADS = (int(argument) for argument in sys.argv[1:4])
TOKENS, TOP_K, NUM_CHAINS = 4, 2, 2  # tokens of a device; chains of each group in a program
SPEC = PartitionSpec(("data", "node", "rank"))


def chain(ids, x, *, group, implementation):
    """plan, dispatch and combine: three calls in a row."""
    plan = jax_moe.plan(
        ids, group=group, num_experts=2 * group.num_ranks, implementation=implementation
    )
    rows, row_s = jax_moe.dispatch(x, jnp.ones(ids.shape, jnp.float32), plan)
    y, s = jax_moe.combine(rows + rows, row_s, plan)
    return y + s.sum(1)[:, None]


def inputs(ids, x, number):
    """What the chain of this number gets."""
    return ids + number, x * (number + 1)


def program(ids, x, *, groups):
    """Chains that do not depend on each other, and as many psums and matmuls beside them."""
    outs = [
        chain(*inputs(ids, x, number), group=group, implementation="cpu")
        for number in range(NUM_CHAINS)
        for group in groups
    ]
    sides = [jax.lax.psum((x + i) @ x.T, ("data", "rank")) @ x for i in range(NUM_CHAINS)]
    return outs, sides


def expected(ids, x, groups, jit):
    singles = [jit(functools.partial(chain, group=g, implementation="xla")) for g in groups]
    return [
        np.asarray(single(*inputs(ids, x, number)))
        for number in range(NUM_CHAINS)
        for single in singles
    ]


def repeat(step, args, want, failures):
    first_sides = None
    for i in range(REPETITIONS):
        outs, sides = (jax.tree.map(np.asarray, part) for part in step(*args))
        first_sides = sides if first_sides is None else first_sides
        for got, good in zip([*outs, *sides], [*want, *first_sides], strict=True):
            if got.tobytes() != good.tobytes():
                failures.append(f"repetition {i} of {threading.current_thread().name} differs")
                return


def main():
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    mesh = jax_moe.make_mesh(data=2, node=2)
    groups = [
        jax_moe.ExpertGroup(mesh),
        jax_moe.ExpertGroup(mesh, axes=("data", "node", "rank"), num_nodes=4),
        jax_moe.ExpertGroup(mesh, axes=("rank",), virtual_ranks=2),
    ]

    def jit(function):
        return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=SPEC, out_specs=SPEC))

    rng = np.random.default_rng(0)
    ids = rng.integers(-1, NUM_DEVICES // 2, (NUM_DEVICES * TOKENS, TOP_K)).astype(np.int32)
    x = rng.normal(size=(len(ids), 8)).astype(np.float32)
    args = jax.device_put((ids, x), NamedSharding(mesh, SPEC))
    want = expected(*args, groups, jit)
    failures: list[str] = []
    # Two executables: some threads share one, and some run beside another.
    steps = [jit(functools.partial(program, groups=groups)) for _ in range(min(2, NUM_THREADS))]
    running = [
        threading.Thread(target=repeat, args=(steps[i % len(steps)], args, want, failures))
        for i in range(NUM_THREADS)
    ]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    print(failures[0] if failures else "ok")


if __name__ == "__main__":
    main()
