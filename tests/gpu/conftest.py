"""Tests that need a GPU: `make test-gpu`, or a part of them with SHARD=i/n."""

import os

import pytest


def pytest_collection_modifyitems(config, items):
    here = [item for item in items if item.path.parent == config.rootpath / "tests" / "gpu"]
    for item in here:
        if not item.get_closest_marker("gpu2"):
            item.add_marker(pytest.mark.gpu1)
    if shard := os.environ.get("SHARD"):
        index, count = map(int, shard.split("/"))
        if not 1 <= index <= count:
            raise pytest.UsageError(f"SHARD={shard}: must be i/n with 1 <= i <= n")
        # Dealt out in turn, so that the shards take about the same time.
        dropped = [item for i, item in enumerate(here) if i % count != index - 1]
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if item not in dropped]
