"""What tensor parallelism makes of a module, followed through forwards without memory, before anything is laid out.

A plan names layers; what lies between them it does not name. Between a layer cut by its outputs and one cut by its inputs every
rank has a part of the features: a parameter that works there gets a part of its gradient on each rank, and an operator that looks
across the features sees a part of them. So the module runs twice: whole, and with the sizes that a rank has. Both have to run the
same operators, and of each result a rank has to get the whole, or a share along one dimension.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from forge_core.errors import PlanError
from forge_parallel.foreign.description import Example, called_hollow, hollow
from forge_parallel.foreign.forward import (
    VIEWS,
    Forward,
    Step,
    Whole,
    effect,
    is_elementwise,
    like_the_first,
    makes_alike,
    named_arguments,
    place,
    viewed,
)
from forge_parallel.foreign.weights import written
from forge_parallel.placement.shares import chunk
from forge_parallel.torch_private import storage_key, tree_iter
from forge_parallel.transforms.tensor.rules import Role, Rules

NUMBERS = "where a number of heads or features is named, write -1 there, or take the number from the tensor's shape"


@dataclass(frozen=True)
class State:
    """What is known of a tensor.

    Attributes:
        whole: the shape that it has in the whole module. Where it has another size here, a rank has a share.
        outer: how many stretches of the split dimension follow each other, of each of which a rank has its share.
        sources: the whole parameters, and outputs of modules, to which its gradient goes without a sum over ranks.
    """

    whole: tuple[int, ...]
    outer: int = 1
    sources: frozenset[str] = frozenset()


class Share(Forward):
    """The forward of one rank: follows what is split, and which whole parameters meet it.

    Attributes:
        partial: whole parameters and outputs of modules that meet split features.
        whole: those that work on whole features.
        outputs: paths of modules whose output every rank has.
    """

    DRAWN = 1 - 2**-24

    def __init__(self, module: nn.Module, rules: Rules, steps: Sequence[Step], ranks: int, rank: int) -> None:
        self._steps, self._ranks, self._rank = iter(steps), ranks, rank
        self._states: dict[int, tuple[Tensor, State]] = {}  # a tensor is kept, so that its id stays its own
        self._written: dict[int, frozenset[str]] = {}  # by storage: the sources of what an operator wrote
        self.partial: set[str] = set()
        self.whole: set[str] = set()
        self.outputs: set[str] = set()
        super().__init__(module, rules)
        for name, parameter in module.named_parameters():
            if rules.cut.get(name) is None:
                self._set(parameter, State(tuple(parameter.shape), 1, frozenset({name})))

    def _of(self, tensor: Tensor) -> State:
        _, state = self._states.get(id(tensor)) or (tensor, State(tuple(tensor.shape)))
        more = self._written.get(storage_key(tensor.untyped_storage()), frozenset())
        return replace(state, sources=state.sources | more)

    def _set(self, tensor: Tensor, state: State) -> None:
        self._states[id(tensor)] = tensor, state

    def _split(self, tensor: Tensor) -> int | None:
        """The dimension of which this rank has a share."""
        return next(iter(_differing(tensor, self._of(tensor).whole)), None)

    def cut(self, path: str, part: nn.Module, role: Role) -> Callable[..., Any]:
        """Makes the sizes that this rank has."""
        forward = part.forward if role is not Role.EXPERTS else like_the_first

        def run(*args: Any, **kwargs: Any) -> Tensor:
            given = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
            split = self._split(given[0])
            if role is Role.ROW and split is None:
                raise PlanError(f"tensor: {path} is rowwise, but takes whole features; the layer that makes them must be colwise")
            if role is not Role.ROW and any(self._split(leaf) is not None for leaf in given):
                raise PlanError(f"tensor: {path} needs whole features, but takes split ones; make the layer before it whole")
            self.whole |= set().union(*(self._of(leaf).sources for leaf in given))
            if role is Role.ROW:
                x, state = given[0], self._of(given[0])
                mine = self._share(state.whole[-1])
                if split != x.dim() - 1 or state.outer != 1 or x.shape[-1] != mine:
                    raise PlanError(
                        f"tensor: {path} is rowwise and takes {mine} of {state.whole[-1]} features on a rank, but is given "
                        f"{tuple(x.shape)} of {state.whole}; the layers that make it must be cut alike"
                    )
                args = (x.new_empty(state.whole),)
            out = forward(*args, **kwargs)
            shape = tuple(out.shape)
            if role is Role.ENTERING:
                out = out.new_empty((*shape[:-1], self._share(shape[-1])))
                self._set(out, State(shape))
            else:
                self.outputs.add(path)
                self._set(out, State(shape, 1, frozenset({path})))
            return out

        return run

    def _share(self, size: int) -> int:
        return chunk(size, self._ranks, self._rank)[1]

    def take(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Compares an operator with that of the whole module."""
        expected, step = next(self._steps, None), self.step(func, args, kwargs, out)
        given, name = named_arguments(func, args, kwargs), step.name
        tensors = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
        leaves = [leaf for leaf in tree_iter(out) if isinstance(leaf, Tensor)]
        splits = [(leaf, split) for leaf in tensors if (split := self._split(leaf)) is not None]
        alike = makes_alike(name)
        for leaf, split in splits if not alike else []:
            if (found := effect(func, given, leaf, split, out)) != "none":
                raise self._across(name, known=found == "across")
        if expected is None or (expected.name, expected.numbers, len(expected.shapes)) != (name, step.numbers, len(leaves)):
            raise _draws(self._drawn.values()) if self._drawn else self._depends(name)
        for leaf, whole in zip(leaves, expected.shapes, strict=True):
            differing = _differing(leaf, whole) if leaf.dim() == len(whole) else list(range(leaf.dim()))
            if not splits or alike:
                if differing and not (alike and len(differing) == 1):
                    raise self._depends(name)
                self._set(leaf, State(whole))
            else:
                self._set(leaf, State(whole, self._outer(func, leaf, whole, differing, splits)))
        sources = frozenset().union(*(self._of(leaf).sources for leaf in tensors if self._split(leaf) is None))
        if alike:
            return
        if splits:
            self.partial |= sources
            return
        for leaf in leaves:
            state = self._of(leaf)
            self._set(leaf, State(state.whole, state.outer, sources if leaf.is_floating_point() else frozenset()))
        for leaf in written(func, args, kwargs):
            self._written[storage_key(leaf.untyped_storage())] = sources

    def copied(self, tensor: Tensor, out: Tensor) -> None:
        """Knows the same of it."""
        self._set(out, self._of(tensor))

    def _outer(
        self, func: Any, leaf: Tensor, whole: tuple[int, ...], differing: list[int], splits: Sequence[tuple[Tensor, int]]
    ) -> int:
        """How many stretches the split dimension of a result has; refuses a result of which a rank gets no share."""
        name = func.overloadpacket.__name__
        split, states = splits[0][1], [self._of(tensor) for tensor, _ in splits]
        if len(differing) != 1:
            raise self._across(name)
        (dim,) = differing
        if name in VIEWS:
            if (moved := viewed(states[0].whole, split, states[0].outer, whole)) is None or moved[0] != dim:
                raise self._across(name)
            return moved[1]
        same = all(leaf.shape[dim] == tensor.shape[at] for tensor, at in splits)
        aligned = not is_elementwise(func) or all(at - tensor.dim() == dim - leaf.dim() for tensor, at in splits)
        if not same or not aligned or len({state.outer for state in states}) != 1 or whole[dim] != states[0].whole[split]:
            raise self._across(name)
        return states[0].outer

    def _across(self, name: str, known: bool = True) -> PlanError:
        what = f"applies {name} across features that are split over tp ranks, and each rank has a part of them"
        if not known:
            what = f"applies {name} to features that are split over tp ranks, and Forge does not know that a part is enough"
        advice = "split the layer before it, so that each layer makes one thing, such as queries, or remove it from the plan"
        if name in VIEWS:
            advice = f"{NUMBERS}; else {advice}"
        return PlanError(f"tensor: {self._where()} {what}; {advice}")

    def _depends(self, name: str) -> PlanError:
        return PlanError(
            f"tensor: {self._where()} computes something else ({name}) with the features of a tp rank than with all of them; "
            "take sizes and numbers, such as that of heads, from the configuration there, or set tp to 1"
        )

    def _where(self) -> str:
        return f"{self.path[-1] or 'the module'} ({place()})"

    def finish(self, out: Any) -> None:
        """Takes the module's output, which the loss uses alike on all ranks."""
        for leaf in tree_iter(list(out.values()) if isinstance(out, Mapping) else out):
            if isinstance(leaf, Tensor):
                if self._split(leaf) is not None:
                    raise PlanError(
                        "tensor: the module's output is split over tp ranks; give the last layer 'colwise_gather_output', or "
                        "take it out of the plan"
                    )
                self.whole |= self._of(leaf).sources


def follow(module: nn.Module, rules: Rules, example: Example, ranks: int) -> frozenset[str]:
    """Names of whole parameters that see split activations, whose gradients are sums over tp ranks.

    Args:
        module: parameters on the meta device; unchanged. It is followed as in training.
        rules: how it is to be cut.
        example: what the module is called with.
        ranks: number of tp ranks.

    Raises:
        PlanError: it draws random numbers, looks across what is split, uses one parameter on both sides, names a number of heads,
            cuts a layer that computes something else, or cannot be run without memory.
    """
    copy = _copied(module)
    whole = Whole(copy, rules)
    try:
        called_hollow(copy, example, whole)
    except PlanError:
        raise
    except Exception as cause:
        raise PlanError(
            f"parallelize: tensor parallelism has to follow one forward of {type(module).__name__} without memory, and "
            f"{whole.path[-1] or 'it'} fails ({place(cause)}): {cause}; give example=, what the module is called with, "
            "or set tp to 1"
        ) from cause
    if whole.drawing:
        raise _draws(whole.drawing)
    cut = [parameter.shape[dim] for name, parameter in module.named_parameters() if (dim := rules.cut.get(name)) is not None]
    uneven = any(size % ranks for size in cut)
    return frozenset().union(
        *(_of_rank(module, rules, example, whole.steps, ranks, rank) for rank in {0, ranks - 1 if uneven else 0})
    )


def _of_rank(module: nn.Module, rules: Rules, example: Example, steps: Sequence[Step], ranks: int, rank: int) -> frozenset[str]:
    copy = _copied(module)
    share = Share(copy, rules, steps, ranks, rank)
    try:
        out = called_hollow(copy, example, share)
    except PlanError:
        raise
    except Exception as cause:
        raise PlanError(
            f"tensor: {share.path[-1] or 'the module'} ({place(cause)}) fails with the part of the features that a tp rank has: "
            f"{cause}; {NUMBERS}; where it looks across all features, or meets whole ones, take the layers before it out of the "
            "plan, or set tp to 1"
        ) from cause
    if share.drawing:
        raise _draws(share.drawing)
    share.finish(out)
    _judge(share, rules)
    return frozenset(share.partial)


def _copied(module: nn.Module) -> nn.Module:
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                raise PlanError(
                    f"tensor: {path} holds {name!r}, which is computed from parameters before its forward, as the hooks of "
                    "torch.nn.utils.weight_norm do; use torch.nn.utils.parametrizations outside of the plan, or set tp to 1"
                )
    return hollow(module)


def _judge(found: Share, rules: Rules) -> None:
    if mixed := sorted(found.partial & found.outputs):
        raise PlanError(
            f"tensor: the whole output of {mixed[0]} meets split features, and its gradient would be a part on each rank; cut "
            "the layer that uses it, too, or take both out of the plan"
        )
    if both := sorted(found.partial & found.whole):
        raise PlanError(
            f"tensor: {both[0]} works on split and on whole features, so its gradient is partly a sum over tp ranks; use two "
            "parameters, or set tp to 1"
        )
    if wrong := sorted(rules.summed & found.whole):
        raise PlanError(
            f"tensor: the plan sums the gradient of {wrong[0]} over tp ranks ('replicated_with_grad_allreduce'), but it works on "
            "whole features, where every rank has all of it; take it out of the plan"
        )


def _differing(tensor: Tensor, whole: tuple[int, ...]) -> list[int]:
    return [dim for dim, (mine, every) in enumerate(zip(tensor.shape, whole, strict=True)) if mine != every]


def _draws(paths: Iterable[str]) -> PlanError:
    found = list(dict.fromkeys(path or "the module itself" for path in paths))
    return PlanError(
        f"parallelize: {', '.join(found[:3])} draws random numbers in forward, such as dropout, and tp ranks would draw "
        "different ones; set its rate to 0, or set tp to 1"
    )
