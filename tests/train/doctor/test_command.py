"""`forge-train doctor` as it is typed, on this machine."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from forge_train.doctor.runner import ACCEPTANCE, QUICK
from harness import commands


def said(folder: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit code and the JSON document."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = commands.run("-m", "forge_train", "doctor", *arguments, "--json", cwd=folder, env=environment, timeout=300)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_plain_doctor_looks_at_the_cheap_things_and_writes_nothing(tmp_path: Path) -> None:
    code, document = said(tmp_path, "debug")
    assert [step["name"] for step in document["steps"]] == [step.name for step in QUICK]
    assert document["ended"] and document["recipe"] == "debug" and list(tmp_path.iterdir()) == []
    verdicts = {step["verdict"] for step in document["steps"]}
    assert code == (2 if "FAIL" in verdicts else 1 if "SLOW" in verdicts else 0)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--only", "nonsense"], "nonsense"),
        (["no-such-recipe"], "no-such-recipe"),
        (["debug", "--model.dimm=3"], "dimm"),
        (["--directory", "absent"], "absent"),
        (["--compare", "absent.json"], "absent.json"),
    ],
)
def test_what_it_does_not_know_is_refused(arguments: list[str], word: str, tmp_path: Path) -> None:
    code, document = said(tmp_path, *arguments)
    assert code == 2 and document["ok"] is False and word in document["message"]


def test_a_report_that_got_slower_is_told(tmp_path: Path) -> None:
    code, first = said(tmp_path, "debug", "--only", "disk", "--out", "first")
    assert json.loads((tmp_path / "first/doctor.json").read_text()) == first
    for check in first["steps"][0]["checks"]:
        if check["better"]:
            check["measured"] *= 1000
    (tmp_path / "faster.json").write_text(json.dumps(first))
    code, second = said(tmp_path, "debug", "--only", "disk", "--compare", "faster.json")
    assert code == 1 and len(second["regressions"]) == 2
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith(".forge")] == []


@pytest.mark.slow
def test_the_whole_acceptance_on_a_machine_without_a_gpu(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    code, document = said(tmp_path, "debug", "--acceptance", "--minutes", "0.02", "--directory", "runs")
    verdicts = {step["name"]: step["verdict"] for step in document["steps"]}
    assert list(verdicts) == [step.name for step in ACCEPTANCE]
    assert code in (0, 1), document
    assert [name for name, verdict in verdicts.items() if verdict == "SKIPPED"] == ["gpus", "device", "tests"]
    assert all(verdicts[name] == "PASS" for name in ("numbers", "collectives", "training", "endurance"))
    named = [check for step in document["steps"] for check in step["checks"] if check["verdict"] in ("SLOW", "FAIL")]
    assert all(check["remedy"] for check in named)
    assert (tmp_path / "doctor/doctor.html").is_file() and list((tmp_path / "runs").iterdir()) == []
