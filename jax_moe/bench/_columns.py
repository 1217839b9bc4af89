"""The columns of the table: our implementations by name, and the plain-JAX ways."""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

import jax_moe
from jax_moe import _implementation
from jax_moe.bench._all_gather import AllGather
from jax_moe.bench._all_to_all import AllToAll
from jax_moe.bench._plain import Sizes
from jax_moe.bench._ragged_all_to_all import RaggedAllToAll

OURS = _implementation.NAMES
PLAIN = {
    "all_gather": AllGather,
    "all_to_all": AllToAll,
    "ragged_all_to_all": RaggedAllToAll,
}
NAMES = (*OURS, *PLAIN)

TITLES = {
    "all_gather": "all_gather + sort + gather, scatter-add + psum_scatter",
    "all_to_all": "sort + capacity all_to_all, and back",
    "ragged_all_to_all": "sort + ragged_all_to_all (128 updates a peer), and back",
}


@dataclasses.dataclass(frozen=True)
class OurWay:
    """One of our implementations, with the methods of a plain way."""

    group: jax_moe.ExpertGroup
    sizes: Sizes
    implementation: Any
    tail: Any = None

    def prepare(self, ids):
        """The plan."""
        return jax_moe.plan(
            ids,
            group=self.group,
            num_experts=self.sizes.num_experts,
            capacity=self.sizes.capacity,
            tail=self.tail,
            implementation=self.implementation,
        )

    def dispatch(self, x, s, plan):
        """See `jax_moe.dispatch`."""
        return jax_moe.dispatch(x, s, plan)

    def combine(self, rows, row_s, plan):
        """See `jax_moe.combine`."""
        return jax_moe.combine(rows, row_s, plan)


@dataclasses.dataclass(frozen=True)
class Column:
    """One way to exchange tokens, as a column of the table."""

    name: str
    way: Any

    @property
    def ours(self) -> bool:
        """Whether it is an implementation of this package."""
        return self.name in OURS

    @property
    def exact(self) -> bool:
        """Whether its sums must equal the reference's bit for bit."""
        return self.ours

    @property
    def title(self) -> str:
        """What the column is, in words."""
        return TITLES.get(self.name, f'jax_moe, implementation="{self.name}"')


def make(name: str, group: jax_moe.ExpertGroup, sizes: Sizes, tail: str | None) -> Column:
    """The column of that name.

    Raises:
      ValueError: unknown name.
      NotImplementedError: it cannot run here; the message says why.
    """
    if name in PLAIN:
        obstacle = _plain_obstacle(name, group)
        if obstacle:
            raise NotImplementedError(obstacle)
        return Column(name, PLAIN[name](sizes))
    if name not in OURS:
        raise ValueError(f"column {name!r}: must be one of {', '.join(NAMES)}.")
    _implementation.resolve(name, group)
    if importlib.util.find_spec(f"jax_moe._{name}") is None and name != "reference":
        raise NotImplementedError(f'implementation="{name}" is not in this build')
    return Column(name, OurWay(group, sizes, name, tail))


def _plain_obstacle(name: str, group: jax_moe.ExpertGroup) -> str | None:
    if group.virtual_ranks > 1:
        return "a plain-JAX way has one rank per device, not several virtual ones"
    if name == "ragged_all_to_all" and group.devices[0].platform == "cpu":
        return "XLA has no ragged_all_to_all on CPU devices"
    return None
