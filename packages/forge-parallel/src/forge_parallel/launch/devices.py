"""Do the ranks of a job have devices of one kind? They tell each other when they meet, and rank 0 judges.

Ranks with GPUs of different capabilities would choose different kernels, for attention and for float8: one rank would not compute
what another one does, and nothing would say so. Devices that are alike but for memory or clocks are only slow together.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from forge_core.terminal import size
from forge_parallel import accelerator

_NEARLY = 0.02
"""By which share two memories may differ and count as alike: error correction and drivers take some of it."""


@dataclass(frozen=True)
class Device:
    """What a rank works on: its `kind` decides how tensors are exchanged, its `architecture` which kernels there are."""

    host: str
    kind: str
    name: str
    architecture: str = ""
    memory: int | None = None

    @classmethod
    def of(cls, host: str, device: torch.device) -> "Device":
        """That of this process."""
        asked = accelerator.name(device), accelerator.architecture(device), accelerator.memory(device)
        return cls(host, device.type, *asked)

    def __str__(self) -> str:
        told = [self.name, f"of {self.architecture}" if self.architecture else "", size(self.memory) if self.memory else ""]
        return " ".join(filter(None, told))


def judged(devices: Sequence[Device]) -> tuple[str, str]:
    """(why these cannot work together, what to know of them when they do), by rank; "" for nothing."""
    if len({one.kind for one in devices}) > 1:
        idle = sorted({one.host for one in devices if one.kind == accelerator.CPU.type})
        do = f"`forge-train doctor` on {', '.join(idle[:4])} says why torch uses no GPU there" if idle else "choose one kind"
        return f"ranks have devices of different kinds: {_listed(devices)}; {do}", ""
    if len({one.architecture for one in devices}) > 1:
        return (
            f"ranks have devices of different capabilities: {_listed(devices)}; their kernels would not compute the same. "
            "Choose nodes of one kind (--constraint, --nodelist), or devices of one kind with CUDA_VISIBLE_DEVICES",
            "",
        )
    memories = [one.memory for one in devices if one.memory is not None]
    unequal = bool(memories) and min(memories) < (1 - _NEARLY) * max(memories)
    if unequal or len({one.name for one in devices}) > 1:
        return "", f"ranks have different devices: {_listed(devices)}; all wait for the slowest, and the smallest memory counts"
    return "", ""


def _listed(devices: Sequence[Device]) -> str:
    """Which ranks have which device, and on which host the first of them is."""
    ranks: dict[str, list[int]] = {}
    for rank, one in enumerate(devices):
        ranks.setdefault(str(one), []).append(rank)
    return ", ".join(f"{_ranks(held)} {told} ({devices[held[0]].host})" for told, held in ranks.items())


def _ranks(held: Sequence[int]) -> str:
    if len(held) == 1:
        return f"rank {held[0]} has"
    if list(held) == list(range(held[0], held[-1] + 1)):
        return f"ranks {held[0]}-{held[-1]} have"
    more = f" and {len(held) - 8} more" if len(held) > 8 else ""
    return f"ranks {', '.join(map(str, held[:8]))}{more} have"
