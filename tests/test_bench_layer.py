"""The layer's bench: columns that compute the same layer, wrong ones refused, and its report."""

import json

import pytest

from jax_moe.bench import _layer_columns, layer

SMALL = ["--shape", "tiny", "--tokens", "8", "--hidden", "16", "--width", "8", "--devices", "4"]


def test_command_line_compares_times_and_reports(tmp_path, capsys):
    columns = ["moe", "cpu", "local", "gshard", "maxtext"]
    out = [tmp_path / "out.json", tmp_path / "out.md"]
    layer.main(
        [*SMALL, "--dtype", "float32", "--routing", "skewed", "--columns", ",".join(columns),
         "--repetitions", "3", "--seconds", "0", "--json", str(out[0]), "--markdown", str(out[1])]
    )  # fmt: skip
    found = json.loads(out[0].read_text())
    parts = ["router", "plan", "dispatch", "experts", "combine"]
    assert [(r["column"], r["measure"]) for r in found["records"]] == [
        *((column, "forward+backward") for column in columns[:-1]),
        *(("part", part) for part in parts),
    ]
    for record in found["records"]:
        assert 0 < record["least_us"] <= record["median_us"]
    tflops = 3 * 6 * (8 * 4) * 16 * 8 / 1e6  # 8 tokens of 4 experts, three matmuls, three ways
    for record in found["records"][:4]:
        assert record["tflops"] * record["median_us"] == pytest.approx(tflops)
        assert record["peak_bytes"] > 0
    assert list(found["skipped"]) == ["maxtext"]
    report = out[1].read_text()
    printed = capsys.readouterr()
    assert report.strip() in printed.out
    assert "compiling moe: " in printed.err and "compiling the parts: " in printed.err
    for words in (*columns, *parts, "skewed, MaxVio", "Not run: maxtext"):
        assert words in report


def test_a_column_that_computes_something_else_is_refused(monkeypatch):
    """Local routing is another layer: it must not pass under another column's name."""
    make = _layer_columns.make

    def mislabelled(name, *rest):
        return make("local" if name == "all_to_all" else name, *rest)

    monkeypatch.setattr(_layer_columns, "make", mislabelled)
    with pytest.raises(AssertionError, match=r"all_to_all: \[0\] differs by"):
        layer.main([*SMALL, "--dtype", "bfloat16", "--columns", "cpu,all_to_all", "--no-parts"])
