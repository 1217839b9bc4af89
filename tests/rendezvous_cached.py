"""Program: one exchange with a compilation cache; prints the cache's hits and misses, and a sum.

Argument: the cache's folder.
"""

import collections
import sys

import jax
import jax.numpy as jnp

import jax_moe

events: collections.Counter[str] = collections.Counter()


def main():
    jax.config.update("jax_num_cpu_devices", 4)
    jax.config.update("jax_compilation_cache_dir", sys.argv[1])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.monitoring.register_event_listener(lambda event, **_: events.update([event]))
    mesh = jax_moe.make_mesh()
    group = jax_moe.ExpertGroup(mesh)

    def exchange(ids, x):
        plan = jax_moe.plan(ids, group=group, num_experts=8, implementation="cpu")
        rows, row_s = jax_moe.dispatch(x, x[:, :2], plan)
        return jax_moe.combine(rows, row_s, plan)

    spec = jax.P(group.axes)
    step = jax.jit(jax.shard_map(exchange, mesh=mesh, in_specs=spec, out_specs=spec))
    ids = jnp.arange(32, dtype=jnp.int32).reshape(16, 2) % 8
    x = jnp.ones((16, 4), jnp.float32)
    lowered = step.lower(ids, x)
    events.clear()
    compiled = lowered.compile()
    found = [events[f"/jax/compilation_cache/cache_{what}"] for what in ("hits", "misses")]
    y, _ = compiled(ids, x)
    print(*found, float(y.sum()))


if __name__ == "__main__":
    main()
