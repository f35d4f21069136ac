"""`forge-train doctor` on CUDA devices: it finds them, and their numbers right. They cannot tell waits: no training here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rehearsal.device import NoCompiler, environment

pytestmark = pytest.mark.rehearsal


def test_torch_and_numbers_pass_on_devices_of_host_memory(tmp_path: Path) -> None:
    try:
        variables = {**os.environ, **environment(2)}
    except NoCompiler as reason:
        pytest.skip(str(reason))
    command = [sys.executable, "-m", "forge_train", "doctor", "debug", "--json", "--only", "torch,gpus,numbers"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=variables, timeout=400, check=False)
    steps = {step["name"]: step for step in json.loads(done.stdout)["steps"]}
    checks = {name: {check["name"]: check["verdict"] for check in step["checks"]} for name, step in steps.items()}
    assert checks["torch"]["torch can use a device"] == "PASS"
    assert checks["gpus"]["GPUs read each other's memory"] == "PASS" and "FAIL" not in checks["gpus"].values()
    assert {checks["numbers"][f"{model}, fp64"] for model in ("dense", "experts")} == {"PASS"}, steps["numbers"]
    assert "FAIL" not in checks["numbers"].values()
