"""Loads the device into this process at the moment at which torch is imported: torch asks once, in its import, for what a CUDA
library has to offer, so the library has to be there before, and what `torch.cuda` says of it can only follow after."""

import ctypes
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from rehearsal.device import COMPILER, DEVICES, LIBRARY
from rehearsal.device.build import MODULE, torch_directory


class WithTorch(MetaPathFinder):
    """Finds torch as Python does, and has the device loaded around its import."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """torch's, once; nothing else is found here."""
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        torch_itself: Any = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            _before(os.environ[LIBRARY])
            torch_itself(module)
            _after(os.environ[LIBRARY], int(os.environ.get(DEVICES, "8")))

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _before(library: str) -> None:
    for name in ("libtorch_cpu.so", "libtorch_python.so"):
        ctypes.CDLL(str(torch_directory() / "lib" / name), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(library, ctypes.RTLD_GLOBAL)


def _after(library: str, devices: int) -> None:
    loader = ExtensionFileLoader(MODULE, library)
    spec = importlib.util.spec_from_file_location(MODULE, Path(library), loader=loader)
    assert spec is not None
    device = importlib.util.module_from_spec(spec)
    loader.exec_module(device)
    sys.modules[MODULE] = device
    device.set_count(devices)
    from rehearsal.device import cuda, flash, grouped, nccl, streams

    cuda.install(device, compiles=COMPILER in os.environ)
    streams.install(device)
    flash.install()
    grouped.install()
    nccl.install(device)
