"""The columns of the table: our implementations by name, and the plain-JAX ways."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax_moe
from jax_moe import _implementation
from jax_moe.bench import _deepep
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
NAMES = (*OURS, *PLAIN, _deepep.KIND)

_TITLES = {
    "all_gather": "all_gather + sort + gather; scatter-add (in the payload's type) + psum_scatter",
    "all_to_all": "sort + all_to_all of a buffer of C/R rows a destination + sort; and back",
    "ragged_all_to_all": "sort + ragged_all_to_all (128 updates a peer) + sort; and back",
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

    def group_sizes(self, ids, plan):
        """Rows of each of the device's experts, int32 [V*E/R]."""
        del ids
        return plan.group_sizes

    def dispatch(self, x, s, plan):
        """See `jax_moe.dispatch`."""
        return jax_moe.dispatch(x, s, plan)

    def combine(self, rows, row_s, plan):
        """See `jax_moe.combine`."""
        return jax_moe.combine(rows, row_s, plan)


@dataclasses.dataclass(frozen=True)
class Column:
    """One way to exchange tokens, as a column of the table.

    Args:
      name: what `NAMES` has, or "ptx:N" for N SMs that send to other GPUs.
      way: has `prepare`, `dispatch` and `combine`.
    """

    name: str
    way: Any

    @property
    def kind(self) -> str:
        """The name in `NAMES`."""
        return self.name.partition(":")[0]

    @property
    def ours(self) -> bool:
        """Whether it is an implementation of this package, whose sums must be exact."""
        return self.kind in OURS


def title(name: str) -> str:
    """What a column is, in words."""
    kind, _, link_sms = name.partition(":")
    if kind == _deepep.KIND:
        return _deepep.title(name)
    ours = f'jax_moe, implementation="{kind}"' + f", {link_sms} link SMs" * bool(link_sms)
    return _TITLES.get(kind, ours)


def check_name(name: str) -> str:
    """The name itself.

    Raises:
      ValueError: no column is called so.
    """
    kind, colon, sms = name.partition(":")
    if kind not in NAMES or (colon and not (kind in ("ptx", _deepep.KIND) and sms.isdecimal())):
        raise ValueError(
            f'column {name!r}: must be one of {", ".join(NAMES)}, "ptx:N" or "deepep:N".'
        )
    if kind == _deepep.KIND and _deepep.sms(name) % 2:
        raise ValueError(f"column {name!r}: DeepEP takes an even number of SMs.")
    return name


def make(name: str, group: jax_moe.ExpertGroup, sizes: Sizes, tail: str | None) -> Column:
    """The column of that name.

    Raises:
      ValueError: unknown name.
      NotImplementedError: it cannot run here; the message says why.
    """
    kind, _, link_sms = check_name(name).partition(":")
    if kind in PLAIN:
        obstacle = _plain_obstacle(kind, group)
        if obstacle:
            raise NotImplementedError(obstacle)
        return Column(name, PLAIN[kind](sizes))
    _implementation.resolve(kind, group)
    if link_sms:  # a group of the same key: it shares the pool
        group = dataclasses.replace(group, link_sms=int(link_sms))
    return Column(name, OurWay(group, sizes, kind, tail))


def _plain_obstacle(kind: str, group: jax_moe.ExpertGroup) -> str | None:
    if group.virtual_ranks > 1:
        return "a plain-JAX way has one rank per device, not several virtual ones"
    if kind == "ragged_all_to_all" and group.devices[0].platform == "cpu":
        return "XLA has no ragged_all_to_all on CPU devices"
    return None
