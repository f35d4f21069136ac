"""Sizes of the fp32 tensors that operators return: what a computation holds in more than its own precision."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Wide(TorchDispatchMode):
    """While it is on, `sizes` are the numbers of elements of all fp32 tensors that were returned, each once, the largest last."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = [0]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        found = [value for value in tree_leaves(out) if isinstance(value, torch.Tensor) and value.itemsize == 4]
        self.sizes = sorted({*self.sizes, *(value.numel() for value in found)})
        return out
