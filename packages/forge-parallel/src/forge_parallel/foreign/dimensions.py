"""What operators do along a dimension that is split over ranks: the few things that are right on a rank's share alone.

An operator that is not known to be right is refused: a new one, or one with another effect, must not pass in silence.
"""

from collections.abc import Mapping
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor

from forge_parallel.torch_private import schema

PIECES = frozenset({"slice", "split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes", "unbind", "select", "chunk"})
"""Operators that take pieces of a dimension: of a split one a rank would take pieces of its part."""

NORMS = frozenset({"native_layer_norm", "_fused_rms_norm", "_fused_rms_norm_backward"})
"""Operators that look across the last dimensions, those of `normalized_shape`."""

VIEWS = frozenset({"view", "_unsafe_view", "reshape"})
"""Operators that read the elements of a tensor, row by row, as another shape."""

ELEMENTWISE = frozenset(
    {
        *("copy_", "fill_", "zero_", "_to_copy", "lift_fresh", "masked_fill_", "hardswish"),
        *("log_sigmoid_forward", "_prelu_kernel", "native_dropout", "polar", "complex", "real", "imag", "_conj", "resolve_conj"),
        *("floor_divide", "bernoulli_"),
    }
)
"""Operators of single elements that torch does not tag as `pointwise`."""

COPIES = frozenset({"clone", "detach", "alias", "contiguous"})
"""Operators whose result is their argument."""

REARRANGING = frozenset({"t", "transpose", "permute", "unsqueeze", "squeeze", "expand", "numpy_T", "movedim"})
"""Operators that move whole dimensions, whatever their `dim` is."""

PRODUCTS = frozenset({"mm", "bmm", "addmm", "baddbmm"})
"""Matrix products. The dimension that is summed over is not in the result, so the result's shape tells whether it was split."""

WITHOUT_VALUES = ("empty", "zeros", "ones", "full", "_like", "new_", "scalar_tensor")
"""In the names of operators that make a tensor whose elements are all alike: of any size."""


def named_arguments(func: Any, args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """An operator's arguments by name, defaults included."""
    names = [argument.name for argument in schema(func).arguments]
    defaults = {argument.name: argument.default_value for argument in schema(func).arguments if argument.has_default_value()}
    return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}


def is_elementwise(func: Any) -> bool:
    """Whether an operator makes each element from those at the same place, or broadcast to it."""
    return torch.Tag.pointwise in func.tags or func.overloadpacket.__name__ in ELEMENTWISE


def makes_alike(name: str) -> bool:
    """Whether an operator makes a tensor whose elements are all alike."""
    return any(part in name for part in WITHOUT_VALUES)


def effect(func: Any, given: Mapping[str, Any], tensor: Tensor, split: int, out: Any) -> Literal["none", "across", "unknown"]:
    """What an operator does along dimension `split` of its argument `tensor`: nothing, so that a rank's share of the argument
    gives its share of the result; it looks across the dimension or takes pieces of it; or it is not known."""
    name = func.overloadpacket.__name__
    if is_elementwise(func) or name in VIEWS | REARRANGING | PRODUCTS:
        return "none"
    if name in NORMS:
        looks = split >= tensor.dim() - len(given["normalized_shape"])
    elif name in PIECES:
        whole = isinstance(out, Tensor) and out.dim() == tensor.dim() and out.shape[split] == tensor.shape[split]
        looks = split in _dims(given, "dim", tensor) and not whole
    elif name in ("tril", "triu"):
        looks = split >= tensor.dim() - 2
    elif name == "repeat":
        looks = given["repeats"][split - tensor.dim()] != 1
    elif name == "constant_pad_nd":
        pads = given["pad"]
        at = 2 * (tensor.dim() - 1 - split)
        looks = any(pads[at : at + 2])
    elif name == "index":
        looks = split < len(given["indices"]) and given["indices"][split] is not None
    elif key := next((key for key in ("dim", "dims") if key in given), None):
        looks = split in _dims(given, key, tensor)
    elif "dim" not in given and name in ("sum", "mean", "prod", "amax", "amin", "max", "min", "norm", "median", "any", "all"):
        looks = True
    else:
        return "unknown"
    return "across" if looks else "none"


def viewed(before: tuple[int, ...], split: int, outer: int, after: tuple[int, ...]) -> tuple[int, int] | None:
    """The dimension of `after` that is split when a tensor of shape `before` is viewed, and how many stretches of it follow each
    other of which each rank has its share; None if a stretch is taken apart.

    Args:
        before: whole shape.
        split: the dimension that is split.
        outer: in how many stretches it is; more than 1 where batch and heads were merged.
        after: whole shape of the view.
    """
    ahead = prod(before[:split]) * outer
    for dim in range(len(after)):
        above = prod(after[:dim])
        if above <= ahead < above * after[dim]:
            return (dim, ahead // above) if ahead % above == 0 and after[dim] % (ahead // above) == 0 else None
    return None


def _dims(given: Mapping[str, Any], key: str, tensor: Tensor) -> set[int]:
    dim = given[key]
    dims = [dim] if isinstance(dim, int) else dim
    return {one % tensor.dim() for one in dims} if dims else set(range(tensor.dim()))
