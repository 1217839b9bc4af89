"""One optimizer step, as one jitted function: schedules, loss, AdamW, routing bias."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

import jax_moe
from train.config import Config, OptimizerConfig
from train.data import Batch, Packed, token_dtype
from train.model import LanguageModel
from train.routing import forced_routing
from train.sharding import Layout


class TrainState(NamedTuple):
    """Everything that a step changes.

    Attributes:
      params: float32, by path in the model.
      biases: float32, by path: the routing biases.
      optimizer: AdamW's means and counts.
      step: steps done.
    """

    params: dict[str, Array]
    biases: dict[str, Array]
    optimizer: Any
    step: Int[Array, ""]


def schedule(config: OptimizerConfig) -> optax.Schedule:
    """Returns step -> learning rate: constant, a cosine over the last steps, times a warm-up."""
    decay_steps = config.decay_steps or config.total_steps
    cosine = optax.cosine_decay_schedule(
        config.peak_rate, decay_steps, alpha=config.final_rate / config.peak_rate
    )
    begin = config.total_steps - decay_steps

    def rate(step):
        decayed = cosine(jnp.maximum(step - begin, 0) if begin else step)
        # (step + 1): the first step moves too.
        return decayed * jnp.minimum(1.0, (step + 1) / max(1, config.warmup_steps))

    return rate


def bias_schedule(config: OptimizerConfig) -> Callable[[Int[Array, ""]], Array]:
    """Returns step -> how far the routing biases move: constant, and zero in the last steps."""
    end = config.total_steps - config.bias_frozen_steps
    return lambda step: jnp.where(step < end, jnp.float32(config.bias_step), jnp.float32(0))


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Makes clipped AdamW; its weight decay takes in every parameter."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            schedule(config),
            b1=config.b1,
            b2=config.b2,
            eps=config.eps,
            weight_decay=config.weight_decay,
        ),
    )


def cross_entropy(logits: Float[Array, "batch length vocab"], targets: Int[Array, "batch length"]):
    """Returns -log p(target), float32 [batch, length]."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets)


class Trainer:
    """The jitted functions of one run: `initialise`, `step` and `evaluate`.

    Args:
      config: the run.
      group: the expert-parallel group; its mesh is the run's mesh.
    """

    def __init__(self, config: Config, group: jax_moe.ExpertGroup):
        self.config, self.group = config, group
        self.layout = Layout(group.mesh, config.mesh.shard_dense)
        self.optimizer = make_optimizer(config.optimizer)
        model = nnx.eval_shape(self._make_model)
        self._graph, *self._templates = nnx.split(model, nnx.Param, ...)
        specs = self.layout.specs(self._templates[0])
        self.abstract_state = place(jax.eval_shape(self._make_state), specs, group.mesh)
        self.num_params = sum(leaf.size for leaf in self.abstract_state.params.values())
        self.shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state)
        self.batch_sharding = NamedSharding(group.mesh, PartitionSpec(group.mesh.axis_names))
        whole = NamedSharding(group.mesh, PartitionSpec())
        self.initialise = jax.jit(self._make_state, out_shardings=self.shardings)
        self.step = jax.jit(self._step, donate_argnums=0, out_shardings=(self.shardings, whole))
        self.evaluate = jax.jit(self._evaluate, out_shardings=(whole, whole))

    @property
    def tokens_per_rank(self) -> int:
        """Tokens that an MoE layer gets at once from each rank."""
        data, group = self.config.data, self.group
        ranks = group.mesh.size * group.virtual_ranks * self.config.micro_batches
        return -(-data.batch * data.sequence // ranks)

    @property
    def abstract_batch(self) -> Batch:
        """Shapes, types and shardings of one step's batch."""
        data = self.config.data
        shape, dtype = (data.batch, data.sequence + 1), token_dtype(self.config.model.vocab_size)
        tokens = jax.ShapeDtypeStruct(shape, dtype, sharding=self.batch_sharding)
        segments = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self.batch_sharding)
        return Packed(tokens, segments) if data.documents else tokens

    def lower_step(self, *platforms: str) -> jax.stages.Lowered:
        """Lowers `step` for the run's batch, and for the platforms where any are named.

        Raises:
          ValueError: the batch does not divide into the devices.
        """
        batch, parts = self.config.data.batch, self.config.micro_batches
        if batch % (self.group.mesh.size * parts):
            raise ValueError(
                f"data.batch={batch} is not a multiple of {self.group.mesh.size} devices x "
                f"micro_batches={parts}: every device takes as many sequences at a time."
            )
        traced = self.step.trace(self.abstract_state, self.abstract_batch)
        return traced.lower(lowering_platforms=platforms or None)

    def compile_step(self, options: dict[str, Any] | None = None) -> Any:
        """Compiles `step` for the run's batch, with XLA's `options`; nothing runs."""
        return self.lower_step().compile(compiler_options=options)

    def _make_model(self) -> LanguageModel:
        config = self.config
        return LanguageModel(
            config.model,
            self.group,
            config.implementation,
            attention=config.attention,
            gather=self.layout.gather,
            force=forced_routing(config),
            seed=config.seed,
        )

    def _make_state(self) -> TrainState:
        params, biases = self._arrays(self._make_model())
        return TrainState(params, biases, self.optimizer.init(params), jnp.int32(0))

    def _arrays(self, model: LanguageModel) -> tuple[dict[str, Array], dict[str, Array]]:
        _, params, biases = nnx.split(model, nnx.Param, ...)
        return to_arrays(params), to_arrays(biases)

    def model(self, params: dict[str, Array], biases: dict[str, Array]) -> LanguageModel:
        """Returns the model that has these arrays."""
        params_template, biases_template = self._templates
        states = to_state(params, params_template), to_state(biases, biases_template)
        return nnx.merge(self._graph, *states)

    def _loss(self, params, biases, batch: Batch, total):
        """Returns a micro-batch's share of the step's loss, with its parts (loss, stats)."""
        losses, real, stats = token_losses(self.model(params, biases), batch)
        parts = self.config.micro_batches
        loss = losses.mean() / parts if real is None else jnp.vdot(losses, real) / total
        objective = loss
        if self.config.optimizer.aux_loss_weight and stats is not None:
            weight = self.config.optimizer.aux_loss_weight / parts
            objective = objective + weight * stats.aux_loss.sum()
        return objective, (loss, stats)

    def _gradients(self, state: TrainState, batch: Batch):
        """Returns (gradients, (loss, stats)) of the batch, one micro-batch after the other."""
        gradient = jax.grad(self._loss, has_aux=True)
        total = None
        if isinstance(batch, Packed):
            total = jnp.maximum(real_predictions(batch.segments).sum(), 1)
        if self.config.micro_batches == 1:
            return gradient(state.params, state.biases, batch, total)

        def add(sums, part):
            grads, (loss, stats) = gradient(state.params, state.biases, part, total)
            return jax.tree.map(jnp.add, sums, (grads, loss)), stats

        zeros = jax.tree.map(jnp.zeros_like, state.params), jnp.float32(0)
        (grads, loss), stats = jax.lax.scan(add, zeros, self._micro_batches(batch))
        return grads, (loss, None if stats is None else add_up(stats))

    def _micro_batches(self, batch: Batch) -> Batch:
        """Cuts a batch into [micro-batches, ...] in such a way that no sequence moves."""
        parts, axes = self.config.micro_batches, self.group.mesh.axis_names
        sharding = NamedSharding(self.group.mesh, PartitionSpec(None, axes))

        def cut(array):
            strided = array.reshape(-1, parts, array.shape[-1]).swapaxes(0, 1)
            return jax.lax.with_sharding_constraint(strided, sharding)

        return jax.tree.map(cut, batch)

    def _step(self, state: TrainState, batch: Batch):
        grads, (loss, stats) = self._gradients(state, batch)
        with jax.numpy_dtype_promotion("standard"):  # optax mixes counts and rates
            updates, optimizer = self.optimizer.update(grads, state.optimizer, state.params)
            learning_rate = schedule(self.config.optimizer)(state.step)
        params: Any = optax.apply_updates(state.params, updates)
        grad_norm = jnp.sqrt(sum(jnp.vdot(grad, grad) for grad in grads.values()))
        finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        metrics = {
            "loss": loss,
            "grad_norm": grad_norm,
            "learning_rate": learning_rate,
            "finite": finite,
        }
        biases = state.biases
        if stats is not None:
            model = self.model(params, biases)
            step_size = bias_schedule(self.config.optimizer)(state.step)
            model.update_biases(stats.counts, step_size)
            _, biases = self._arrays(model)
            metrics |= {"moe": stats, "bias": model.routing_biases(), "bias_step": step_size}
        # A step that went wrong changes nothing but its number.
        new, old = (params, biases, optimizer), (state.params, state.biases, state.optimizer)
        new = jax.tree.map(lambda new, old: jnp.where(finite, new, old), new, old)
        return TrainState(*new, step=state.step + 1), metrics

    def _evaluate(self, state: TrainState, batch: Batch, weights):
        """Returns -log p and number of the predictions, summed with each window's weight."""
        losses, real, _ = token_losses(self.model(state.params, state.biases), batch)
        real = jnp.ones_like(losses) if real is None else real
        return jnp.vdot((losses * real).sum(axis=1), weights), jnp.vdot(real.sum(axis=1), weights)


def token_losses(model: LanguageModel, batch: Batch):
    """Returns (-log p float32 [batch, length], which count or None for all, the layers' stats)."""
    tokens, segments = batch if isinstance(batch, Packed) else (batch, None)
    tokens = tokens.astype(jnp.int32)
    if segments is None:
        logits, stats = model(tokens[:, :-1])
        return cross_entropy(logits, tokens[:, 1:]), None, stats
    logits, stats = model(tokens[:, :-1], segments[:, :-1])
    return cross_entropy(logits, tokens[:, 1:]), real_predictions(segments), stats


def real_predictions(segments: Int[Array, "batch window"]) -> Float[Array, "batch length"]:
    """Returns 1 where the next token is of the same document, else 0."""
    same = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    return same.astype(jnp.float32)


def add_up(stats: jax_moe.MoEStats) -> jax_moe.MoEStats:
    """Returns the statistics [layers, ...] of a step from its micro-batches' [parts, layers, ...].

    Tokens and rows are added up, the loads' ratios are those of the sums, and the rest are means.
    """
    counts = stats.counts.sum(axis=0, dtype=jnp.int32)
    loads = counts.astype(jnp.float32)
    loads = loads / jnp.maximum(loads.mean(axis=-1, keepdims=True), 1e-9)
    return dataclasses.replace(
        jax.tree.map(lambda leaf: leaf.astype(jnp.float32).mean(axis=0), stats),
        counts=counts,
        dropped=stats.dropped.sum(axis=0, dtype=jnp.int32),
        invalid=stats.invalid.sum(axis=0, dtype=jnp.int32),
        max_vio=loads.max(axis=-1) - 1,
        min_load=loads.min(axis=-1),
    )


def to_arrays(state: nnx.State) -> dict[str, Any]:
    """Returns a state's arrays by path, as "moe_blocks/0/mlp/down"."""
    return {"/".join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(state)}


def to_state(arrays: Mapping[str, Any], template: nnx.State) -> nnx.State:
    """Puts arrays by path into the variables of `template`."""
    flat = nnx.to_flat_state(template)
    return nnx.from_flat_state(
        [(path, leaf.replace(arrays["/".join(map(str, path))])) for path, leaf in flat]
    )


def place(
    state: TrainState, specs: Mapping[str, PartitionSpec], mesh: Mesh | AbstractMesh
) -> TrainState:
    """Gives every array of an abstract state its sharding; the optimizer's means have `specs`."""

    def with_sharding(path, leaf):
        spec = specs.get(getattr(path[-1], "key", ""), PartitionSpec())
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree_util.tree_map_with_path(with_sharding, state)
