"""Two processes that share a group: on one GPU, on two, and on two of which each sees its own.

With JAX_MOE_KILLS=0 no process is killed, and the last test has nothing to look at.
"""

import re
import signal

import pytest
from process_world import BOTH, ON_ONE_GPU, World, worlds

pytestmark = pytest.mark.multiproc


@pytest.fixture(scope="module")
def one_gpu(tmp_path_factory) -> World:
    """Both on GPU 0, side by side under MPS, else in turns. No collectives."""
    return World("one_gpu", (0, 0), "all", tmp_path_factory.mktemp("one"), **ON_ONE_GPU)


@pytest.fixture(scope="module")
def two_gpus(tmp_path_factory) -> World:
    return World("two_gpus", (0, 1), "all", tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def apart(tmp_path_factory) -> World:
    """As launchers do that give every process its GPU."""
    return World(
        "apart", (-1, -1), "first", tmp_path_factory.mktemp("apart"),
        CUDA_VISIBLE_DEVICES=("0", "1"),
    )  # fmt: skip


ALL = [*BOTH, pytest.param("apart", marks=pytest.mark.gpu2)]


@worlds(ALL)
def test_every_bit(world):
    for process in range(2):
        world.step(process, "exchanged")
        assert 'implementation "ptx"' in world.logs[process].read_text()


@worlds(ALL)
def test_preflight(world):
    log = world.logs[0].read_text()
    link = {"one_gpu": "same GPU", "two_gpus": "NVLink", "apart": "unknown"}[
        world.logs[0].stem[:-1]
    ]
    assert "IPC" in log and link in log, log[:3000]
    assert 'implementation="ptx": possible' in log


@worlds(BOTH)
def test_soak(world):
    for process in range(2):
        assert world.step(process, "soak")["wrong"] == 0


@worlds(BOTH)
def test_rebuild_and_close(world):
    for process in range(2):
        world.step(process, "rebuilt")


@worlds(BOTH)
def test_a_stopped_process_is_named_and_the_group_comes_back(world):
    told = world.step(0, "stopped")
    assert "phase join: rank 0 (GPU" in told["fault"]
    assert re.search(r" of process 0\) waited 2(\.\d+)? s for rank 1 \(GPU", told["fault"])
    assert " of process 1) to start the same call" in told["fault"]
    assert told["fault"].splitlines()[0] in world.logs[0].read_text(), "printed at once"
    assert told["nan"]
    assert 1.9 < told["seconds"] < 20
    assert "gave up because rank 0" in world.step(1, "stopped")["fault"]
    for process in range(2):
        world.step(process, "mended")


@worlds(BOTH)
def test_the_survivor_of_a_killed_process_tells(world):
    told = world.step(0, "survived")
    assert "of process 1)" in told["fault"], told
    assert "waited 2" in told["fault"]
    assert "done" in world.steps[0]
    assert world.codes == [0, -signal.SIGKILL]
