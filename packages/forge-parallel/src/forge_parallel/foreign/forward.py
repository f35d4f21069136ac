"""One forward of a module without memory, operator by operator: that of the whole module, and what any has in common with it."""

import inspect
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from forge_core.errors import PlanError
from forge_parallel.foreign.description import computed, must_be_known, must_be_known_experts
from forge_parallel.foreign.tensor_trace import COPIES, VIEWS, is_elementwise, named_arguments
from forge_parallel.torch_private import DisableTorchFunction, TorchDispatchMode, storage_key, tree_iter
from forge_parallel.transforms.tensor.rules import Role, Rules

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
