"""Every bad installation and node is named, with what to do; a good one passes."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from forge_parallel.verify.parity import Measurement
from forge_train.doctor import correctness, node, torch_build, training
from forge_train.doctor.peaks import peak
from forge_train.doctor.step import DoctorSettings
from forge_train.doctor.torch_build import VisibleGpu, has_kernels

H100 = VisibleGpu("NVIDIA H100 80GB HBM3", (9, 0), 80 << 30)
GOOD = torch_build.BuildFacts(
    seen=True,
    version="2.13.0+cu128",
    cuda="12.8",
    driver=(12, 4),
    available=True,
    architectures=("sm_80", "sm_90"),
    devices=(H100, H100),
)
A100 = VisibleGpu("NVIDIA A100-SXM4-80GB", (8, 0), 80 << 30)
V100 = VisibleGpu("Tesla V100", (7, 0), 32 << 30)
OUT = replace(GOOD, available=False, devices=(), architectures=())
NODE = node.NodeFacts(
    gpu=True,
    infiniband=True,
    file=None,
    locked=None,
    shared=8 << 30,
    free=100 << 30,
    wanted=10 << 30,
    triton=True,
    compiler="/usr/bin/gcc",
    missing=(),
    cores=8,
)


def test_a_good_machine_passes() -> None:
    assert {check.verdict for check in [*torch_build.judge(GOOD), *node.judge_node(NODE)]} == {"PASS"}


@pytest.mark.parametrize(
    ("facts", "name", "verdict", "remedy"),
    [
        (torch_build.BuildFacts(seen=True, version="2.13.0+cpu"), "torch is built for GPUs", "FAIL", "whl/cu128"),
        (torch_build.BuildFacts(seen=True, version="2.13.0+cpu", driver=(12, 6)), "torch is built for GPUs", "FAIL", "whl/cu126"),
        (replace(OUT, cuda="13.0", driver=(12, 4)), "driver", "FAIL", "a newer driver"),
        (replace(OUT, driver=None), "driver", "FAIL", "install the driver"),
        (replace(OUT, visible=""), "torch can use a device", "FAIL", "CUDA_VISIBLE_DEVICES"),
        (replace(OUT, error="no CUDA-capable device"), "torch can use a device", "FAIL", "--gpus all"),
        (replace(GOOD, devices=(H100, A100)), "devices are alike", "SLOW", "slowest"),
        (replace(GOOD, devices=(V100,)), "kernels", "FAIL", "install a torch"),
        (replace(GOOD, devices=(V100,), architectures=("sm_70",)), "bf16", "SLOW", "fp32"),
        (replace(GOOD, devices=(A100,), wants_float8=True), "float8", "SLOW", "remove transforms.float8"),
        (replace(GOOD, devices=(A100,)), "float8", "SKIPPED", "transforms.float8"),
        (torch_build.BuildFacts(seen=False, version="2.13.0+cpu"), "GPU", "SKIPPED", "nvidia-smi"),
    ],
)
def test_an_installation_that_does_not_fit(facts: torch_build.BuildFacts, name: str, verdict: str, remedy: str) -> None:
    found = {check.name: check for check in torch_build.judge(facts)}
    assert found[name].verdict == verdict and remedy in found[name].remedy


def test_a_driver_runs_newer_minor_versions_of_its_cuda() -> None:
    assert [
        check.verdict for check in torch_build.judge(replace(GOOD, cuda="12.9", driver=(12, 0))) if check.name == "driver"
    ] == ["PASS"]


@pytest.mark.parametrize(
    ("capability", "architectures", "runs"),
    [
        ((9, 0), ["sm_90a"], True),
        ((8, 9), ["sm_80"], True),
        ((8, 0), ["sm_86"], False),
        ((9, 0), ["sm_80"], False),
        ((10, 0), ["sm_80", "compute_90"], True),
        ((12, 0), ["sm_100"], False),
    ],
)
def test_which_builds_a_device_can_run(capability: tuple[int, int], architectures: list[str], runs: bool) -> None:
    assert has_kernels(capability, architectures) is runs


@pytest.mark.parametrize(
    ("facts", "name", "verdict", "remedy"),
    [
        (replace(NODE, file=1 << 20), "size of a file (ulimit -f)", "FAIL", "ulimit -f unlimited"),
        (replace(NODE, file=1 << 40), "size of a file (ulimit -f)", "SKIPPED", "more ranks"),
        (replace(NODE, locked=64 << 10), "memory that can be locked (ulimit -l)", "FAIL", "LimitMEMLOCK"),
        (replace(NODE, shared=64 << 20), "/dev/shm", "FAIL", "--shm-size"),
        (replace(NODE, free=9 << 30), "room on the disk", "FAIL", "job.dir"),
        (replace(NODE, compiler=None), "compiler for Triton", "FAIL", "gcc"),
        (replace(NODE, triton=False), "compiler for Triton", "FAIL", "pip install triton"),
        (replace(NODE, missing=("torchao",)), "extras", "SKIPPED", 'pip install "forge-parallel[float8]"'),
        (replace(NODE, slow_bf16="no bf16 units"), "bf16 on the processor", "SKIPPED", "fp32"),
    ],
)
def test_a_node_that_lacks_something(facts: node.NodeFacts, name: str, verdict: str, remedy: str) -> None:
    found = {check.name: check for check in node.judge_node(facts)}
    assert found[name].verdict == verdict and remedy in found[name].remedy
    assert sum(check.verdict != "PASS" for check in found.values()) == 1


def test_a_node_without_gpus_and_cards_needs_less() -> None:
    facts = replace(NODE, gpu=False, infiniband=False, locked=64 << 10, shared=64 << 20, compiler=None, triton=False)
    assert {check.verdict for check in node.judge_node(facts)} == {"PASS", "SKIPPED"}


def test_a_gpu_is_seen_by_its_device_file_or_by_the_tool_of_its_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    monkeypatch.setenv("PATH", str(tools))
    assert not torch_build.sees_gpu(tmp_path)
    tool = tools / "nvidia-smi"
    for script, seen in (("echo No devices; exit 6", False), ("echo 'GPU 0: NVIDIA H100'", True)):
        tool.write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(0o755)
        assert torch_build.sees_gpu(tmp_path) is seen
    tool.unlink()
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    assert torch_build.sees_gpu(tmp_path)


@pytest.mark.parametrize(
    ("name", "bf16"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA B200", 2250e12),
    ],
)
def test_peaks_are_those_of_the_data_sheets(name: str, bf16: float) -> None:
    known = peak(name)
    assert known is not None and known.bf16 == bf16 and known.tf32 == pytest.approx(bf16 / 2, rel=1e-2)
    assert peak("Tesla T4") is None and peak(f"{name} MIG 1g.10gb") is None


def test_the_verdict_on_tests_is_that_of_pytest() -> None:
    assert training.judge_tests(0, "5 passed, 2 skipped in 3 s\n").verdict == "PASS"
    wrong = training.judge_tests(1, "FAILED tests/a.py::test_b - assert\n1 failed, 3 passed in 2 s\n")
    assert wrong.verdict == "FAIL" and "tests/a.py::test_b" in wrong.value() and "1 failed" in wrong.value()


@pytest.mark.parametrize(("kind", "limit"), [("cpu", "1e-10"), ("cuda", "1e-05")])
def test_fp64_on_another_kind_of_device_may_differ_by_the_rounding_of_angles(
    kind: str, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both models are held to the same limit, whatever limits other precisions have."""
    one = {"w": torch.ones(1, dtype=torch.float64)}
    same = Measurement([1.0], [1.0], [1.0], one, one, one)
    monkeypatch.setattr(correctness, "device", lambda: torch.device(kind))
    monkeypatch.setattr(correctness, "_measured", lambda *_: same)
    monkeypatch.setattr(correctness, "_float8", lambda _: iter(()))
    checks = {check.name: check for check in correctness.examine_numbers(DoctorSettings("debug"))}
    assert {checks[f"{model}, fp64"].expected.split(" of a CPU")[0].split()[-1] for model in ("dense", "experts")} == {limit}
    far = replace(same, loss=[1.0 + 5e-5])
    monkeypatch.setattr(correctness, "_measured", lambda preset, here, *_: same if here.type == "cpu" else far)
    if kind == "cuda":
        found = list(correctness.examine_numbers(DoctorSettings("debug")))
        assert [check.verdict for check in found if check.name.endswith("fp64")] == ["FAIL", "FAIL"]
