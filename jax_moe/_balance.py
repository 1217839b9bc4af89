"""Load balance: the routing bias and its step, the sequence-wise loss, and a layer's statistics."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jax_moe._arguments import array
from jax_moe._router import RouterConfig, check_config, log_score, score


class RouterBias(nnx.Variable):
    """The routing bias: float32 [E], added to the scores for choosing only.

    Not a parameter: it has no gradient, and `update_bias` moves it once per optimizer step, so
    keep it out of the optimizer (which `nnx.Param` filters do) and out of any cast to bfloat16.
    """


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MoEStats:
    """What one call of an MoE layer reports, the same on all devices. Padding tokens count nowhere.

    Attributes:
      counts: int32 [E], tokens that chose each expert, over the whole mesh; before any dropping.
      dropped: int32 [], rows dropped past the capacity, over the whole mesh.
      invalid: int32 [], given expert ids that were neither -1 nor an expert, over the whole mesh.
      aux_loss: float32 [], sequence-wise balance loss, unweighted; 1 at perfect balance.
      max_vio: float32 [], largest load over mean load, minus 1; 0 at perfect balance.
      min_load: float32 [], smallest load over mean load; 1 at perfect balance.
      router_entropy: float32 [], mean entropy of the tokens' normalised scores, in nats.
      nodes_per_token: float32 [], mean number of nodes whose experts a token chose.
    """

    counts: Int[Array, " experts"]
    dropped: Int[Array, ""]
    invalid: Int[Array, ""]
    aux_loss: Float[Array, ""]
    max_vio: Float[Array, ""]
    min_load: Float[Array, ""]
    router_entropy: Float[Array, ""]
    nodes_per_token: Float[Array, ""]


def update_bias(
    bias: Float[Array, "*layers experts"],
    counts: Int[Array, "*layers experts"],
    step_size: float | Float[Array, ""],
) -> Float[Array, "*layers experts"]:
    """Raises the bias of every expert below the mean load by one step, lowers it above.

    To be called once per optimizer step, with the counts of all its micro-batches added up. The
    comparison with the mean is exact: integers alone, without a product that could overflow.

    Args:
      bias: float32 [..., E].
      counts: integers [..., E], global loads of the optimizer step; their sum fits the type.
      step_size: how far one step goes; 1e-3 in DeepSeek-V3's training.

    Returns:
      The new bias [..., E], of the bias' dtype; unchanged where a load equals the mean.

    Raises:
      ValueError: the shapes differ.
      TypeError: the counts are not integers, or an operand is no array.

    Source: DeepSeek-V3 technical report, section 2.1.2.
    """
    bias, counts = array("bias", bias), array("counts", counts)
    step_size = array("step_size", step_size)
    if bias.shape != counts.shape:
        raise ValueError(
            f"bias has shape {bias.shape} and counts {counts.shape}: one count per bias is needed."
        )
    if not jnp.issubdtype(bias.dtype, jnp.floating):
        raise TypeError(f"bias has dtype {bias.dtype}: must be of floating point.")
    if not jnp.issubdtype(counts.dtype, jnp.integer):
        raise TypeError(
            f"counts have dtype {counts.dtype}: averaged or cast counts cannot be compared "
            "exactly; pass the integer sums."
        )
    num_experts = jnp.asarray(counts.shape[-1], counts.dtype)
    total = jnp.sum(counts, axis=-1, keepdims=True, dtype=counts.dtype)
    mean, rest = total // num_experts, total % num_experts
    # count < total / E, in integers: below the quotient, or at it with a remainder left.
    below = (counts < mean) | ((counts == mean) & (rest > 0))
    direction = jnp.where(below, 1, jnp.where(counts > mean, -1, 0)).astype(bias.dtype)
    return bias + step_size.astype(bias.dtype) * direction


def normalized_scores(
    logits: Float[Array, "*tokens experts"], config: RouterConfig
) -> Float[Array, "*tokens experts"]:
    """Scores of all experts divided by their sum: float32 [..., E], finite for finite logits."""
    return jax.nn.softmax(log_score(logits.astype(jnp.float32), config))


def top_experts(
    logits: Float[Array, "*tokens experts"], config: RouterConfig
) -> Int[Array, "*tokens topk"]:
    """The K experts with the largest unbiased scores, whatever the groups: int32 [..., K]."""
    logits = lax.stop_gradient(logits.astype(jnp.float32))
    # By the scores, not the logits, so that ties are the router's.
    return lax.top_k(score(logits, config), config.top_k, is_stable=True)[1]


def sequence_balance_loss(
    logits: Float[Array, "*sequences length experts"],
    mask: Bool[Array, "*sequences length"] | None,
    config: RouterConfig,
    *,
    chosen: Int[Array, "*sequences length topk"] | None = None,
) -> Float[Array, ""]:
    """The sequence-wise auxiliary loss, unweighted: the mean over sequences of sum_i f_i P_i.

    f_i is E/K times the share of the sequence's tokens whose K largest unbiased scores, whatever
    the groups, include expert i; P_i is the mean of the normalised scores. Only P has a gradient.

    Args:
      logits: floating point [..., S, E], of S tokens of one sequence.
      mask: bool [..., S], True for real tokens; None where all are. A sequence without any does
        not count.
      config: the router's configuration.
      chosen: int32 [..., S, K], `top_experts` of the logits, where they are known already.

    Returns:
      float32 []; 0 where no sequence counts.

    Raises:
      ValueError: the shapes do not fit each other or `config`.
      TypeError: an operand is no array.

    Source: DeepSeek-V3 technical report, section 2.1.2 (equations 17 to 20).
    """
    check_config(config)
    logits = array("logits", logits)
    if logits.ndim < 2 or logits.shape[-1] != config.num_experts:
        raise ValueError(
            f"logits have shape {logits.shape}: must be [..., length, {config.num_experts}], with "
            "config.num_experts last."
        )
    real = check_mask(mask, logits.shape[:-1])
    real = jnp.ones(logits.shape[:-1], jnp.bool_) if real is None else real
    # Selected before anything else: a padding token may hold NaN, whose gradient would be NaN too.
    logits = jnp.where(real[..., None], logits.astype(jnp.float32), 0)
    weight = real.astype(jnp.float32)[..., None]
    length = jnp.maximum(jnp.sum(weight, axis=-2), 1)

    if chosen is None:
        chosen = top_experts(logits, config)
    one_hot = chosen[..., None] == jnp.arange(config.num_experts, dtype=chosen.dtype)
    hits = one_hot.any(-2).astype(jnp.float32) * weight
    load = jnp.sum(hits, axis=-2) * (config.num_experts / config.top_k) / length
    share = jnp.sum(normalized_scores(logits, config) * weight, axis=-2) / length
    sequences = jnp.sum(jnp.any(real, axis=-1), dtype=jnp.float32)
    return jnp.sum(load * share) / jnp.maximum(sequences, 1)


def check_mask(mask: Array | None, shape: tuple[int, ...]) -> Array | None:
    """The mask of so many tokens as an array, or None.

    Raises:
      ValueError: it is of another shape or dtype.
    """
    if mask is None:
        return None
    mask = array("mask", mask)
    if mask.shape != shape or mask.dtype != jnp.bool_:
        raise ValueError(
            f"mask is {mask.dtype}{list(mask.shape)}: must be bool{list(shape)}, True for real "
            "tokens."
        )
    return mask


def load_ratios(counts: Int[Array, " experts"]) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """(largest load / mean - 1, smallest load / mean), float32 []; (0, 1) without any token."""
    loads = counts.astype(jnp.float32)
    mean = jnp.mean(loads)
    safe = jnp.where(mean > 0, mean, 1)
    ratios = jnp.where(mean > 0, loads / safe, 1)
    return jnp.max(ratios) - 1, jnp.min(ratios)
