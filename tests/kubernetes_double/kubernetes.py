"""Stands in for the package `kubernetes`: a cluster in which the manifest named by MANIFEST runs.

Only what JAX's detection asks for, answered from the manifest.
"""

import os
from types import SimpleNamespace
from typing import Any

import yaml

with open(os.environ["MANIFEST"], encoding="utf-8") as _file:
    _OBJECTS = {item["kind"]: item for item in yaml.safe_load_all(_file)}
_JOB, _SERVICE = _OBJECTS["Job"], _OBJECTS["Service"]
_NAME = _JOB["metadata"]["name"]
_LABELS = {"job-name": _NAME, "batch.kubernetes.io/job-name": _NAME}  # the job controller's


def _allowed(group: str, resource: str, verb: str) -> None:
    """Fails where the manifest's role does not give the right."""
    rules = _OBJECTS["Role"]["rules"]
    assert (
        _JOB["spec"]["template"]["spec"]["serviceAccountName"]
        == (_OBJECTS["RoleBinding"]["subjects"][0]["name"])
    )
    assert any(
        group in rule["apiGroups"] and resource in rule["resources"] and verb in rule["verbs"]
        for rule in rules
    ), (group, resource, verb)


class _Core:
    def list_namespaced_pod(self, namespace: str, field_selector: str) -> Any:
        _allowed("", "pods", "list")
        assert namespace == "training" and field_selector.startswith("status.podIP=")
        owner = SimpleNamespace(controller=True, kind="Job")
        metadata = SimpleNamespace(name=_NAME, labels=_LABELS, owner_references=[owner])
        spec = SimpleNamespace(subdomain=_JOB["spec"]["template"]["spec"].get("subdomain"))
        return SimpleNamespace(items=[SimpleNamespace(metadata=metadata, spec=spec)])

    def list_namespaced_service(self, namespace: str) -> Any:
        _allowed("", "services", "list")
        spec = _SERVICE["spec"]
        spec = SimpleNamespace(cluster_ip=spec["clusterIP"], selector=spec["selector"])
        return SimpleNamespace(items=[SimpleNamespace(metadata=None, spec=spec)])


class _Batch:
    def read_namespaced_job(self, name: str, namespace: str) -> Any:
        _allowed("batch", "jobs", "get")
        assert (name, namespace) == (_NAME, "training")
        spec = SimpleNamespace(parallelism=_JOB["spec"]["parallelism"])
        return SimpleNamespace(metadata=SimpleNamespace(name=name, labels={}), spec=spec)


class _ApiException(Exception):
    pass


config = SimpleNamespace(load_incluster_config=lambda: None)
client = SimpleNamespace(
    CoreV1Api=_Core, BatchV1Api=_Batch, exceptions=SimpleNamespace(ApiException=_ApiException)
)
