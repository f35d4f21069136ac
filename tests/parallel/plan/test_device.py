"""What a device says of itself: of a CPU nothing, of an accelerator its name and its memory since it was last asked."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forge_parallel.placement.device import name, take_peaks

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
    assert len(sources) > 100 and [file.name for file in sources if lowers.search(file.read_text())] == ["matmul.py"]
    assert torch.get_float32_matmul_precision() == "highest"
