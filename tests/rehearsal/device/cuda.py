"""What `torch.cuda` says of the devices: the functions that a build with CUDA has in C, under torch's names."""

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

CAPABILITY = (9, 0)
GIGABYTES = 80
MEMORY = "FORGE_REHEARSAL_MEMORY"
"""The environment variable with the bytes that a device says it has, where it is to fill them: host memory is less."""


def uncompiled(model: Callable[..., Any] | None = None, **_: Any) -> Any:
    """In place of `torch.compile`, whose kernels need a real device: what it is given."""
    return (lambda function: function) if model is None else model


def install(device: Any, compiles: bool) -> None:
    """Makes `torch.cuda` that of a machine with these devices; `compiles` leaves `torch.compile` as it is."""
    import torch

    def exchange(index: int) -> int:
        before = device.current()
        if index >= 0:
            device.set_current(index)
        return before

    def set_device(index: int) -> None:
        torch.cuda._lazy_init()
        device.set_current(index)

    def start() -> None:
        torch.cuda.default_generators = tuple(device.default_generator(index) for index in range(device.count()))

    def statistics(_: int) -> dict[str, Any]:
        bytes_ = {"current": device.allocated(), "peak": device.peak(), "allocated": 0, "freed": 0}
        return {name: {"all": bytes_} for name in ("allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes")}

    in_c: dict[str, Callable[..., Any]] = {
        "init": start,
        "isInBadFork": lambda: False,
        "getArchFlags": lambda: f"sm_{CAPABILITY[0]}{CAPABILITY[1]}",
        "getDeviceCount": device.count,
        "getDevice": device.current,
        "setDevice": set_device,
        "exchangeDevice": exchange,
        "maybeExchangeDevice": exchange,
        "synchronize": device.synchronize,
        "getCurrentRawStream": lambda _: 0,
        "memoryStats": statistics,
        "resetPeakMemoryStats": lambda _: device.reset_peak(),
        "resetAccumulatedMemoryStats": lambda _: None,
        "emptyCache": lambda: None,
        "set_sync_debug_mode": lambda _: None,  # `waits.py` counts waits
    }
    for name, function in in_c.items():
        setattr(torch._C, f"_cuda_{name}", function)
    torch._C._accelerator_isAllocatorInitialized = lambda: False  # the simulated devices cache no memory
    properties = _properties()
    free = lambda _=None: (properties.total_memory - device.allocated(), properties.total_memory)  # noqa: E731
    in_python: dict[str, Any] = {
        "_cudart": SimpleNamespace(),
        "_get_device_properties": lambda _: properties,
        "_exchange_device": exchange,
        "_maybe_exchange_device": lambda index: exchange(index),  # the compiler wants functions of their own
        "_device_count_nvml": lambda: -1,
        "is_current_stream_capturing": lambda: False,
        "mem_get_info": free,
        "can_device_access_peer": lambda one, other: one != other,
    }
    vars(torch.cuda).update(in_python)
    torch.version.cuda = "12.8"
    if not compiles:
        torch.compile = uncompiled
    _resize(torch.UntypedStorage, device)


def _properties() -> SimpleNamespace:
    return SimpleNamespace(
        name="NVIDIA H100 (rehearsal)",
        major=CAPABILITY[0],
        minor=CAPABILITY[1],
        total_memory=int(os.environ.get(MEMORY, GIGABYTES << 30)),
        multi_processor_count=132,
        warp_size=32,
        pci_domain_id=0,
        pci_bus_id=0x18,
        pci_device_id=0,
        gcnArchName="",
    )


def _resize(storage_class: Any, device: Any) -> None:
    """torch's own resizes memory of CUDA only where it is built with it."""
    import torch

    of_torch = storage_class.resize_

    def resize_(storage: Any, size: int) -> Any:
        if storage.device.type != "cuda":
            return of_torch(storage, size)
        with torch.no_grad():
            device.resize_storage(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage), size)
        return storage

    storage_class.resize_ = resize_
    storage_class.is_cuda = property(lambda storage: storage.device.type == "cuda")
