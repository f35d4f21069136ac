"""Manifests for Kubernetes: a JobSet, or a PyTorchJob of the Kubeflow training operator, with one pod per node.

Each pod runs `forge-train launch local`, which starts the ranks of its node, so the exit code of a pod is that of the run: all
pods restart after a failure or a preemption, and none restarts after a refusal. (torchrun would end with 1 in both cases.)
The resolved recipe is in a ConfigMap beside the job.

Sources: JobSet API v1alpha2 (github.com/kubernetes-sigs/jobset, api/jobset/v1alpha2/jobset_types.go), PyTorchJob v1
(github.com/kubeflow/training-operator, pkg/apis/kubeflow.org/v1), Pod failure policy (Kubernetes documentation of Job).
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

import yaml

from forge_core.errors import ConfigError, Fault, Faults
from forge_core.redaction import redacted_text
from forge_train.directory import run_directory
from forge_train.launch.cluster import Cluster
from forge_train.process.restarts import AGAIN, NoProgress
from forge_train.process.stop import HOOK_FAILED, REQUEUE, RolledBackTooOften, TrainingError
from forge_train.recipe.load import Recipe

FINAL = (2, TrainingError.exit_code, 4, RolledBackTooOften.exit_code, HOOK_FAILED, NoProgress.exit_code)
"""Exit codes after which another start would end the same way."""

RETRYABLE = 138
"""Exit code of a pod that PyTorchJob starts again: with the restart policy ExitCode, 128 to 255 are retryable."""

_PORT = 29500
_RECIPE_FOLDER = "/etc/forge"
_RESTARTS = "metadata.annotations['jobset.sigs.k8s.io/restart-attempt']"


def kubernetes_manifests(recipe: Recipe, cluster: Cluster) -> list[dict[str, Any]]:
    """Returns the ConfigMap with the recipe, and the job.

    Args:
        recipe: resolved and checked for the world size of the job.
        cluster: the cluster file.

    Raises:
        ConfigError: there is no image or no volume, the run's directory is not on the volume, or the recipe has secrets.
    """
    _require_complete(recipe, cluster)
    section = cluster.kubernetes
    name = object_name(recipe.job.job.name)
    recipes = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(name, cluster),
        "data": {"recipe.toml": recipe.as_toml()},
    }
    return [recipes, _jobset(name, cluster) if section.kind == "jobset" else _pytorchjob(name, cluster)]


def as_yaml(manifests: Sequence[Mapping[str, Any]]) -> str:
    """Returns one YAML document per object; texts of several lines are written as such."""

    class Dumper(yaml.SafeDumper):
        pass

    def lines(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)

    Dumper.add_representer(str, lines)
    return yaml.dump_all(manifests, Dumper=Dumper, sort_keys=False, width=10_000)


def object_name(name: str) -> str:
    """Returns a name for objects of Kubernetes: a DNS label that leaves room for the suffixes of pods."""
    text = re.sub(r"[^a-z0-9]+", "-", name.lower())[:40].strip("-")
    return text if re.match(r"[a-z]", text) else f"run-{text}".rstrip("-")


def _require_complete(recipe: Recipe, cluster: Cluster) -> None:
    section, faults = cluster.kubernetes, Faults()
    if cluster.container.image is None:
        faults.add("container.image", "is not set, but every pod needs an image", hint="set it, or --image")
    if section.volume is None:
        faults.add(
            "kubernetes.volume",
            "is not set: the run's directory would be in a pod, and its checkpoints would be lost with the pod",
            hint="name a PersistentVolumeClaim that all pods can write (ReadWriteMany), or set --volume",
        )
    directory = PurePosixPath(section.mount) / str(run_directory(recipe.job))
    if ".." in directory.parts or not directory.is_relative_to(section.mount):
        faults.add(
            "job.dir", f"{directory} is not on the volume, which is mounted at {section.mount}", hint="set a directory below it"
        )
    text = recipe.as_toml()
    if redacted_text(text) != text:
        faults.add("RECIPE", "has a secret, which everyone who may read ConfigMaps could read", hint="pass it in the environment")
    if faults.items:
        raise ConfigError(Fault(item.key, item.message, item.origin, item.hint) for item in faults.items)


def _metadata(name: str, cluster: Cluster) -> dict[str, Any]:
    section = cluster.kubernetes
    labels = {"app.kubernetes.io/managed-by": "forge-train"}
    if section.queue is not None:
        labels["kueue.x-k8s.io/queue-name"] = section.queue
    return {"name": name, **({"namespace": section.namespace} if section.namespace else {}), "labels": labels}


def _jobset(name: str, cluster: Cluster) -> dict[str, Any]:
    section = cluster.kubernetes
    command = _command(cluster, "$JOB_COMPLETION_INDEX", f"{name}-node-0-0.{name}", str(_PORT), '"${FORGE_ATTEMPT:-0}"')
    pods = _pod(name, cluster, "trainer", f"exec {command}")
    attempt = {"name": "FORGE_ATTEMPT", "valueFrom": {"fieldRef": {"fieldPath": _RESTARTS}}}
    pods["spec"]["containers"][0]["env"].append(attempt)
    pods["spec"]["restartPolicy"] = "Never"
    refused = {"action": "FailJob", "onExitCodes": {"containerName": "trainer", "operator": "In", "values": list(FINAL)}}
    job = {
        "parallelism": section.nodes,
        "completions": section.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,  # one lost pod ends the job, and the JobSet starts all of its pods again
        "podFailurePolicy": {"rules": [refused]},
        "template": pods,
    }
    rule = {"name": "refused", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(name, cluster),
        "spec": {
            "network": {"enableDNSHostnames": True},
            "failurePolicy": {"maxRestarts": section.max_restarts, "rules": [rule]},
            "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": job}}],
        },
    }


def _pytorchjob(name: str, cluster: Cluster) -> dict[str, Any]:
    section = cluster.kubernetes
    command = _command(cluster, '"${RANK:-0}"', '"${MASTER_ADDR:-localhost}"', f'"${{MASTER_PORT:-{_PORT}}}"', "0")
    again = " | ".join(str(code) for code in sorted({REQUEUE, *AGAIN}))
    # The operator sets variables of torchrun that count pods; the launcher sets those that count ranks.
    script = (
        f"env -u RANK -u WORLD_SIZE {command} &\nchild=$!\ntrap 'kill -TERM \"$child\"' TERM\n"
        'wait "$child"\ncode=$?\n'
        'while kill -0 "$child" 2>/dev/null; do wait "$child"; code=$?; done\n'
        f'case "$code" in {again}) exit {RETRYABLE} ;; esac\nexit "$code"\n'
    )

    def replica(count: int) -> dict[str, Any]:
        return {"replicas": count, "restartPolicy": "ExitCode", "template": _pod(name, cluster, "pytorch", script)}

    replicas = {"Master": replica(1)} | ({"Worker": replica(section.nodes - 1)} if section.nodes > 1 else {})
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": _metadata(name, cluster),
        "spec": {"runPolicy": {"backoffLimit": section.max_restarts}, "pytorchReplicaSpecs": replicas},
    }


def _command(cluster: Cluster, node: str, address: str, port: str, attempt: str) -> str:
    """Returns the command of a pod for its shell; all arguments are words of the shell."""
    section = cluster.kubernetes
    trainer = shlex.join(shlex.split(cluster.container.command))
    local = f"{trainer} launch local {_RECIPE_FOLDER}/recipe.toml --processes {section.ranks}"
    return f"{local} --machines {section.nodes} --machine {node} --address {address} --port {port} --attempt {attempt}"


def _pod(name: str, cluster: Cluster, container: str, script: str) -> dict[str, Any]:
    """Returns the template of a pod."""
    section = cluster.kubernetes
    resources: dict[str, Any] = {section.gpu_resource: section.gpus_per_node, "cpu": section.cpus, "memory": section.memory}
    limits = {key: value if isinstance(value, str) else str(value) for key, value in resources.items() if value is not None}
    trainer: dict[str, Any] = {
        "name": container,
        "image": cluster.container.image,
        "command": ["/bin/sh", "-c", script],
        "workingDir": section.mount,
        "env": [{"name": key, "value": str(value)} for key, value in cluster.environment.items()],
        "volumeMounts": [
            {"name": "run", "mountPath": section.mount},
            {"name": "recipe", "mountPath": _RECIPE_FOLDER, "readOnly": True},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
    }
    if limits:
        trainer["resources"] = {"requests": limits, "limits": dict(limits)}
    spec: dict[str, Any] = {
        "terminationGracePeriodSeconds": section.grace_seconds,
        "containers": [trainer],
        "volumes": [
            {"name": "run", "persistentVolumeClaim": {"claimName": section.volume}},
            {"name": "recipe", "configMap": {"name": name}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": section.shared_memory}},
        ],
    }
    optional: Mapping[str, Any] = {
        "nodeSelector": section.node_selector,
        "tolerations": [{"key": key, "operator": "Exists"} for key in section.tolerate],
        "serviceAccountName": section.service_account,
        "imagePullSecrets": [{"name": section.image_pull_secret}] if section.image_pull_secret else [],
        "priorityClassName": section.priority_class,
    }
    return {"spec": spec | {key: value for key, value in optional.items() if value}}
