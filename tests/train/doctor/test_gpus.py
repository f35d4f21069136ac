"""What a driver, the system and torch say of GPUs, and what is made of it."""

from dataclasses import replace
from pathlib import Path

import pytest

from forge_train.doctor import gpus
from forge_train.doctor.gpus import Gpu

WELL = Gpu("00000000:18:00.0", errors=0, slowed=0, limit=700.0, default=700.0)
PEERS = "GPUs read each other's memory"
NODES = {0: frozenset(range(8)), 1: frozenset(range(8, 16))}
GOOD = gpus.GpuFacts(driver=(WELL, WELL), near=(0, 1), nodes=NODES, cores=frozenset(range(16)))


def with_driver(**said: float | None) -> gpus.GpuFacts:
    """A second GPU of which the driver says something else."""
    return replace(GOOD, driver=(WELL, replace(WELL, bus="00000000:3B:00.0", **said)))


def test_good_gpus_pass() -> None:
    assert {check.verdict for check in gpus.judge(GOOD)} == {"PASS"}
    assert len(list(gpus.judge(GOOD))) == 5


@pytest.mark.parametrize(
    ("facts", "name", "verdict", "measured", "remedy"),
    [
        (with_driver(errors=3), "memory errors", "FAIL", "3 on 00000000:3B:00.0", "--gpu-reset"),
        (with_driver(slowed=0x2), "clocks", "SLOW", "00000000:3B:00.0: clocks set by an application", "-rgc"),
        (with_driver(slowed=0x48), "clocks", "SLOW", "slowed by hardware, slowed by hardware because of heat", "TEMPERATURE"),
        (with_driver(slowed=0x20), "clocks", "SLOW", "slowed by the driver because of heat", "TEMPERATURE"),
        (with_driver(slowed=0x80), "clocks", "SLOW", "slowed by the power supply", "POWER"),
        (with_driver(limit=400.0), "power limit", "SLOW", "00000000:3B:00.0: 400 of 700 W", "nvidia-smi -pl 700"),
        (replace(GOOD, driver=None), "driver's own account", "SKIPPED", "nvidia-smi", "driver's tools"),
        (replace(GOOD, cores=NODES[0]), "cores near the GPUs", "SLOW", "none for GPU 1 (node 1)", "--cpu-bind"),
        (
            replace(GOOD, apart=((1, 0),)),
            "GPUs read each other's memory",
            "SLOW",
            "1 of 2 pairs do not, such as 1 and 0",
            "topo -p2p",
        ),
    ],
)
def test_what_is_wrong_is_named(facts: gpus.GpuFacts, name: str, verdict: str, measured: str, remedy: str) -> None:
    found = {check.name: check for check in gpus.judge(facts)}
    assert found[name].verdict == verdict
    assert measured in found[name].value() and remedy in found[name].remedy
    assert sum(check.verdict != "PASS" for check in found.values()) == 1


def test_a_gpu_that_rests_or_reaches_its_limit_is_not_slowed() -> None:
    assert {check.verdict for check in gpus.judge(with_driver(slowed=0x1 | 0x4))} == {"PASS"}


def test_a_driver_that_does_not_tell_is_not_judged() -> None:
    silent = Gpu("00000000:01:00.0")
    verdicts = {check.name: check.verdict for check in gpus.judge(replace(GOOD, driver=(silent,)))}
    assert [name for name, verdict in verdicts.items() if verdict == "SKIPPED"] == ["memory errors", "clocks", "power limit"]
    assert {check.verdict for check in gpus.judge(replace(GOOD, driver=(WELL, silent)))} == {"PASS"}


@pytest.mark.parametrize(
    "facts",
    [
        replace(GOOD, nodes={0: NODES[0]}, cores=frozenset({77})),
        replace(GOOD, near=(None, None), cores=frozenset({77})),
        replace(GOOD, near=(2, 2), nodes=NODES | {2: frozenset()}),
    ],
    ids=["one node", "unknown", "a node without cores"],
)
def test_cores_are_judged_only_where_there_is_a_choice(facts: gpus.GpuFacts) -> None:
    assert {check.verdict for check in gpus.judge(facts)} == {"PASS"}


def test_one_gpu_has_no_other_one_to_read() -> None:
    assert PEERS not in [check.name for check in gpus.judge(replace(GOOD, near=(0,)))]


TOOL = """#!/bin/sh
case "$1" in
*%s*)
%s
;;
*) echo 'Field "clocks_event_reasons.active" is not a valid field to query.'; exit 2 ;;
esac
"""
LISTED = """cat <<'END'
00000000:18:00.0, 0, 700.00, 700.00, 0x0000000000000001
00000000:3B:00.0, [N/A], [Not Supported], 350.00, 0x0000000000000040
END"""
EXPECTED = (
    Gpu("00000000:18:00.0", errors=0, slowed=1, limit=700.0, default=700.0),
    Gpu("00000000:3B:00.0", errors=None, slowed=64, limit=None, default=350.0),
)


@pytest.mark.parametrize(
    ("field", "answer", "expected"),
    [
        ("clocks_event_reasons.active", LISTED, EXPECTED),
        ("clocks_throttle_reasons.active", LISTED, EXPECTED),
        ("clocks_event_reasons.active", "echo 'NVIDIA-SMI has failed'; exit 9", None),
    ],
    ids=["new driver", "old driver", "broken driver"],
)
def test_the_tool_of_the_driver_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str, answer: str, expected: tuple[Gpu, ...] | None
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(TOOL % (field, answer))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert gpus.facts([], lambda *_: True).driver == expected


def test_without_the_tool_nothing_is_told_of_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus.facts([], lambda *_: True, tmp_path).driver is None


def test_the_system_says_which_cores_are_near_which_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for bus, node in (("0000:18:00.0", "1"), ("0000:3b:00.0", "-1")):
        folder = tmp_path / "sys/bus/pci/devices" / bus
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
    for node, cores in (("node1", "4-5,8"), ("node0", "0-3"), ("node2", "")):
        folder = tmp_path / "sys/devices/system/node" / node
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cores}\n")
    buses = ["0000:18:00.0", "0000:3b:00.0", "0000:99:00.0", None]
    found = gpus.facts(buses, lambda one, other: {one, other} != {0, 1} and one < other, tmp_path)
    assert found.near == (1, None, None, None)
    assert found.nodes == {0: frozenset(range(4)), 1: frozenset({4, 5, 8}), 2: frozenset()}
    assert found.apart == ((0, 1), (1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (3, 2))
    assert found.cores


@pytest.mark.gpu
def test_addresses_of_this_machine_are_those_of_the_system() -> None:
    address = gpus._bus(0)
    assert address is not None and Path("/sys/bus/pci/devices", address).exists()
