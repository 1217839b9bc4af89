"""One optimizer step, as one jitted function: schedule, loss, AdamW, routing bias."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, UInt8

import jax_moe
from train.config import Config, OptimizerConfig
from train.model import LanguageModel
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
        self.evaluate = jax.jit(self._evaluate, out_shardings=whole)

    @property
    def tokens_per_rank(self) -> int:
        """Tokens that an MoE layer gets at once from each rank."""
        data, group = self.config.data, self.group
        ranks = group.mesh.size * group.virtual_ranks
        return -(-data.batch * data.sequence // ranks)

    def lower_step(self, *platforms: str) -> jax.stages.Lowered:
        """Lowers `step` for the run's batch, and for the platforms where any are named."""
        shape = (self.config.data.batch, self.config.data.sequence + 1)
        windows = jax.ShapeDtypeStruct(shape, jnp.uint8, sharding=self.batch_sharding)
        traced = self.step.trace(self.abstract_state, windows)
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
            gather=self.layout.gather,
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

    def _loss(self, params, biases, windows):
        model = self.model(params, biases)
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
        with jax.numpy_dtype_promotion("standard"):  # optax mixes counts and rates
            updates, optimizer = self.optimizer.update(grads, state.optimizer, state.params)
            learning_rate = schedule(self.config.optimizer)(state.step)
        params: Any = optax.apply_updates(state.params, updates)
        metrics = {
            "loss": loss,
            "grad_norm": jnp.sqrt(sum(jnp.vdot(grad, grad) for grad in grads.values())),
            "learning_rate": learning_rate,
        }
        biases = state.biases
        if stats is not None:
            model = self.model(params, biases)
            model.update_biases(stats.counts, self.config.optimizer.bias_step)
            _, biases = self._arrays(model)
            metrics["moe"] = stats
        return TrainState(params, biases, optimizer, state.step + 1), metrics

    def _evaluate(self, state: TrainState, windows: UInt8[Array, "batch window"], weights):
        """Returns the summed -log p of the windows' predictions, each window times its weight."""
        tokens = windows.astype(jnp.int32)
        logits, _ = self.model(state.params, state.biases)(tokens[:, :-1])
        return jnp.vdot(cross_entropy(logits, tokens[:, 1:]).sum(axis=1), weights)


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
