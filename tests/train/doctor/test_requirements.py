"""`forge-train doctor --requires`: what this machine has, and how to get what it has not."""

import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from forge_core.errors import ForgeError
from forge_train.doctor import requirements
from forge_train.doctor.requirements import REQUIREMENTS, judge_hub, judge_nodes, judge_wandb, required
from forge_train.doctor.step import Check, DoctorSettings
from harness import commands
from train.launch.cluster_programs import fake_slurm

SETTINGS = DoctorSettings("")


def said(folder: Path, *arguments: str, **variables: str) -> tuple[int, dict]:
    """Exit code and the JSON document, without a GPU."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **variables}
    words = ("-m", "forge_train", "doctor", *arguments, "--json")
    done = commands.run(*words, cwd=folder, env=environment, timeout=120, torch=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def slurm_program(folder: Path, name: str, body: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{body}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of stand-ins for SLURM's programs, first on PATH; no job around."""
    programs = fake_slurm(tmp_path / "slurm").folder / "bin"
    slurm_program(programs, "scancel", "")
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    return programs


def test_the_exit_code_is_0_only_with_everything_that_is_named(tmp_path: Path) -> None:
    code, document = said(tmp_path, "--requires", "wandb", WANDB_MODE="offline")
    assert code == 0 and [step["verdict"] for step in document["steps"]] == ["PASS"]
    code, document = said(tmp_path, "--requires", "slurm , wandb", WANDB_MODE="offline", PATH="/nowhere")
    assert code == 2 and {step["name"]: step["verdict"] for step in document["steps"]} == {"slurm": "FAIL", "wandb": "PASS"}
    (check,) = next(step for step in document["steps"] if step["name"] == "slurm")["checks"]
    assert "sbatch" in check["measured"] and "login node" in check["remedy"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_cpu_has_torch_and_no_gpu(tmp_path: Path) -> None:
    code, document = said(tmp_path, "--requires", "gpu,torch")
    assert code == 2 and {step["name"]: step["verdict"] for step in document["steps"]} == {"torch": "PASS", "gpu": "FAIL"}
    assert all(check["remedy"] for step in document["steps"] for check in step["checks"] if check["verdict"] == "FAIL")


def test_an_installation_whose_torch_cannot_be_imported_is_told_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.12: cannot open shared object file')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    code, document = said(tmp_path, "--requires", "torch", PYTHONPATH=path)
    (check,) = document["steps"][0]["checks"]
    assert code == 2 and "libcudart" in check["measured"] and "install-and-verify" in check["remedy"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--requires", "gpus"], ["gpus", *(step.name for step in REQUIREMENTS)]),
        (["--requires", "gpu,tpu"], ["tpu", "known: torch"]),
        (["--requires", ""], ["names nothing", "slurm"]),
        (["--requires", " , "], ["names nothing"]),
        (["debug", "--requires", "torch"], ["reads no recipe; remove debug"]),
        (["--requires", "torch", "--acceptance", "--only", "disk"], ["remove --acceptance, --only"]),
        (["debug", "--requires", "torch", "--optimizer.lr=1"], ["debug, --optimizer.lr=1"]),
    ],
)
def test_what_cannot_be_required_is_refused(arguments: list[str], words: list[str], tmp_path: Path) -> None:
    code, document = said(tmp_path, *arguments)
    assert code == 2 and document["ok"] is False and all(word in document["message"] for word in words), document


def test_the_option_and_the_page_name_every_requirement() -> None:
    root = Path(__file__).parents[3]
    names = [step.name for step in REQUIREMENTS]
    assert names == ["torch", "gpu", "multi-node", "slurm", "wandb", "hf"]
    page = (root / "docs/skills.md").read_text()
    source = (root / "apps/forge-train/src/forge_train/commands/doctor.py").read_text()
    assert all(f"| `{name}` |" in page and name in source for name in names)
    assert [step.name for step in required("hf,torch,hf")] == ["torch", "hf"]


def only(checks: Iterator[Check]) -> Check:
    (check,) = checks
    return check


def test_slurm_needs_programs_an_answer_and_a_partition(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = only(requirements.examine_slurm(SETTINGS))
    assert (found.verdict, found.measured) == ("PASS", "partitions gpu, long")
    slurm_program(slurm, "sinfo", "true")
    found = only(requirements.examine_slurm(SETTINGS))
    assert found.verdict == "FAIL" and "no partition" in found.value() and found.remedy
    slurm_program(slurm, "sinfo", "echo 'Unable to contact slurm controller' >&2; exit 1")
    found = only(requirements.examine_slurm(SETTINGS))
    assert found.verdict == "FAIL" and "Unable to contact" in found.value() and "scontrol ping" in found.remedy
    monkeypatch.setattr(requirements, "_ANSWER_SECONDS", 0.2)
    slurm_program(slurm, "sinfo", "exec sleep 20")
    assert "did not answer" in only(requirements.examine_slurm(SETTINGS)).value()
    (slurm / "scancel").unlink()
    monkeypatch.setenv("PATH", str(slurm))  # this machine may have a SLURM of its own
    assert only(requirements.examine_slurm(SETTINGS)).measured == "scancel not on PATH"


@pytest.mark.parametrize(
    ("rows", "verdict", "told"),
    [
        ("gpu|up|idle|1\\ngpu|up|mixed-|1", "PASS", "partition gpu has 2"),
        ("gpu|up|idle~|8", "PASS", "partition gpu has 8"),  # nodes that are off until a job needs them
        ("gpu|up|idle|1\\nlong|up|allocated|1", "FAIL", "has 1 usable"),  # a job cannot have nodes of two partitions
        ("gpu|up|idle|1\\ngpu|up|down*|5\\ngpu|up|idle*|5\\ngpu|up|drained|3", "FAIL", "partition gpu has 1"),
        ("gpu|down|idle|9", "FAIL", "no usable node"),
        ("gpu", "FAIL", "no usable node"),
    ],
)
def test_a_partition_with_two_usable_nodes_is_multi_node(rows: str, verdict: str, told: str, slurm: Path) -> None:
    slurm_program(slurm, "sinfo", f"printf '{rows}\\n'")
    found = judge_nodes({})
    assert found.verdict == verdict and told in found.value() and bool(found.remedy) == (verdict == "FAIL")


@pytest.mark.parametrize(
    ("environment", "verdict"),
    [
        ({"SLURM_JOB_NUM_NODES": "2"}, "PASS"),
        ({"SLURM_JOB_NUM_NODES": "1"}, "FAIL"),  # inside of a job, what the cluster has does not help
        ({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, "PASS"),
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}, "FAIL"),
    ],
)
def test_inside_of_a_job_its_own_nodes_count(environment: dict[str, str], verdict: str, slurm: Path) -> None:
    slurm_program(slurm, "sinfo", "printf 'gpu|up|idle|9\\n'")
    assert judge_nodes(environment).verdict == verdict


def test_without_a_scheduler_the_remedy_names_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    found = judge_nodes({})
    assert found.verdict == "FAIL" and "login node" in found.remedy and "--machines 2" in found.remedy


def test_a_key_of_wandb_is_found_where_its_login_leaves_it(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path)}
    assert "forge-train[wandb]" in judge_wandb({**home, "WANDB_API_KEY": "k"}, installed=False).remedy
    assert "wandb login" in judge_wandb(home, installed=True).remedy
    assert judge_wandb({**home, "WANDB_MODE": "offline"}, installed=True).verdict == "PASS"
    assert judge_wandb({**home, "WANDB_MODE": "online"}, installed=True).verdict == "FAIL"
    assert judge_wandb({**home, "WANDB_API_KEY": "secret"}, installed=True).value() == "the key is in WANDB_API_KEY"
    (tmp_path / ".netrc").write_text("machine api.wandb.ai\n  login user\n  password secret\n")
    (tmp_path / ".netrc").chmod(0o600)
    found = judge_wandb(home, installed=True)
    assert found.verdict == "PASS" and "secret" not in found.value()
    (tmp_path / "empty").write_text("machine api.wandb.ai\n  login user\n")
    assert judge_wandb({**home, "NETRC": str(tmp_path / "empty")}, installed=True).verdict == "FAIL"
    assert judge_wandb({**home, "WANDB_BASE_URL": "https://wandb.example.org"}, installed=True).verdict == "FAIL"
    (tmp_path / "other").write_text("machin api.wandb.ai\n")
    found = judge_wandb({**home, "NETRC": str(tmp_path / "other")}, installed=True)
    assert found.verdict == "FAIL" and "correct" in found.remedy


class Hub(BaseHTTPRequestHandler):
    code = 200

    def do_HEAD(self) -> None:
        self.send_response(self.code)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(("code", "verdict"), [(200, "PASS"), (401, "PASS"), (503, "FAIL")])
def test_the_hub_is_there_if_it_answers(code: int, verdict: str, hub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Hub, "code", code)
    monkeypatch.setenv("no_proxy", "*")
    assert only(judge_hub({"HF_ENDPOINT": hub}, True, True)).verdict == verdict
    if code == 200:
        checks = list(judge_hub({"HF_ENDPOINT": hub}, True, False))
        assert [check.verdict for check in checks] == ["PASS", "SKIPPED"] and "forge-data[huggingface]" in checks[1].remedy


def test_a_hub_that_is_not_there_fails_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    closed = only(judge_hub({"HF_ENDPOINT": "http://127.0.0.1:9"}, True, True))
    assert closed.verdict == "FAIL" and "refused" in closed.value() and "hf download" in closed.remedy
    for environment, word in (({"HF_HUB_OFFLINE": "1"}, "unset HF_HUB_OFFLINE"), ({"HF_ENDPOINT": "file:///etc"}, "HF_ENDPOINT")):
        found = only(judge_hub(environment, True, True))
        assert found.verdict == "FAIL" and word in found.remedy
    assert only(judge_hub({}, False, True)).remedy == "pip install huggingface_hub"


def test_an_unknown_name_raises_before_anything_is_examined() -> None:
    with pytest.raises(ForgeError, match="no requirement has this name"):
        required("torch,nothing")
