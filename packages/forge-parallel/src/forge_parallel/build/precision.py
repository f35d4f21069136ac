"""Compute precision on one data rank, with the meaning that FSDP's mixed precision has on many.

Every floating parameter is cast to the compute dtype for the span of one forward and backward; gradients flow through
the cast into the parameter's own dtype. The same numbers come out as under FSDP with `param_dtype`, whereas autocast
would choose a dtype per operator. The cast spans the backward too, because recomputation runs a forward inside it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
"""Names in a recipe."""


@contextmanager
def cast_parameters(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Inside, floating parameters of `module` are their casts to `dtype`; a tied parameter is cast once."""
    casts: dict[int, torch.Tensor] = {}
    swapped: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]] = []
    try:
        for owner in module.modules():
            for name, parameter in owner._parameters.items():
                if parameter is not None and parameter.is_floating_point() and parameter.dtype != dtype:
                    if id(parameter) not in casts:
                        casts[id(parameter)] = parameter.to(dtype)
                    swapped.append((owner._parameters, name, parameter))
        for slots, name, parameter in swapped:
            slots[name] = casts[id(parameter)]  # type: ignore[assignment]  # a plain tensor with a graph to `parameter`
        yield
    finally:
        for slots, name, parameter in swapped:
            slots[name] = parameter
