"""Descriptions of hardware: those that Forge ships, and the errors of others."""

from pathlib import Path

import pytest

from forge_core.errors import ForgeError
from forge_parallel.dryrun.fake_world import ACCELERATORS
from forge_parallel.timing import Hardware, UnknownHardware, known_hardware

GOOD = """
name = "mine"
memory_gib = 80
memory_gb_s = 3350
bf16_tflops = 989
per_node = 8
node_gb_s = 450
node_latency_us = 3
network_gb_s = 50
network_latency_us = 8
host_gb_s = 40
"""


def test_shipped_hardware() -> None:
    assert set(ACCELERATORS) <= set(known_hardware())
    for name in known_hardware():
        gpu = Hardware.load(name)
        assert gpu.name == name
        assert gpu.node.bandwidth > gpu.network.bandwidth
        if name in ACCELERATORS:
            assert gpu.memory == ACCELERATORS[name].memory
    h100 = Hardware.load("h100")
    assert h100.flops == {"bf16": 989e12, "fp8": 1979e12, "fp32": 67e12}  # NVIDIA's data sheet, dense
    assert (h100.bandwidth, h100.node.bandwidth, h100.network.bandwidth) == (3.35e12, 450e9, 50e9)


def test_a_file(tmp_path: Path) -> None:
    (tmp_path / "gpu.toml").write_text(GOOD)
    gpu = Hardware.load(str(tmp_path / "gpu.toml"))
    assert (gpu.name, gpu.memory, gpu.per_node, gpu.host) == ("mine", 80 << 30, 8, 40e9)
    assert gpu.node.latency == pytest.approx(3e-6)
    assert "fp8" not in gpu.flops


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("network_gb_s = 400.5", "network_gb_s = 400.5 is not between 0.1 and 400 GB/s \\(not Gbit/s\\)"),
        ("bf16_tflops = 989e12", "bf16_tflops = 989000000000000.0 is not between"),
        ("memory_gib = 85899345920", "memory_gib = 85899345920 is not between 1 and 2000 GiB"),
        ("node_latency_us = 0", "node_latency_us = 0 is not between"),
        ("per_node = 8.0", "per_node = 8.0 is not a whole number"),
        ("memory_gb_s = true", "memory_gb_s = True is not a number"),
        ('host_gb_s = "40"', "host_gb_s = '40' is not a number"),
        ("bf16_tflops = nan", "bf16_tflops = nan is not between"),
        ("name = 3", "name is a text"),
        ("cores = 3", "unknown key cores; keys are name, note, memory_gib"),
    ],
)
def test_a_wrong_line(line: str, told: str) -> None:
    key = line.partition(" ")[0]
    kept = "\n".join(old for old in GOOD.splitlines() if not old.startswith(f"{key} "))
    with pytest.raises(ForgeError, match=f"gpu.toml does not describe hardware: .*{told}"):
        Hardware.read(f"{kept}\n{line}", "gpu.toml")


def test_missing_lines_are_all_named() -> None:
    with pytest.raises(ForgeError, match=r"memory_gib is missing.*bf16_tflops is missing.*host_gb_s is missing"):
        Hardware.read('name = "empty"', "gpu.toml")


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UnknownHardware, match="unknown hardware 'rtx': choose a100, b200, gb200, gb300, h100, h200, or give"):
        Hardware.load("rtx")
    with pytest.raises(ForgeError, match="cannot read the hardware file"):
        Hardware.load(str(tmp_path / "none.toml"))
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ForgeError, match="cannot read the hardware file"):
        Hardware.load(str(tmp_path / "bytes.toml"))
    (tmp_path / "bad.toml").write_text("memory_gib = ")
    with pytest.raises(ForgeError, match="is not TOML"):
        Hardware.load(str(tmp_path / "bad.toml"))
