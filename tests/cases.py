"""Named cases of plan, dispatch and combine, shared by the tests and the benches.

A case is one setting of all sizes plus the kind of routing and of values in it. Everything here is
numpy: a case says what goes in, `oracle.py` says what must come out.
"""

import dataclasses
import math
import zlib

import ml_dtypes
import numpy as np

IMPLEMENTATIONS = ("reference", "xla", "cpu")
INT32 = np.iinfo(np.int32)


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes, routing and values of one setting.

    Args:
        name: also the seed.
        tokens, experts, topk, hidden: T (per rank), E, K, H.
        mesh: sizes of the mesh axes (data, node, rank), in devices.
        axes: the mesh axes that form the group; every other axis separates group instances.
        virtual_ranks: V, ranks a device hosts.
        num_nodes: nodes of the group; None leaves the choice to ExpertGroup.
        capacity, capacity_factor, alignment, tail: as in `jax_moe.plan`.
        routing: a key of ROUTINGS.
        special: values with subnormals, signed zeros, infinities and NaN instead of ordinary ones.
    """

    name: str
    tokens: int
    experts: int
    topk: int
    hidden: int
    mesh: tuple[int, int, int] = (1, 1, 1)
    axes: tuple[str, ...] = ("node", "rank")
    virtual_ranks: int = 1
    num_nodes: int | None = None
    dtype: str = "float32"
    capacity: int | None = None
    capacity_factor: float | None = None
    alignment: int = 1
    tail: str = "zero"
    routing: str = "uniform"
    special: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def mesh_shape(self) -> dict[str, int]:
        return dict(zip(("data", "node", "rank"), self.mesh, strict=True))

    @property
    def devices(self) -> int:
        return math.prod(self.mesh)

    @property
    def ranks(self) -> int:
        """R, ranks of one group."""
        return math.prod(self.mesh_shape[axis] for axis in self.axes) * self.virtual_ranks

    @property
    def groups(self) -> int:
        """Group instances that run side by side."""
        return self.devices * self.virtual_ranks // self.ranks

    @property
    def nodes(self) -> int:
        if self.num_nodes is not None:
            return self.num_nodes
        return self.mesh_shape[self.axes[0]] if len(self.axes) == 2 else 1

    @property
    def local_experts(self) -> int:
        return self.experts // self.ranks

    @property
    def payload(self) -> np.dtype:
        return np.dtype(ml_dtypes.bfloat16 if self.dtype == "bfloat16" else self.dtype)

    def on_devices(self, devices: int) -> "Case":
        """The same group, values and results, its ranks spread over another number of devices."""
        assert self.groups == 1
        assert self.ranks % devices == 0
        return dataclasses.replace(
            self,
            mesh=(1, 1, devices),
            axes=("node", "rank"),
            virtual_ranks=self.ranks // devices,
            num_nodes=self.nodes,
        )

    def rng(self, purpose: str) -> np.random.Generator:
        return np.random.default_rng(zlib.crc32(f"{self.name}/{purpose}".encode()))


def _uniform(case: Case, rng: np.random.Generator) -> np.ndarray:
    """K different experts per token (repeats only where K > E)."""
    shape = (case.groups, case.ranks, case.tokens, max(case.topk, case.experts))
    scores = rng.random(shape)
    ids = np.argsort(scores, axis=-1)[..., : case.topk]
    return ids % case.experts


def _skewed(case: Case, rng: np.random.Generator) -> np.ndarray:
    """K different experts, low numbers far likelier: some experts stay empty."""
    weights = 1.0 / (1.0 + np.arange(case.experts)) ** 1.5
    shape = (case.groups, case.ranks, case.tokens, case.experts)
    keys = rng.exponential(size=shape) / weights
    return np.argsort(keys, axis=-1)[..., : case.topk]


def _uneven(case: Case, rng: np.random.Generator) -> np.ndarray:
    """Ranks use none (the first) to all (the last) of their tokens, tokens some of their K."""
    ids = _uniform(case, rng)
    for r in range(case.ranks):
        used = case.tokens * r // max(1, case.ranks - 1) if case.ranks > 1 else case.tokens // 2
        for g in range(case.groups):
            ids[g, r, rng.permutation(case.tokens)[used:]] = -1
    return np.where(rng.random(ids.shape) < 0.9 * rng.random((*ids.shape[:3], 1)), -1, ids)


def _quiet(case: Case, rng: np.random.Generator) -> np.ndarray:
    """The last rank receives nothing, rank 0 sends nothing."""
    ids = _uniform(case, rng)
    ids = np.where(ids // case.local_experts == case.ranks - 1, -1, ids)
    ids[:, 0] = -1
    return ids


def _none(case: Case, rng: np.random.Generator) -> np.ndarray:
    """No token has an expert."""
    del rng
    return np.full((case.groups, case.ranks, case.tokens, case.topk), -1)


def _one_expert(case: Case, rng: np.random.Generator) -> np.ndarray:
    """Every (token, k) goes to one expert, another one in each group."""
    chosen = rng.integers(case.experts, size=(case.groups, 1, 1, 1))
    return np.broadcast_to(chosen, (case.groups, case.ranks, case.tokens, case.topk)).copy()


def _repeats(case: Case, rng: np.random.Generator) -> np.ndarray:
    """Few experts chosen with repetition: a token often has several rows at one expert."""
    few = rng.integers(case.experts, size=max(2, case.experts // 3))
    return rng.choice(few, size=(case.groups, case.ranks, case.tokens, case.topk))


def _invalid(case: Case, rng: np.random.Generator) -> np.ndarray:
    """A third of the ids lies outside 0..E-1, up to both ends of int32."""
    ids = _uniform(case, rng)
    wrong = [-1, -2, -case.experts, case.experts, case.experts + 1, INT32.min, INT32.max]
    return np.where(rng.random(ids.shape) < 0.35, rng.choice(wrong, size=ids.shape), ids)


ROUTINGS = {
    "uniform": _uniform,
    "skewed": _skewed,
    "uneven": _uneven,
    "quiet": _quiet,
    "none": _none,
    "one_expert": _one_expert,
    "repeats": _repeats,
    "invalid": _invalid,
}


def expert_ids(case: Case) -> np.ndarray:
    """Expert ids of every token, int32 [groups, R, T, K]."""
    return ROUTINGS[case.routing](case, case.rng("routing")).astype(np.int32)


def terms(case: Case, purpose: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Values whose sum depends on the order: magnitudes over 2^-8 to 2^8, or special ones."""
    rng = case.rng(purpose)
    if case.special:
        return rng.choice(special_values(dtype), size=shape)
    scale = np.exp2(rng.integers(-8, 9, size=shape).astype(np.float32))
    return (rng.standard_normal(shape, dtype=np.float32) * scale).astype(dtype)


def special_values(dtype: np.dtype) -> np.ndarray:
    """Signed zeros, subnormals, pairs whose difference is subnormal, the largest, inf and NaN."""
    info = ml_dtypes.finfo(dtype)
    tiny, least, most = float(info.tiny), float(info.smallest_subnormal), float(info.max)
    small = [0.0, 0.0, least, 7 * least, tiny - least, tiny, tiny * 1.5, tiny * 1.25, 1.0, 3.0]
    large = [most, float("inf")]
    both = small * 4 + large
    return np.array(both + [-v for v in both] + [float("nan")]).astype(dtype)


# One device, one rank: the smallest things that can go wrong.
SINGLE = (
    Case("single", tokens=3, experts=2, topk=1, hidden=8),
    Case("single_hidden_1", tokens=5, experts=3, topk=2, hidden=1, dtype="bfloat16"),
    Case("single_all_padding", tokens=4, experts=4, topk=2, hidden=7, routing="none", alignment=8),
    Case("single_wide", tokens=9, experts=5, topk=3, hidden=16384, dtype="bfloat16"),
)

# Every group size, odd sizes, and routings that leave ranks, tokens and experts empty.
GROUPS = (
    Case("ep2_uneven", tokens=7, experts=6, topk=3, hidden=7, mesh=(1, 1, 2), routing="uneven"),
    Case("ep3_odd", tokens=5, experts=9, topk=3, hidden=7, mesh=(1, 1, 3), dtype="bfloat16"),
    Case("ep4_quiet", tokens=6, experts=8, topk=2, hidden=8, mesh=(1, 1, 4), routing="quiet"),
    Case("ep5_skewed", tokens=11, experts=15, topk=4, hidden=96, mesh=(1, 1, 5), routing="skewed"),
    Case("ep6_repeats", tokens=7, experts=18, topk=5, hidden=8, mesh=(1, 1, 6), routing="repeats"),
    Case("ep8_uniform", tokens=13, experts=40, topk=8, hidden=96, mesh=(1, 1, 8)),
    Case(
        "ep8_wide", tokens=3, experts=16, topk=4, hidden=16384, mesh=(1, 1, 8), dtype="bfloat16"
    ),
    Case("ep8_none", tokens=5, experts=16, topk=2, hidden=8, mesh=(1, 1, 8), routing="none"),
    Case(
        "ep8_one_expert",
        tokens=5, experts=16, topk=2, hidden=8, mesh=(1, 1, 8), routing="one_expert",
    ),
    Case(
        "ep8_invalid",
        tokens=9, experts=24, topk=4, hidden=7, mesh=(1, 1, 8), routing="invalid",
        dtype="bfloat16",
    ),
)  # fmt: skip

# Groups smaller than the world, groups on other axes, virtual ranks and nodes.
LAYOUTS = (
    Case(
        "data4_ep2_uneven",
        tokens=5, experts=4, topk=2, hidden=8, mesh=(4, 1, 2), routing="uneven",
    ),
    Case(
        "data2_ep3",
        tokens=4, experts=6, topk=2, hidden=8, mesh=(2, 1, 3), axes=("rank",), dtype="bfloat16",
    ),
    Case(
        "rank_axis_only",
        tokens=5, experts=4, topk=3, hidden=7, mesh=(2, 2, 2), axes=("rank",),
    ),
    Case(
        "swapped_axes",
        tokens=6, experts=16, topk=4, hidden=8, mesh=(1, 4, 2), axes=("rank", "node"),
        dtype="bfloat16",
    ),
    Case(
        "outer_axes",
        tokens=6, experts=8, topk=3, hidden=8, mesh=(2, 2, 2), axes=("data", "rank"), num_nodes=1,
    ),
    Case(
        "nodes_2x4",
        tokens=9, experts=32, topk=8, hidden=96, mesh=(1, 2, 4), dtype="bfloat16",
    ),
    Case("nodes_4x2", tokens=9, experts=32, topk=8, hidden=8, mesh=(1, 4, 2)),
    Case(
        "nodes_2x4_invalid",
        tokens=8, experts=24, topk=6, hidden=7, mesh=(1, 2, 4), routing="invalid",
    ),
    Case(
        "data2_nodes_2x2",
        tokens=7, experts=12, topk=5, hidden=8, mesh=(2, 2, 2), dtype="bfloat16",
        routing="skewed",
    ),
    Case(
        "virtual8_nodes_2",
        tokens=9, experts=32, topk=8, hidden=8, virtual_ranks=8, num_nodes=2, dtype="bfloat16",
    ),
    Case(
        "virtual4_nodes_4",
        tokens=7, experts=16, topk=6, hidden=96, mesh=(1, 1, 2), virtual_ranks=4, num_nodes=4,
    ),
    Case(
        "virtual3_ep3",
        tokens=5, experts=27, topk=5, hidden=7, mesh=(1, 1, 3), virtual_ranks=3,
        routing="uneven",
    ),
    Case(
        "virtual2_data2",
        tokens=6, experts=16, topk=4, hidden=8, mesh=(2, 2, 2), virtual_ranks=2,
        dtype="bfloat16", routing="repeats",
    ),
    Case(
        "virtual8_ep8",
        tokens=3, experts=64, topk=6, hidden=8, mesh=(1, 1, 8), virtual_ranks=8, num_nodes=4,
        routing="invalid",
    ),
    Case("virtual5", tokens=4, experts=10, topk=3, hidden=7, virtual_ranks=5, routing="quiet"),
    Case(
        "virtual7_ep1",
        tokens=3, experts=21, topk=4, hidden=8, virtual_ranks=7, dtype="bfloat16",
    ),
    Case(
        "virtual6_nodes_6",
        tokens=5, experts=12, topk=6, hidden=8, virtual_ranks=6, num_nodes=6,
    ),
)  # fmt: skip

# Capacity, alignment and tails.
CAPACITY = (
    Case(
        "overflow_uniform",
        tokens=12, experts=16, topk=4, hidden=8, mesh=(1, 1, 4), capacity=29,
    ),
    Case(
        "overflow_skewed",
        tokens=16, experts=16, topk=4, hidden=8, mesh=(1, 1, 4), routing="skewed", capacity=40,
        alignment=8, dtype="bfloat16",
    ),
    Case(
        "overflow_one_expert",
        tokens=5, experts=8, topk=3, hidden=7, mesh=(1, 1, 8), routing="one_expert", capacity=11,
    ),
    Case(
        "overflow_to_nothing",  # one row for three busy experts a rank: the cap is 0
        tokens=12, experts=6, topk=4, hidden=8, mesh=(1, 1, 2), capacity=1,
    ),
    Case(
        "overflow_below_alignment",  # not even one aligned group fits
        tokens=6, experts=4, topk=2, hidden=8, mesh=(1, 1, 2), capacity=8, alignment=8,
    ),
    Case(
        "overflow_factor",
        tokens=10, experts=8, topk=3, hidden=8, mesh=(1, 2, 2), capacity_factor=0.7,
        routing="skewed", dtype="bfloat16",
    ),
    Case(
        "overflow_virtual",
        tokens=9, experts=24, topk=5, hidden=8, mesh=(1, 1, 2), virtual_ranks=4, num_nodes=2,
        capacity=33, alignment=4, routing="invalid",
    ),
    Case(
        "repeats_past_worst_case",  # E/R < K: the default capacity counts each expert once a token
        tokens=6, experts=4, topk=6, hidden=8, mesh=(1, 1, 4), routing="one_expert",
    ),
    Case(
        "aligned_8",
        tokens=7, experts=12, topk=3, hidden=96, mesh=(1, 1, 4), alignment=8, dtype="bfloat16",
        routing="skewed",
    ),
    Case(
        "aligned_128",
        tokens=20, experts=8, topk=4, hidden=8, mesh=(1, 2, 2), alignment=128, routing="uneven",
    ),
    Case(
        "aligned_128_undefined",
        tokens=20, experts=8, topk=4, hidden=8, mesh=(1, 1, 4), alignment=128,
        tail="undefined", dtype="bfloat16",
    ),
    Case(
        "undefined_uneven",
        tokens=9, experts=16, topk=3, hidden=7, mesh=(1, 1, 8), tail="undefined",
        routing="uneven", capacity_factor=2.0,
    ),
    Case(
        "undefined_none",
        tokens=4, experts=8, topk=2, hidden=8, mesh=(1, 1, 2), tail="undefined", routing="none",
    ),
)  # fmt: skip

# Values for which a sum that flushes and a copy that does not can be told apart.
SPECIAL = (
    Case(
        "special_float32",
        tokens=33, experts=16, topk=6, hidden=96, mesh=(1, 1, 4), special=True, routing="uneven",
    ),
    Case(
        "special_bfloat16",
        tokens=33, experts=16, topk=6, hidden=96, mesh=(1, 1, 4), special=True, routing="uneven",
        dtype="bfloat16",
    ),
    Case(
        "special_nodes",
        tokens=17, experts=32, topk=8, hidden=96, mesh=(1, 2, 2), virtual_ranks=2, num_nodes=4,
        special=True, dtype="bfloat16", routing="uneven",
    ),
    Case(
        "special_nodes_float32",
        tokens=17, experts=16, topk=8, hidden=96, mesh=(1, 2, 4), special=True,
        capacity_factor=1.0, alignment=2,
    ),
)  # fmt: skip

CASES = (*SINGLE, *GROUPS, *LAYOUTS, *CAPACITY, *SPECIAL)
BY_NAME = {case.name: case for case in CASES}

# Published models, for the benches.
MODELS = (
    Case("mixtral_8x7b", tokens=4096, experts=8, topk=2, hidden=4096, mesh=(1, 1, 8),
         dtype="bfloat16"),
    Case("qwen3_30b_a3b", tokens=4096, experts=128, topk=8, hidden=2048, mesh=(1, 1, 8),
         dtype="bfloat16"),
    Case("deepseek_v3", tokens=4096, experts=256, topk=8, hidden=7168, mesh=(1, 1, 8),
         dtype="bfloat16"),
)  # fmt: skip
# The same with few tokens, for the tests.
SMALL_MODELS = tuple(
    dataclasses.replace(case, name=f"{case.name}_small", tokens=3, routing="uneven")
    for case in MODELS
)
