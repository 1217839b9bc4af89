"""The launchers' files: the manifest and JAX's detection agree, the environment is one place."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import train

pytestmark = pytest.mark.multiproc

LAUNCH = Path(train.__file__).parent / "launch"
TESTS = Path(__file__).parent

# JAX reads the pod's namespace from a file at a fixed place.
IN_A_POD = """
mount -t tmpfs none /run
mkdir -p /run/secrets/kubernetes.io/serviceaccount
echo training > /run/secrets/kubernetes.io/serviceaccount/namespace
exec "$@"
"""

WHAT_JOIN_PASSES_ON = """
import jax
from jax._src.clusters import ClusterEnv
from train import processes

def initialize(**given):
    names = ("coordinator_address", "num_processes", "process_id", "local_device_ids")
    given = [given.get(name) for name in names]
    print(*ClusterEnv.auto_detect_unset_distributed_params(*given, None, None))

jax.distributed.initialize = initialize
processes.join()
"""


def objects() -> dict[str, dict]:
    text = (LAUNCH / "kubernetes.yaml").read_text()
    return {item["kind"]: item for item in yaml.safe_load_all(text)}


def container() -> dict:
    return objects()["Job"]["spec"]["template"]["spec"]["containers"][0]


def test_the_pods_of_the_manifest_find_each_other():
    job = objects()["Job"]
    environment = {variable["name"]: variable["value"] for variable in container()["env"]}
    environment |= {
        "KUBERNETES_SERVICE_HOST": "10.0.0.1",
        "JOB_COMPLETION_INDEX": "1",
        "HOSTNAME": "localhost",
        "MANIFEST": str(LAUNCH / "kubernetes.yaml"),
        "PYTHONPATH": os.pathsep.join([str(LAUNCH.parents[1]), str(TESTS / "kubernetes_double")]),
        "PATH": os.environ["PATH"],
    }
    done = subprocess.run(
        ["unshare", "--map-root-user", "--mount", "sh", "-ec", IN_A_POD, "-", sys.executable]
        + ["-P", "-c", WHAT_JOIN_PASSES_ON],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "jax-moe-0.jax-moe-pods:55527 2 1 None\n"
    assert job["spec"]["completionMode"] == "Indexed"
    assert int(environment["JAX_NUM_PROCESSES"]) == job["spec"]["parallelism"]
    assert job["spec"]["completions"] == job["spec"]["parallelism"]
    selector = objects()["Service"]["spec"]["selector"]
    assert selector == {"job-name": job["metadata"]["name"]}


def test_an_announced_launcher_that_is_not_there_is_an_error():
    program = "from train import processes; processes.join()"
    environment = {"JAX_NUM_PROCESSES": "2", "PYTHONPATH": str(LAUNCH.parents[1])}
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "but JAX detects no launcher: set all three" in done.stderr


def test_the_environment_keeps_what_is_set_and_xla_knows_the_flags():
    script = f'source {LAUNCH / "environment.sh"}; exec "$@"'
    program = "import os, jax; jax.devices('cpu'); print(os.environ['NCCL_DEBUG'])"
    environment = {"PATH": os.environ["PATH"], "NCCL_DEBUG": "INFO", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        ["bash", "-euc", script, "-", sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "INFO\n"


@pytest.mark.parametrize("name", ["slurm.sh", "mpirun.sh", "kubernetes.yaml"])
def test_every_launcher_takes_the_environment_from_one_place(name):
    text = (LAUNCH / name).read_text()
    assert "environment.sh" in text
    names = re.findall(r"^export (\w+)=", (LAUNCH / "environment.sh").read_text(), re.MULTILINE)
    assert names
    for name in names:  # a pod's folder of compiled programs lies elsewhere
        assert f"{name}=" not in text
        assert f"name: {name}\n" not in text or name == "JAX_COMPILATION_CACHE_DIR"
