"""The trainer in two processes with a GPU each, or on one GPU: the losses of one process."""

import contextlib
import os
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.multiproc

STEPS = 8
LIMIT_S = 150.0
# 8 ranks on 4 nodes in each run. The same bits of the matrix products are not to be had from
# batches of other sizes, but TensorFloat-32 would part the losses after three digits.
TINY = [
    "tiny", "--steps", str(STEPS), "--print-every", "1", "--data.validation-windows", "1",
    "--mesh.node", "1", "--mesh.num-nodes", "4", "--mesh.cpu-devices", "0",
    "--optimizer.warmup-steps", "2", "--implementation", "ptx",
]  # fmt: skip
ENVIRONMENT = {
    "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.1",
    "XLA_FLAGS": "--xla_gpu_autotune_level=0",
    "JAX_DEFAULT_MATMUL_PRECISION": "highest",
}


class Training:
    """Runs of `tiny`, each into a folder of its own."""

    def __init__(self, folder: Path):
        import jobs  # not at the top: without the extra "train" the other tests can be collected
        import toy

        self.job = jobs.Job.make(folder)
        self.text = toy.write_text(folder / "longer.txt", 60_000)

    def losses(self, run: str, module: str, before: list[str], mesh: list[str], **changes):
        """The losses of a run that ends in time with status 0."""
        folder = self.job.folder
        text = ["--run-dir", str(folder / run), "--data.file", str(self.text)]
        command = self.job.command(module, *before, *TINY, *mesh, *text)
        output = folder / f"{run}.txt"
        process = self.job.start(command, output, **ENVIRONMENT | changes)
        try:
            status = process.wait(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            status = f"not done after {LIMIT_S:g} s"
        finally:
            end(process)
        printed = [output, *sorted((folder / run / "logs").glob("*.log"))]
        tails = "\n".join(f"{path}\n{path.read_text()[-3000:]}" for path in printed)
        assert status == 0, f"{status}\n{tails}"
        return self.job.losses(run)


def end(process: subprocess.Popen) -> None:
    """A second SIGTERM makes the launcher kill its processes."""
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=5)


@pytest.fixture(scope="module")
def training(tmp_path_factory) -> Training:
    return Training(tmp_path_factory.mktemp("training"))


@pytest.fixture(scope="module")
def alone(training) -> np.ndarray:
    mesh = ["--mesh.rank", "1", "--mesh.virtual-ranks", "8"]
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    return training.losses("alone", "train", [], mesh, CUDA_VISIBLE_DEVICES=first)


@pytest.mark.parametrize(
    "gpus", [pytest.param(("0", "1"), marks=pytest.mark.gpu2, id="two_gpus"),
             pytest.param(("0", "0"), id="one_gpu")],
)  # fmt: skip
def test_two_processes_train_as_one_does(training, alone, gpus):
    mesh = ["--mesh.rank", "2", "--mesh.virtual-ranks", "4"]
    before = ["--processes", "2", "--gpus", *gpus, "--"]
    losses = training.losses("-".join(("gpus", *gpus)), "train.launch_local", before, mesh)
    assert losses[-1] < losses[0] - 0.1
    np.testing.assert_allclose(losses, alone, rtol=2e-5)
