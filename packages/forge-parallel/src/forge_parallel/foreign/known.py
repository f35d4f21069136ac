"""Whether a layer computes what its role says, and nothing else: a product and a bias, or a look-up.

What a class is named, or what it is derived from, does not say what an object computes: a subclass with its own forward, a
parametrization, a correction of low rank. So the layer's operators are compared with those of the known computation.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forge_core.errors import PlanError
from forge_parallel.tensor.rules import Role
from forge_parallel.torch_private import DisableTorchFunction, TorchDispatchMode, tree_iter, tree_map


class _Operators(TorchDispatchMode):
    """Writes down operators with names for their tensors: of a parameter, the input, or the operator that made it."""

    def __init__(self, part: nn.Module, x: Tensor) -> None:
        super().__init__()
        self.steps: list[Any] = []
        self._kept: list[Any] = []  # so that an id stays its tensor's own
        self._names: dict[int, str] = {id(p): slot for slot, p in part._parameters.items() if p is not None}
        self._names[id(x)] = "input"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator and writes it down."""
        with DisableTorchFunction():
            out = func(*args, **(kwargs or {}))
        given = [self.name(leaf) for leaf in tree_iter((args, kwargs or {}))]
        for index, leaf in enumerate(tree_iter(out)):
            if isinstance(leaf, Tensor):
                self._names.setdefault(id(leaf), f"{len(self.steps)}.{index}")
        self._kept.append((args, out))
        self.steps.append((str(func), given))
        return out

    def name(self, leaf: Any) -> str:
        """Of a tensor or another argument."""
        return self._names.get(id(leaf), "another tensor") if isinstance(leaf, Tensor) else repr(leaf)


def must_be_known(path: str, part: nn.Module, role: Role, forward: Callable[..., Any], x: Tensor, replaced: bool) -> None:
    """Refuses a layer that computes something else than its role cuts.

    Args:
        path: of the layer.
        part: the layer; parameters on the meta device.
        role: what it becomes.
        forward: its own.
        x: its input.
        replaced: whether `forward` is set on the instance, where it hides that of the class which the layer is given.

    Raises:
        PlanError: the operators of `forward` are not those of the known computation on the same parameters.
    """
    # Not `part.weight`, which may be computed.
    weight, bias = (part._parameters.get(slot) for slot in ("weight", "bias"))
    known: Callable[..., Tensor] = partial(F.linear, weight=weight, bias=bias)  # type: ignore[arg-type]
    what = "multiplies by its weight and adds its bias"
    if role is Role.TABLE:
        what, known = "looks up its weight", partial(F.embedding, weight=weight, padding_idx=part.padding_idx)  # type: ignore[arg-type]
    if replaced:
        why = "its forward was replaced on the instance"
    elif weight is None or _operators(part, x, forward) != _operators(part, x, known):
        own = type(part).forward not in (nn.Linear.forward, nn.Embedding.forward)
        why = "its class has a forward of its own" if own else "it is parametrized, or has an option that changes the result"
    else:
        return
    raise PlanError(
        f"tensor: {path} ({type(part).__name__}) would be cut as a module that {what}, but it computes something else: {why}; "
        "take it out of the plan, or move what it does beyond that into a module around it"
    )


def _operators(part: nn.Module, x: Tensor, compute: Callable[[Tensor], Any]) -> Any:
    with torch.no_grad(), _Operators(part, x) as seen:
        out = compute(x)
    return seen.steps, tree_map(seen.name, out)


def must_be_known_experts(path: str, part: nn.Module) -> None:
    """Refuses experts whose forward, which asks for values and so cannot be followed, is not one of transformers.

    Raises:
        PlanError: its class, or the instance, has another forward.
    """
    if "forward" in vars(part) or type(part).forward.__module__.partition(".")[0] != "transformers":
        raise PlanError(
            f"tensor: {path} ({type(part).__name__}) would be cut as experts of transformers, but has a forward of its own, and "
            "what that computes with a part of the features is not known; take it out of the plan, or set tp to 1"
        )
