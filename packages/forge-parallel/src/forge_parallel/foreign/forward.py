"""One forward of a module without memory, operator by operator, and what operators do along a dimension that is split over ranks.

An operator that is not known to be right on a rank's share alone is refused: a new one, or one with another effect, must not pass
in silence.
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


CUT = {Role.ENTERING, Role.GATHERED, Role.ROW, Role.TABLE, Role.EXPERTS}
"""Roles that change what is split. Their modules' own operators are the layout's business."""

ASKING = frozenset({"lt", "le", "gt", "ge", "_local_scalar_dense", "_to_copy"})
"""Operators by which code asks whether a random number is below a rate; the rate may be zero."""

LIBRARIES = frozenset({"torch", "forge_parallel", "einops"})
"""Packages whose lines are not those of the module."""


@dataclass(frozen=True)
class Step:
    """An operator of the whole module: its name, the numbers that it is given apart from sizes, and the shapes of its results."""

    name: str
    numbers: tuple[float, ...]
    shapes: tuple[tuple[int, ...], ...]


class Forward(TorchDispatchMode):
    """One forward of `module`, whose parameters have no memory. What depends on none of them, such as positions and masks, has
    its value.

    Attributes:
        path: of the modules that are running, outermost first.
        drawing: paths of modules that draw random numbers on which the output depends.
    """

    DRAWN: float
    """What every uniform random number is."""

    def __init__(self, module: nn.Module, rules: Rules) -> None:
        super().__init__()
        self.path = [""]
        self.drawing: list[str] = []
        self._inside = 0
        self._drawn: dict[int, str] = {}  # random numbers that have only been compared so far, and where
        self._kept: list[Any] = []  # so that ids stay their tensors' own, and torch copies as often in every forward
        for path, part in module.named_modules():
            part.register_forward_pre_hook(lambda *_, path=path: self.path.append(path))
            part.register_forward_hook(self._leave)
            if (role := rules.roles.get(path)) in CUT:
                part.forward = self._opaque(self.cut(path, part, role))

    def cut(self, path: str, part: nn.Module, role: Role) -> Callable[..., Any]:
        """What stands for the forward of a module that the plan cuts."""
        raise NotImplementedError

    def take(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Takes an operator outside of cut modules."""
        raise NotImplementedError

    def copied(self, tensor: Tensor, out: Tensor) -> None:
        """Takes a copy, which torch makes or not as the order of elements in memory asks for."""

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
        """Runs an operator and follows what it does."""
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
        """Follows random numbers. Those that are only asked whether they are below a rate are the lowest in one forward and the
        highest in the other: if both do the same, then nothing depends on them."""
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

    def step(self, func: Any, args: Any, kwargs: Any, out: Any) -> Step:
        """What an operator did."""
        leaves = [leaf for leaf in tree_iter(out) if isinstance(leaf, Tensor)]
        kinds = (float, int) if is_elementwise(func) else (float,)
        numbers = [leaf for leaf in tree_iter((args, kwargs)) if type(leaf) in kinds]
        numbers += [kwargs["fill_value"]] if type(kwargs.get("fill_value")) is int else []
        numbers += [leaf.item() for leaf in leaves if not leaf.dim() and not leaf.is_meta and id(leaf) not in self._drawn]
        name = func.overloadpacket.__name__
        return Step("view" if name in VIEWS else name, tuple(numbers), tuple(tuple(leaf.shape) for leaf in leaves))


class Whole(Forward):
    """The forward of one process: writes its operators down, and refuses layers that are not what the plan takes them for."""

    DRAWN = 0.0

    def __init__(self, module: nn.Module, rules: Rules) -> None:
        named = [(name, parameter) for name, parameter in module.named_parameters() if rules.cut.get(name) is not None]
        self._cut = {storage_key(parameter.untyped_storage()): name for name, parameter in named}
        self.steps: list[Step] = []
        super().__init__(module, rules)

    def cut(self, path: str, part: nn.Module, role: Role) -> Callable[..., Any]:
        """Its own, if that is known."""
        if role is Role.EXPERTS:
            must_be_known_experts(path, part)
            return like_the_first
        forward, replaced = part.forward, "forward" in vars(part)

        def run(*args: Any, **kwargs: Any) -> Any:
            if len(args) != 1 or kwargs:
                given = f"{next(iter(kwargs))!r} by name" if kwargs else f"{len(args)} arguments"
                raise PlanError(f"tensor: {path} is given {given}; a layer that is cut takes one tensor by place: layer(x)")
            must_be_known(path, part, role, forward, args[0], replaced)
            return forward(*args)

        return run

    def take(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Writes an operator down."""
        for leaf in tree_iter((args, kwargs)):
            if isinstance(leaf, Tensor):
                self._is_whole(leaf)
        self.steps.append(self.step(func, args, kwargs, out))

    def copied(self, tensor: Tensor, out: Tensor) -> None:
        """Must be of something that is whole."""
        self._is_whole(tensor)

    def _is_whole(self, tensor: Tensor) -> None:
        if name := self._cut.get(storage_key(tensor.untyped_storage())):
            raise PlanError(
                f"tensor: the plan cuts {name}, but it is read outside of its module's forward ({place()}); leave it whole"
            )


def like_the_first(*args: Any, **kwargs: Any) -> Tensor:
    """Experts ask for values. What they return has the form of their input."""
    return torch.zeros_like(next(leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)))


def place(cause: BaseException | None = None) -> str:
    """File and line of the module's code that runs, or that raised `cause`."""
    for frame, line in _frames(cause):
        if frame.f_globals.get("__name__", "").partition(".")[0] not in LIBRARIES:
            return f"{frame.f_code.co_filename}:{line}"
    return "in torch"


def _frames(cause: BaseException | None) -> Iterator[tuple[Any, int]]:
    """Innermost first."""
    if cause is not None:
        yield from reversed(list(traceback.walk_tb(cause.__traceback__)))
    else:
        yield from traceback.walk_stack(inspect.currentframe())
