"""One optimizer step, as one jitted function: schedule, loss, AdamW, routing bias."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, UInt8

import jax_moe
from train.config import Config, OptimizerConfig
from train.model import LanguageModel


class TrainState(NamedTuple):
    """Everything that a step changes."""

    params: nnx.State
    biases: nnx.State
    optimizer: Any
    step: Int[Array, ""]


def schedule(config: OptimizerConfig) -> optax.Schedule:
    """Returns step -> learning rate: a cosine over total_steps, times a linear warm-up."""
    cosine = optax.cosine_decay_schedule(
        config.peak_rate, config.total_steps, alpha=config.final_rate / config.peak_rate
    )
    # (step + 1): the first step moves too.
    return lambda step: cosine(step) * jnp.minimum(1.0, (step + 1) / max(1, config.warmup_steps))


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
        self.optimizer = make_optimizer(config.optimizer)
        abstract_model = nnx.eval_shape(self._make_model)
        self.graph, params, _ = nnx.split(abstract_model, nnx.Param, ...)
        self.num_params = sum(leaf.size for leaf in jax.tree.leaves(params))
        self.abstract_state = place(jax.eval_shape(self._make_state), group.mesh)
        self.shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state)
        self.batch_sharding = NamedSharding(group.mesh, PartitionSpec(group.mesh.axis_names))
        whole = NamedSharding(group.mesh, PartitionSpec())
        self.initialise = jax.jit(self._make_state, out_shardings=self.shardings)
        self.step = jax.jit(self._step, donate_argnums=0, out_shardings=(self.shardings, whole))
        self.evaluate = jax.jit(self._evaluate, out_shardings=whole)

    def _make_model(self) -> LanguageModel:
        config = self.config
        return LanguageModel(config.model, self.group, config.implementation, seed=config.seed)

    def _make_state(self) -> TrainState:
        _, params, biases = nnx.split(self._make_model(), nnx.Param, ...)
        return TrainState(params, biases, self.optimizer.init(params), jnp.int32(0))

    def model(self, state: TrainState) -> LanguageModel:
        """Returns the model that `state` describes."""
        return nnx.merge(self.graph, state.params, state.biases)

    def _loss(self, params, biases, windows):
        model = nnx.merge(self.graph, params, biases)
        tokens = windows.astype(jnp.int32)
        logits, stats = model(tokens[:, :-1])
        loss = cross_entropy(logits, tokens[:, 1:]).mean()
        total = loss
        if self.config.optimizer.aux_loss_weight and stats is not None:
            total = total + self.config.optimizer.aux_loss_weight * stats.aux_loss.sum()
        return total, (loss, stats)

    def _step(self, state: TrainState, windows: UInt8[Array, "batch window"]):
        gradient = jax.grad(self._loss, has_aux=True)
        grads, (loss, stats) = gradient(state.params, state.biases, windows)
        updates, optimizer = self.optimizer.update(grads, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = {
            "loss": loss,
            "grad_norm": optax.global_norm(grads),
            "learning_rate": schedule(self.config.optimizer)(state.step),
        }
        biases = state.biases
        if stats is not None:
            model = nnx.merge(self.graph, params, biases)
            model.update_biases(stats.counts, self.config.optimizer.bias_step)
            biases = nnx.split(model, nnx.Param, ...)[2]
            metrics["moe"] = stats
        return TrainState(params, biases, optimizer, state.step + 1), metrics

    def _evaluate(self, state: TrainState, windows: UInt8[Array, "batch window"], weights):
        """Returns the summed -log p of the windows' predictions, each window times its weight."""
        tokens = windows.astype(jnp.int32)
        logits, _ = self.model(state)(tokens[:, :-1])
        return jnp.vdot(cross_entropy(logits, tokens[:, 1:]).sum(axis=1), weights)


def place(state: TrainState, mesh: Mesh) -> TrainState:
    """Gives every array of an abstract state its sharding: experts over the group, the rest whole.

    The expert layer names the axes of its weights (`out_sharding`); the optimizer's means carry the
    same names.
    """

    def of_leaf(leaf):
        if not isinstance(leaf, nnx.Variable):
            return with_axes(leaf, ())
        names = tuple(leaf.get_metadata("out_sharding", None) or ())
        # Stacked layers have a leading axis that the layer itself does not know of.
        names = (None,) * (leaf.ndim - len(names)) + names if names else ()
        return leaf.replace(with_axes(leaf.get_value(), names))

    def with_axes(array, names):
        sharding = NamedSharding(mesh, PartitionSpec(*names))
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

    return jax.tree.map(of_leaf, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
