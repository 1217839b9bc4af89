"""A run's outcome as JSON and as Markdown."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from jax_moe.bench._columns import title
from jax_moe.bench._programs import HEADLINE, MEASURES
from jax_moe.bench._run import Outcome, Record, Setting

# Measures in which a column is compared with the best of the others.
COMPARED = ("plan+dispatch+combine", "dispatch+combine", "forward+backward")


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Our column against the fastest of the others, in one setting and measure."""

    routing: str
    dtype: str
    measure: str
    ours: str
    rival: str
    times_faster: float  # medians: the rival's over ours
    memory_ratio: float  # peak bytes: ours over the rival's
    least_memory_ratio: float  # ours over the least of any other column


def our_column(records: Iterable[Record]) -> str | None:
    """The implementation that the run is about: the fastest kind that was measured."""
    names = list(dict.fromkeys(record.column for record in records))
    return next((n for fast in ("ptx", "cpu", "xla") for n in names if _kind(n) == fast), None)


def _kind(column: str) -> str:
    return column.partition(":")[0]


def comparisons(outcome: Outcome) -> list[Comparison]:
    """Our column against the others, the specification's apart, in each setting."""
    ours = our_column(outcome.records)
    if ours is None:
        return []
    # Neither the specification nor our column with other settings is a rival.
    apart, found = (_kind(ours), "reference"), []
    for setting in outcome.settings:
        for measure in COMPARED:
            rows = {r.column: r for r in _of(outcome, setting) if r.measure == measure}
            mine = rows.get(ours)
            rows = {name: row for name, row in rows.items() if _kind(name) not in apart}
            if mine is None or not rows:
                continue
            rival = min(rows.values(), key=lambda r: r.median_us)
            least = min(r.peak_bytes for r in rows.values())
            found.append(
                Comparison(
                    routing=setting.routing,
                    dtype=setting.dtype,
                    measure=measure,
                    ours=mine.column,
                    rival=rival.column,
                    times_faster=rival.median_us / mine.median_us,
                    memory_ratio=mine.peak_bytes / rival.peak_bytes,
                    least_memory_ratio=mine.peak_bytes / least,
                )
            )
    return found


def as_document(outcome: Outcome, conditions: dict[str, str]) -> dict[str, Any]:
    """Everything, for programs."""
    return {
        "conditions": conditions,
        "options": dataclasses.asdict(outcome.options),
        "num_ranks": outcome.num_ranks,
        "before each timed call": outcome.preparation,
        "measures": MEASURES,
        "settings": [dataclasses.asdict(s) for s in outcome.settings],
        "records": [dataclasses.asdict(r) | {"peak_bytes": r.peak_bytes} for r in outcome.records],
        "comparisons": [dataclasses.asdict(c) for c in comparisons(outcome)],
        "skipped": outcome.skipped,
    }


def as_markdown(outcome: Outcome, conditions: dict[str, str]) -> str:
    """A section for docs/results.md."""
    return "\n".join(_lines(outcome, conditions)) + "\n"


def _lines(outcome: Outcome, conditions: dict[str, str]) -> Iterator[str]:
    yield f"## {outcome.options.shape}, {outcome.num_ranks} ranks"
    yield ""
    yield from fact_lines(conditions | {"before each timed call": outcome.preparation})
    yield (
        "- every column gave the specified result before it was timed: expert rows bit for bit "
        "and in the specified order, sums bit for bit (ours) or to the payload's tolerance; "
        "inputs are random, unused rows NaN; no column drops rows"
    )
    calls = outcome.options.calls
    yield (
        "- time: milliseconds, median ± standard deviation over repetitions in which all columns "
        "take turns, from the call to the last device's result"
        + (f", of {calls} calls in sequence in one program, divided by {calls}" * (calls > 1))
    )
    yield ""
    yield "| measure | inside the timed region |"
    yield "| --- | --- |"
    for measure in outcome.options.measures:
        yield f"| {measure} | {MEASURES[measure]} |"
    yield ""
    yield "| column | way |"
    yield "| --- | --- |"
    for column in dict.fromkeys(r.column for r in outcome.records):
        yield f"| {column} | {title(column)} |"
    for setting in outcome.settings:
        yield ""
        yield from _setting_lines(outcome, setting)
    yield from _comparison_lines(outcome)
    yield from skipped_lines(outcome.skipped)


def fact_lines(facts: dict[str, str]) -> Iterator[str]:
    """What a run was made under, as a list."""
    for name, value in facts.items():
        yield f"- {name}: `{value}`" if name == "command" else f"- {name}: {value}"


def skipped_lines(skipped: dict[str, str]) -> Iterator[str]:
    """Says what could not run, and why."""
    for name, why in skipped.items():
        yield ""
        yield f"Not run: {name}: {why.rstrip('.')}."


def _setting_lines(outcome: Outcome, setting: Setting) -> Iterator[str]:
    records, measures = _of(outcome, setting), outcome.options.measures
    counts = sorted(r.repetitions for r in records) or [0]
    yield (
        f"### {setting.dtype}, {setting.routing} routing: MaxVio {setting.max_violation:.2f}, "
        f"C {setting.capacity} rows ({setting.rows} used at the busiest rank), "
        f"{counts[0]} to {counts[-1]} repetitions"
    )
    yield ""
    yield f"| ms | {' | '.join(measures)} |"
    yield f"| --- |{' ---: |' * len(measures)}"
    for column in dict.fromkeys(r.column for r in records):
        cells = {r.measure: f"{ms(r.median_us)} ± {ms(r.deviation_us)}" for r in records
                 if r.column == column}  # fmt: skip
        yield f"| {column} | {' | '.join(cells.get(m, '-') for m in measures)} |"
    floor = " | ".join(ms(setting.floor_us[m]) for m in measures)
    yield f"| floor: necessary bytes at {setting.copy_gb_per_s:.1f} GB/s of copy | {floor} |"
    ours = {r.measure: r.median_us for r in records if r.column == our_column(records)}
    if ours:
        shares = " | ".join(f"{setting.floor_us[m] / ours[m]:.0%}" for m in measures)
        yield f"| {our_column(records)}, floor / time | {shares} |"
    if bare := [r for r in records if r.measure not in measures]:
        yield ""
        yield "| ms | | |"
        yield "| --- | --- | ---: |"
        for r in bare:
            yield f"| {r.column} | {r.measure} | {ms(r.median_us)} ± {ms(r.deviation_us)} |"
    yield ""
    yield from _byte_lines(records)


def _byte_lines(records: list[Record]) -> Iterator[str]:
    shown = [r for r in records if r.measure in (HEADLINE, "forward+backward")]
    yield (
        "| MB a rank | crosses a link | XLA temporaries | outputs | own buffers | peak | "
        "mean ± deviation, ms |"
    )
    yield "| --- |" + " ---: |" * 6
    for r in shown:
        yield (
            f"| {r.column}, {r.measure} | {_mb(r.link_bytes)} | {_mb(r.temp_bytes)} | "
            f"{_mb(r.output_bytes)} | {_mb(r.own_bytes)} | {_mb(r.peak_bytes)} | "
            f"{ms(r.mean_us)} ± {ms(r.deviation_us)} |"
        )


def _comparison_lines(outcome: Outcome) -> Iterator[str]:
    found = comparisons(outcome)
    if not found:
        return
    yield ""
    yield f"### {found[0].ours} against the fastest of the other columns"
    yield ""
    yield (
        "| routing, type | measure | fastest other | times faster | peak memory, of its | "
        "of the least of all |"
    )
    yield "| --- | --- | --- | ---: | ---: | ---: |"
    for c in found:
        yield (
            f"| {c.routing}, {c.dtype} | {c.measure} | {c.rival} | {c.times_faster:.2f} | "
            f"{c.memory_ratio:.2f} | {c.least_memory_ratio:.2f} |"
        )


def _of(outcome: Outcome, setting: Setting) -> list[Record]:
    return [
        record
        for record in outcome.records
        if (record.routing, record.dtype) == (setting.routing, setting.dtype)
    ]


def ms(microseconds: float) -> str:
    """Microseconds as milliseconds, three digits."""
    return f"{microseconds / 1000:.3g}" if microseconds < 1e5 else f"{microseconds / 1000:.0f}"


def _mb(count: int) -> str:
    return f"{count / 1e6:.2f}" if count < 1e7 else f"{count / 1e6:.0f}"
