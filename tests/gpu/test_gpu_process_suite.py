"""The cases of the suite, graphs and XLA's collectives where two processes share a group."""

import pytest
from process_world import BOTH, COLLECTIVES_ON_ONE_GPU, ON_ONE_GPU, World, worlds

pytestmark = pytest.mark.multiproc

LIMIT_S = 220.0
CAPTURE = (
    "--xla_gpu_graph_min_graph_size=1 --xla_gpu_command_buffer_scheduling_mode=SERIALIZE "
    "--xla_gpu_autotune_level=0"
)
FLAGS = {"XLA_FLAGS": (CAPTURE, CAPTURE)}


@pytest.fixture(scope="module")
def one_gpu(tmp_path_factory) -> World:
    return World(
        "suite_one_gpu", (0, 0), "suite", tmp_path_factory.mktemp("one"), limit_s=LIMIT_S,
        **ON_ONE_GPU, **FLAGS,
    )  # fmt: skip


@pytest.fixture(scope="module")
def two_gpus(tmp_path_factory) -> World:
    return World(
        "suite_two_gpus", (0, 1), "suite", tmp_path_factory.mktemp("two"), limit_s=LIMIT_S, **FLAGS
    )


@worlds(BOTH)
def test_every_bit_of_every_case(world):
    for process in range(2):
        told = world.step(process, "every case")
        assert told["count"] > 30
        assert {1, 2, 4} <= set(told["virtual_ranks"])


@worlds(BOTH)
def test_graphs_are_replayed_with_changing_routing(world):
    for process in range(2):
        told = world.step(process, "replayed")
        assert told["launches"] < told["calls"], "no call was replayed by a graph"


@pytest.fixture(scope="module")
def beside_on_one_gpu(tmp_path_factory) -> World:
    return World(
        "beside_one_gpu", (0, 0), "collectives", tmp_path_factory.mktemp("beside"),
        **ON_ONE_GPU, **COLLECTIVES_ON_ONE_GPU,
    )  # fmt: skip


@pytest.fixture(scope="module")
def beside_on_two_gpus(tmp_path_factory) -> World:
    return World("beside_two_gpus", (0, 1), "collectives", tmp_path_factory.mktemp("beside"))


@worlds([pytest.param("beside_on_two_gpus", marks=pytest.mark.gpu2), "beside_on_one_gpu"])
def test_soak_beside_collectives_in_one_program(world):
    for process in range(2):
        wrong = world.step(process, "soak beside collectives")["wrong"]
        assert wrong == {"1": 0, "4": 0}  # by virtual ranks
