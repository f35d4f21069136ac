"""`forge-train doctor --acceptance` on CUDA devices: every step but the repository's own tests, which run here by themselves.
Sizes are small, and times mean nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rehearsal.device import NoCompiler, environment
from rehearsal.device.cuda import MEMORY
from rehearsal.device.small import SMALL

pytestmark = pytest.mark.rehearsal


STEPS = "node,torch,gpus,device,bandwidth,disk,matmul,kernels,numbers,collectives,training,endurance"


def test_every_step_runs_on_devices_of_host_memory(tmp_path: Path) -> None:
    try:
        variables = {**os.environ, **environment(2), SMALL: "1", MEMORY: str(1 << 28)}
    except NoCompiler as reason:
        pytest.skip(str(reason))
    command = [sys.executable, "-m", "forge_train", "doctor", "debug", "--json", "--minutes", "0.02", "--only", STEPS]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=variables, timeout=600, check=False)
    steps = {step["name"]: step for step in json.loads(done.stdout)["steps"]}
    assert list(steps) == STEPS.split(",")
    checks = {name: {check["name"]: check["verdict"] for check in step["checks"]} for name, step in steps.items()}
    assert checks["torch"]["torch can use a device"] == "PASS"
    assert checks["gpus"]["GPUs read each other's memory"] == "PASS"
    assert checks["device"]["memory of device 1"] == checks["device"]["products of device 1"] == "PASS"
    assert checks["matmul"]["bf16"] in ("PASS", "SLOW") and checks["kernels"]["products of experts"] == "PASS"
    assert {checks["numbers"][f"{model}, fp64"] for model in ("dense", "experts")} == {"PASS"}, steps["numbers"]
    assert {checks["collectives"][f"{name} by NCCL"] for name in ("all-reduce", "all-gather", "all-to-all")} == {"PASS"}
    assert checks["training"]["loss"] == checks["training"]["peak memory"] == checks["endurance"]["loss"] == "PASS"
    failed = {name: verdict for name, found in checks.items() for verdict in found.values() if verdict == "FAIL"}
    assert failed == {}, done.stdout


def test_the_requirement_gpu_is_met_on_devices_of_host_memory(tmp_path: Path) -> None:
    try:
        variables = {**os.environ, **environment(2), MEMORY: str(1 << 28)}
    except NoCompiler as reason:
        pytest.skip(str(reason))
    command = [sys.executable, "-m", "forge_train", "doctor", "--requires", "gpu,torch", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=variables, timeout=300, check=False)
    checks = {step["name"]: step["checks"] for step in json.loads(done.stdout)["steps"]}
    assert done.returncode == 0 and [check["verdict"] for check in checks["gpu"]] == ["PASS"], done.stdout
    assert checks["gpu"][0]["measured"].startswith("2 x ")
