"""The accelerator of this process: the only module of this package that asks what kind a device is, or calls torch by its
kind.

`torch.accelerator` answers for every kind. What has been tested, or rehearsed by a stand-in for a GPU, on one kind only is
asked for by name, and other kinds refuse: ROCm, whose devices torch calls `cuda` too, and XPU differ from CUDA in this file
only. Also here: whether the process can compile for its device, which is tried with a function of one line, and deterministic
kernels.
"""

import os
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

import torch
from torch.utils import deterministic as torch_deterministic

from forge_core.errors import PlanError
from forge_parallel import torch_private
from forge_parallel.torch_private import detect_fake_mode

CPU = torch.device("cpu")

COLLECTIVES = {"cuda": "nccl", "xpu": "xccl"}
"""Kinds of devices that Forge computes on, and the backend of their collectives. Others, such as those of a Mac, are left alone:
fp64, which proofs are made in, does not exist there."""

_NO_HOST_MEMORY = "DefaultCPUAllocator: can't allocate memory"

FLOAT8 = (8, 9)
"""Compute capability from which GPUs of NVIDIA multiply float8 numbers: Ada, Hopper and later."""

FLOAT8_GROUPS = (9, 10)
"""Major compute capabilities with a float8 product of several matrices at once: Hopper, and Blackwell of data centers."""


def kind() -> str:
    """Of devices that this process can use, such as `cuda`; `cpu` where there are none."""
    here = torch.accelerator.current_accelerator()
    usable = here is not None and here.type in COLLECTIVES and torch.accelerator.is_available()
    return here.type if here is not None and usable else CPU.type


def count() -> int:
    """How many accelerators this process can use."""
    return 0 if kind() == CPU.type else torch.accelerator.device_count()


def use(index: int) -> torch.device:
    """The accelerator of this number, which is the current one from here on."""
    torch.accelerator.set_device_index(index)
    return torch.device(kind(), index)


def current() -> torch.device:
    """The accelerator that work goes to; a CPU where there is none."""
    found = kind()
    return CPU if found == CPU.type else torch.device(found, torch.accelerator.current_device_index())


def is_initialized() -> bool:
    """Whether this process has begun to use its accelerator. It cannot be forked then."""
    here = torch.accelerator.current_accelerator()
    return here is not None and here.type in COLLECTIVES and _module(here).is_initialized()


def wait(device: torch.device) -> None:
    """Returns when the device has done all work."""
    if device.type != CPU.type:
        torch.accelerator.synchronize(device)


def forget_cache() -> None:
    """Gives memory that torch holds for later tensors back to the devices."""
    torch.accelerator.empty_cache()


def event_behind(device: torch.device) -> Any:
    """An event behind what was queued on an accelerator so far."""
    return _module(device).current_stream(device).record_event()


def timed_event(device: torch.device) -> Any:
    """An event behind what was queued on an accelerator so far, which knows when the device passed it."""
    event = torch.Event(device, enable_timing=True)
    event.record(_module(device).current_stream(device))
    return event


@contextmanager
def random_states_kept() -> Iterator[None]:
    """The generators of torch, on every device, are afterwards as they were before."""
    devices = range(torch.accelerator.device_count()) if is_initialized() else ()
    with torch.random.fork_rng(devices=devices):
        yield


def backend(device: torch.device) -> str:
    """Of a process group whose ranks exchange tensors of such a device, and those of the host, too."""
    collectives = COLLECTIVES.get(device.type)
    return "gloo" if collectives is None else f"cpu:gloo,{device.type}:{collectives}"


def name(device: torch.device) -> str:
    """What the device calls itself, such as `NVIDIA H200`; of a CPU its type."""
    return device.type if device.type == CPU.type else _module(device).get_device_name(device)


def capability(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of a GPU of NVIDIA; None of other devices, whose numbers mean something else."""
    return torch.cuda.get_device_capability(device) if _is_nvidia(device) else None


def architecture(device: torch.device) -> str:
    """What kernels are made for, such as `9.0` of NVIDIA and `gfx942` of AMD; "" where the device does not say."""
    if found := capability(device):
        return "{}.{}".format(*found)
    if device.type != "cuda":
        return ""
    return getattr(torch.cuda.get_device_properties(device), "gcnArchName", "").partition(":")[0]


def memory(device: torch.device) -> int | None:
    """Bytes of an accelerator, taken or not; None where it does not say, and for a CPU, whose memory other processes share."""
    found = _free_and_all(device)
    return None if found is None else found[1]


def free_memory(device: torch.device) -> int | None:
    """Bytes of an accelerator that no process holds; None as above."""
    found = _free_and_all(device)
    return None if found is None else found[0]


def _free_and_all(device: torch.device) -> tuple[int, int] | None:
    ask = None if device.type == CPU.type else getattr(_module(device), "mem_get_info", None)
    if ask is None:
        return None
    free, whole = ask(device)
    return int(free), int(whole)


def take_peaks(device: torch.device) -> dict[str, int]:
    """Memory of an accelerator since the last call; empty for a CPU.

    `device_memory` (bytes in tensors at most), `device_memory_reserved` (bytes held by the allocator at most) and
    `device_memory_retries` (how often, of the process so far, it had to give back what it held to find room: each one stops the
    device; smaller micro-batches, or fewer fragments).
    """
    if device.type == CPU.type:
        return {}
    module = _module(device)
    stats = module.memory_stats(device)
    module.reset_peak_memory_stats(device)
    keys = {
        "device_memory": "allocated_bytes.all.peak",
        "device_memory_reserved": "reserved_bytes.all.peak",
        "device_memory_retries": "num_alloc_retries",
    }
    return {said: int(stats[key]) for said, key in keys.items() if key in stats}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, or what caused it, is that memory could not be had: of an accelerator, or of the host."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, torch.OutOfMemoryError) or (isinstance(seen, RuntimeError) and _NO_HOST_MEMORY in str(seen)):
            return True
        seen = seen.__cause__
    return False


def notes_allocations(device: torch.device) -> bool:
    """Whether the allocator of the device can say what it did."""
    return device.type != CPU.type and torch_private.notes_allocations(getattr(_module(device), "memory", None))


def note_allocations(device: torch.device, entries: int | None) -> None:
    """The last so many events of the allocator are kept from here on; None ends it."""
    torch_private.record_allocations(_module(device).memory, entries)


def write_allocations(device: torch.device, path: str) -> None:
    """Writes them to a file for pytorch.org/memory_viz.

    Raises:
        OSError: it cannot be written.
    """
    torch_private.write_allocations(_module(device).memory, path)


def profiled(device: torch.device) -> list[Any]:
    """What a profiler records here: the host, and the device where this torch can."""
    known = torch.profiler.supported_activities()
    wanted = [torch.profiler.ProfilerActivity.CPU, getattr(torch.profiler.ProfilerActivity, device.type.upper(), None)]
    return [activity for activity in dict.fromkeys(wanted) if activity in known]


def warns_of_waits(device: torch.device) -> bool:
    """From here on, torch warns where the host waits for the device; False where it cannot."""
    if device.type != "cuda":
        return False
    torch.cuda.set_sync_debug_mode("warn")
    return True


def draws(device: torch.device) -> bool:
    """Whether initial weights are drawn on the device: by the Philox of CUDA, seeded anew for each block."""
    return device.type == "cuda"


def float8_fault(device: torch.device) -> str:
    """Why the device does not multiply float8 numbers by itself; "" where it does."""
    return _float8_fault(device, lambda found: found >= FLOAT8, "float8 products")


def float8_groups_fault(device: torch.device) -> str:
    """The same of the float8 products of stacked experts, whose kernel fewer GPUs have."""
    return _float8_fault(device, lambda found: found[0] in FLOAT8_GROUPS, "float8 products of stacked experts")


def _float8_fault(device: torch.device, has: Any, what: str) -> str:
    found = capability(device)
    if found is None and device.type != CPU.type:
        return f"{name(device)} is not a GPU of NVIDIA, on which alone {what} are proven"
    if found is None or not has(found):
        return f"{name(device) if found else f'the device {device.type!r}'} has no {what}"
    return ""


def flex_fault(device: torch.device) -> str:
    """Why flex attention is not used on the accelerator; "" where it is, and for a CPU, which has another kernel."""
    return (
        ""
        if device.type == CPU.type or _is_nvidia(device)
        else f"flex attention is proven on GPUs of NVIDIA only, and this is {name(device)}"
    )


def shares_memory(device: torch.device) -> bool:
    """Whether kernels of torch read the memory of other devices of this kind (symmetric memory)."""
    return _is_nvidia(device)


def _is_nvidia(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None


def _module(device: torch.device) -> Any:
    return torch.get_device_module(device)


def require_compiler(device: torch.device, key: str) -> None:
    """Compiles and runs a function on an accelerator, once in a process: what is missing shows here, and not in the first step,
    in the middle of the compiler. `key` is what asks for it in a recipe. A dry run compiles nothing, and is not refused.

    Raises:
        PlanError: it does not compile, or not run; says what is missing, where that can be seen.
    """
    if device.type == CPU.type or detect_fake_mode() is not None:
        return
    if fault := _fault(device):
        raise PlanError(f"{key} needs a compiler for {name(device)}, and there it fails: {fault}")


@cache
def _fault(device: torch.device) -> str:
    try:
        torch.compile(_one_more, fullgraph=True)(torch.zeros(4, device=device))
    except Exception as cause:  # noqa: BLE001 (the compiler raises what its parts raise)
        told = next((line for line in str(cause).splitlines() if line.strip()), "")
        return f"{type(cause).__name__}: {told.strip()[:200]}. {missing_for_compiler()}"
    return ""


def _one_more(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def missing_for_compiler() -> str:
    """What the compiler lacks in this environment, as far as it can be seen without it."""
    if find_spec("triton") is None:
        return "Triton is not installed: pip install triton, in the version that this torch requires (pip show torch)"
    compiler = os.environ.get("CC")
    if which(compiler) is None if compiler else not (which("gcc") or which("clang")):
        named = f"CC names {compiler!r}, which is not there" if compiler else "there is neither gcc nor clang on the path"
        return f"Triton needs a C compiler, and {named}: install gcc, or set CC to one"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return "Triton needs the headers of Python: install python3-dev (or python3-devel), or take a Python that brings them"
    return "TORCH_LOGS=inductor tells more; without it, leave out what has to be compiled"


WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_FILLING: Any = torch_deterministic
"""A module whose attribute torch makes when it is imported."""

FIXED = (":4096:8", ":16:8")
"""Workspaces with which products on several streams of CUDA are summed in one order; the first is the faster one."""


@contextmanager
def deterministic(on: bool) -> Iterator[None]:
    """Inside, what is computed twice from the same numbers has the same bits; with `on` False nothing changes.

    torch takes other kernels, which may be slower, and an operator that has none raises an error with its name
    (`torch.use_deterministic_algorithms`). It has to be entered before the first product on a GPU. Collectives of NCCL sum in an
    order that depends on how ranks are connected: the same nodes give the same bits, others may not.

    Raises:
        PlanError: the environment asks for a workspace with which products differ.
    """
    if not on:
        yield
        return
    if os.environ.setdefault(WORKSPACE, FIXED[0]) not in FIXED:
        raise PlanError(
            f"deterministic kernels need {WORKSPACE} to be {' or '.join(FIXED)}, and it is {os.environ[WORKSPACE]!r}; "
            "unset it, or set train.deterministic = false"
        )
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark, fill = torch.backends.cudnn.benchmark, _FILLING.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False  # it chooses kernels by their time
    _FILLING.fill_uninitialized_memory = False  # no number of a run comes from there, and filling takes time
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark, _FILLING.fill_uninitialized_memory = benchmark, fill
