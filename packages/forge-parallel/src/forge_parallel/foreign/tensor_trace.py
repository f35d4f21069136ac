"""Traces a module under a tensor-parallel plan, in forwards on the meta device, before the module is parallelized.

A plan names layers, not the operators between them. Between a layer split along its outputs and one split along its inputs, each
rank has a part of the features: a parameter used there gets a partial gradient on each rank, and an operator across the features
sees only a part of them. So the module runs twice: whole, and with the sizes of one rank. Both runs must have the same operators,
and each result must be whole on the rank, or a share along one dimension.
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
    Operation,
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

NUMBERS = "if code there uses a fixed number of heads or features, replace it by -1 or take it from the tensor's shape"


@dataclass(frozen=True)
class TraceState:
    """The traced properties of a tensor.

    Attributes:
        whole: the tensor's shape in the whole module. The rank has a share along the dimension whose size differs.
        outer: number of consecutive segments in the split dimension, each of which is split over the ranks.
        sources: parameters and module outputs that are not split and get the tensor's gradient without a sum over ranks.
    """

    whole: tuple[int, ...]
    outer: int = 1
    sources: frozenset[str] = frozenset()


class ShareTrace(Forward):
    """Traces the forward of one rank: which tensors are split, and which whole parameters are combined with split ones.

    Attributes:
        partial: whole parameters and module outputs that are combined with split features.
        whole: whole parameters and module outputs that are combined with whole features.
        outputs: paths of modules whose output is whole on every rank.
    """

    DRAWN = 1 - 2**-24

    def __init__(self, module: nn.Module, rules: Rules, steps: Sequence[Operation], ranks: int, rank: int) -> None:
        self._steps, self._ranks, self._rank = iter(steps), ranks, rank
        self._states: dict[int, tuple[Tensor, TraceState]] = {}  # with the tensor, so that its id is not reused
        self._written: dict[int, frozenset[str]] = {}  # storage -> sources of what operators wrote to it
        self.partial: set[str] = set()
        self.whole: set[str] = set()
        self.outputs: set[str] = set()
        super().__init__(module, rules)
        for name, parameter in module.named_parameters():
            if rules.cut.get(name) is None:
                self._set(parameter, TraceState(tuple(parameter.shape), 1, frozenset({name})))

    def _of(self, tensor: Tensor) -> TraceState:
        _, state = self._states.get(id(tensor)) or (tensor, TraceState(tuple(tensor.shape)))
        more = self._written.get(storage_key(tensor.untyped_storage()), frozenset())
        return replace(state, sources=state.sources | more)

    def _set(self, tensor: Tensor, state: TraceState) -> None:
        self._states[id(tensor)] = tensor, state

    def _split(self, tensor: Tensor) -> int | None:
        """Returns the dimension along which this rank has a share; None if the tensor is whole."""
        return next(iter(_differing(tensor, self._of(tensor).whole)), None)

    def cut(self, path: str, part: nn.Module, role: Role) -> Callable[..., Any]:
        """Returns a forward whose output has this rank's sizes."""
        forward = part.forward if role is not Role.EXPERTS else like_the_first

        def run(*args: Any, **kwargs: Any) -> Tensor:
            tensors = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
            split = self._split(tensors[0])
            if role is Role.ROW and split is None:
                raise PlanError(f"tensor: {path} is rowwise, but its input has whole features; make the layer before it colwise")
            if role is not Role.ROW and any(self._split(leaf) is not None for leaf in tensors):
                raise PlanError(
                    f"tensor: {path} needs whole features, but its input is split; remove the layer before it from the plan"
                )
            self.whole |= set().union(*(self._of(leaf).sources for leaf in tensors))
            if role is Role.ROW:
                x, state = tensors[0], self._of(tensors[0])
                share = self._share(state.whole[-1])
                if split != x.dim() - 1 or state.outer != 1 or x.shape[-1] != share:
                    raise PlanError(
                        f"tensor: {path} is rowwise and needs {share} of {state.whole[-1]} features on a rank, but its input is "
                        f"{tuple(x.shape)} of {state.whole}; split the layers before it in the same way"
                    )
                args = (x.new_empty(state.whole),)
            out = forward(*args, **kwargs)
            shape = tuple(out.shape)
            if role is Role.ENTERING:
                out = out.new_empty((*shape[:-1], self._share(shape[-1])))
                self._set(out, TraceState(shape))
            else:
                self.outputs.add(path)
                self._set(out, TraceState(shape, 1, frozenset({path})))
            return out

        return run

    def _share(self, size: int) -> int:
        return chunk(size, self._ranks, self._rank)[1]

    def take(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Compares an operator with that of the whole module."""
        expected, step = next(self._steps, None), self.step(func, args, kwargs, out)
        arguments, name = named_arguments(func, args, kwargs), step.name
        tensors = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
        leaves = [leaf for leaf in tree_iter(out) if isinstance(leaf, Tensor)]
        splits = [(leaf, split) for leaf in tensors if (split := self._split(leaf)) is not None]
        alike = makes_alike(name)
        for leaf, split in splits if not alike else []:
            if (kind := effect(func, arguments, leaf, split, out)) != "none":
                raise self._across(name, known=kind == "across")
        if expected is None or (expected.name, expected.numbers, len(expected.shapes)) != (name, step.numbers, len(leaves)):
            raise _draws(self._drawn.values()) if self._drawn else self._depends(name)
        for leaf, whole in zip(leaves, expected.shapes, strict=True):
            differing = _differing(leaf, whole) if leaf.dim() == len(whole) else list(range(leaf.dim()))
            if not splits or alike:
                if differing and not (alike and len(differing) == 1):
                    raise self._depends(name)
                self._set(leaf, TraceState(whole))
            else:
                self._set(leaf, TraceState(whole, self._outer(func, leaf, whole, differing, splits)))
        sources = frozenset().union(*(self._of(leaf).sources for leaf in tensors if self._split(leaf) is None))
        if alike:
            return
        if splits:
            self.partial |= sources
            return
        for leaf in leaves:
            state = self._of(leaf)
            self._set(leaf, TraceState(state.whole, state.outer, sources if leaf.is_floating_point() else frozenset()))
        for leaf in written(func, args, kwargs):
            self._written[storage_key(leaf.untyped_storage())] = sources

    def copied(self, tensor: Tensor, out: Tensor) -> None:
        """Gives the copy the state of the original."""
        self._set(out, self._of(tensor))

    def _outer(
        self, func: Any, leaf: Tensor, whole: tuple[int, ...], differing: list[int], splits: Sequence[tuple[Tensor, int]]
    ) -> int:
        """Returns the number of segments in a result's split dimension; refuses a result of which the rank has no share."""
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
        what = f"applies {name} across features that are split over tp ranks, so each rank would see only its part"
        if not known:
            what = (
                f"applies {name} to features that are split over tp ranks, and Forge has no rule that this is correct on a part"
            )
        advice = "split the layer before it into layers with one output each, such as queries, or remove it from the plan"
        if name in VIEWS:
            advice = f"{NUMBERS}; else {advice}"
        return PlanError(f"tensor: {self._where()} {what}; {advice}")

    def _depends(self, name: str) -> PlanError:
        return PlanError(
            f"tensor: {self._where()} computes something else ({name}) on a tp rank's part of the features than on all of them; "
            "take sizes, such as the number of heads, from the configuration instead of tensors, or set tp to 1"
        )

    def _where(self) -> str:
        return f"{self.path[-1] or 'the module'} ({place()})"

    def finish(self, out: Any) -> None:
        """Checks the module's output, from which every rank computes the same loss."""
        for leaf in tree_iter(list(out.values()) if isinstance(out, Mapping) else out):
            if isinstance(leaf, Tensor):
                if self._split(leaf) is not None:
                    raise PlanError(
                        "tensor: the module's output is split over tp ranks; give the last layer the style "
                        "'colwise_gather_output', or remove it from the plan"
                    )
                self.whole |= self._of(leaf).sources


def follow(module: nn.Module, rules: Rules, example: Example, ranks: int) -> frozenset[str]:
    """Returns the names of whole parameters that are combined with split activations: their gradients are summed over tp ranks.

    Args:
        module: the module, with parameters on the meta device; not changed. It is traced in training mode.
        rules: how the plan splits the module.
        example: the module's arguments.
        ranks: number of tp ranks.

    Raises:
        PlanError: the module draws random numbers, computes across split features, uses one parameter on split and on whole
            features, has a fixed number of heads, splits a layer with an unknown computation, or fails on the meta device.
    """
    copy = _copied(module)
    whole = Whole(copy, rules)
    try:
        called_hollow(copy, example, whole)
    except PlanError:
        raise
    except Exception as cause:
        raise PlanError(
            f"parallelize: tensor parallelism has to trace one forward of {type(module).__name__} on the meta device, but "
            f"{whole.path[-1] or 'it'} fails ({place(cause)}): {cause}; pass the module's arguments as example=, or set tp to 1"
        ) from cause
    if whole.drawing:
        raise _draws(whole.drawing)
    cut = [parameter.shape[dim] for name, parameter in module.named_parameters() if (dim := rules.cut.get(name)) is not None]
    uneven = any(size % ranks for size in cut)
    return frozenset().union(
        *(_of_rank(module, rules, example, whole.steps, ranks, rank) for rank in {0, ranks - 1 if uneven else 0})
    )


def _of_rank(
    module: nn.Module, rules: Rules, example: Example, steps: Sequence[Operation], ranks: int, rank: int
) -> frozenset[str]:
    copy = _copied(module)
    share = ShareTrace(copy, rules, steps, ranks, rank)
    try:
        out = called_hollow(copy, example, share)
    except PlanError:
        raise
    except Exception as cause:
        raise PlanError(
            f"tensor: {share.path[-1] or 'the module'} ({place(cause)}) fails with a tp rank's part of the features: {cause}; "
            f"{NUMBERS}; if it needs all features, remove the layers before it from the plan, or set tp to 1"
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
                    f"tensor: {path}.{name} is computed from parameters before the forward, as the hooks of "
                    "torch.nn.utils.weight_norm do; use torch.nn.utils.parametrizations outside the plan, or set tp to 1"
                )
    return hollow(module)


def _judge(share: ShareTrace, rules: Rules) -> None:
    if mixed := sorted(share.partial & share.outputs):
        raise PlanError(
            f"tensor: the output of {mixed[0]} is whole, but is combined with split features, so its gradient would be partial "
            "on each rank; split the layer that uses it as well, or remove both from the plan"
        )
    if both := sorted(share.partial & share.whole):
        raise PlanError(
            f"tensor: {both[0]} is used with split and with whole features, so only a part of its gradient is to be summed over "
            "tp ranks; use two parameters, or set tp to 1"
        )
    if wrong := sorted(rules.summed & share.whole):
        raise PlanError(
            f"tensor: the plan sums the gradient of {wrong[0]} over tp ranks ('replicated_with_grad_allreduce'), but it is used "
            "with whole features, where every rank has the complete gradient; remove it from the plan"
        )


def _differing(tensor: Tensor, whole: tuple[int, ...]) -> list[int]:
    return [dim for dim, (size, full) in enumerate(zip(tensor.shape, whole, strict=True)) if size != full]


def _draws(paths: Iterable[str]) -> PlanError:
    names = list(dict.fromkeys(path or "the module itself" for path in paths))
    return PlanError(
        f"parallelize: the forward of {', '.join(names[:3])} draws random numbers, such as dropout, which would differ between "
        "tp ranks; set the rate to 0, or set tp to 1"
    )
