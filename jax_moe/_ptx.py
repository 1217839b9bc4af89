"""implementation="ptx": the hand-written kernels of `ptx/` on NVIDIA GPUs, as XLA FFI custom calls.

The calls are pure and only launch. What they need beforehand, room in the group's pool above all,
is made while the program is lowered: tracing alone (`jax.eval_shape`) allocates nothing.

All calls of a group must come in one order on all ranks. They do: XLA runs the custom calls of a
program one after the other in the order of its schedule, and every device runs the same program.

`jax_moe.dispatch` comes here through `_exchange.py`. The targets' handlers are `Plan`, `Dispatch`
and `Combine` in `xla_ffi/cuda_handlers.cc`; `_ffi.py` registers them.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import Mesh

from jax_moe import _calls, _cuda, _ffi
from jax_moe._plan import Plan, PlanSpec


class Need(NamedTuple):
    """Sizes of a call that decide what must be ready for it."""

    operation: str
    tokens: int  # of one rank
    top_k: int
    payload_bytes: int  # of one token


def plan(expert_ids: jax.Array, spec: PlanSpec) -> Sequence[jax.Array]:
    """See `jax_moe.plan`; `_reference.PlanArrays` and, last, the arrivals."""
    leading, top_k = expert_ids.shape
    need = Need("plan", leading // spec.group.virtual_ranks, top_k, 0)
    expert_ids = _make_ready(expert_ids, spec, need)
    results = _calls.plan_results(expert_ids, spec)
    results.append(((spec.group.num_ranks * leading, top_k), jnp.int32))
    return _call("jax_moe_plan", results, spec, expert_ids)


def dispatch(x: jax.Array, s: jax.Array, plan: Plan) -> tuple[jax.Array, jax.Array]:
    """See `jax_moe.dispatch`."""
    arrivals = _arrivals(plan, "dispatch")
    x = _make_ready(x, plan.spec, _need("dispatch", x, plan))
    results = _calls.dispatch_results(x, s, plan)
    operands = (x, s, plan.expert_ids, plan.positions, plan.sources, arrivals)
    rows, row_s = _call("jax_moe_dispatch", results, plan.spec, *operands, plan.padded_group_sizes)
    return rows, row_s


def combine(rows: jax.Array, row_s: jax.Array, plan: Plan) -> tuple[jax.Array, jax.Array]:
    """See `jax_moe.combine`."""
    arrivals = _arrivals(plan, "combine")
    rows = _make_ready(rows, plan.spec, _need("combine", rows, plan))
    results = _calls.combine_results(rows, row_s, plan)
    operands = (rows, row_s, plan.expert_ids, plan.positions, arrivals)
    y, s = _call("jax_moe_combine", results, plan.spec, *operands)
    return y, s


def _need(operation: str, payload: jax.Array, plan: Plan) -> Need:
    num_tokens, top_k = plan.expert_ids.shape
    size = _cuda.payload_bytes(payload.shape[1], payload.dtype)
    return Need(operation, num_tokens // plan.spec.group.virtual_ranks, top_k, size)


def _arrivals(plan: Plan, operation: str) -> jax.Array:
    if plan.arrivals is None:
        raise ValueError(
            f'jax_moe.{operation} with implementation="ptx" was given a plan made with '
            f'implementation="{plan.spec.implementation}", which lacks what the kernels need: '
            'make the plan with implementation="ptx" too.'
        )
    return plan.arrivals


def _call(
    target: str, results: _calls.Results, spec: PlanSpec, *operands: jax.Array
) -> Sequence[jax.Array]:
    sms = {"num_sms": spec.group.num_sms or 0, "link_sms": spec.group.link_sms or 0}
    return _calls.call(target, results, spec, *operands, like=operands[0], **sms)


def _sizes(spec: PlanSpec, need: Need) -> tuple[int, ...]:
    return (
        _cuda.OPERATIONS.index(need.operation) + 1,
        spec.group.nodes,
        need.tokens,
        need.top_k,
        spec.num_experts,
        spec.capacity,
        spec.alignment,
        need.payload_bytes,
    )


def _make_ready(array: jax.Array, spec: PlanSpec, need: Need) -> jax.Array:
    """The array itself; refuses calls past the kernels' limits, and prepares for the rest.

    Raises:
      ValueError: past a limit.
      MemoryError: (when lowered) no room for the pool.
    """
    _ffi.cuda.check_limits(spec.group.num_ranks, *_sizes(spec, need))
    return _ready_p.bind(array, spec=spec, need=need)


def _prepare(spec: PlanSpec, need: Need, lowering: int) -> None:
    group = spec.group
    if not isinstance(group.mesh, Mesh):
        return  # Lowered for elsewhere.
    _ffi.cuda.check_call(group.key, *_sizes(spec, need), group.num_sms or 0)
    _cuda.reserve(
        group,
        need.tokens,
        need.top_k,
        spec.num_experts,
        need.payload_bytes,
        lowering=lowering,
    )


_numbers = itertools.count(1)


class _Lowerings(threading.local):
    """Numbers the programs as they are lowered, each by one thread; others may do so meanwhile."""

    def __init__(self):
        self._last, self._number = None, 0

    def number(self, ctx) -> int:
        program = ctx.module_context.channel_iterator  # one object a program
        if program is not self._last:
            self._last, self._number = program, next(_numbers)
        return self._number


_lowerings = _Lowerings()


# The identity, for what happens when it is lowered or run by itself.
_ready_p = Primitive("jax_moe_ready")
_ready_p.def_abstract_eval(lambda x, *, spec, need: x)


@_ready_p.def_impl
def _ready_now(x, *, spec, need):
    _prepare(spec, need, 0)
    return x


def _ready_lowering(ctx, x, *, spec, need):
    _prepare(spec, need, _lowerings.number(ctx))
    return [x]


mlir.register_lowering(_ready_p, _ready_lowering)
