"""Which dimension of an operator's result is split, when one of its argument's is."""

from collections.abc import Mapping
from math import prod
from typing import Any

from torch import Tensor

from forge_parallel.torch_private import schema

UNKNOWN = -1
"""Split, but it is not known along which dimension."""

PIECES = frozenset({"slice", "split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes", "unbind", "select", "chunk"})
"""Operators that take pieces of a dimension: of a split one a rank would take pieces of its part."""

ACROSS = frozenset(
    {
        *(
            "mean",
            "sum",
            "prod",
            "var",
            "var_mean",
            "std",
            "std_mean",
            "amax",
            "amin",
            "max",
            "min",
            "norm",
            "linalg_vector_norm",
        ),
        *("_softmax", "_log_softmax", "_safe_softmax", "logsumexp", "cumsum", "sort", "topk", "argmax", "argmin", "median"),
    }
)
"""Operators that look across `dim`, or across everything when they have none."""

NORMS = frozenset({"native_layer_norm", "_fused_rms_norm", "_fused_rms_norm_backward"})
"""Operators that look across the last dimensions, those of `normalized_shape`."""


def named_arguments(func: Any, args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """An operator's arguments by name, defaults included."""
    names = [argument.name for argument in schema(func).arguments]
    defaults = {argument.name: argument.default_value for argument in schema(func).arguments if argument.has_default_value()}
    return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}


def across(name: str, given: Mapping[str, Any], tensor: Tensor, split: int, out: Any) -> bool:
    """Whether an operator looks across dimension `split` of its argument `tensor`, or takes pieces of it."""
    if name in NORMS:
        return split >= tensor.dim() - len(given["normalized_shape"])
    if name in ACROSS:
        return split in _dims(given, tensor)
    if name in PIECES:
        whole = isinstance(out, Tensor) and out.dim() == tensor.dim() and out.shape[split] == tensor.shape[split]
        return split in _dims(given, tensor) and not whole
    return False


def dimension_of(name: str, given: Mapping[str, Any], tensor: Tensor, split: int, out: Tensor) -> int:
    """The dimension of `out` that is split when dimension `split` of `tensor` is."""
    if name in ("view", "_unsafe_view", "reshape"):
        return _viewed(tuple(tensor.shape), split, tuple(out.shape))
    if name == "t":
        return 1 - split
    if name == "transpose":
        one, other = (given[key] % tensor.dim() for key in ("dim0", "dim1"))
        return {one: other, other: one}.get(split, split)
    if name == "permute":
        return [dim % tensor.dim() for dim in given["dims"]].index(split)
    if name == "unsqueeze":
        return split + (given["dim"] % out.dim() <= split)
    gone = out.dim() - tensor.dim()
    if gone < 0 and -gone == len(dims := _dims(given, tensor)):
        return split - sum(dim < split for dim in dims)
    place = split + max(gone, 0)  # shapes are aligned at their ends
    return place if gone >= 0 and out.shape[place] == tensor.shape[split] else UNKNOWN


def _dims(given: Mapping[str, Any], tensor: Tensor) -> set[int]:
    if "dim" not in given:
        return set(range(tensor.dim()))
    dim = given["dim"]
    dims = [dim] if isinstance(dim, int) else dim
    return {one % tensor.dim() for one in dims} if dims else set(range(tensor.dim()))


def _viewed(before: tuple[int, ...], split: int, after: tuple[int, ...]) -> int:
    """The outermost of the dimensions into which a view takes a dimension apart is the one that is split."""
    ahead = prod(before[:split])
    found = [dim for dim, size in enumerate(after) if prod(after[:dim]) == ahead and size > 1]
    return found[0] if found and ahead else UNKNOWN
