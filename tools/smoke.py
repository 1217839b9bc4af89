"""Tries an installed jax_moe: one exchange on two CPU devices, whose result is known."""

import importlib.metadata

import jax
import jaxlib.version

jax.config.update("jax_num_cpu_devices", 2)

import jax.numpy as jnp  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import jax_moe  # noqa: E402

if jax_moe.__version__ != importlib.metadata.version("jax_moe"):
    raise SystemExit(f"__version__ {jax_moe.__version__} is not the installed distribution's")

mesh = jax_moe.make_mesh(rank=2, devices=jax.devices("cpu"))
group = jax_moe.ExpertGroup(mesh)


def exchange(x, s, ids):
    plan = jax_moe.plan(ids, group=group, num_experts=4, implementation="cpu")
    return jax_moe.combine(*jax_moe.dispatch(x, s, plan), plan)


ids = jnp.array([[0, 3], [2, -1], [1, 1], [3, 2]])
x, s = jnp.arange(32.0).reshape(4, 8), jnp.arange(8.0).reshape(4, 2)
spec = P(("node", "rank"))
y, back = jax.jit(jax.shard_map(exchange, mesh=mesh, in_specs=spec, out_specs=spec))(x, s, ids)

rows_per_token = jnp.array([[2.0], [1.0], [2.0], [2.0]])
if not (y == x * rows_per_token).all() or not (back == jnp.where(ids < 0, 0, s)).all():
    raise SystemExit(f"wrong result of dispatch and combine:\n{y}\n{back}")
print(f"jax_moe {jax_moe.__version__} on jaxlib {jaxlib.version.__version__}: right")
