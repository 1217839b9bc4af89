"""Node-limited top-k routing: which experts a token goes to, and with which gate weights."""

import dataclasses
import functools
import math
import operator
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jax_moe._arguments import array, instance, integer, number

_FLOAT32 = jnp.finfo(jnp.float32)
_MAX_KEPT_GROUPS = 4  # a DeepSeek-V3 token goes to at most 4 nodes


@dataclasses.dataclass(frozen=True)
class RouterConfig:
    """How the router scores and limits a token's choice of experts.

    Args:
      num_experts: E, experts in all.
      top_k: K, experts chosen per token.
      num_groups: groups of num_experts/num_groups consecutive experts; 1 is unlimited routing.
          None is "not yet resolved": `route` treats it as 1, and `resolve` settles it for a mesh.
      top_groups: groups a token may choose from; needed when num_groups is more than 1.
      group_score_top: a group's score is the sum of this many of its best biased scores.
      score: "sigmoid" (each expert by itself) or "softmax" (over all experts).
      normalize: whether the chosen experts' weights are divided by their sum.
      scale: factor on the weights.

    Raises:
      ValueError: the numbers contradict each other.
      TypeError: a count is not an integer, or the scale no number.

    Source: the gate of DeepSeek-V3 (technical report, section 2.1.2).
    """

    num_experts: int
    top_k: int
    num_groups: int | None = None
    top_groups: int | None = None
    group_score_top: int = 2
    score: Literal["sigmoid", "softmax"] = "sigmoid"
    normalize: bool = True
    scale: float = 1.0

    def __post_init__(self) -> None:
        for name in ("num_experts", "top_k", "num_groups", "top_groups", "group_score_top"):
            value = getattr(self, name)
            if value is not None or name not in ("num_groups", "top_groups"):
                object.__setattr__(self, name, integer(name, value, 1))
        object.__setattr__(self, "scale", number("scale", self.scale))
        if self.num_groups == 1 and self.top_groups is None:
            object.__setattr__(self, "top_groups", 1)
        if self.top_k > self.num_experts:
            raise ValueError(
                f"top_k={self.top_k} is more than num_experts={self.num_experts}: a token chooses "
                "each expert at most once. Lower top_k or add experts."
            )
        if self.score not in ("sigmoid", "softmax"):
            raise ValueError(f'score={self.score!r} is unknown: use "sigmoid" or "softmax".')
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise ValueError(
                f"scale={self.scale} must be finite and positive: 1.0 leaves the weights alone."
            )
        self._check_groups()

    def _check_groups(self) -> None:
        num_groups, top_groups = self.num_groups, self.top_groups
        if num_groups is None:
            if top_groups is not None:
                raise ValueError(
                    f"top_groups={top_groups} was given without num_groups: set num_groups too, or "
                    "neither and let resolve() choose both."
                )
            return
        if top_groups is None:
            raise ValueError(
                f"num_groups={num_groups} needs top_groups, the groups a token may choose from: "
                f"set it to 1..{num_groups} (num_groups=1 is unlimited routing)."
            )
        if self.num_experts % num_groups:
            raise ValueError(
                f"num_groups={num_groups} must divide num_experts={self.num_experts}: groups are "
                "equal. Choose a divisor."
            )
        if top_groups > num_groups:
            raise ValueError(
                f"top_groups={top_groups} is more than num_groups={num_groups}: set it to "
                f"1..{num_groups}."
            )
        self._check_group_size(self.num_experts // num_groups, num_groups, top_groups)

    def _check_group_size(self, group_size: int, num_groups: int, top_groups: int) -> None:
        if self.top_k > top_groups * group_size:
            raise ValueError(
                f"top_k={self.top_k} is more than the {top_groups * group_size} experts of "
                f"{top_groups} kept groups of {group_size} (num_experts={self.num_experts}, "
                f"num_groups={num_groups}): raise top_groups, or lower top_k or num_groups "
                "(num_groups=1 is unlimited routing)."
            )
        # One group is never ranked, so its score does not matter.
        if num_groups > 1 and self.group_score_top > group_size:
            raise ValueError(
                f"group_score_top={self.group_score_top} is more than the {group_size} experts of "
                f"a group (num_experts={self.num_experts}, num_groups={num_groups}): lower it to "
                f"{group_size}, or lower num_groups (num_groups=1 is unlimited routing)."
            )

    @classmethod
    def deepseek_v3(cls) -> "RouterConfig":
        """Returns DeepSeek-V3's routing: top 8 of 256 experts, from at most 4 of 8 groups."""
        return cls(num_experts=256, top_k=8, num_groups=8, top_groups=4, scale=2.5)

    def resolve(self, num_nodes: int) -> "RouterConfig":
        """Returns a configuration whose groups are set, for a model created on `num_nodes` nodes.

        Called once, at model creation: the result is part of the model (and of its checkpoint) and
        stays when the model moves to another mesh.

        Args:
          num_nodes: N, nodes of the expert-parallel group.

        Returns:
          This configuration where num_groups is set; else one group per node, min(4, N) kept.

        Raises:
          ValueError: the groups do not fit the experts or, where set already, the nodes.
        """
        self.check_nodes(num_nodes)
        if self.num_groups is not None:
            return self
        return dataclasses.replace(
            self, num_groups=num_nodes, top_groups=min(_MAX_KEPT_GROUPS, num_nodes)
        )

    def check_nodes(self, num_nodes: int) -> None:
        """Refuses groups that do not lie on one node each.

        Experts are laid over the nodes in order, so that num_groups a multiple of num_nodes puts
        each group on one node; a token then goes to at most min(top_groups, num_nodes) nodes.

        Args:
          num_nodes: N, nodes of the expert-parallel group.

        Raises:
          ValueError: num_groups is neither 1 nor unset nor a multiple of num_nodes.
        """
        num_nodes = integer("num_nodes", num_nodes, 1)
        if self.num_groups is not None and self.num_groups > 1 and self.num_groups % num_nodes:
            raise ValueError(
                f"num_groups={self.num_groups} is not a multiple of num_nodes={num_nodes}: a group "
                "would lie on two nodes, and top_groups would not limit the nodes a token goes to. "
                f"Use a multiple of {num_nodes}, another number of nodes, or num_groups=1 "
                "(unlimited routing)."
            )


class Routing(NamedTuple):
    """A router's choice.

    Attributes:
      expert_ids: [..., K] int32, distinct, by descending biased score, ties to the lowest id.
      weights: [..., K] float32 gate weights, from the unbiased scores of the chosen.
      scores: [..., E] float32 unbiased scores of all experts.
    """

    expert_ids: Int[Array, "*tokens topk"]
    weights: Float[Array, "*tokens topk"]
    scores: Float[Array, "*tokens experts"]


def route(
    logits: Float[Array, "*tokens experts"],
    bias: Float[Array, " experts"] | None,
    config: RouterConfig,
    *,
    expert_ids: Int[Array, "*tokens topk"] | None = None,
) -> Routing:
    """Chooses each token's experts and weighs them, in float32.

    The bias steers the choice alone: neither it nor the choice has a gradient. The weights'
    gradient with respect to the logits is finite for every finite logit. Infinite biased scores
    rank as the largest or smallest float32. NaN ranks as the smallest: expert ids stay distinct and
    in range, and NaN is seen in `scores`, and in `weights` where its expert is chosen.

    Args:
      logits: [..., E] floating point, any leading shape; upcast to float32.
      bias: [E] floating point, or None for none.
      config: static; an unset num_groups counts as 1 (unlimited routing).
      expert_ids: [..., K] int32, the choice where it is made elsewhere: ids in 0..E-1, which are
        weighed and nothing more. Neither bias nor groups have a part in it.

    Returns:
      Routing(expert_ids [..., K] int32, weights [..., K] float32, scores [..., E] float32).

    Raises:
      ValueError: the shapes do not fit `config`.
      TypeError: the logits or the bias are not floating point, or an operand is no array.

    Source: the gate of DeepSeek-V3 (technical report, section 2.1.2).
    """
    logits = array("logits", logits)
    bias = None if bias is None else array("bias", bias)
    expert_ids = None if expert_ids is None else array("expert_ids", expert_ids)
    _check_operands(logits, bias, config)
    logits = logits.astype(jnp.float32)
    scores = score(logits, config)
    if expert_ids is None:
        expert_ids = _choose(scores, bias, config)
    elif expert_ids.shape != (*logits.shape[:-1], config.top_k) or expert_ids.dtype != jnp.int32:
        raise ValueError(
            f"expert_ids is {expert_ids.dtype}{list(expert_ids.shape)}: it must be "
            f"int32{[*logits.shape[:-1], config.top_k]}, top_k ids for each token of the logits."
        )
    return Routing(expert_ids, _weigh(logits, scores, expert_ids, config), scores)


def score(logits: Array, config: RouterConfig) -> Array:
    """The scores of all experts [..., E], for float32 logits."""
    return jax.nn.sigmoid(logits) if config.score == "sigmoid" else jax.nn.softmax(logits)


def log_score(logits: Array, config: RouterConfig) -> Array:
    """The scores' logarithms, up to a constant, also where the scores underflow."""
    return jax.nn.log_sigmoid(logits) if config.score == "sigmoid" else logits


def check_config(config: RouterConfig) -> None:
    """Refuses what is no routing configuration."""
    instance("config", config, RouterConfig, "a jax_moe.RouterConfig")


def _check_operands(logits: Array, bias: Array | None, config: RouterConfig) -> None:
    check_config(config)
    for name, operand in (("logits", logits), ("bias", bias)):
        if operand is not None and not jnp.issubdtype(operand.dtype, jnp.floating):
            raise TypeError(f"{name} have dtype {operand.dtype}: a floating-point type is needed.")
    if logits.ndim < 1 or logits.shape[-1] != config.num_experts:
        raise ValueError(
            f"logits have shape {logits.shape}: the last axis must be "
            f"num_experts={config.num_experts}. Fix the gate's width or the config."
        )
    if bias is not None and bias.shape != (config.num_experts,):
        raise ValueError(
            f"bias has shape {bias.shape}: it must be ({config.num_experts},), one value per "
            "expert, or None."
        )


def _choose(scores: Array, bias: Array | None, config: RouterConfig) -> Array:
    """Returns expert ids [..., K] int32 by descending biased score within the best groups."""
    biased = lax.stop_gradient(scores)
    if bias is not None:
        biased = biased + lax.stop_gradient(bias).astype(jnp.float32)
    # Finite scores keep every expert of a kept group above the mask's -inf, so that K distinct
    # allowed experts are always found; one zero makes -0 (a flushed subnormal) tie with +0.
    biased = jnp.nan_to_num(biased, nan=_FLOAT32.min, posinf=_FLOAT32.max, neginf=_FLOAT32.min)
    biased = jnp.where(biased == 0, jnp.float32(0), biased)
    if config.num_groups is not None and config.num_groups > 1:
        kept = _kept_groups(biased, config)
        biased = jnp.where(kept, biased, -jnp.inf)
    return lax.top_k(biased, config.top_k, is_stable=True)[1].astype(jnp.int32)


def _kept_groups(biased: Array, config: RouterConfig) -> Array:
    """Returns [..., E] bool: whether the expert's group is among the best `top_groups`."""
    assert config.num_groups is not None and config.top_groups is not None
    group_size = config.num_experts // config.num_groups
    grouped = biased.reshape(*biased.shape[:-1], config.num_groups, group_size)
    best = lax.top_k(grouped, config.group_score_top, is_stable=True)[0]
    # Unrolled, because jnp.sum's order (hence the rounding, hence a tie) differs by backend.
    terms = [best[..., i] for i in range(config.group_score_top)]
    group_scores = functools.reduce(operator.add, terms)
    kept = lax.top_k(group_scores, config.top_groups, is_stable=True)[1]
    mask = (kept[..., None, :] == jnp.arange(config.num_groups, dtype=kept.dtype)[:, None]).any(-1)
    return jnp.broadcast_to(mask[..., None], grouped.shape).reshape(biased.shape)


def _weigh(logits: Array, scores: Array, expert_ids: Array, config: RouterConfig) -> Array:
    """Returns the chosen experts' weights [..., K] float32."""
    if config.normalize:
        # score / sum(score) as a softmax over log(score): scores that underflow together still
        # have a right quotient and a finite gradient. (Softmax's own log-sum cancels.)
        chosen = jnp.take_along_axis(logits, expert_ids, axis=-1)
        weights = jax.nn.softmax(log_score(chosen, config))
    else:
        weights = jnp.take_along_axis(scores, expert_ids, axis=-1)
    return weights * jnp.float32(config.scale)
