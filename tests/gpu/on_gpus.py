"""The shared cases on few GPUs: their ranks become virtual ranks."""

import dataclasses

import cases
import numpy as np
import oracle
import origin
import runs


def on_gpus(case: cases.Case) -> cases.Case:
    """One instance of the case's group, hidden rounded up to what the kernels take."""
    step = 16 // case.payload.itemsize
    return dataclasses.replace(
        case,
        mesh=(1, 1, 1),
        axes=("node", "rank"),
        virtual_ranks=case.ranks,
        num_nodes=case.nodes,
        hidden=-(-case.hidden // step) * step,
    )


def setting(case: cases.Case) -> runs.Setting:
    """The case on as many of the GPUs here as divide its ranks."""
    return runs.setting_for(case, "ptx")


# Sizes that only matter to these kernels: many chunks, the limits, a real model.
LARGER = (
    cases.Case(
        "many_tokens", tokens=257, experts=64, topk=8, hidden=1024, virtual_ranks=8, num_nodes=2,
        dtype="bfloat16", routing="skewed",
    ),
    cases.Case(
        "many_tokens_overflow", tokens=515, experts=12, topk=3, hidden=36, virtual_ranks=4,
        capacity_factor=0.8, alignment=16, routing="uneven",
    ),
    cases.Case(
        "deepseek_v3", tokens=64, experts=256, topk=8, hidden=7168, virtual_ranks=8,
        dtype="bfloat16", tail="undefined",
    ),
    cases.Case(
        "all_limits", tokens=5, experts=2048, topk=16, hidden=32768, virtual_ranks=4,
        num_nodes=4, dtype="bfloat16",
    ),
    cases.Case(
        "one_rank", tokens=300, experts=8, topk=2, hidden=512, routing="repeats", special=True,
    ),
)  # fmt: skip


def check(case: cases.Case, got: dict, ranks: slice = slice(None)) -> None:
    """Compares what those ranks got from `runs.everything` with the oracle, every specified bit."""
    given, plans = runs.inputs(case), runs.plans(case)
    for field in runs.PLAN_FIELDS:
        want = np.stack([getattr(p, field) for p in plans])
        want = want[:, :, None] if field == "invalid" else want
        origin.assert_same_bits(got[field], want[:, ranks], field)
    for name, x, s in (("dispatch", given.x, given.s), ("combine_vjp", given.dy, given.ds)):
        pairs = [oracle.dispatch(a, b, p) for a, b, p in zip(x, s, plans, strict=True)]
        rows, row_s = map(np.stack, zip(*pairs, strict=True))
        keep = runs.specified(case)[:, ranks]
        origin.assert_same_rows(got[name][0], rows[:, ranks], f"{name} rows", keep=keep)
        origin.assert_same_bits(got[name][1], row_s[:, ranks], f"{name} row_s", keep=keep)
    sums = (("combine", given.rows, given.row_s), ("dispatch_vjp", given.d_rows, given.d_row_s))
    for name, rows, row_s in sums:
        pairs = [
            oracle.combine(a, b, p, num_nodes=case.nodes)
            for a, b, p in zip(rows, row_s, plans, strict=True)
        ]
        y, s = map(np.stack, zip(*pairs, strict=True))
        origin.assert_same_bits(got[name][0], y[:, ranks], f"{name} y")
        origin.assert_same_bits(got[name][1], s[:, ranks], f"{name} s")
