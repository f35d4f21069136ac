"""Manifests for Kubernetes: their shape is the published one, their pods train, and what would lose checkpoints is refused."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from forge_core.errors import ConfigError
from forge_train.cli import main
from forge_train.launch.cluster import load_cluster
from forge_train.launch.kubernetes import as_yaml, kubernetes_manifests, object_name
from forge_train.recipe.load import load_recipe
from forge_train.trackers import read_metrics

SCHEMA = json.loads(Path(__file__).with_name("manifests.schema.json").read_text())
WHOLE = (
    *("--kubernetes.gpus_per_node=4", "--kubernetes.cpus=64", "--kubernetes.memory=200Gi", "--kubernetes.namespace=lab"),
    *('--kubernetes.node_selector={gpu = "h100"}', '--kubernetes.tolerate=["nvidia.com/gpu"]', "--kubernetes.queue=team"),
    *("--kubernetes.service_account=trainer", "--kubernetes.image_pull_secret=pull", "--kubernetes.priority_class=low"),
    *('--environment.NCCL_DEBUG="INFO"', "--environment.OMP_NUM_THREADS=8"),
)


def manifests(*keys: str, overrides: tuple[str, ...] = (), nodes: int = 2) -> tuple[dict[str, Any], dict[str, Any]]:
    """The ConfigMap and the job, as read from the YAML."""
    needed = ["--container.image=lab/forge:2", "--kubernetes.volume=runs", f"--kubernetes.nodes={nodes}"]
    ranks = [] if any("gpus_per_node" in key for key in keys) else ["--kubernetes.ranks_per_node=1"]
    cluster = load_cluster(None, [*needed, *ranks, *keys])
    recipe = load_recipe("debug", ["--train.micro_batch=1", *overrides], nodes * cluster.kubernetes.ranks)
    recipes, job = yaml.safe_load_all(as_yaml(kubernetes_manifests(recipe, cluster)))
    return recipes, job


def pods_of(job: dict[str, Any]) -> list[dict[str, Any]]:
    if job["kind"] == "JobSet":
        return [job["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]]
    return [replica["template"]["spec"] for replica in job["spec"]["pytorchReplicaSpecs"].values()]


@pytest.mark.parametrize("kind", ["jobset", "pytorchjob"])
@pytest.mark.parametrize("keys", [(), WHOLE], ids=["least", "whole"])
def test_manifests_have_the_published_shape(kind: str, keys: tuple[str, ...]) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    for manifest in manifests(f"--kubernetes.kind={kind}", *keys):
        jsonschema.validate(manifest, SCHEMA)
        assert manifest["metadata"].get("namespace") == ("lab" if keys else None)


@pytest.mark.parametrize("kind", ["jobset", "pytorchjob"])
def test_every_pod_has_the_volume_the_recipe_and_what_it_asked_for(kind: str) -> None:
    recipes, job = manifests(f"--kubernetes.kind={kind}", *WHOLE, overrides=("--optimizer.lr=0.004",))
    assert "lr = 0.004" in recipes["data"]["recipe.toml"]
    for pod in pods_of(job):
        (trainer,) = pod["containers"]
        claims = {volume["name"]: volume.get("persistentVolumeClaim") for volume in pod["volumes"]}
        places = {mount["name"]: mount["mountPath"] for mount in trainer["volumeMounts"]}
        assert claims["run"] == {"claimName": "runs"} and places["run"] == trainer["workingDir"] == "/forge"
        assert places["recipe"] == "/etc/forge" and places["shared-memory"] == "/dev/shm"
        assert {"name": "recipe", "configMap": {"name": recipes["metadata"]["name"]}} in pod["volumes"]
        expected = {"nvidia.com/gpu": "4", "cpu": "64", "memory": "200Gi"}
        assert trainer["resources"] == {"requests": expected, "limits": expected}
        assert {"name": "NCCL_DEBUG", "value": "INFO"} in trainer["env"]
        assert {"name": "OMP_NUM_THREADS", "value": "8"} in trainer["env"]
        assert pod["nodeSelector"] == {"gpu": "h100"} and pod["serviceAccountName"] == "trainer"
        assert pod["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists"}]
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"


def test_a_jobset_restarts_all_pods_but_not_after_a_refusal() -> None:
    _, job = manifests("--kubernetes.max_restarts=7", nodes=4)
    inner = job["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (inner["parallelism"], inner["completions"], inner["completionMode"], inner["backoffLimit"]) == (4, 4, "Indexed", 0)
    assert inner["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [2, 3, 4, 7, 9, 93]
    assert job["spec"]["failurePolicy"]["maxRestarts"] == 7
    (rule,) = job["spec"]["failurePolicy"]["rules"]
    assert rule["action"] == "FailJobSet" and rule["onJobFailureReasons"] == ["PodFailurePolicy"]


def test_a_pytorchjob_has_one_master_and_the_other_pods_as_workers() -> None:
    _, job = manifests("--kubernetes.kind=pytorchjob", nodes=4)
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert {name: replica["replicas"] for name, replica in replicas.items()} == {"Master": 1, "Worker": 3}
    assert list(manifests("--kubernetes.kind=pytorchjob", nodes=1)[1]["spec"]["pytorchReplicaSpecs"]) == ["Master"]


def test_a_program_gets_the_manifests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["launch", "kubernetes", "debug", "--ranks-per-node=1", "--nodes=2", "--image=x", "--volume=runs"]
    file = tmp_path / "job.yaml"
    for arguments, output in (([], None), ([f"--output={file}"], str(file))):
        with pytest.raises(SystemExit) as end:
            main([*words, *arguments, "--json"])
        document = json.loads(capsys.readouterr().out)
        assert not end.value.code and document["output"] == output
        assert [manifest["kind"] for manifest in document["manifests"]] == ["ConfigMap", "JobSet"]
    assert list(yaml.safe_load_all(file.read_text())) == document["manifests"]


def test_what_would_lose_checkpoints_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["launch", "kubernetes", "debug", "--ranks-per-node=1"])
    error = capsys.readouterr()
    assert end.value.code == 2 and error.out == ""
    assert "container.image: is not set" in error.err and "kubernetes.volume: is not set" in error.err
    for place in ("/elsewhere/run", "../run"):
        with pytest.raises(ConfigError, match=r"job\.dir: .*run is not on the volume, which is mounted at /forge"):
            manifests(overrides=(f"--job.dir={place}",))
    manifests(overrides=("--job.dir=/forge/deep/run",))


@pytest.mark.parametrize(
    ("name", "expected"),
    [("Small MoE_7", "small-moe-7"), ("7b", "run-7b"), ("é", "run"), ("a" * 60, "a" * 40), ("x" * 39 + "-y", "x" * 39)],
)
def test_names_of_objects_are_dns_labels(name: str, expected: str) -> None:
    assert object_name(name) == expected


@pytest.mark.parametrize(("code", "pod"), [(0, 0), (2, 2), (93, 93), (9, 9), (75, 138), (5, 138), (8, 138), (1, 138)])
def test_a_pod_of_a_pytorchjob_ends_with_a_retryable_code_if_a_restart_helps(tmp_path: Path, code: int, pod: int) -> None:
    """The operator restarts pods after 128 to 255, and not after 1 to 127."""
    script = script_of(tmp_path, "pytorchjob", f"exit {code}")
    assert subprocess.run(["/bin/sh", "-c", script], check=False, timeout=60).returncode == pod


def test_a_pod_of_a_pytorchjob_passes_the_stop_signal_on_and_its_variables_as_options(tmp_path: Path) -> None:
    body = f'echo "$RANK $*" > {tmp_path}/called; trap "exit 75" TERM; for _ in $(seq 600); do sleep 0.05; done'
    script = script_of(tmp_path, "pytorchjob", body)
    variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "debug-master-0", "MASTER_PORT": "23456"}
    pod = subprocess.Popen(["/bin/sh", "-c", script], env=os.environ | variables)
    while not (tmp_path / "called").exists():
        time.sleep(0.02)
    time.sleep(0.2)
    pod.send_signal(signal.SIGTERM)
    assert pod.wait(30) == 138
    called = (tmp_path / "called").read_text()
    assert called.startswith(" launch local /etc/forge/recipe.toml --processes 1 --machines 2 --machine 1 ")
    assert "--address debug-master-0 --port 23456" in called


def script_of(tmp_path: Path, kind: str, body: str) -> str:
    """The shell script of a pod, with a stand-in for the trainer."""
    program = tmp_path / "forge-train"
    program.write_text(f"#!/bin/bash\n{body}\n")
    program.chmod(0o755)
    _, job = manifests(f"--kubernetes.kind={kind}", f"--container.command={program}")
    return pods_of(job)[0]["containers"][0]["command"][2]


@pytest.mark.slow
def test_two_pods_of_a_jobset_train_one_run(tmp_path: Path) -> None:
    """Their script runs as it is, but for the name of pod 0, which only a cluster resolves, and the place of the recipe."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    keys = (f"--container.command={sys.executable} -m forge_train",)
    recipes, job = manifests(*keys, overrides=("--train.max_steps=6",))
    (tmp_path / "recipe.toml").write_text(recipes["data"]["recipe.toml"])
    script = pods_of(job)[0]["containers"][0]["command"][2]
    for before, after in (("debug-node-0-0.debug", "127.0.0.1"), ("/etc/forge", str(tmp_path)), ("29500", str(port))):
        assert before in script
        script = script.replace(before, after)
    common = os.environ | {"OMP_NUM_THREADS": "1", "FORGE_ATTEMPT": "0"}
    pods = [
        subprocess.Popen(["/bin/sh", "-c", script], env=common | {"JOB_COMPLETION_INDEX": str(index)}, cwd=tmp_path)
        for index in range(2)
    ]
    assert [pod.wait(300) for pod in pods] == [0, 0]
    assert {row["step"] for row in read_metrics(tmp_path / "runs/debug/metrics.jsonl")} >= {1, 6}
    assert "layout dp2" in (tmp_path / "runs/debug/logs/rank-00001.log").read_text()
