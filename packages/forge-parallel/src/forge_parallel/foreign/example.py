"""What a foreign module is called with."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from forge_core.errors import PlanError

Example = Mapping[str, Any] | Tensor
"""Keyword arguments of the module, or its only argument. Dimension 0 of its tensors counts rows."""

ROWS, LENGTH = 2, 8


def call(module: nn.Module, example: Example) -> Any:
    """The module's output."""
    return module(**example) if isinstance(example, Mapping) else module(example)


def example_for(module: nn.Module) -> Tensor:
    """An input that suits a module's first layer: token ids (2, 8), or features (2, 8, in_features).

    Raises:
        PlanError: the first module with parameters is neither an embedding nor a linear layer.
    """
    generator = torch.Generator().manual_seed(0)
    first = next((part for part in module.modules() if any(p is not None for p in part._parameters.values())), None)
    if isinstance(first, nn.Embedding):
        return torch.randint(first.num_embeddings, (ROWS, LENGTH), generator=generator)
    if isinstance(first, nn.Linear):
        return torch.randn(ROWS, LENGTH, first.in_features, generator=generator)
    raise PlanError(
        f"parallelize: {type(module).__name__} does not begin with an embedding or a linear layer, so its input is not known; "
        "give example=, a tensor or the keyword arguments that the module is called with"
    )
