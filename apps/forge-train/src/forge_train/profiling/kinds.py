"""What kind of work an event is, by its category first and by its name only within one: an operator is never a kernel.

A name decides from its beginning. `record_param_comms` contains "mm" and multiplies no matrices; kernels that a compiler fused
around a collective name it, and compute.
"""

import re
from enum import StrEnum

from forge_train.profiling.trace import Event


class Kind(StrEnum):
    """Of work that takes time on a device, or on the threads of a CPU."""

    COMPUTE = "compute"
    COMMUNICATION = "communication"
    MEMORY = "memory"


_KERNELS = re.compile(
    r"(void )?(\w+::)*(nccl|rccl|oneccl|nvshmem|multimem_|one_shot_all_reduce|two_shot_all_reduce)", re.IGNORECASE
)
"""Of libraries for collectives, and of torch's symmetric memory."""

_BETWEEN_DEVICES = ("Memcpy PtoP", "CopyPeerToPeer")

_HOST_COLLECTIVES = ("c10d::", "_c10d_functional::", "_c10d_functional_autograd::", "record_param_comms", "_dtensor::")
"""Operators that start a collective, with what they do to start it."""

_WORK = re.compile(r"(gloo|mpi|ucc):")
"""Collectives of a CPU: annotations of the threads that run them, as long as they run."""

_ENGINES = ("autograd::", "profiler::")

_MOVES = frozenset(f"aten::{name}" for name in ("copy_", "fill_", "zero_", "empty", "empty_strided", "resize_", "_pin_memory"))
"""Operators that only move, fill or allocate memory, when they do not call others."""


def of_device(event: Event) -> Kind:
    """Of a kernel, copy or fill of a device. A copy between devices is communication."""
    if event.category == "kernel":
        return Kind.COMMUNICATION if _KERNELS.match(event.name) else Kind.COMPUTE
    return Kind.COMMUNICATION if event.name.startswith(_BETWEEN_DEVICES) else Kind.MEMORY


def is_collective(name: str) -> bool:
    """Whether an annotation lasts as long as a collective of a CPU."""
    return _WORK.match(name) is not None


def of_operator(name: str) -> Kind | None:
    """Of an operator by itself, without those that it calls. None for what only calls others: autograd's engine, and functions
    written in Python, which may wait for a collective; without a namespace, compiled code alone computes by itself."""
    if name.startswith(_HOST_COLLECTIVES):
        return Kind.COMMUNICATION
    if name.startswith(_ENGINES) or ("::" not in name and "Compiled" not in name):
        return None
    return Kind.MEMORY if name in _MOVES else Kind.COMPUTE
