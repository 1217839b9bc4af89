"""Two independent chains of one group in one jit, run many times; prints what was launched.

Run by test_gpu_graphs.py with XLA_FLAGS that say how XLA puts calls into CUDA graphs. With argument
`collective` the calls go to XLA's stream for collectives; with a number it makes so many rounds;
with `slow` the deadlines are minutes.
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import cases  # noqa: E402
import jax  # noqa: E402
import numpy as np  # noqa: E402
import on_gpus  # noqa: E402
import oracle  # noqa: E402
import origin  # noqa: E402
import runs  # noqa: E402
from jax.experimental.compute_on import compute_on  # noqa: E402

import jax_moe  # noqa: E402
from jax_moe import _ffi  # noqa: E402

ROUNDS = next((int(a) for a in sys.argv[1:] if a.isdecimal()), 30)
# Dispatch x and combine the rows as they are: every token comes back as often as it has rows.
CASES = [
    cases.Case(
        f"graph{i}", tokens=24, experts=16, topk=4, hidden=128, virtual_ranks=4, num_nodes=2,
        dtype="bfloat16", routing=routing,
    )
    for i, routing in enumerate(["uniform", "skewed", "repeats", "uneven", "quiet", "invalid"])
]  # fmt: skip


def main() -> None:
    at = on_gpus.setting(dataclasses.replace(CASES[0], capacity=24 * 4 * 4))
    slow = 30.0 if "slow" in sys.argv else 1.0
    at.group.set_timeout(10.0 * slow, flight_timeout_s=5.0 * slow)

    def chain(ids, x, s):
        plan = at.plan(ids, "ptx", capacity=at.capacity)
        rows, row_s = jax_moe.dispatch(x, s, plan)
        return plan.sources, *jax_moe.combine(rows, row_s, plan)

    run: Any = chain
    if "collective" in sys.argv:
        run = compute_on(
            chain,
            compute_type="gpu_stream:collective",
            out_memory_spaces=jax.memory.Space.Device,
        )

    @jax.jit
    @at.shard_map
    def both(first, second):
        return run(*first), run(*second)

    def operands(case):
        given = runs.inputs(case)
        return tuple(map(at.place, (given.ids, given.x, given.s)))

    def expected(case):
        given = runs.inputs(case)
        p = oracle.plan(given.ids[0], num_experts=case.experts, capacity=at.capacity, alignment=1)
        rows, row_s = oracle.dispatch(given.x[0], given.s[0], p)
        return p.sources, *oracle.combine(rows, row_s, p, num_nodes=2)

    given = [operands(case) for case in CASES]
    want = [expected(case) for case in CASES]
    for round_ in range(ROUNDS):
        a, b = round_ % len(CASES), (2 * round_ + 1) % len(CASES)
        results = jax.block_until_ready(both(given[a], given[b]))
        for name, got, right in zip("ab", results, (want[a], want[b]), strict=True):
            for what, x, y in zip(("sources", "y", "s"), got, right, strict=True):
                # [R*n, ...] as [R, n, ...]
                origin.assert_same_bits(
                    np.asarray(x).reshape(y.shape), y, f"round {round_} chain {name} {what}"
                )
    at.group.check()
    launches = _ffi.cuda.num_launches(at.group.key)
    calls = 6 * ROUNDS * at.group.num_devices
    precompiled = _ffi.cuda.is_precompiled(at.group.devices[0].local_hardware_id)
    print(json.dumps({"calls": calls, "launches": launches, "precompiled": precompiled}))


main()
