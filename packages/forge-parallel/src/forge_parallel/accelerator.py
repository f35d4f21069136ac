"""The accelerator of this process. Only this module of the package branches on the kind of a device, or calls torch by its kind.

`torch.accelerator` supports every kind. Features that are tested, or rehearsed with a simulated GPU, on one kind only check for
this kind by name, and are refused on others: ROCm, whose devices are also called `cuda` in torch, and XPU differ from CUDA only
in this file. The module also tests whether the process can compile for its device, with a one-line function, and switches to
deterministic kernels.
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
"""Kind of device that Forge supports -> backend of its collectives. Others, such as those of a Mac, are not used, since they have
no fp64, in which proofs are made."""

_NO_HOST_MEMORY = "DefaultCPUAllocator: can't allocate memory"

FLOAT8 = (8, 9)
"""Compute capability from which NVIDIA GPUs multiply float8 numbers: Ada, Hopper and later."""

FLOAT8_GROUPS = (9, 10)
"""Major compute capabilities with a grouped float8 product: Hopper, and data-center Blackwell."""


def kind() -> str:
    """Returns the kind of the devices that this process can use, such as `cuda`; `cpu` if there are none."""
    here = torch.accelerator.current_accelerator()
    usable = here is not None and here.type in COLLECTIVES and torch.accelerator.is_available()
    return here.type if here is not None and usable else CPU.type


def count() -> int:
    """Returns the number of accelerators that this process can use."""
    return 0 if kind() == CPU.type else torch.accelerator.device_count()


def use(index: int) -> torch.device:
    """Makes the accelerator with this index the current one and returns it."""
    torch.accelerator.set_device_index(index)
    return torch.device(kind(), index)


def current() -> torch.device:
    """Returns the current accelerator; the CPU if there is none."""
    current_kind = kind()
    return CPU if current_kind == CPU.type else torch.device(current_kind, torch.accelerator.current_device_index())


def is_initialized() -> bool:
    """Whether this process has initialized its accelerator, after which it cannot be forked."""
    here = torch.accelerator.current_accelerator()
    return here is not None and here.type in COLLECTIVES and _module(here).is_initialized()


def wait(device: torch.device) -> None:
    """Blocks until the device has finished all work."""
    if device.type != CPU.type:
        torch.accelerator.synchronize(device)


def forget_cache() -> None:
    """Returns memory that torch caches to the devices."""
    torch.accelerator.empty_cache()


def event_behind(device: torch.device) -> Any:
    """Returns an event after all work queued on an accelerator so far."""
    return _module(device).current_stream(device).record_event()


def timed_event(device: torch.device) -> Any:
    """Returns an event after all work queued on an accelerator so far, with the time at which the device reaches it."""
    event = torch.Event(device, enable_timing=True)
    event.record(_module(device).current_stream(device))
    return event


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Context that restores the states of torch's random generators on all devices."""
    devices = range(torch.accelerator.device_count()) if is_initialized() else ()
    with torch.random.fork_rng(devices=devices):
        yield


def backend(device: torch.device) -> str:
    """Returns the backend of a process group whose ranks exchange tensors of the device and of the host."""
    collectives = COLLECTIVES.get(device.type)
    return "gloo" if collectives is None else f"cpu:gloo,{device.type}:{collectives}"


def name(device: torch.device) -> str:
    """Returns the name of the device, such as `NVIDIA H200`; the type of a CPU."""
    return device.type if device.type == CPU.type else _module(device).get_device_name(device)


def capability(device: torch.device) -> tuple[int, int] | None:
    """Returns the compute capability of an NVIDIA GPU; None for other devices, whose numbers have another meaning."""
    return torch.cuda.get_device_capability(device) if _is_nvidia(device) else None


def architecture(device: torch.device) -> str:
    """Returns the target of kernels, such as `9.0` for NVIDIA and `gfx942` for AMD; "" if unknown."""
    if found := capability(device):
        return "{}.{}".format(*found)
    if device.type != "cuda":
        return ""
    return getattr(torch.cuda.get_device_properties(device), "gcnArchName", "").partition(":")[0]


def memory(device: torch.device) -> int | None:
    """Returns the total bytes of an accelerator; None if unknown, and for a CPU, whose memory other processes share."""
    sizes = _free_and_all(device)
    return None if sizes is None else sizes[1]


def free_memory(device: torch.device) -> int | None:
    """Returns the bytes of an accelerator that no process uses; None as in `memory`."""
    sizes = _free_and_all(device)
    return None if sizes is None else sizes[0]


def _free_and_all(device: torch.device) -> tuple[int, int] | None:
    ask = None if device.type == CPU.type else getattr(_module(device), "mem_get_info", None)
    if ask is None:
        return None
    free, whole = ask(device)
    return int(free), int(whole)


def take_peaks(device: torch.device) -> dict[str, int]:
    """Returns memory statistics of an accelerator since the last call; empty for a CPU.

    `device_memory`: maximum bytes in tensors. `device_memory_reserved`: maximum bytes reserved by the allocator.
    `device_memory_retries`: how often since the start of the process the allocator had to release its cache to allocate memory;
    each retry blocks the device, and is avoided by smaller micro-batches or less fragmentation.
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
    return {metric: int(stats[key]) for metric, key in keys.items() if key in stats}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, or one of its causes, is a failed allocation on an accelerator or on the host."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, torch.OutOfMemoryError) or (isinstance(seen, RuntimeError) and _NO_HOST_MEMORY in str(seen)):
            return True
        seen = seen.__cause__
    return False


def notes_allocations(device: torch.device) -> bool:
    """Whether the device's allocator can record its events."""
    return device.type != CPU.type and torch_private.notes_allocations(getattr(_module(device), "memory", None))


def note_allocations(device: torch.device, entries: int | None) -> None:
    """Records the last `entries` events of the allocator from here on; None stops recording."""
    torch_private.record_allocations(_module(device).memory, entries)


def write_allocations(device: torch.device, path: str) -> None:
    """Writes the recorded events to a file for pytorch.org/memory_viz.

    Raises:
        OSError: the file cannot be written.
    """
    torch_private.write_allocations(_module(device).memory, path)


def profiled(device: torch.device) -> list[Any]:
    """Returns what a profiler records here: the host and, if this torch supports it, the device."""
    known = torch.profiler.supported_activities()
    wanted = [torch.profiler.ProfilerActivity.CPU, getattr(torch.profiler.ProfilerActivity, device.type.upper(), None)]
    return [activity for activity in dict.fromkeys(wanted) if activity in known]


def warns_of_waits(device: torch.device) -> bool:
    """Makes torch warn whenever the host waits for the device; returns False if that is not supported."""
    if device.type != "cuda":
        return False
    torch.cuda.set_sync_debug_mode("warn")
    return True


def draws(device: torch.device) -> bool:
    """Whether initial weights are drawn on the device, with CUDA's Philox generator, seeded for each block."""
    return device.type == "cuda"


def float8_fault(device: torch.device) -> str:
    """Returns why the device has no float8 products; "" if it has."""
    return _float8_fault(device, lambda found: found >= FLOAT8, "float8 products")


def float8_groups_fault(device: torch.device) -> str:
    """Returns why the device has no float8 products of stacked experts, whose kernel fewer GPUs support; "" if it has."""
    return _float8_fault(device, lambda found: found[0] in FLOAT8_GROUPS, "float8 products of stacked experts")


def _float8_fault(device: torch.device, has: Any, what: str) -> str:
    found = capability(device)
    if found is None and device.type != CPU.type:
        return f"{name(device)} is not an NVIDIA GPU, and {what} are proven only on these"
    if found is None or not has(found):
        return f"{name(device) if found else f'the device {device.type!r}'} has no {what}"
    return ""


def flex_fault(device: torch.device) -> str:
    """Returns why flex attention is not used on the accelerator; "" if it is, and for a CPU, which has another kernel."""
    return (
        ""
        if device.type == CPU.type or _is_nvidia(device)
        else f"flex attention is proven on NVIDIA GPUs only, and this is {name(device)}"
    )


def shares_memory(device: torch.device) -> bool:
    """Whether torch's kernels can access the memory of other devices of this kind (symmetric memory)."""
    return _is_nvidia(device)


def _is_nvidia(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None


def _module(device: torch.device) -> Any:
    return torch.get_device_module(device)


def require_compiler(device: torch.device, key: str) -> None:
    """Compiles and runs a function on an accelerator, once per process, so that a missing compiler is reported before the first
    step. `key` is the key of the recipe that needs the compiler. A dry run compiles nothing and is not checked.

    Raises:
        PlanError: the function does not compile or run; the message says what is missing, if known.
    """
    if device.type == CPU.type or detect_fake_mode() is not None:
        return
    if fault := _fault(device):
        raise PlanError(f"{key} needs a compiler for {name(device)}, and there it fails: {fault}")


@cache
def _fault(device: torch.device) -> str:
    try:
        torch.compile(_one_more, fullgraph=True)(torch.zeros(4, device=device))
    except Exception as cause:  # noqa: BLE001 (the compiler's parts may raise anything)
        line = next((line for line in str(cause).splitlines() if line.strip()), "")
        return f"{type(cause).__name__}: {line.strip()[:200]}. {missing_for_compiler()}"
    return ""


def _one_more(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def missing_for_compiler() -> str:
    """Returns what the compiler lacks in this environment, as far as that can be found out without running it."""
    if find_spec("triton") is None:
        return "Triton is not installed: pip install triton, in the version that this torch requires (pip show torch)"
    compiler = os.environ.get("CC")
    if which(compiler) is None if compiler else not (which("gcc") or which("clang")):
        problem = f"CC names {compiler!r}, which does not exist" if compiler else "neither gcc nor clang is on the path"
        return f"Triton needs a C compiler, but {problem}: install gcc, or set CC to one"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return "Triton needs Python's headers: install python3-dev (or python3-devel), or use a Python that includes them"
    return "set TORCH_LOGS=inductor for details, or remove the features that need the compiler"


WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_FILLING: Any = torch_deterministic
"""A module with an attribute that torch sets when it is imported."""

FIXED = (":4096:8", ":16:8")
"""Workspaces with which products on several CUDA streams are summed in a fixed order; the first one is faster."""


@contextmanager
def deterministic(on: bool) -> Iterator[None]:
    """Context in which equal computations have bitwise equal results; no effect if `on` is False.

    torch uses other kernels, which may be slower; an operator without a deterministic kernel raises an error with its name
    (`torch.use_deterministic_algorithms`). Enter it before the first product on a GPU. NCCL sums in an order that depends on the
    connections between ranks: the same nodes have equal results, other nodes may not.

    Raises:
        PlanError: the environment sets a workspace with which products are not deterministic.
    """
    if not on:
        yield
        return
    if os.environ.setdefault(WORKSPACE, FIXED[0]) not in FIXED:
        raise PlanError(
            f"deterministic kernels need {WORKSPACE} to be {' or '.join(FIXED)}, but it is {os.environ[WORKSPACE]!r}; "
            "unset it, or set train.deterministic = false"
        )
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark, fill = torch.backends.cudnn.benchmark, _FILLING.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False  # it selects kernels by their speed
    _FILLING.fill_uninitialized_memory = False  # no result depends on it, and filling takes time
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark, _FILLING.fill_uninitialized_memory = benchmark, fill
