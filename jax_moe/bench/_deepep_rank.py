"""One rank of the bench's DeepEP columns: a process with PyTorch and without JAX.

Started by _deepep.py as `_deepep_rank.py FOLDER RANK`. The folder holds settings.json and the
operands of each rank, RANK.npz; there come the results of each column, RANK-SMS.npz, and from rank
0 outcome.json: memory, and the seconds of each repetition at the slowest rank. bfloat16 goes as
uint16.
"""
# pyright: reportMissingImports=false, reportIndexIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch  # first: deep_ep is linked against its libraries
import torch.distributed as dist
import triton
import triton.language as tl

import deep_ep  # isort: skip

FLUSH_BYTES = 256 << 20  # more than a GPU's L2 cache
BLOCK = 1024  # elements of a token that one Triton program moves
MEETING = 64  # tokens of the exchange that is the barrier on the GPUs


@triton.jit
def _to_rows(
    tokens, s, position, rows, row_s, hidden, top_k: tl.constexpr, lanes: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    """Writes each token, read once, and its scalars to its rows; -1 is no row."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = part * block + tl.arange(0, block)
    lane = tl.arange(0, lanes)
    its = tl.load(position + token * top_k + lane, mask=lane < top_k, other=-1)
    scalars = tl.load(s + token * top_k + lane, mask=its >= 0)
    tl.store(row_s + its, scalars, mask=(its >= 0) & (part == 0))
    used = tl.max(its, 0) >= 0
    payload = tl.load(tokens + token * hidden + column, mask=(column < hidden) & used)
    for k in tl.static_range(top_k):
        row = tl.load(position + token * top_k + k)
        tl.store(rows + row * hidden + column, payload, mask=(column < hidden) & (row >= 0))


@triton.jit
def _to_tokens(rows, position, tokens, hidden, top_k: tl.constexpr, block: tl.constexpr):
    """Adds each token's rows in float32."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    total = tl.zeros([block], tl.float32)
    for k in tl.static_range(top_k):
        row = tl.load(position + token * top_k + k)
        mask = (column < hidden) & (row >= 0)
        total += tl.load(rows + row * hidden + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(tokens + token * hidden + column, total.to(tl.bfloat16), mask=column < hidden)


class Rank:
    """The operands of this rank, and what DeepEP needs for all columns."""

    def __init__(self, folder: Path, rank: int):
        self.settings = settings = json.loads((folder / "settings.json").read_text())
        # What hangs shows where, before it is killed.
        faulthandler.dump_traceback_later(settings["limit_s"], exit=True)
        torch.cuda.set_device(settings["gpus"][rank])
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=settings["ranks"]
        )
        with np.load(folder / f"{rank}.npz") as given:
            held = {name: torch.from_numpy(given[name]).cuda() for name in given.files}
        self.ids = held["ids"].to(deep_ep.topk_idx_t)
        self.s = held["s"]
        self.x, self.rows = (held[name].view(torch.bfloat16) for name in ("x", "rows"))
        self.most = settings["ranks"] * len(self.x)  # tokens that can come
        self.numbers = torch.arange(self.most * self.ids.shape[1], device="cuda")
        self.flush = torch.zeros(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
        self.own_bytes = {sms: self._buffer_bytes(sms) for sms in settings["sms"]}
        self.buffer = deep_ep.Buffer(dist.group.WORLD, max(self.own_bytes.values()), 0)

    def configs(self, sms: int) -> tuple:
        """DeepEP's own choices for dispatch and combine with so many SMs."""
        deep_ep.Buffer.set_num_sms(sms)
        ranks = self.settings["ranks"]
        return deep_ep.Buffer.get_dispatch_config(ranks), deep_ep.Buffer.get_combine_config(ranks)

    def _buffer_bytes(self, sms: int) -> int:
        token = self.x.shape[1] * self.x.element_size()
        ranks = self.settings["ranks"]
        return max(c.get_nvl_buffer_size_hint(token, ranks) for c in self.configs(sms))

    def layout(self, count: int | None = None) -> dict:
        """Which of the first `count` tokens go where."""
        per_rank, _, per_expert, in_rank, _ = self.buffer.get_dispatch_layout(
            self.ids[:count], self.settings["experts"]
        )
        return dict(
            num_tokens_per_rank=per_rank, num_tokens_per_expert=per_expert, is_token_in_rank=in_rank
        )

    def send(self, config, layout: dict, count: int | None = None) -> tuple:
        """Dispatch without a wait of the host: tokens, local experts, scalars; and the handle."""
        tokens, local, s, _, handle, _ = self.buffer.dispatch(
            self.x[:count],
            topk_idx=self.ids[:count],
            topk_weights=self.s[:count],
            num_worst_tokens=self.settings["ranks"] * len(self.x[:count]),
            config=config,
            **layout,
        )
        return tokens, local, s, handle

    def positions(self, local: torch.Tensor) -> torch.Tensor:
        """The row of each (token, k) in the order (expert, source rank, token, k), or -1.

        Tokens arrive in the order (source rank, token), so a stable sort by expert does it.
        """
        local_experts = self.settings["experts"] // self.settings["ranks"]
        key = torch.where(local < 0, local_experts, local).flatten().to(torch.int16)
        order = torch.argsort(key, stable=True)
        position = torch.empty_like(order).scatter_(0, order, self.numbers)
        return position.masked_fill_(local.flatten() < 0, -1).view_as(local)

    def expand(self, tokens, s, position) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens to expert rows."""
        hidden, top_k = tokens.shape[1], position.shape[1]
        rows = tokens.new_empty(self.rows.shape)
        row_s = s.new_empty(len(rows))
        grid = len(tokens), triton.cdiv(hidden, BLOCK)
        lanes = triton.next_power_of_2(top_k)
        _to_rows[grid](tokens, s, position, rows, row_s, hidden, top_k, lanes, BLOCK)
        return rows, row_s

    def reduce(self, rows, position) -> torch.Tensor:
        """Expert rows to one row a token."""
        hidden = rows.shape[1]
        tokens = rows.new_empty(self.most, hidden)
        grid = self.most, triton.cdiv(hidden, BLOCK)
        _to_tokens[grid](rows, position, tokens, hidden, position.shape[1], BLOCK)
        return tokens


class Column:
    """The measures with so many SMs."""

    def __init__(self, rank: Rank, sms: int):
        self.rank = rank
        self.dispatch_config, self.combine_config = rank.configs(sms)
        self.tokens, local, _, self.handle = self._send()
        self.position = rank.positions(local)
        self.measures: dict[str, Callable] = {
            "plan+dispatch+combine": self.both,
            "plan+dispatch": lambda: self.dispatch()[0],
            "combine": lambda: self.combine(rank.rows, self.position, self.handle),
            "bare plan+dispatch": self._send,
            "bare combine": lambda: self._back(self.tokens, self.handle),
        }

    def _send(self) -> tuple:
        return self.rank.send(self.dispatch_config, self.rank.layout())

    def _back(self, tokens, handle) -> torch.Tensor:
        return self.rank.buffer.combine(tokens, handle, config=self.combine_config)[0]

    def dispatch(self) -> tuple:
        """Expert ids and tokens to (rows, row_s); and what combine needs."""
        tokens, local, s, handle = self._send()
        position = self.rank.positions(local)
        return self.rank.expand(tokens, s, position), position, handle

    def combine(self, rows, position, handle) -> torch.Tensor:
        """Expert rows to summed tokens."""
        return self._back(self.rank.reduce(rows, position), handle)

    def both(self) -> tuple:
        """Expert ids and tokens to (summed tokens, row_s)."""
        (rows, row_s), position, handle = self.dispatch()
        return self.combine(rows, position, handle), row_s

    def results(self) -> dict[str, torch.Tensor]:
        """What is to be checked, by measure and number; unused rows are zero."""
        used = int((self.position >= 0).sum())
        (rows, row_s), (y, row_s_too) = self.measures["plan+dispatch"](), self.both()
        for array in (rows, row_s, row_s_too):
            array[used:] = 0
        return {
            "plan+dispatch 0": rows, "plan+dispatch 1": row_s,
            "plan+dispatch+combine 0": y, "plan+dispatch+combine 1": row_s_too,
            "combine 0": self.measures["combine"](),
        }  # fmt: skip


def bits(array: torch.Tensor) -> torch.Tensor:
    """As integers of the same size, which compare NaN as equal."""
    return array.view({2: torch.int16, 4: torch.int32}[array.element_size()])


def tensors(result) -> list[torch.Tensor]:
    """The tensors of a result, those of the handle included."""
    if isinstance(result, torch.Tensor):
        return [result]
    return [t for part in result for t in tensors(part)] if isinstance(result, tuple) else []


def save(columns: dict[int, Column], folder: Path, rank: int) -> None:
    """Writes each column's results; what equals the column before becomes the same file."""
    before, path = {}, folder
    for sms, column in columns.items():
        results = {name: bits(array) for name, array in column.results().items()}
        target = folder / f"{rank}-{sms}.npz"
        if before and all(torch.equal(results[name], before[name]) for name in results):
            os.link(path, target)
        else:
            np.savez(target, **{name: array.cpu().numpy() for name, array in results.items()})
        before, path = results, target


def memory(program: Callable) -> dict[str, int]:
    """Bytes that a program takes at most at a time, and those of its result."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = program()
    torch.cuda.synchronize()
    output = sum(t.numel() * t.element_size() for t in tensors(result))
    return {"temp": torch.cuda.max_memory_allocated() - before - output, "output": output}


def time_once(rank: Rank, program: Callable, meet: Callable) -> float:
    """Seconds of `calls` calls, from when the ranks have met on their GPUs."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    dist.barrier()
    rank.flush.add_(1)
    meet()
    start.record()
    for _ in range(rank.settings["calls"]):
        program()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def time_in_turns(rank: Rank, programs: dict[str, Callable], meet: Callable) -> dict[str, list]:
    """Repeats all programs in turns, in the same random order on all ranks.

    After the first round rank 0 says how many more there are.
    """
    seconds = {name: [] for name in programs}
    order, rounds = random.Random(0), [rank.settings["repetitions"]]
    begin, done = time.monotonic(), 0
    while done < rounds[0]:
        for name in order.sample(list(programs), len(programs)):
            seconds[name].append(time_once(rank, programs[name], meet))
        done += 1
        if done == 1:
            fit = int(rank.settings["seconds"] / (time.monotonic() - begin))
            rounds = [min(rounds[0], max(rank.settings["least"], fit))]
            dist.broadcast_object_list(rounds)
    return seconds


def main(folder: Path, number: int) -> None:
    """Verifies nothing itself: writes results, then times, then writes what that gave."""
    rank = Rank(folder, number)
    columns = {sms: Column(rank, sms) for sms in rank.settings["sms"]}
    save(columns, folder, number)
    wanted = rank.settings["measures"]
    programs = {
        f"{sms} {name}": column.measures[name] for sms, column in columns.items() for name in wanted
    }
    used = {name: memory(program) for name, program in programs.items()}
    few, config = rank.layout(MEETING), next(iter(columns.values())).dispatch_config
    seconds = time_in_turns(rank, programs, lambda: rank.send(config, few, MEETING))
    everyone = [None] * rank.settings["ranks"]
    dist.all_gather_object(everyone, (seconds, used))
    if number == 0:
        outcome = {
            "own_bytes": rank.own_bytes,
            "seconds": {n: np.max([s[n] for s, _ in everyone], 0).tolist() for n in programs},
            "memory": {
                n: {part: max(u[n][part] for _, u in everyone) for part in ("temp", "output")}
                for n in programs
            },
        }
        (folder / "outcome.json").write_text(json.dumps(outcome))
    dist.barrier()


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with the bench
    status = 1
    try:
        main(Path(sys.argv[1]), int(sys.argv[2]))
        status = 0
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(status)  # the buffer's end would wait for the other ranks
