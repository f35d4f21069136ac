"""What a device says of itself: of a CPU nothing, of an accelerator its name and its memory since it was last asked; and what
kinds of accelerators other than CUDA are believed to have, which is what was proven on them: nothing."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forge_core.errors import PlanError
from forge_parallel import accelerator
from forge_parallel.accelerator import name, take_peaks
from forge_parallel.transforms.float8 import conversion

CUDA = torch.device("cuda", 0)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stands for `torch.cuda`: its statistics are those that an allocator keeps, and the peak ends with a reset."""
    stats = {
        "allocated_bytes.all.peak": 300,
        "reserved_bytes.all.peak": 400,
        "num_alloc_retries": 2,
        "allocated_bytes.all.current": 100,
    }

    def reset(_: Any) -> None:
        stats.update({"allocated_bytes.all.peak": 100, "reserved_bytes.all.peak": 400})

    found = SimpleNamespace(memory_stats=lambda _: dict(stats), reset_peak_memory_stats=reset, get_device_name=lambda _: "Test 1")
    monkeypatch.setattr(torch, "get_device_module", lambda device: {"cuda": found}[device.type])
    return found


def test_peaks_are_those_since_the_last_call(module: SimpleNamespace) -> None:
    assert take_peaks(CUDA) == {"device_memory": 300, "device_memory_reserved": 400, "device_memory_retries": 2}
    assert take_peaks(CUDA)["device_memory"] == 100


def test_what_an_accelerator_does_not_count_is_left_out(module: SimpleNamespace) -> None:
    module.memory_stats = lambda _: {"allocated_bytes.all.peak": 5}
    assert take_peaks(CUDA) == {"device_memory": 5}


def test_names(module: SimpleNamespace) -> None:
    assert name(CUDA) == "Test 1" and name(torch.device("cpu")) == "cpu"


def test_a_cpu_has_no_memory_of_its_own(module: SimpleNamespace) -> None:
    assert take_peaks(torch.device("cpu")) == {}


def test_nothing_turns_tf32_on() -> None:
    """`precision.compute = "fp32"` says what it is; torch's default is exact, and no line of the packages changes it but one that
    measures products of every kind in a separate process."""
    root = Path(__file__).parents[3]
    sources = [file for folder in ("packages", "apps") for file in root.glob(f"{folder}/*/src/**/*.py")]
    lowers = re.compile(r"allow_tf32|set_float32_matmul_precision|fp32_precision\s*=")
    assert len(sources) > 100 and [file.name for file in sources if lowers.search(file.read_text())] == ["speed.py"]
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.fixture
def rocm(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """An MI300 under ROCm, which torch calls `cuda`: its capability reads like that of a GPU of NVIDIA that has everything."""
    monkeypatch.setattr(torch.version, "hip", "6.4.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 4))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "AMD Instinct MI300X")
    properties = SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    return torch.device("cuda", 0)


def test_what_was_proven_on_cuda_is_not_used_on_rocm(rocm: torch.device) -> None:
    fault = "AMD Instinct MI300X is not an NVIDIA GPU, and float8 products are proven only on these"
    assert accelerator.float8_fault(rocm) == fault
    assert accelerator.float8_groups_fault(rocm).startswith("AMD Instinct MI300X is not an NVIDIA GPU")
    assert accelerator.flex_fault(rocm).endswith("and this is AMD Instinct MI300X")
    assert not accelerator.shares_memory(rocm)
    assert (accelerator.capability(rocm), accelerator.architecture(rocm)) == (None, "gfx942")
    with pytest.raises(PlanError, match=rf"emulate = false, but {fault}; use 'auto' or true"):
        conversion.emulates(False, rocm)
    with pytest.warns(UserWarning, match=rf"{fault}: they are emulated, which is slower than bf16; remove transforms\.float8"):
        assert conversion.emulates("auto", rocm)
    assert conversion.emulates(True, rocm), "what was asked for is not warned of"


def test_the_same_questions_of_a_gpu_of_nvidia(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert accelerator.float8_fault(CUDA) == accelerator.float8_groups_fault(CUDA) == accelerator.flex_fault(CUDA) == ""
    assert accelerator.shares_memory(CUDA) and accelerator.architecture(CUDA) == "9.0"


@pytest.mark.parametrize(("device", "expected"), [("cpu", "gloo"), ("cuda", "cpu:gloo,cuda:nccl"), ("xpu", "cpu:gloo,xpu:xccl")])
def test_backends(device: str, expected: str) -> None:
    assert accelerator.backend(torch.device(device)) == expected


@pytest.mark.parametrize(("kind", "available", "expected"), [("xpu", True, "xpu"), ("xpu", False, "cpu"), ("mps", True, "cpu")])
def test_devices_of_kinds_that_forge_computes_on_are_found(
    monkeypatch: pytest.MonkeyPatch, kind: str, available: bool, expected: str
) -> None:
    """A Mac has a device without fp64, so work stays on its CPU."""
    begun = SimpleNamespace(is_initialized=lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: available)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 2)
    monkeypatch.setattr(torch, "get_device_module", lambda device: {"xpu": begun}[device.type])
    assert accelerator.kind() == expected and accelerator.count() == (4 if expected == "xpu" else 0)
    assert accelerator.current() == (torch.device("xpu", 2) if expected == "xpu" else torch.device("cpu"))
    assert accelerator.is_initialized() == (kind == "xpu")


def test_xpu_has_names_and_nothing_that_is_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    xpu = torch.device("xpu", 0)
    module = SimpleNamespace(get_device_name=lambda _: "Test 2", mem_get_info=lambda _: (3, 5))
    monkeypatch.setattr(torch, "get_device_module", lambda device: {"xpu": module}[device.type])
    assert (accelerator.memory(xpu), accelerator.free_memory(xpu), accelerator.architecture(xpu)) == (5, 3, "")
    assert "Test 2 is not an NVIDIA GPU" in accelerator.float8_fault(xpu) and accelerator.flex_fault(xpu)
    assert not accelerator.draws(xpu) and not accelerator.shares_memory(xpu) and not accelerator.warns_of_waits(xpu)
