"""State of a node's GPUs: reports of the driver, nearby cores, and access to each other's memory.

`facts` queries the machine; `judge` needs only the facts.
"""

import csv
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import which
from typing import Any

from forge_core.machine import allowed_cores
from forge_train.doctor.step import Check, DoctorSettings, Skip

_ASKED = ("pci.bus_id", "ecc.errors.uncorrected.volatile.total", "power.limit", "power.default_limit")
_REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
"""Name of the query in newer and in older drivers."""

_SLOWED = {
    0x2: "clocks set by an application",
    0x8: "slowed by hardware",
    0x20: "slowed by the driver because of heat",
    0x40: "slowed by hardware because of heat",
    0x80: "slowed by the power supply",
}
"""Bits of NVML's reasons for low clocks that also matter without load; idling and the power limit under load do not count."""


@dataclass(frozen=True)
class Gpu:
    """State of one GPU, from its driver; None if unknown.

    Attributes:
        bus: PCI address, such as `0000:18:00.0`.
        errors: number of memory errors that ECC could not correct, since the driver was loaded.
        slowed: reasons for reduced clocks, as bits of NVML.
        limit, default: current and default power limit in watts.
    """

    bus: str
    errors: int | None = None
    slowed: int | None = None
    limit: float | None = None
    default: float | None = None


@dataclass(frozen=True)
class GpuFacts:
    """Facts about a node's GPUs.

    Attributes:
        driver: the GPUs listed by nvidia-smi; None if it is missing or fails.
        near: NUMA node of each torch device; None if unknown.
        nodes: cores of each NUMA node of the machine.
        cores: cores that this process may use.
        apart: pairs of torch devices where the first cannot access the memory of the second.
    """

    driver: tuple[Gpu, ...] | None
    near: tuple[int | None, ...]
    nodes: dict[int, frozenset[int]]
    cores: frozenset[int]
    apart: tuple[tuple[int, int], ...] = ()


def examine_gpus(_: DoctorSettings) -> Iterator[Check]:
    """Step `gpus`: collects facts about the GPUs and checks them."""
    import torch

    from forge_parallel import accelerator

    if accelerator.kind() != "cuda":
        raise Skip("no GPU is visible", "see the step torch for the reason")
    return judge(facts([_bus(index) for index in range(accelerator.count())], torch.cuda.can_device_access_peer))


def facts(buses: Sequence[str | None], reads: Callable[[int, int], bool], root: Path = Path("/")) -> GpuFacts:
    """Returns the facts about this node's GPUs.

    Args:
        buses: PCI address of each torch device; None if unknown.
        reads: returns True if a device can access the memory of another.
        root: root of the file system.
    """
    pairs = [(one, other) for one in range(len(buses)) for other in range(len(buses)) if one != other]
    return GpuFacts(
        driver=_driver(),
        near=tuple(_node(bus, root) for bus in buses),
        nodes=_nodes(root),
        cores=allowed_cores(),
        apart=tuple(pair for pair in pairs if not reads(*pair)),
    )


def _bus(index: int) -> str | None:
    """Returns the PCI address of a torch device in the format of Linux."""
    import torch

    seen = torch.cuda.get_device_properties(index)
    parts = [getattr(seen, name, None) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")]
    if None in parts:  # older than torch 2.8
        return None
    return "{:04x}:{:02x}:{:02x}.0".format(*parts)


def _node(bus: str | None, root: Path) -> int | None:
    file = root / f"sys/bus/pci/devices/{bus}/numa_node"
    if bus is None or not file.is_file():
        return None
    number = int(file.read_text())
    return None if number < 0 else number


def _nodes(root: Path) -> dict[int, frozenset[int]]:
    found = {}
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        spans = [span.partition("-") for span in (folder / "cpulist").read_text().strip().split(",") if span]
        cores = (range(int(first), int(last or first) + 1) for first, _, last in spans)
        found[int(folder.name.removeprefix("node"))] = frozenset(core for span in cores for core in span)
    return dict(sorted(found.items()))


def _driver() -> tuple[Gpu, ...] | None:
    """Returns the GPUs that `nvidia-smi` lists; None if it fails."""
    command = which("nvidia-smi")
    for reasons in _REASONS if command else ():
        asked = f"--query-gpu={','.join((*_ASKED, reasons))}"
        try:
            done = subprocess.run(
                [str(command), asked, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=20, check=False
            )
        except (OSError, subprocess.TimeoutExpired):  # nvidia-smi hangs if the driver does
            return None
        if done.returncode == 0:
            return tuple(_gpu(row) for row in csv.reader(done.stdout.splitlines(), skipinitialspace=True) if row)
    return None


def _gpu(row: list[str]) -> Gpu:
    bus, errors, limit, default, slowed = row
    return Gpu(bus, _number(errors, int), _number(slowed, lambda text: int(text, 16)), _number(limit), _number(default))


def _number(text: str, of: Callable[[str], Any] = float) -> Any:
    """Parses a number; returns None for text such as `[N/A]` or `[Not Supported]`."""
    try:
        return of(text)
    except ValueError:
        return None


def judge(found: GpuFacts) -> Iterator[Check]:
    """Yields checks of the GPUs' facts, with remedies."""
    if found.driver is None:
        yield Check("driver's own account", "SKIPPED", "nvidia-smi is missing or fails", remedy="install the driver's tools")
    else:
        yield _errors(found.driver)
        yield _clocks(found.driver)
        yield _power(found.driver)
    yield _cores(found)
    if len(found.near) > 1:
        yield _peers(found)


def _errors(gpus: Sequence[Gpu]) -> Check:
    name, expected = "memory errors", "no uncorrectable ECC errors"
    wrong = [f"{gpu.errors} on {gpu.bus}" for gpu in gpus if gpu.errors]
    if wrong:
        remedy = "take it out of service and reset it (nvidia-smi --gpu-reset); if errors occur again, replace it"
        return Check(name, "FAIL", ", ".join(wrong), expected=expected, remedy=remedy)
    if all(gpu.errors is None for gpu in gpus):
        return Check(
            name,
            "SKIPPED",
            "no GPU counts them",
            expected=expected,
            remedy="nvidia-smi -e 1, if it has ECC",
        )
    return Check(name, "PASS", "none", expected=expected)


def _clocks(gpus: Sequence[Gpu]) -> Check:
    name, expected = "clocks", "not reduced"
    held = {gpu.bus: [why for bit, why in _SLOWED.items() if (gpu.slowed or 0) & bit] for gpu in gpus}
    told = "; ".join(f"{bus}: {', '.join(reasons)}" for bus, reasons in held.items() if reasons)
    if told:
        remedy = "check cooling and power (nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER); nvidia-smi -rac -rgc resets clocks"
        return Check(name, "SLOW", told, expected=expected, remedy=remedy)
    if all(gpu.slowed is None for gpu in gpus):
        return Check(name, "SKIPPED", "the driver does not report it", expected=expected)
    return Check(name, "PASS", "free", expected=expected)


def _power(gpus: Sequence[Gpu]) -> Check:
    name, expected = "power limit", "the manufacturer's default"
    capped = [gpu for gpu in gpus if gpu.limit is not None and gpu.default is not None and gpu.limit < gpu.default]
    if capped:
        told = "; ".join(f"{gpu.bus}: {gpu.limit:g} of {gpu.default:g} W" for gpu in capped)
        return Check(name, "SLOW", told, expected=expected, remedy=f"raise it with nvidia-smi -pl {capped[0].default:g}")
    if all(gpu.limit is None for gpu in gpus):
        return Check(name, "SKIPPED", "the driver does not report it", expected=expected)
    return Check(
        name, "PASS", ", ".join(sorted({f"{gpu.limit:g} W" for gpu in gpus if gpu.limit is not None})), expected=expected
    )


def _cores(found: GpuFacts) -> Check:
    """Checks for cores on each GPU's NUMA node, since other cores reach the GPU over a slower bus."""
    name, expected = "cores near the GPUs", "cores on each GPU's NUMA node"
    if len(found.nodes) < 2 or all(node is None for node in found.near):
        return Check(
            name, "PASS", "one NUMA node" if len(found.nodes) < 2 else "the system does not report it", expected=expected
        )
    far = [f"{index} (node {node})" for index, node in enumerate(found.near) if _is_far(node, found)]
    if far:
        remedy = "give the job cores of these nodes too: --cpu-bind of srun, --cpuset-cpus of a container, taskset"
        return Check(name, "SLOW", f"none for GPU {', '.join(far)}", expected=expected, remedy=remedy)
    told = ", ".join(f"GPU {index} on node {node}" for index, node in enumerate(found.near) if node is not None)
    return Check(name, "PASS", told, expected=expected)


def _is_far(node: int | None, found: GpuFacts) -> bool:
    """Returns True if a NUMA node has cores, but none that this process may use."""
    return node is not None and not found.cores & (found.nodes.get(node) or found.cores)


def _peers(found: GpuFacts) -> Check:
    name, expected = "GPUs read each other's memory", "every GPU that of every other GPU"
    if not found.apart:
        return Check(name, "PASS", "all do", expected=expected)
    pairs = len(found.near) * (len(found.near) - 1)
    told = f"{len(found.apart)} of {pairs} pairs do not, such as {found.apart[0][0]} and {found.apart[0][1]}"
    remedy = "NCCL copies through the host between them: nvidia-smi topo -p2p r shows why (IOMMU, ACS, a container, the model)"
    return Check(name, "SLOW", told, expected=expected, remedy=remedy)
