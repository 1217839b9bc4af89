"""Expert-parallel Mixture-of-Experts communication for JAX."""

from importlib.metadata import version as _version

from jax_moe._balance import MoEStats, RouterBias, sequence_balance_loss, update_bias
from jax_moe._cuda import pool_bytes, preflight
from jax_moe._exchange import combine, dispatch
from jax_moe._group import ExpertGroup, make_mesh
from jax_moe._grouped_matmul import grouped_matmul
from jax_moe._grouped_swiglu import grouped_swiglu
from jax_moe._memory import save_plan, save_rows, saved_bytes
from jax_moe._moe import MoE
from jax_moe._plan import Plan, plan, row_capacity
from jax_moe._preflight import Link, Preflight
from jax_moe._router import RouterConfig, Routing, route

__all__ = [
    "ExpertGroup",
    "Link",
    "MoE",
    "MoEStats",
    "Plan",
    "Preflight",
    "RouterBias",
    "RouterConfig",
    "Routing",
    "combine",
    "dispatch",
    "grouped_matmul",
    "grouped_swiglu",
    "make_mesh",
    "plan",
    "pool_bytes",
    "preflight",
    "route",
    "row_capacity",
    "save_plan",
    "save_rows",
    "saved_bytes",
    "sequence_balance_loss",
    "update_bias",
]

__version__ = _version("jax_moe")
