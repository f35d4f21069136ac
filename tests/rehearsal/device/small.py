"""Sizes with which the steps of the doctor are over in seconds on devices of host memory, whose arithmetic is a CPU's."""

import sys
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

SMALL = "FORGE_REHEARSAL_SMALL"
"""The environment variable that takes them."""

_STEPS = "forge_train.doctor."
_SIZES: Mapping[str, Mapping[str, Any]] = {
    "correctness": {
        "_MEMORY_CHUNK": 1 << 22,
        "_PRODUCT_SECONDS": 0.2,
        "_PRODUCT_SIZE": 128,
        "_COLLECTIVE_SIZES": (1 << 12, 1 << 16),
        "_STRAGGLER_SQUARE": 128,
    },
    "node": {"_GPU_DISK_BYTES": 1 << 22},
    "speed": {"_GPU_COPY_BYTES": 1 << 20, "_ATTENTION_LENGTH": 64, "_MATMUL_SQUARE": 256},
}


class Small(MetaPathFinder):
    """Finds steps as Python does, and sets their sizes when they have been imported; a size that is not there is an error."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Of steps with a size."""
        sizes = _SIZES.get(name.removeprefix(_STEPS), {}) if name.startswith(_STEPS) else {}
        if not sizes:
            return None
        sys.meta_path.remove(self)
        try:
            spec = find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is None or spec.loader is None:
            return spec
        whole: Any = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            whole(module)
            for key, value in sizes.items():
                getattr(module, key)
                setattr(module, key, value)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
