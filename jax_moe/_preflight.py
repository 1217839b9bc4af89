"""Which GPUs reach each other's memory, how, and why not: what the PTX kernels need beforehand.

GPUs of one process reach each other by pointer, those of two processes of a host through the
driver's IPC handles. Every process describes its own GPUs and tries to open memory of the others;
all come to the same result, because all of it is gathered.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jax_moe import _ffi
from jax_moe._meeting import Meeting

Device = Any  # jax.Device, which is no type to pyright
Instances = Sequence[Sequence[Device]]
_native = _ffi.cuda


@dataclasses.dataclass(frozen=True)
class Link:
    """How a GPU reaches the memory of another.

    Attributes:
      source: the GPU that reads and writes.
      target: the GPU whose memory it is.
      way: "pointer" within a process, "IPC" between two, "none" between hosts.
      link: "NVLink", "PCIe", "same GPU", or "unknown" where the source's process does not see the
        other GPU or it was not looked at.
      refused: why it does not work; empty if it does.
    """

    source: str
    target: str
    way: str
    link: str
    refused: str = ""


@dataclasses.dataclass(frozen=True)
class Preflight:
    """What was found out about some GPUs; its text is a table of all pairs.

    Attributes:
      links: every ordered pair of GPUs that must reach each other.
      obstacle: why the PTX kernels cannot serve them, or None.
      ordinals: CUDA ordinal of each GPU in its own process, by JAX's device id.
      processes_per_gpu: the most processes that share one GPU.
    """

    links: tuple[Link, ...]
    obstacle: str | None
    ordinals: dict[int, int]
    processes_per_gpu: int = 1

    def __str__(self) -> str:
        rows = [("from", "to", "way", "link", "")]
        rows += [(x.source, x.target, x.way, x.link, x.refused or "ok") for x in self.links]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        verdict = f"not possible: {self.obstacle}" if self.obstacle else "possible"
        return "\n".join([*lines, f'implementation="ptx": {verdict}'])


def examine(instances: Instances, *, place: str, what: str, timeout_s: float) -> Preflight:
    """Looks at the GPUs of some group instances.

    If they are of several processes, all of these must call it.

    Raises:
      RuntimeError: a process did not come within `timeout_s` seconds.
    """
    own = jax.process_index()
    everyone = _processes(instances)
    together = connected(instances, own)
    here = [device for device in _devices(instances) if device.process_index == own]
    if everyone == [own]:
        return _judge(instances, {own: _card(here)}, {own: {}})
    near = [x for x in instances if together & {device.process_index for device in x}]
    with Meeting(f"{place}/{min(together)}", what, sorted(together), timeout_s, process=own) as m:
        hosts = dict(zip(sorted(together), m.gather("host", _host()), strict=True))
        if any(len({hosts[device.process_index] for device in x}) > 1 for x in near):
            found = _spans_hosts(near, hosts)
        else:
            texts = m.gather("gpus", json.dumps(_card(here)))
            cards = dict(zip(sorted(together), map(json.loads, texts), strict=True))
            texts = m.gather("probes", json.dumps(_try_probes(near, cards, own)))
            probes = dict(zip(sorted(together), map(json.loads, texts), strict=True))
            found = _judge(near, cards, probes)
    if set(everyone) == together:
        return found
    # What one host refuses all must, since all run one program.
    with Meeting(f"{place}/all", what, everyone, timeout_s, process=own) as m:
        verdicts = m.gather("verdict", found.obstacle or "")
    other = next((f"process {p}: {v}" for p, v in zip(everyone, verdicts, strict=True) if v), None)
    return dataclasses.replace(found, obstacle=found.obstacle or other)


def _devices(instances: Instances) -> list[Device]:
    return list(itertools.chain.from_iterable(instances))


def _processes(instances: Instances) -> list[int]:
    return sorted({device.process_index for device in _devices(instances)})


def connected(instances: Instances, process: int) -> set[int]:
    """The processes that share an instance with this one, directly or through others."""
    found, before = {process}, set()
    while found != before:
        before = set(found)
        for instance in instances:
            members = {device.process_index for device in instance}
            if members & found:
                found |= members
    return found


def _host() -> str:
    """The boot id: containers of one host have host names of their own, but one kernel."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _namespaces() -> dict[str, str]:
    return {name: os.readlink(f"/proc/self/ns/{name}") for name in ("ipc", "pid")}


def _card(devices: Sequence[Device]) -> dict:
    """What this process tells of its GPUs."""
    card = {"namespaces": _namespaces(), "gpus": {}, "error": ""}
    try:
        for device in devices:
            gpu = _native.describe_gpu(device.local_hardware_id)
            try:
                gpu["probe"], gpu["unshared"] = _native.export_probe(gpu["ordinal"]).hex(), ""
            except RuntimeError as error:
                gpu["probe"], gpu["unshared"] = "", str(error)
            card["gpus"][str(device.id)] = gpu
    except (NotImplementedError, RuntimeError) as error:
        card["error"] = str(error)
    return card


def _try_probes(instances: Instances, cards: dict[int, dict], own: int) -> dict[str, str]:
    """What came of opening the other processes' memory: "id-id" to an error or ""."""
    tried = {}
    for a, b in _pairs(instances):
        if a.process_index != own or b.process_index == own:
            continue
        ours, theirs = _gpu(cards, a), _gpu(cards, b)
        if ours and theirs and theirs["probe"]:
            try:
                _native.try_probe(ours["ordinal"], bytes.fromhex(theirs["probe"]))
            except RuntimeError as error:
                tried[f"{a.id}-{b.id}"] = str(error)
            else:
                tried[f"{a.id}-{b.id}"] = ""
    return tried


def _pairs(instances: Instances):
    for instance in instances:
        yield from itertools.permutations(instance, 2)


def _gpu(cards: dict[int, dict], device: Device) -> dict | None:
    return cards[device.process_index]["gpus"].get(str(device.id))


def _name(device: Device, ordinal: int | None = None) -> str:
    gpu = f"device {device.id}" if ordinal is None else f"GPU {ordinal}"
    return f"{gpu} of process {device.process_index}"


def _spans_hosts(instances: Instances, hosts: dict[int, str]) -> Preflight:
    links = []
    for a, b in _pairs(instances):
        same = hosts[a.process_index] == hosts[b.process_index]
        refused = "not tried" if same else "on another host"
        links.append(Link(_name(a), _name(b), "none", "unknown", refused))
    by_host: dict[str, list[int]] = {}
    for process, host in sorted(hosts.items()):
        by_host.setdefault(host, []).append(process)
    members = "; ".join(", ".join(map(str, processes)) for processes in by_host.values())
    obstacle = (
        f"it spans {len(by_host)} hosts (processes {members}, told apart by boot id), and the ptx "
        "kernels reach the GPUs of one"
    )
    return Preflight(tuple(links), obstacle, {})


def _judge(
    instances: Instances, cards: dict[int, dict], probes: dict[int, dict[str, str]]
) -> Preflight:
    links = tuple(_link(a, b, cards, probes) for a, b in _pairs(instances))
    gpus = {d.id: gpu for d in _devices(instances) if (gpu := _gpu(cards, d)) is not None}
    sharing = Counter(uuid for card in cards.values() for uuid in _uuids(card))
    return Preflight(
        links,
        _errors(cards) or _refusals(links) or (_differences(gpus) if len(cards) > 1 else None),
        {device: gpu["ordinal"] for device, gpu in gpus.items()},
        max(sharing.values(), default=1),
    )


def _uuids(card: dict) -> set[str]:
    return {gpu["uuid"] for gpu in card["gpus"].values()}


def _link(a: Device, b: Device, cards: dict[int, dict], probes: dict[int, dict[str, str]]) -> Link:
    way = "pointer" if a.process_index == b.process_index else "IPC"
    source, target = _gpu(cards, a), _gpu(cards, b)
    if source is None or target is None:
        return Link(_name(a), _name(b), way, "unknown", "a GPU cannot be used")
    reach = source["reach"].get(target["uuid"])
    if source["uuid"] == target["uuid"]:
        link, refused = "same GPU", ""
    elif reach is None:
        link, refused = "unknown", ""
    else:
        link, refused = "NVLink" if reach[1] else "PCIe", "" if reach[0] else "no peer access"
    if way == "IPC" and not refused:
        error = target["unshared"] or probes[a.process_index].get(f"{a.id}-{b.id}", "not tried")
        refused = _ipc_refusal(error, cards[a.process_index], cards[b.process_index])
    names = _name(a, source["ordinal"]), _name(b, target["ordinal"])
    return Link(*names, way, link, refused)


def _ipc_refusal(error: str, card: dict, other: dict) -> str:
    if not error:
        return ""
    ours, theirs = card["namespaces"], other["namespaces"]
    apart = [name.upper() for name in ours if ours[name] != theirs[name]]
    hint = (
        f"; the two are in different {' and '.join(apart)} namespaces: run both in one container, "
        "or start the containers with --ipc=host and --pid=host"
        if apart
        else ""
    )
    return f"IPC is refused ({error}){hint}"


def _errors(cards: dict[int, dict]) -> str | None:
    errors = (f"process {p}: {card['error']}" for p, card in cards.items() if card["error"])
    return next(errors, None)


def _refusals(links: Sequence[Link]) -> str | None:
    refused = [link for link in links if link.refused]
    if not refused:
        return None
    first = refused[0]
    more = f" (and {len(refused) - 1} more of {len(links)} pairs)" if len(refused) > 1 else ""
    return (
        f"{first.source} cannot reach the memory of {first.target}: {first.refused}{more}; "
        "jax_moe.preflight shows all pairs"
    )


def _differences(gpus: dict[int, dict]) -> str | None:
    """The ranks must choose the same shape of launch, each for itself."""
    kinds = {
        (gpu["name"], gpu["num_sms"], *gpu["resident_blocks"]): gpu["name"] for gpu in gpus.values()
    }
    if len({kind[1:] for kind in kinds}) <= 1:
        return None
    found = "; ".join(f"{kind[0]}: {kind[1]} SMs, {kind[2:]} blocks" for kind in sorted(kinds))
    return f"its processes have GPUs of different sizes ({found}), and the kernels need equal ones"
