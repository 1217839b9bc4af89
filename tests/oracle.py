"""What plan, dispatch and combine must give, in numpy and Python loops.

Written from the specification alone and independently of `jax_moe`: one group instance at a time,
arrays stacked over its ranks. Slow on purpose; it has no vectorised trick that could be wrong.
"""

import collections
import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything `jax_moe.Plan` holds, of one group instance, stacked over its R ranks.

    `rows[r]` lists the real rows of rank r in order: (position, expert, source rank, token, k).
    """

    expert_ids: np.ndarray  # [R, T, K] i32
    positions: np.ndarray  # [R, T, K] i32
    sources: np.ndarray  # [R, C] i32
    group_sizes: np.ndarray  # [R, E/R] i32
    padded_group_sizes: np.ndarray  # [R, E/R] i32
    dropped: np.ndarray  # [R, E/R] i32
    invalid: np.ndarray  # [R] i32
    rows: tuple[tuple[tuple[int, int, int, int, int], ...], ...]

    def used(self, rank: int) -> int:
        """Rows of a rank before its tail, padding included."""
        return int(self.padded_group_sizes[rank].sum())


def align_up(count: int, alignment: int) -> int:
    while count % alignment:
        count += 1
    return count


def per_expert_cap(counts: list[int], capacity: int, alignment: int) -> int:
    """The largest c >= 0 with sum(align_up(min(n, c))) <= capacity."""
    cap = max(counts, default=0)
    while sum(align_up(min(n, cap), alignment) for n in counts) > capacity:
        cap -= 1
    return cap


def plan(ids: np.ndarray, *, num_experts: int, capacity: int, alignment: int) -> Plan:
    """The plan of one group: ids [R, T, K], capacity in rows per rank."""
    ranks, tokens, topk = ids.shape
    local = num_experts // ranks
    clean = np.full_like(ids, -1)
    positions = np.full_like(ids, -1)
    invalid = np.zeros(ranks, np.int32)
    wanted: list[list[tuple[int, int, int]]] = [[] for _ in range(num_experts)]
    for source in range(ranks):
        for token in range(tokens):
            for k in range(topk):
                expert = int(ids[source, token, k])
                if 0 <= expert < num_experts:
                    clean[source, token, k] = expert
                    wanted[expert].append((source, token, k))
                elif expert != -1:
                    invalid[source] += 1

    sources = np.full((ranks, capacity), -1, np.int32)
    sizes = np.zeros((ranks, local), np.int32)
    padded = np.zeros((ranks, local), np.int32)
    dropped = np.zeros((ranks, local), np.int32)
    rows = []
    for rank in range(ranks):
        mine = wanted[rank * local : (rank + 1) * local]
        cap = per_expert_cap([len(w) for w in mine], capacity, alignment)
        start, here = 0, []
        for e, w in enumerate(mine):
            kept = w[:cap]
            for i, (source, token, k) in enumerate(kept):
                positions[source, token, k] = start + i
                sources[rank, start + i] = (source * tokens + token) * topk + k
                here.append((start + i, rank * local + e, source, token, k))
            sizes[rank, e] = len(kept)
            padded[rank, e] = align_up(len(kept), alignment)
            dropped[rank, e] = len(w) - len(kept)
            start += int(padded[rank, e])
        rows.append(tuple(here))
    return Plan(clean, positions, sources, sizes, padded, dropped, invalid, tuple(rows))


def dispatch(x: np.ndarray, s: np.ndarray, p: Plan) -> tuple[np.ndarray, np.ndarray]:
    """Rows [R, C, H] and row_s [R, C] from x [R, T, H] and s [R, T, K]; padding and tail zero."""
    ranks, capacity = p.sources.shape
    rows = np.zeros((ranks, capacity, x.shape[-1]), x.dtype)
    row_s = np.zeros((ranks, capacity), s.dtype)
    for rank in range(ranks):
        for position, _, source, token, k in p.rows[rank]:
            rows[rank, position] = x[source, token]
            row_s[rank, position] = s[source, token, k]
    return rows, row_s


def flush(v: np.ndarray) -> np.ndarray:
    """float32 with subnormals replaced by a zero of their sign."""
    return np.where(np.abs(v) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), v), v)


def add(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """One float32 addition that flushes its inputs and its result."""
    with np.errstate(all="ignore"):
        return flush(np.add(flush(a), flush(b), dtype=np.float32))


def ordered_sum(terms: list[np.ndarray]) -> np.ndarray:
    """Terms of the payload type added in float32 in the order given, rounded back at the end."""
    if len(terms) == 1:  # a copy, which keeps every bit
        return terms[0]
    total = terms[0].astype(np.float32)
    for term in terms[1:]:
        total = add(total, term.astype(np.float32))
    with np.errstate(all="ignore"):
        return total.astype(terms[0].dtype)


def combine(
    rows: np.ndarray, row_s: np.ndarray, p: Plan, *, num_nodes: int
) -> tuple[np.ndarray, np.ndarray]:
    """y [R, T, H] and s [R, T, K] from rows [R, C, H] and row_s [R, C]."""
    ranks, tokens, topk = p.positions.shape
    local = p.group_sizes.shape[1]
    ranks_per_node = ranks // num_nodes
    y = np.zeros((ranks, tokens, rows.shape[-1]), rows.dtype)
    s = np.zeros((ranks, tokens, topk), row_s.dtype)
    for owner in range(ranks):
        for token in range(tokens):
            at_rank = collections.defaultdict(list)
            for k in range(topk):
                position = p.positions[owner, token, k]
                if position >= 0:
                    rank = int(p.expert_ids[owner, token, k]) // local
                    at_rank[rank].append(rows[rank, position])
                    s[owner, token, k] = row_s[rank, position]
            partials = {rank: ordered_sum(at_rank[rank]) for rank in sorted(at_rank)}
            if num_nodes > 1:
                at_node = collections.defaultdict(list)
                for rank, partial in partials.items():
                    at_node[rank // ranks_per_node].append(partial)
                partials = {node: ordered_sum(at_node[node]) for node in sorted(at_node)}
            if partials:
                y[owner, token] = ordered_sum(list(partials.values()))
    return y, s
