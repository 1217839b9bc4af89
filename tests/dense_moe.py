"""The MoE layer again, dense: every expert on every token, in float64, on one device.

Routing is done in numpy with Python loops over the tokens; it refuses inputs in which a choice is
so close that float32 might choose otherwise (exact ties are fine where they are exact in both).
The rest is plain jnp under x64, so that autodiff gives every gradient.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import jax_moe

CLOSE = 2e-6


@dataclasses.dataclass(frozen=True)
class Result:
    """What a layer must give; `grads` has x and every weight by name."""

    y: np.ndarray
    expert_ids: np.ndarray
    counts: np.ndarray
    aux_loss: float
    router_entropy: float
    nodes_per_token: float
    grads: dict[str, np.ndarray]


def scores_of(logits, config: jax_moe.RouterConfig):
    """Unbiased scores, numpy float64."""
    if config.score == "sigmoid":
        return 1 / (1 + np.exp(-logits))
    shifted = np.exp(logits - logits.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


def largest(values, count: int) -> list[int]:
    """Places of the largest values, the lower place first in a tie; refuses a close call."""
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    if count < len(values):
        gap = values[order[count - 1]] - values[order[count]]
        assert gap == 0 or gap > CLOSE, f"choices {gap} apart: float32 might choose otherwise"
    return order[:count]


def choose(scores, bias, config: jax_moe.RouterConfig) -> list[int]:
    """The experts of one token."""
    groups = config.num_groups or 1
    size = len(scores) // groups
    biased = [float(s) + float(b) for s, b in zip(scores, bias, strict=True)]
    allowed = range(len(scores))
    if groups > 1:
        by_group = [sorted(biased[g * size : (g + 1) * size], reverse=True) for g in range(groups)]
        sums = [sum(group[: config.group_score_top]) for group in by_group]
        kept = sorted(largest(sums, config.top_groups))
        allowed = [g * size + i for g in kept for i in range(size)]
    return [allowed[i] for i in largest([biased[e] for e in allowed], config.top_k)]


def gate_weights(scores, ids, config):
    """Weights [T, K] of the chosen, jnp."""
    chosen = jnp.take_along_axis(scores, ids, axis=-1)
    if config.normalize:
        chosen = chosen / chosen.sum(-1, keepdims=True)
    return chosen * config.scale


def swiglu(x, gate_up, down):
    """[T, H] -> [T, H], or [E, T, H] where the weights have a leading E."""
    gate, up = jnp.split(x @ gate_up, 2, axis=-1)
    return (gate / (1 + jnp.exp(-gate)) * up) @ down


def forward(weights, x, ids, routed, real, config):
    """y [T, H] and the normalised scores [T, E]; a `routed` id of -1 adds nothing."""
    logits = x @ weights["router"]
    is_sigmoid = config.score == "sigmoid"
    scores = 1 / (1 + jnp.exp(-logits)) if is_sigmoid else jax.nn.softmax(logits)
    gates = gate_weights(scores, jnp.maximum(ids, 0), config)
    experts = jnp.arange(config.num_experts)[:, None, None]
    share = jnp.where(routed == experts, gates, 0).sum(-1)  # [E, T]
    y = (swiglu(x, weights["gate_up"], weights["down"]) * share[..., None]).sum(0)
    if "shared_gate_up" in weights:
        y = y + swiglu(x, weights["shared_gate_up"], weights["shared_down"])
    return jnp.where(real[:, None], y, 0), scores / scores.sum(-1, keepdims=True)


def load_shares(scores, real, config):
    """f of the sequence-wise loss, [B, S, E] and [B, S] -> [B, E], divided by the B that count."""
    shares = np.zeros((len(real), config.num_experts))
    for b in range(len(real)):
        for t in np.flatnonzero(real[b]):
            shares[b, largest(scores[b, t], config.top_k)] += 1 / real[b].sum()
    counting = max(1, real.any(1).sum())
    return shares * config.num_experts / config.top_k / counting


@functools.partial(jax.jit, static_argnames="config")
def differentiate(weights, x, ids, routed, real, dy, shares, aux_weight, config):
    """((gradients of the weights, of x), (y, normalised scores, auxiliary loss))."""

    def objective(weights, x):
        y, scores = forward(weights, x, ids, routed, real, config)
        of_sequence = jnp.where(real[:, None], scores, 0).reshape(len(shares), -1, shares.shape[1])
        lengths = jnp.maximum(1, real.reshape(len(shares), -1).sum(1)).astype(scores.dtype)
        aux = (shares * of_sequence.sum(1) / lengths[:, None]).sum()
        return (y * dy).sum() + aux_weight * aux, (y, scores, aux)

    return jax.grad(objective, argnums=(0, 1), has_aux=True)(weights, x)


def run(weights, bias, x, mask, dy, config, *, nodes=1, aux_weight=0.0, dropped=None) -> Result:
    """The layer's results, and the gradients of sum(y * dy) + aux_weight * aux_loss.

    Args:
      weights: the layer's, by name. bias: [E].
      x, dy: [B, S, H]; mask: bool [B, S].
      config: with its groups resolved; nodes: of the group.
      dropped: bool [B*S, K] of the (token, k) that lose their row, in the layer's order of k.
    """
    with jax.enable_x64(True):
        weights = {name: jnp.asarray(w, jnp.float64) for name, w in weights.items()}
        shape = x.shape
        x, dy = (jnp.asarray(a, jnp.float64).reshape(-1, shape[-1]) for a in (x, dy))
        real = np.asarray(mask).reshape(-1)
        scores = scores_of(np.asarray(x @ weights["router"]), config)
        ids = np.full((len(x), config.top_k), -1)
        for t in np.flatnonzero(real):
            ids[t] = choose(scores[t], np.asarray(bias, np.float64), config)
        routed = ids if dropped is None else np.where(dropped, -1, ids)

        by_sequence = scores.reshape(*mask.shape, -1)
        (grads, dx), (y, share, aux) = differentiate(
            weights, x, ids, routed, real, dy,
            load_shares(by_sequence, real.reshape(mask.shape), config), aux_weight, config,
        )  # fmt: skip
        share = np.asarray(share)[real]
        return Result(
            y=np.asarray(y).reshape(shape),
            expert_ids=ids,
            counts=np.bincount(ids[real].reshape(-1), minlength=config.num_experts),
            aux_loss=float(aux),
            router_entropy=float(-(share * np.log(share)).sum(-1).mean()) if real.any() else 0.0,
            nodes_per_token=mean_nodes(ids[real], config.num_experts, nodes),
            grads={name: np.asarray(g) for name, g in grads.items()}
            | {"x": np.asarray(dx).reshape(shape)},
        )


def mean_nodes(ids, num_experts: int, nodes: int) -> float:
    visited = [len({int(e) // (num_experts // nodes) for e in row}) for row in ids]
    return float(np.mean(visited)) if visited else 0.0
