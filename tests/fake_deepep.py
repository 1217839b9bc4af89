"""Stands in for a rank of DeepEP, without GPUs and PyTorch; run by test_bench_deepep.py.

Arguments as of jax_moe/bench/_deepep_rank.py. FAKE_DEEPEP says what goes wrong: "good", "swaps two
rows", "fails" (rank 1), "hangs" (and has a child of its own, whose number it writes).
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np

FOLDER, RANK, MODE = Path(sys.argv[1]), int(sys.argv[2]), os.environ["FAKE_DEEPEP"]
SETTINGS = json.loads((FOLDER / "settings.json").read_text())
EXPERTS = SETTINGS["experts"] // SETTINGS["ranks"]  # of a rank


def results() -> dict[str, np.ndarray]:
    given = [dict(np.load(FOLDER / f"{rank}.npz")) for rank in range(SETTINGS["ranks"])]
    ids = np.stack([g["ids"] for g in given])
    x, rows = (np.stack([g[n] for g in given]).view(ml_dtypes.bfloat16) for n in ("x", "rows"))
    s = np.stack([g["s"] for g in given])
    mine = sorted((expert, *at) for at, expert in np.ndenumerate(ids) if expert // EXPERTS == RANK)
    got, row_s = np.zeros(rows.shape[1:], rows.dtype), np.zeros(rows.shape[1], s.dtype)
    for row, (_, source, token, k) in enumerate(mine):
        got[row], row_s[row] = x[source, token], s[source, token, k]
    if MODE == "swaps two rows":
        got[[0, 1]] = got[[1, 0]]
    y = (x[RANK].astype(np.float32) * ids.shape[2]).astype(x.dtype)
    combined = np.zeros(y.shape, np.float32)
    used = [0] * SETTINGS["ranks"]
    for expert, source, token, _ in sorted((e, *at) for at, e in np.ndenumerate(ids)):
        rank = expert // EXPERTS
        if source == RANK:
            combined[token] += rows[rank, used[rank]].astype(np.float32)
        used[rank] += 1
    return {
        "plan+dispatch 0": got.view(np.uint16), "plan+dispatch 1": row_s,
        "plan+dispatch+combine 0": y.view(np.uint16), "plan+dispatch+combine 1": row_s,
        "combine 0": combined.astype(x.dtype).view(np.uint16),
    }  # fmt: skip


def main() -> None:
    if MODE == "fails":
        if RANK == 1:
            sys.exit("no such symbol: frobnicate")
        time.sleep(600)
    if MODE == "hangs":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(os.environ["CHILD"] + str(RANK)).write_text(str(child.pid))
        time.sleep(600)
    first, *others = (FOLDER / f"{RANK}-{sms}.npz" for sms in SETTINGS["sms"])
    np.savez(first, **results())
    for other in others:
        os.link(first, other)
    if RANK == 0:
        names = [f"{sms} {measure}" for sms in SETTINGS["sms"] for measure in SETTINGS["measures"]]
        outcome = {
            "own_bytes": {sms: 1000 * sms for sms in SETTINGS["sms"]},
            "seconds": {
                name: [1e-3 * len(name), 3e-3, 5e-3][: SETTINGS["repetitions"]] for name in names
            },
            "memory": {name: {"temp": 7, "output": len(name)} for name in names},
        }
        (FOLDER / "outcome.json").write_text(json.dumps(outcome))


main()
