"""Traces one forward of a module on the meta device, and classifies operators by their effect on a dimension split over ranks.

An operator that is not known to be correct on a rank's share alone is refused, so that a new operator cannot silently compute a
wrong result.
"""

import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor, nn

from forge_core.errors import PlanError
from forge_parallel.foreign.description import computed, must_be_known, must_be_known_experts
from forge_parallel.torch_private import DisableTorchFunction, TorchDispatchMode, schema, storage_key, tree_iter
from forge_parallel.transforms.tensor.rules import Role, Rules

PIECES = frozenset({"slice", "split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes", "unbind", "select", "chunk"})
"""Operators that select pieces of a dimension; on a split dimension a rank would select pieces of its share."""


NORMS = frozenset({"native_layer_norm", "_fused_rms_norm", "_fused_rms_norm_backward"})
"""Operators that normalize over the last dimensions, those of `normalized_shape`."""


VIEWS = frozenset({"view", "_unsafe_view", "reshape"})
"""Operators that reinterpret a tensor's elements, in row-major order, as another shape."""


ELEMENTWISE = frozenset(
    {
        *("copy_", "fill_", "zero_", "_to_copy", "lift_fresh", "masked_fill_", "hardswish"),
        *("log_sigmoid_forward", "_prelu_kernel", "native_dropout", "polar", "complex", "real", "imag", "_conj", "resolve_conj"),
        *("floor_divide", "bernoulli_"),
    }
)
"""Elementwise operators that torch does not tag as `pointwise`."""


COPIES = frozenset({"clone", "detach", "alias", "contiguous"})
"""Operators whose result equals their argument."""


REARRANGING = frozenset({"t", "transpose", "permute", "unsqueeze", "squeeze", "expand", "numpy_T", "movedim"})
"""Operators that only reorder, add or remove whole dimensions, whatever their `dim` is."""


PRODUCTS = frozenset({"mm", "bmm", "addmm", "baddbmm"})
"""Matrix products. The contracted dimension is not in the result, so the result's shape shows whether it was split."""


WITHOUT_VALUES = ("empty", "zeros", "ones", "full", "_like", "new_", "scalar_tensor")
"""Parts of the names of operators that create a tensor of equal elements, in any size."""


def named_arguments(func: Any, args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an operator's arguments by name, defaults included."""
    names = [argument.name for argument in schema(func).arguments]
    defaults = {argument.name: argument.default_value for argument in schema(func).arguments if argument.has_default_value()}
    return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}


def is_elementwise(func: Any) -> bool:
    """Whether each element of the result depends only on the elements at the same (broadcast) index."""
    return torch.Tag.pointwise in func.tags or func.overloadpacket.__name__ in ELEMENTWISE


def makes_alike(name: str) -> bool:
    """Whether an operator creates a tensor of equal elements."""
    return any(part in name for part in WITHOUT_VALUES)


def effect(func: Any, given: Mapping[str, Any], tensor: Tensor, split: int, out: Any) -> Literal["none", "across", "unknown"]:
    """Classifies an operator by its effect on dimension `split` of its argument `tensor`.

    Returns:
        "none": a rank's share of the argument yields its share of the result. "across": the operator combines or selects elements
        along the dimension. "unknown": Forge has no rule for the operator.
    """
    name = func.overloadpacket.__name__
    if is_elementwise(func) or name in VIEWS | REARRANGING | PRODUCTS:
        return "none"
    if name in NORMS:
        is_across = split >= tensor.dim() - len(given["normalized_shape"])
    elif name in PIECES:
        whole = isinstance(out, Tensor) and out.dim() == tensor.dim() and out.shape[split] == tensor.shape[split]
        is_across = split in _dims(given, "dim", tensor) and not whole
    elif name in ("tril", "triu"):
        is_across = split >= tensor.dim() - 2
    elif name == "repeat":
        is_across = given["repeats"][split - tensor.dim()] != 1
    elif name == "constant_pad_nd":
        pads = given["pad"]
        at = 2 * (tensor.dim() - 1 - split)
        is_across = any(pads[at : at + 2])
    elif name == "index":
        is_across = split < len(given["indices"]) and given["indices"][split] is not None
    elif key := next((key for key in ("dim", "dims") if key in given), None):
        is_across = split in _dims(given, key, tensor)
    elif "dim" not in given and name in ("sum", "mean", "prod", "amax", "amin", "max", "min", "norm", "median", "any", "all"):
        is_across = True
    else:
        return "unknown"
    return "across" if is_across else "none"


def viewed(before: tuple[int, ...], split: int, outer: int, after: tuple[int, ...]) -> tuple[int, int] | None:
    """Returns the dimension of `after` that is split when a tensor of shape `before` is viewed in shape `after`, and the number
    of consecutive segments in it, each of which is split over the ranks; None if the view breaks a segment up.

    Args:
        before: full shape.
        split: the split dimension of `before`.
        outer: number of segments in `split`; more than 1 where batch and heads were merged.
        after: full shape of the view.
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
    return {dim % tensor.dim() for dim in dims} if dims else set(range(tensor.dim()))


CUT = {Role.ENTERING, Role.GATHERED, Role.ROW, Role.WHOLE_ROW, Role.TABLE, Role.EXPERTS}
"""Roles that change which tensors are split. The operators inside of their modules are not traced."""

ASKING = frozenset({"lt", "le", "gt", "ge", "_local_scalar_dense", "_to_copy"})
"""Operators with which code compares a random number with a rate; the rate may be zero."""

LIBRARIES = frozenset({"torch", "forge_parallel", "einops"})
"""Packages whose frames are skipped when a line of the module is looked for."""


@dataclass(frozen=True)
class Operation:
    """An operator of the whole module: its name, its numeric arguments other than sizes, and the shapes of its results."""

    name: str
    numbers: tuple[float, ...]
    shapes: tuple[tuple[int, ...], ...]


class Forward(TorchDispatchMode):
    """Traces one forward of `module`, whose parameters are on the meta device. Tensors that depend on no parameter, such as
    positions and masks, have values.

    Attributes:
        path: paths of the running modules, outermost first.
        drawing: paths of modules that draw random numbers on which the output depends.
    """

    DRAWN: float
    """The value of every uniform random number."""

    def __init__(self, module: nn.Module, rules: Rules) -> None:
        super().__init__()
        self.path = [""]
        self.drawing: list[str] = []
        self._inside = 0
        self._drawn: dict[int, str] = {}  # random numbers that have only been compared so far -> the module that drew them
        self._kept: list[Any] = []  # keeps the tensors alive, so that no id is reused and every forward has the same copies
        for path, part in module.named_modules():
            part.register_forward_pre_hook(lambda *_, path=path: self.path.append(path))
            part.register_forward_hook(self._leave)
            if (role := rules.roles.get(path)) in CUT:
                part.forward = self._opaque(self.cut(path, part, role))

    def cut(self, path: str, part: nn.Module, role: Role) -> Callable[..., Any]:
        """Returns the replacement of the forward of a module that the plan splits."""
        raise NotImplementedError

    def take(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Handles an operator outside of split modules."""
        raise NotImplementedError

    def copied(self, tensor: Tensor, out: Tensor) -> None:
        """Handles a copy. Whether torch copies depends on the memory order of the elements, so copies are not compared."""

    def _leave(self, *_: Any) -> None:
        self.path.pop()

    def _opaque(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            self._inside += 1
            out = forward(*args, **kwargs)
            self._inside -= 1
            return out

        return run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs and traces an operator."""
        with DisableTorchFunction():
            kwargs = kwargs or {}
            out = computed(func, args, kwargs)
            self._kept.append(out)
            if not self._inside:
                self._draw(func, args, kwargs, out)
                if func.overloadpacket.__name__ in COPIES:
                    self.copied(args[0], out)
                else:
                    self.take(func, args, kwargs, out)
            return out

    def _draw(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Traces random numbers. Numbers that are only compared with a rate are the lowest possible in one forward and the
        highest in the other; if both forwards run the same operators, nothing depends on the numbers."""
        name, outputs = func.overloadpacket.__name__, [leaf for leaf in tree_iter(out) if isinstance(leaf, Tensor)]
        if torch.Tag.nondeterministic_seeded in func.tags:
            if name == "rand":
                for leaf in outputs:
                    self._drawn[id(leaf)] = self.path[-1]
                    leaf.fill_(self.DRAWN)
            elif named_arguments(func, args, kwargs).get("dropout_p", 1) > 0:
                self.drawing.append(self.path[-1])
        elif any(id(leaf) in self._drawn for leaf in tree_iter((args, kwargs))):
            if name in ASKING | COPIES:
                self._drawn |= {id(leaf): self.path[-1] for leaf in outputs}
            else:
                self.drawing.append(self.path[-1])

    def step(self, func: Any, args: Any, kwargs: Any, out: Any) -> Operation:
        """Returns the record of an operator."""
        leaves = [leaf for leaf in tree_iter(out) if isinstance(leaf, Tensor)]
        kinds = (float, int) if is_elementwise(func) else (float,)
        numbers = [leaf for leaf in tree_iter((args, kwargs)) if type(leaf) in kinds]
        numbers += [kwargs["fill_value"]] if type(kwargs.get("fill_value")) is int else []
        numbers += [leaf.item() for leaf in leaves if not leaf.dim() and not leaf.is_meta and id(leaf) not in self._drawn]
        name = func.overloadpacket.__name__
        return Operation("view" if name in VIEWS else name, tuple(numbers), tuple(tuple(leaf.shape) for leaf in leaves))


class Whole(Forward):
    """Traces the forward of one process: records its operators, and refuses layers that the plan takes for something else."""

    DRAWN = 0.0

    def __init__(self, module: nn.Module, rules: Rules) -> None:
        named = [(name, parameter) for name, parameter in module.named_parameters() if rules.cut.get(name) is not None]
        self._cut = {storage_key(parameter.untyped_storage()): name for name, parameter in named}
        self.steps: list[Operation] = []
        super().__init__(module, rules)

    def cut(self, path: str, part: nn.Module, role: Role) -> Callable[..., Any]:
        """Returns the module's own forward, which must be the known computation of its role."""
        if role is Role.EXPERTS:
            must_be_known_experts(path, part)
            return like_the_first
        forward, replaced = part.forward, "forward" in vars(part)

        def run(*args: Any, **kwargs: Any) -> Any:
            if len(args) != 1 or kwargs:
                call = f"with {next(iter(kwargs))!r} as keyword" if kwargs else f"with {len(args)} arguments"
                raise PlanError(f"tensor: {path} is called {call}; call a layer that the plan splits with one tensor: layer(x)")
            must_be_known(path, part, role, forward, args[0], replaced)
            return forward(*args)

        return run

    def take(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Records an operator."""
        for leaf in tree_iter((args, kwargs)):
            if isinstance(leaf, Tensor):
                self._is_whole(leaf)
        self.steps.append(self.step(func, args, kwargs, out))

    def copied(self, tensor: Tensor, out: Tensor) -> None:
        """Checks that the copied tensor is not a split parameter."""
        self._is_whole(tensor)

    def _is_whole(self, tensor: Tensor) -> None:
        if name := self._cut.get(storage_key(tensor.untyped_storage())):
            raise PlanError(
                f"tensor: the plan splits {name}, but it is read outside its module's forward ({place()}); "
                "remove it from the plan"
            )


def like_the_first(*args: Any, **kwargs: Any) -> Tensor:
    """Replaces the forward of experts, which needs values: returns zeros in the shape of the first tensor."""
    return torch.zeros_like(next(leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)))


def place(cause: BaseException | None = None) -> str:
    """Returns file and line of the module's code that is running, or that raised `cause`."""
    for frame, line in _frames(cause):
        if frame.f_globals.get("__name__", "").partition(".")[0] not in LIBRARIES:
            return f"{frame.f_code.co_filename}:{line}"
    return "in torch"


def _frames(cause: BaseException | None) -> Iterator[tuple[Any, int]]:
    """Yields frames and line numbers, innermost first."""
    if cause is not None:
        yield from reversed(list(traceback.walk_tb(cause.__traceback__)))
    else:
        yield from traceback.walk_stack(inspect.currentframe())
