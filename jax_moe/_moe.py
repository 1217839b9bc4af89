"""The Flax nnx MoE layer: router, plan, dispatch, experts, combine, shared experts."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from jax_moe import _balance, _implementation
from jax_moe._arguments import array, float_dtype, instance, integer, integers, payload_dtype
from jax_moe._balance import MoEStats, RouterBias
from jax_moe._exchange import combine, dispatch
from jax_moe._group import ExpertGroup, check_group
from jax_moe._grouped_matmul import ROW_ALIGNMENT, Engine, choose_engine
from jax_moe._grouped_swiglu import grouped_swiglu
from jax_moe._implementation import vary_alike
from jax_moe._plan import Plan, check_capacity, check_experts, plan, with_padding
from jax_moe._rounding import sum_dtype
from jax_moe._router import RouterConfig, check_config, route


class MoE(nnx.Module):
    """A Mixture-of-Experts layer with SwiGLU experts, expert-parallel over a group of devices.

    Tokens are spread over every axis of the group's mesh, experts over the group's axes in the
    order of the group's ranks. A call is one `jax.shard_map`, to be used inside a `jax.jit`, under
    `nnx.scan` or `jax.lax.scan` over stacked layers and under `nnx.remat` or `jax.checkpoint`. It
    writes nothing: the routing bias moves when `update_bias` is called.

    Create the layer under `jax.jit` (or `nnx.jit`), so that no device ever holds all experts; the
    weights carry their sharding as metadata.

    Args:
      hidden: H, width of a token.
      width: W, inner width of one expert.
      config: the routing. Left without groups it is settled here, once, by the group's number of
        nodes; `layer.config` is the result and belongs into the model's checkpoint.
      group: the expert-parallel group; E must be a multiple of its ranks.
      num_shared: shared experts, through which every token goes; 0 for none.
      shared_width: inner width of all shared experts together; num_shared * width by default.
      capacity: rows of capacity of one rank; the worst case by default. See `jax_moe.plan`. Where
        the experts' engine wants padded groups, room for the padding comes on top.
      capacity_factor: the same as a multiple of the balanced load.
      dtype: of the computation and of the rows that travel; by default what x and the parameters
        promote to. The router computes in float32.
      param_dtype: of the experts' weights; the router's kernel and bias are float32.
      kernel_init: initializer of one matrix; each expert's is drawn by itself.
      implementation: of plan, dispatch and combine; None chooses by the devices.
      rngs: the stream `params` is used.

    Raises:
      ValueError: the numbers contradict each other, a routing group would straddle two nodes, or
        the implementation does not carry the dtype.
      TypeError: an argument is of the wrong type.
      NotImplementedError: the named implementation cannot serve the group.

    Source: DeepSeek-V3 technical report, section 2.1.2.
    """

    def __init__(
        self,
        hidden: int,
        width: int,
        config: RouterConfig,
        group: ExpertGroup,
        *,
        num_shared: int = 1,
        shared_width: int | None = None,
        capacity: int | None = None,
        capacity_factor: float | None = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Callable[..., Array] = nnx.initializers.normal(0.02),
        implementation: _implementation.Name | None = None,
        rngs: nnx.Rngs,
    ):
        _check_place(config, group)
        hidden, width = integers(hidden=hidden, width=width)
        num_shared, shared_width = _check_shared(num_shared, shared_width)
        capacity, capacity_factor = check_capacity(capacity, capacity_factor)
        name = _implementation.resolve(implementation, group)
        dtype = None if dtype is None else payload_dtype("dtype", dtype, name)
        param_dtype = float_dtype("param_dtype", param_dtype)
        instance("rngs", rngs, nnx.Rngs, "a flax.nnx.Rngs, such as nnx.Rngs(0)")
        self.hidden, self.width, self.dtype = hidden, width, dtype
        self.config = config.resolve(group.nodes)
        self.settings = _Settings(self.config, group, capacity, capacity_factor, implementation)

        num_experts = config.num_experts
        experts = functools.partial(_make_experts, rngs, kernel_init, param_dtype, group)
        self.router = nnx.Param(kernel_init(rngs.params(), (hidden, num_experts), jnp.float32))
        self.bias = RouterBias(jnp.zeros(num_experts, jnp.float32))
        # Gate and up are one matrix, gate first: the rows are then read once for both.
        self.gate_up = experts((num_experts, hidden, 2 * width))
        self.down = experts((num_experts, width, hidden))

        shared = shared_width if shared_width is not None else num_shared * width
        self.shared_gate_up = self.shared_down = nnx.data(None)
        if num_shared:
            make = functools.partial(kernel_init, dtype=param_dtype)
            self.shared_gate_up = nnx.Param(make(rngs.params(), (hidden, 2 * shared)))
            self.shared_down = nnx.Param(make(rngs.params(), (shared, hidden)))

    def __call__(
        self,
        x: Float[Array, "*batch hidden"],
        mask: Bool[Array, "*batch"] | None = None,
        *,
        expert_ids: Int[Array, "*batch topk"] | None = None,
    ) -> tuple[Float[Array, "*batch hidden"], MoEStats]:
        """Applies the layer.

        Args:
          x: floating point [..., S, H]; the next-to-last axis is a sequence for the auxiliary
            loss, and any number of tokens is fine. Sharded over all mesh axes in row-major order
            nothing has to move before the dispatch.
          mask: bool [..., S], True for real tokens. Padding tokens use no routed expert, give
            zero, count in no statistic, and may hold anything.
          expert_ids: int32 [..., S, K], the experts where they are not to be the router's choice
            (balanced, or replayed from another run); it weighs them all the same.

        Returns:
          (y of x's shape, of the layer's dtype, `MoEStats`).
        """
        x = array("x", x)
        self._check_tokens(x)
        mask = _balance.check_mask(mask, x.shape[:-1])
        if mask is not None:  # selected, not multiplied: padding may hold NaN
            x = jnp.where(mask[..., None], x, 0)
        dtype = self.dtype or np.promote_types(x.dtype, self.gate_up.dtype)
        weights = self.router[...], self.bias[...], self.gate_up[...], self.down[...]
        forced = None if expert_ids is None else self._check_ids(expert_ids, x.shape[:-1])
        y, logits, chosen, totals = _routed_experts(self.settings, dtype, x, mask, forced, *weights)
        if self.shared_gate_up is not None and self.shared_down is not None:
            y = y + _dense_swiglu(x, self.shared_gate_up[...], self.shared_down[...], dtype)
        aux_loss = _balance.sequence_balance_loss(logits, mask, self.config, chosen=chosen)
        return y, _make_stats(totals, aux_loss)

    def _check_ids(self, expert_ids: Array, batch: tuple[int, ...]) -> Array:
        """The given ids as [tokens, K]."""
        ids, wanted = array("expert_ids", expert_ids), (*batch, self.config.top_k)
        if ids.shape != wanted or ids.dtype != jnp.int32:
            raise ValueError(
                f"expert_ids is {ids.dtype}{list(ids.shape)}: must be int32{list(wanted)}, top_k "
                "ids for each token."
            )
        return ids.reshape(-1, self.config.top_k)

    def _check_tokens(self, x: Array) -> None:
        if jax.sharding.get_abstract_mesh().manual_axes:
            raise ValueError(
                "MoE was called inside a jax.shard_map, and is one itself: call it outside, with "
                "the tokens of all devices, or build on plan, dispatch and combine inside."
            )
        if x.ndim < 2 or x.shape[-1] != self.hidden or not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(
                f"x is {x.dtype}{list(x.shape)}: it must be floating point [..., length, "
                f"{self.hidden}], with this layer's hidden={self.hidden} last."
            )

    def update_bias(self, counts: Int[Array, "*layers experts"], step_size: float) -> None:
        """Moves the routing bias by one step; once per optimizer step, outside any remat.

        Args:
          counts: `MoEStats.counts`, added up over the micro-batches of the step.
          step_size: as in `jax_moe.update_bias`.
        """
        self.bias[...] = _balance.update_bias(self.bias[...], counts, step_size)


@dataclasses.dataclass(frozen=True)
class _Settings:
    """What a compiled call depends on beside shapes and dtypes."""

    config: RouterConfig
    group: ExpertGroup
    capacity: int | None
    capacity_factor: float | None
    implementation: _implementation.Name | None

    def engine(self, gate_up: Array, down: Array) -> tuple[Engine, dict[str, Any]]:
        """What multiplies on the group's devices, and the plan's settings that suit it."""
        device = next(iter(self.group.devices), None)
        # An abstract mesh counts as CPU devices, or as what "ptx" needs.
        on_cpu = device is None and self.implementation != "ptx"
        num_rows = ROW_ALIGNMENT["pallas"]  # of which `plan` makes a multiple, and so does this
        rows = jax.ShapeDtypeStruct((num_rows, gate_up.shape[1]), gate_up.dtype)
        engine = "blocks" if on_cpu else choose_engine(device, rows, gate_up, down)
        alignment, capacity = ROW_ALIGNMENT.get(engine, 1), self.capacity
        if capacity is not None and alignment > 1:
            capacity = with_padding(capacity, len(gate_up) // self.group.virtual_ranks, alignment)
        return engine, {"alignment": alignment, "capacity": capacity}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Totals:
    """Sums over the whole mesh; int32 but for the entropy. A visit is a token at a node."""

    counts: Array
    dropped: Array
    invalid: Array
    visits: Array
    tokens: Array
    entropy: Array


def _check_place(config: RouterConfig, group: ExpertGroup) -> None:
    check_config(config)
    check_group(group)
    check_experts(config.num_experts, group.num_ranks)
    if not group.mesh.are_all_axes_auto:
        raise ValueError(
            f"MoE reshapes and spreads tokens whatever their sharding, but the axes of its mesh "
            f"are {group.mesh.axis_types}: make them Auto, as jax_moe.make_mesh does."
        )


def _check_shared(num_shared: int, shared_width: int | None) -> tuple[int, int | None]:
    num_shared = integer("num_shared", num_shared, 0)
    if shared_width is None:
        return num_shared, None
    if not num_shared:
        raise ValueError(
            f"shared_width={shared_width} with num_shared=0: it is the width of the shared experts "
            "together; leave it None without any."
        )
    return num_shared, integer("shared_width", shared_width, 1)


def _make_experts(rngs, kernel_init, dtype, group: ExpertGroup, shape) -> nnx.Param:
    """Expert weights [E, ...], each expert's matrix drawn by itself, sharded over the group."""
    keys = jax.random.split(rngs.params(), shape[0])
    values = jax.vmap(lambda key: kernel_init(key, shape[1:], dtype))(keys)
    spec = (group.axes, None, None)
    is_real = isinstance(group.mesh, Mesh)
    return nnx.Param(values, out_sharding=spec, mesh=group.mesh, eager_sharding=is_real)


def _dense_swiglu(x: Array, gate_up: Array, down: Array, dtype: Any) -> Array:
    """The shared experts: one SwiGLU over all tokens."""
    gate, up = jnp.split(x.astype(dtype) @ gate_up.astype(dtype), 2, axis=-1)
    return (jax.nn.silu(gate) * up) @ down.astype(dtype)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _routed_experts(
    settings: _Settings, dtype: Any, x: Array, mask: Array | None, forced: Array | None, *weights
) -> tuple[Array, Array, Array, _Totals]:
    """Spreads the tokens over the mesh and takes them through router and experts."""
    group, batch = settings.group, x.shape[:-1]
    flat = x.reshape(-1, x.shape[-1])
    real = jnp.ones(len(flat), jnp.bool_) if mask is None else mask.reshape(-1)
    # Every virtual rank gets the same number of tokens, at least one; the last may be padding.
    ranks = group.mesh.size * group.virtual_ranks
    missing = -len(flat) % ranks if len(flat) else ranks
    if missing:
        rows = ((0, missing), (0, 0))
        flat, real = jnp.pad(flat, rows), jnp.pad(real, (0, missing))
        forced = None if forced is None else jnp.pad(forced, rows)
    tokens, experts = P(group.mesh.axis_names), P(group.axes)
    local = jax.shard_map(
        functools.partial(_local_experts, settings, dtype),
        mesh=group.mesh,
        in_specs=(tokens, tokens, tokens, P(), P(), experts, experts),
        out_specs=((tokens, tokens, tokens), P()),
    )
    by_token, totals = local(flat, real, forced, *weights)
    if missing:
        by_token = tuple(array[:-missing] for array in by_token)
    y, logits, chosen = (array.reshape(*batch, array.shape[-1]) for array in by_token)
    return y, logits, chosen, totals


def _local_experts(
    settings: _Settings, dtype: Any, x, real, forced, router, bias, gate_up, down
) -> tuple[tuple[Array, Array, Array], _Totals]:
    """The routed experts on one device, its tokens and its experts: (y, logits, top experts)."""
    config, group = settings.config, settings.group
    wide = sum_dtype(x.dtype)
    logits = jnp.matmul(x.astype(wide), router.astype(wide), precision=jax.lax.Precision.HIGHEST)
    routing = route(logits, bias, config, expert_ids=forced)
    expert_ids = jnp.where(real[:, None], routing.expert_ids, -1)
    # Before they are rounded: the replicas' gradients are added up in the weights' own type.
    _, gate_up, down = vary_alike(x, gate_up, down)
    weights = gate_up.astype(dtype), down.astype(dtype)
    engine, layout = settings.engine(*weights)
    exchange = plan(
        expert_ids,
        group=group,
        num_experts=config.num_experts,
        capacity_factor=settings.capacity_factor,
        **layout,
        tail="undefined",  # nothing below reads it
        implementation=settings.implementation,
    )
    scalars = routing.weights.astype(sum_dtype(dtype))
    rows, row_s = dispatch(x.astype(dtype), scalars, exchange)
    rows = grouped_swiglu(
        rows,
        row_s,
        *weights,
        exchange.padded_group_sizes,  # padding is zero
        virtual_ranks=group.virtual_ranks,
        tail="undefined",
        engine=engine,
    )
    y, _ = combine(rows, row_s, exchange)
    # For the auxiliary loss: out there, the partitioner would gather all scores for a top-k.
    chosen = _balance.top_experts(logits, config)
    totals = _sum_totals(settings, expert_ids, logits, real, exchange)
    return (y, logits, chosen), totals


def _sum_totals(settings: _Settings, expert_ids, logits, real, exchange: Plan) -> _Totals:
    """Adds up over the mesh what the statistics need: one sum of integers, one of floats."""
    num_experts, nodes = settings.config.num_experts, settings.group.nodes
    one_hot = expert_ids[..., None] == jnp.arange(num_experts, dtype=jnp.int32)
    chosen = one_hot.any(axis=1)
    visited = chosen.reshape(-1, nodes, num_experts // nodes).any(axis=-1)
    arrays = exchange.dropped, exchange.invalid, visited, real
    numbers = [jnp.sum(array, dtype=jnp.int32) for array in arrays]
    integers = jnp.concatenate([jnp.sum(chosen, axis=0, dtype=jnp.int32), jnp.stack(numbers)])
    scores = _balance.normalized_scores(jax.lax.stop_gradient(logits), settings.config)
    entropy = -jnp.sum(jax.scipy.special.xlogy(scores, scores), axis=-1)
    entropy = jnp.sum(jnp.where(real, entropy, 0))
    axes = settings.group.mesh.axis_names
    integers, entropy = jax.lax.psum(integers, axes), jax.lax.psum(entropy, axes)
    dropped, invalid, visits, tokens = integers[num_experts:]
    return _Totals(integers[:num_experts], dropped, invalid, visits, tokens, entropy)


def _make_stats(totals: _Totals, aux_loss: Array) -> MoEStats:
    max_vio, min_load = _balance.load_ratios(totals.counts)
    tokens = jnp.maximum(totals.tokens, 1).astype(jnp.float32)
    return MoEStats(
        counts=totals.counts,
        dropped=totals.dropped,
        invalid=totals.invalid,
        aux_loss=aux_loss,
        max_vio=max_vio,
        min_load=min_load,
        router_entropy=totals.entropy / tokens,
        nodes_per_token=totals.visits.astype(jnp.float32) / tokens,
    )
