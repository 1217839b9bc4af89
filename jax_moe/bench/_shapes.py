"""What is exchanged: named sizes, and expert ids that load the experts evenly or not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

import numpy as np

Routing = Literal["balanced", "skewed"]
ROUTINGS: tuple[Routing, ...] = ("balanced", "skewed")

_SKEW = 1.0  # MaxVio of the skewed routing
SKEW_SAMPLE = 8192  # tokens on which the skew is tuned


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of one exchange.

    Args:
      name: as given on the command line.
      tokens: tokens T of one rank.
      hidden: elements H of one token.
      experts: experts E of the group.
      top_k: experts K of one token.
      ranks: ranks R to make where devices are free to choose, that is on CPU.
      width: inner width W of one expert, for the whole layer.
      num_shared: experts that every token goes through, for the whole layer.
    """

    name: str
    tokens: int
    hidden: int
    experts: int
    top_k: int
    ranks: int = 8
    width: int = 64
    num_shared: int = 0

    def __str__(self) -> str:
        return (
            f"{self.name}: T {self.tokens} per rank, H {self.hidden}, E {self.experts}, "
            f"K {self.top_k}"
        )


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("tiny", tokens=32, hidden=64, experts=16, top_k=4),
        Shape("cpu8", tokens=1024, hidden=1024, experts=64, top_k=8, width=256, num_shared=1),
        Shape(  # one layer of the trainer's `tiny`
            "tiny-lm", tokens=256, hidden=96, experts=8, top_k=2, width=96, num_shared=1
        ),
        Shape(
            "deepseek-v3", tokens=4096, hidden=7168, experts=256, top_k=8, width=2048, num_shared=1
        ),
        Shape(
            "deepseek-v2-lite",
            tokens=4096,
            hidden=2048,
            experts=64,
            top_k=6,
            width=1408,
            num_shared=2,
        ),
        Shape("qwen3-30b-a3b", tokens=4096, hidden=2048, experts=128, top_k=8, width=768),
        Shape("mixtral-8x7b", tokens=4096, hidden=4096, experts=8, top_k=2, width=14336),
    )
}


def max_violation(ids: np.ndarray, experts: int) -> float:
    """MaxVio: how far the busiest expert's load is above the mean, as a multiple of the mean."""
    load = np.bincount(ids.reshape(-1), minlength=experts)
    return float(load.max() / load.mean() - 1)


def expert_ids(shape: Shape, ranks: int, routing: Routing, seed: int = 0) -> np.ndarray:
    """Expert ids int32 [R, T, K], distinct within a token; every rank draws alike.

    "balanced" chooses uniformly at random; "skewed" gives the experts log-normal popularities
    whose spread is tuned to a MaxVio of 1, the popular experts lying anywhere.
    """
    rng = np.random.default_rng((seed, ROUTINGS.index(routing)))
    popularity = rng.standard_normal(shape.experts)
    noise = rng.gumbel(size=(ranks * shape.tokens, shape.experts))

    def skew(spread: float) -> float:
        scores = noise[:SKEW_SAMPLE] + spread * popularity
        return max_violation(_choose(scores, shape.top_k), shape.experts)

    spread = 0.0 if routing == "balanced" else tuned_spread(skew, high=8.0)
    return _choose(noise + spread * popularity, shape.top_k).reshape(ranks, shape.tokens, -1)


def _choose(scores: np.ndarray, top_k: int) -> np.ndarray:
    """The top_k best of each token, best first."""
    best = np.argpartition(-scores, top_k - 1, axis=1)[:, :top_k]
    order = np.argsort(-np.take_along_axis(scores, best, 1), axis=1, kind="stable")
    return np.take_along_axis(best, order, 1).astype(np.int32)


def tuned_spread(skew: Callable[[float], float], *, high: float) -> float:
    """The spread in (0, high] of the experts' popularity whose `skew`, a MaxVio, is 1."""
    low = 0.0
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if skew(middle) < _SKEW else (low, middle)
    return high


def tight_capacity(ids: np.ndarray, experts: int, alignment: int = 8) -> int:
    """The rows C of one rank that just hold these ids in every column.

    The capacity all_to_all splits C evenly over the sources, so the busiest pair of ranks sets C.
    """
    ranks = ids.shape[0]
    rank = ids.reshape(ranks, -1) // (experts // ranks)
    pair = max(int(np.bincount(row, minlength=ranks).max()) for row in rank)
    return ranks * (-(-pair // alignment) * alignment)
