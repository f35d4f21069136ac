"""What a foreign module is called with."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from forge_core.errors import PlanError

Example = Mapping[str, Any] | Tensor
"""Keyword arguments of the module, or its only argument. Dimension 0 of its tensors counts rows."""

LENGTH = 8


def call(module: nn.Module, example: Example) -> Any:
    """The module's output."""
    return module(**example) if isinstance(example, Mapping) else module(example)


def example_for(module: nn.Module, rows: int = 2) -> Tensor:
    """An input that suits a module's first layer: token ids (rows, 8), or features (rows, 8, in_features).

    Raises:
        PlanError: the first module with parameters is neither an embedding nor a linear layer.
    """
    generator = torch.Generator().manual_seed(0)
    first = next((part for part in module.modules() if any(p is not None for p in part._parameters.values())), None)
    if isinstance(first, nn.Embedding):
        return torch.randint(first.num_embeddings, (rows, LENGTH), generator=generator)
    if isinstance(first, nn.Linear):
        return torch.randn(rows, LENGTH, first.in_features, generator=generator)
    raise PlanError(
        f"parallelize: {type(module).__name__} does not begin with an embedding or a linear layer, so its input is not known; "
        "give example=, a tensor or the keyword arguments that the module is called with"
    )


def shares(example: Example, count: int) -> list[Example]:
    """`example` cut into `count` shares of its rows. Tensors without rows and other values go to all.

    Raises:
        PlanError: the rows cannot be shared evenly.
    """
    tensors = [example] if isinstance(example, Tensor) else [value for value in example.values() if isinstance(value, Tensor)]
    rows = next((tensor.shape[0] for tensor in tensors if tensor.dim()), 0)
    if not rows or rows % count:
        raise PlanError(f"verify: the example has {rows} rows, which {count} shares cannot divide; give a multiple of {count}")

    def cut(value: Any, index: int) -> Any:
        if isinstance(value, Tensor) and value.dim() and value.shape[0] == rows:
            value = value.chunk(count)[index]
        return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value

    if isinstance(example, Tensor):
        return [cut(example, index) for index in range(count)]
    return [{name: cut(value, index) for name, value in example.items()} for index in range(count)]
