"""Counts the bytes that stay allocated, exactly and on any device, by observing which storages are alive."""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from forge_parallel.torch_private import TorchDispatchMode, storage_key, tree_leaves


class Storages(TorchDispatchMode):
    """Context that records every storage that an operator allocates; `held` returns the bytes of those that are still alive.

    Views and results that are written into an argument allocate nothing, so parameters and inputs are not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {_address(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta" and _address(leaf) not in inputs:
                self._seen[_address(leaf)] = (StorageWeakRef(leaf.untyped_storage()), leaf.untyped_storage().nbytes())
        return out

    def held(self) -> int:
        """Returns the bytes of the storages that are still alive."""
        return sum(size for reference, size in self._seen.values() if not reference.expired())


def held_after(forward: Callable[[], Any]) -> tuple[Any, int]:
    """Returns the result of `forward` and the bytes that it keeps alive: its outputs and the tensors saved for backward.

    A thread of the process group holds the tensors of a collective for a moment after its result is there. With process
    groups, the bytes are those that stay the same for 0.2 s.
    """
    with Storages() as storages:
        result = forward()
        held, same = storages.held(), 0
        while dist.is_initialized() and same < 20:
            time.sleep(0.01)
            before, held = held, storages.held()
            same = same + 1 if held == before else 0
        return result, held


def _address(tensor: torch.Tensor) -> int:
    return storage_key(tensor.untyped_storage())
