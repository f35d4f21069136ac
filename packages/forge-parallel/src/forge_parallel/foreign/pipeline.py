"""Turns a foreign module into one that a pipeline can run, if its blocks exchange only hidden states.

A pipeline passes only hidden states from block to block. The module is run twice without its parameters, with different inputs
and with random outputs of its units. Each block must receive the output of the block before; everything else that a block
receives must be equal in both runs: then it depends only on shapes, and every stage can compute it itself.
"""

from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from forge_core.errors import PlanError
from forge_core.specs import Specs
from forge_parallel.foreign.description import Example, call, describe
from forge_parallel.torch_private import tree_iter, tree_map

ADVICE = (
    "move everything before the blocks, such as added embeddings and dropout, into one module, and everything after them into "
    "modules that are called one after the other; or set pp to 1"
)


@dataclass(frozen=True)
class Visit:
    """One call of a unit: its arguments by name, and the random output that replaced its own."""

    path: str
    given: Mapping[str, Any]
    out: Tensor


class _Stub(nn.Module):
    """Replaces a unit: returns random numbers in the shape of its output."""

    def __init__(self, path: str, unit: nn.Module, visits: list[Visit], block: bool) -> None:
        super().__init__()
        self.path, self.visits, self.block = path, visits, block
        self.hidden = [unit.to("meta")]  # in a list, so that it is not a submodule

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            unit = self.__dict__["hidden"][0]
            if hasattr(unit, name):
                raise PlanError(
                    f"parallelize: {self.path}.{name} is used outside {self.path} ({type(unit).__name__}), but a pipeline stage "
                    f"holds only the modules that it runs; use {name} inside that module, or set pp to 1"
                ) from None
            raise AttributeError(f"{self.path} ({type(unit).__name__}) has no attribute {name!r}") from None

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Records the call and returns random numbers."""
        unit = self.hidden[0]
        given = dict(signature(unit.forward).bind(*args, **kwargs).arguments)
        first = next(iter(given.values()), None)
        if self.block:
            shape = first.shape if isinstance(first, Tensor) else None
        else:
            output = unit(*tree_map(_hollow, args), **tree_map(_hollow, kwargs))
            shape = output.shape if isinstance(output, Tensor) else None
        if shape is None:
            raise PlanError(f"parallelize: with pp, {self.path} must take a tensor first and return one tensor; set pp to 1")
        out = torch.randn(shape)
        self.visits.append(Visit(self.path, tree_map(_copied, given), out.clone()))
        return out


def units_of(module: nn.Module, blocks: Sequence[str]) -> list[str]:
    """Returns the paths of the units of which stages consist: the blocks, and the outermost other modules with parameters."""
    spine = {".".join(words[:end]) for path in blocks for words in [path.split(".")] for end in range(len(words))}
    units = dict.fromkeys(blocks)
    for path, part in module.named_modules():
        if any(parameter is not None for parameter in part._parameters.values()):
            words = path.split(".")
            ends = (".".join(words[:end]) for end in range(1, len(words) + 1))
            units.setdefault(next((prefix for prefix in ends if prefix not in spine), path))
    return list(units)


def visits(module: nn.Module, units: Sequence[str], blocks: Sequence[str], example: tuple[Example, int]) -> list[Visit]:
    """Returns the calls of `units` in one forward, in order, for an example as `changed` returns it."""
    calls: list[Visit] = []
    stubbed = deepcopy(module)
    for path in units:
        above, _, name = path.rpartition(".")
        stubbed.get_submodule(above)._modules[name] = _Stub(path, stubbed.get_submodule(path), calls, path in blocks)
    given, seed = example
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            call(stubbed, given)
    except PlanError:
        raise
    except Exception as cause:
        where = f", after {calls[-1].path}" if calls else ""
        raise PlanError(
            f"parallelize: {type(module).__name__} cannot be traced to see what its blocks receive: {cause}{where}; pass the "
            "module's arguments as example=, or set pp to 1"
        ) from cause
    return calls


def changed(example: Example, seed: int, last: Collection[str], one: str | None = None) -> tuple[Example, int]:
    """Returns an example with values that depend on `seed`, and the seed for the outputs of units. Of the arguments in `last`
    only `one` gets other values, of the same kind: these arguments may be class numbers, masks or weights."""
    if isinstance(example, Tensor):
        return _other(example, seed), seed
    kept = {name: value for name, value in example.items() if name in last}
    given = {name: tree_map(lambda leaf: _other(leaf, seed), value) for name, value in example.items() if name not in last}
    return {**given, **kept, **({one: _same_kind(kept[one])} if one is not None else {})}, seed


def must_not_reach(name: str, one: Sequence[Visit], other: Sequence[Visit]) -> None:
    """Refuses an argument of the last stage on which the inputs of modules depend.

    Args:
        name: name of the argument.
        one: calls of the units.
        other: calls of the units with another value of this argument only.

    Raises:
        PlanError: a module receives other values.
    """
    for mine, theirs in zip(one, other, strict=False):
        if mine.path != theirs.path or not _same(list(mine.given.values()), list(theirs.given.values())):
            raise PlanError(
                f"parallelize: the input of {mine.path} depends on argument {name!r}, but a pipeline passes only one input "
                "through its stages; other arguments reach only the loss in the last stage; set pp to 1"
            )


def must_hand_on(
    module: nn.Module, one: Sequence[Visit], other: Sequence[Visit], units: Sequence[str], blocks: Sequence[str]
) -> None:
    """Refuses a module whose blocks depend on more than the hidden states of the previous block.

    Args:
        module: the module, for its name.
        one: calls of its units.
        other: calls of its units with other inputs.
        units: paths that must be called.
        blocks: the units that run one after the other.

    Raises:
        PlanError: a unit is called never, more than once or out of order; an argument other than its first depends on inputs or
            hidden states; or the module computes something between units.
    """
    name, order = type(module).__name__, [visit.path for visit in one]
    for path in units:
        if order.count(path) != 1:
            times = f"{order.count(path)} times" if path in order else "never"
            raise PlanError(
                f"parallelize: {name} calls {path} {times} in a forward, but a pipeline runs each module once; set pp to 1"
            )
    if (called := [path for path in order if path in blocks]) != list(blocks):
        raise PlanError(f"parallelize: {name} calls its blocks in the order {', '.join(called)}; give blocks=[...] in that order")
    start = order.index(blocks[0])
    if order[start : start + len(blocks)] != called:
        between = next(path for path in order[start:] if path not in blocks)
        raise PlanError(f"parallelize: {name} calls {between} between its blocks, so it belongs to no stage; set pp to 1")
    if start == 0 or start + len(blocks) == len(order):
        raise PlanError("parallelize: with pp, the module needs modules with parameters before and after its blocks; set pp to 1")
    for at in range(start, len(one)):
        path, given, first = one[at].path, one[at].given, next(iter(one[at].given), "")
        before = [one[at - 1]] if at <= start + len(blocks) else one[start + len(blocks) - 1 : at]
        for argument in list(given)[1:]:
            if not _same(given[argument], other[at].given.get(argument)):
                raise PlanError(
                    f"parallelize: argument {argument!r} of {path} depends on inputs or hidden states, but a pipeline passes "
                    f"only {first!r}, the output of the module before; set pp to 1"
                )
        if not any(_same(given.get(first), visit.out) for visit in before):
            raise PlanError(
                f"parallelize: {name} cannot be split into stages: it computes with the hidden states between {before[-1].path} "
                f"and {path}, and every stage would repeat that; {ADVICE}"
            )


def _same(one: Any, other: Any) -> bool:
    ours, theirs = list(tree_iter(one)), list(tree_iter(other))
    return len(ours) == len(theirs) and all(
        isinstance(b, Tensor) and a.shape == b.shape and torch.equal(a, b) if isinstance(a, Tensor) else _equal(a, b)
        for a, b in zip(ours, theirs, strict=True)
    )


def _equal(one: Any, other: Any) -> bool:
    return one == other if isinstance(one, bool | int | float | str) else type(one) is type(other)


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _hollow(leaf: Any) -> Any:
    return leaf.to("meta") if isinstance(leaf, Tensor) else leaf


def _other(leaf: Any, seed: int) -> Any:
    """Returns other values of the same kind. They reach no parameters, so they may exceed the size of an embedding."""
    if not isinstance(leaf, Tensor) or leaf.dtype == torch.bool:
        return leaf
    return leaf + seed if not leaf.is_floating_point() else leaf + torch.randn(leaf.shape, generator=_generator(seed)).to(leaf)


def _same_kind(leaf: Tensor) -> Tensor:
    """Returns the values in another order; for a constant tensor zeros or ones."""
    if leaf.dtype == torch.bool:
        return ~leaf
    if (rolled := leaf.flatten().roll(1).view(leaf.shape)).ne(leaf).any():
        return rolled
    return torch.zeros_like(leaf) if leaf.any() else torch.ones_like(leaf)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Passing(nn.Module):
    """Replaces a module that runs in another stage: returns its first argument."""

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        """Returns the first argument."""
        return hidden


class PipelineModule(nn.Module):
    """Mixed into the class of a foreign module: adds specs, and lets a pipeline drop modules and pass inputs."""

    unit_paths: tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]
    width: int
    first_input: str | None
    """Name of the argument that the first stage receives; None if forward has only one."""
    last_inputs: frozenset[str]
    """Names of the arguments that the last stage receives, such as labels."""

    def specs(self) -> Specs:
        """Returns the specs of the modules in this stage."""
        entry, blocks, leaving = (tuple(path for path in paths if self._here(path)) for paths in self.unit_paths)
        return replace(describe(self, blocks), units={"embed": self.width}, entry=entry, exit=leaving)

    def _here(self, path: str) -> bool:
        return not isinstance(self.get_submodule(path), Passing)

    def leave_out(self, path: str) -> None:
        """Replaces a module by one that returns its input; the names of other modules stay."""
        above, _, name = path.rpartition(".")
        self.get_submodule(above)._modules[name] = Passing()

    def split_inputs(self, batch: Mapping[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """Returns the argument for the first stage, and those for the last stage.

        Raises:
            PlanError: an argument is not in the example that was given to `parallelize`.
        """
        others = dict(batch)
        first = others.pop(self.first_input if self.first_input in others else next(iter(others), ""), None)
        if first is None or others.keys() - self.last_inputs:
            raise PlanError(
                "a pipeline passes one input to the first stage and the other arguments of parallelize's example to the last, "
                f"but a batch has {', '.join(sorted(batch)) or 'no arguments'}; name all arguments in parallelize(..., "
                "example={...}), pass what only the loss needs as targets=, or set pp to 1"
            )
        return first, others

    def forward(
        self,
        x: Tensor,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        labels: Tensor | None = None,
        objective: Any = None,
    ) -> Any:
        """Maps inputs or hidden states to hidden states, or to the result of `objective` on the output."""
        others = {} if objective is None else objective.arguments(labels)
        out = super().forward(x) if self.first_input is None else super().forward(**{self.first_input: x}, **others)
        if objective is not None:
            return objective(self, out, labels)
        return out if isinstance(out, Tensor) else out[0]


@cache
def _staged(original: type[nn.Module]) -> type[nn.Module]:
    return type(f"{original.__name__}Staged", (PipelineModule, original), {})


def stage(module: nn.Module, blocks: list[str], example: Example) -> None:
    """Makes a pipeline able to split a foreign module, which is on the meta device except for its buffers.

    Raises:
        PlanError: it is unclear which modules run before and after the blocks, a block receives more than hidden states, or the
            module computes something between its units.
    """
    units = units_of(module, blocks)
    if own := [
        path for path in units if path not in blocks and any(not path or block.startswith(f"{path}.") for block in blocks)
    ]:
        raise PlanError(
            f"parallelize: {own[0] or 'the root'} contains the blocks and has parameters of its own, which no stage can hold; "
            f"{ADVICE}"
        )
    first_input, last_inputs = _inputs(module, example)
    one, other = (visits(module, units, blocks, changed(example, seed, last_inputs)) for seed in (1, 2))
    must_hand_on(module, one, other, units, blocks)
    for name in sorted(last_inputs):
        must_not_reach(name, one, visits(module, units, blocks, changed(example, 1, last_inputs, name)))
    order = [visit.path for visit in one]
    start = order.index(blocks[0])
    entry, leaving = tuple(order[:start]), tuple(order[start + len(blocks) :])
    hidden = one[start - 1].out
    given = example if first_input is None else example[first_input]  # type: ignore[index]
    if not isinstance(given, Tensor) or given.dim() != 2 or hidden.shape[:-1] != given.shape:
        shape = tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
        raise PlanError(
            "parallelize: with pp, the input must be (rows, length), such as token ids, and hidden states (rows, length, "
            f"width), but the input of {type(module).__name__} is {shape} and the output of {entry[-1]} {tuple(hidden.shape)}; "
            "set pp to 1"
        )
    width = hidden.shape[-1]
    module.__class__ = _staged(type(module))
    module.unit_paths, module.width = (entry, tuple(blocks), leaving), width  # type: ignore[assignment]
    module.first_input, module.last_inputs = first_input, last_inputs  # type: ignore[assignment]
    _must_pass(module, (*entry, *blocks, *leaving), width)


def _inputs(module: nn.Module, example: Example) -> tuple[str | None, frozenset[str]]:
    """Returns the first tensor argument of forward in the example, and the names of the others."""
    if isinstance(example, Tensor):
        return None, frozenset()
    tensors = [name for name in signature(module.forward).parameters if isinstance(example.get(name), Tensor)]
    tensors += [name for name, value in example.items() if isinstance(value, Tensor) and name not in tensors]  # of **kwargs
    return next(iter(tensors or example)), frozenset(tensors[1:])


def _must_pass(module: Any, paths: tuple[str, ...], width: int) -> None:
    empty = deepcopy(module)
    for path in paths:
        empty.leave_out(path)
    given = torch.randn(2, 4, width, generator=torch.Generator().manual_seed(0))
    try:
        with torch.no_grad():
            passed = empty(given.clone())
    except Exception as cause:
        raise PlanError(
            f"parallelize: {type(module).__name__} cannot be split into stages: without its units, its forward fails: {cause}; "
            f"{ADVICE}"
        ) from cause
    if passed.shape != given.shape or not torch.equal(passed, given):
        raise PlanError(
            f"parallelize: {type(module).__name__} cannot be split into stages: it computes with the hidden states between its "
            f"modules, and every stage would repeat that; {ADVICE}"
        )
