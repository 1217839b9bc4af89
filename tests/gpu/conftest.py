"""Tests that need a GPU: `make test-gpu`, or a part of them with SHARD=i/n.

The slow ones under sanitizers run with SHARD=sanitizers, and only then.
"""

import os

import pytest
from process_world import World


@pytest.fixture
def world(request) -> World:
    """What a fixture that `process_world.worlds` names gives."""
    return request.getfixturevalue(request.param)


def pytest_collection_modifyitems(config, items):
    here = [item for item in items if item.path.parent == config.rootpath / "tests" / "gpu"]
    for item in here:
        if not item.get_closest_marker("gpu2"):
            item.add_marker(pytest.mark.gpu1)
    shard = os.environ.get("SHARD", "")
    slow = [item for item in here if item.path.stem == "test_gpu_sanitizers"]
    kept = slow if shard == "sanitizers" else [item for item in here if item not in slow]
    if shard and shard != "sanitizers":
        index, count = map(int, shard.split("/"))
        if not 1 <= index <= count:
            raise pytest.UsageError(f"SHARD={shard}: must be i/n with 1 <= i <= n, or sanitizers")
        # Dealt out in turn, so that the shards take about the same time.
        kept = [item for i, item in enumerate(kept) if i % count == index - 1]
    dropped = [item for item in here if item not in kept]
    config.hook.pytest_deselected(items=dropped)
    items[:] = [item for item in items if item not in dropped]
