"""Expert-parallel Mixture-of-Experts communication for JAX."""

from importlib.metadata import version as _version

from jax_moe._exchange import combine, dispatch
from jax_moe._group import ExpertGroup, make_mesh
from jax_moe._plan import Plan, plan, row_capacity
from jax_moe._router import RouterConfig, Routing, route

__all__ = [
    "ExpertGroup",
    "Plan",
    "RouterConfig",
    "Routing",
    "combine",
    "dispatch",
    "make_mesh",
    "plan",
    "route",
    "row_capacity",
]

__version__ = _version("jax_moe")
