"""A foreign module as a pipeline can run it, and which values its blocks receive.

A pipeline carries the hidden states from block to block, and nothing else. The module runs twice without its parameters, with
other inputs and with random outputs of its modules. What a block receives must be what the block before it returned;
everything else must be equal both times: then it follows from shapes, and every stage can compute it again.
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
    "put all that comes before the blocks, such as tables that are added and dropout, into one module, and all that comes after "
    "them into others that follow each other; or set pp to 1"
)


@dataclass(frozen=True)
class Visit:
    """One call of a unit: what it was given, by the names of its forward's arguments, and what stood for its output."""

    path: str
    given: Mapping[str, Any]
    out: Tensor


class _Stub(nn.Module):
    """Stands for a unit: returns random numbers of the right shape."""

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
                    f"parallelize: {self.path}.{name} is used outside of {self.path} ({type(unit).__name__}); a stage of a "
                    "pipeline holds only the modules that it runs: use it inside of that module, or set pp to 1"
                ) from None
            raise AttributeError(f"{self.path} ({type(unit).__name__}) has no attribute {name!r}") from None

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Of any arguments."""
        unit = self.hidden[0]
        given = dict(signature(unit.forward).bind(*args, **kwargs).arguments)
        first = next(iter(given.values()), None)
        if self.block:
            shape = first.shape if isinstance(first, Tensor) else None
        else:
            found = unit(*tree_map(_hollow, args), **tree_map(_hollow, kwargs))
            shape = found.shape if isinstance(found, Tensor) else None
        if shape is None:
            raise PlanError(f"parallelize: a pipeline needs {self.path} to take and to return one tensor first; set pp to 1")
        out = torch.randn(shape)
        self.visits.append(Visit(self.path, tree_map(_copied, given), out.clone()))
        return out


def units_of(module: nn.Module, blocks: Sequence[str]) -> list[str]:
    """Paths of the modules that stages hold: the blocks, and outermost ones with parameters outside of them."""
    spine = {".".join(words[:end]) for path in blocks for words in [path.split(".")] for end in range(len(words))}
    found = dict.fromkeys(blocks)
    for path, part in module.named_modules():
        if any(parameter is not None for parameter in part._parameters.values()):
            words = path.split(".")
            ends = (".".join(words[:end]) for end in range(1, len(words) + 1))
            found.setdefault(next((prefix for prefix in ends if prefix not in spine), path))
    return list(found)


def visits(module: nn.Module, units: Sequence[str], blocks: Sequence[str], example: tuple[Example, int]) -> list[Visit]:
    """The calls of `units` in one forward, in their order, for an example as `changed` makes it."""
    found: list[Visit] = []
    stubbed = deepcopy(module)
    for path in units:
        above, _, name = path.rpartition(".")
        stubbed.get_submodule(above)._modules[name] = _Stub(path, stubbed.get_submodule(path), found, path in blocks)
    given, seed = example
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            call(stubbed, given)
    except PlanError:
        raise
    except Exception as cause:
        where = f", after {found[-1].path}" if found else ""
        raise PlanError(
            f"parallelize: {type(module).__name__} cannot be followed to see what its blocks are given: {cause}{where}; give "
            "example=, what the module is called with, or set pp to 1"
        ) from cause
    return found


def changed(example: Example, seed: int, last: Collection[str], one: str | None = None) -> tuple[Example, int]:
    """An example with other values for each `seed`, which is also that of what stands for outputs. Of arguments that `last` names
    only `one` has others, which are of the same kind: they may be class numbers, a mask or weights."""
    if isinstance(example, Tensor):
        return _other(example, seed), seed
    kept = {name: value for name, value in example.items() if name in last}
    given = {name: tree_map(lambda leaf: _other(leaf, seed), value) for name, value in example.items() if name not in last}
    return {**given, **kept, **({one: _same_kind(kept[one])} if one is not None else {})}, seed


def must_not_reach(name: str, one: Sequence[Visit], other: Sequence[Visit]) -> None:
    """Refuses an argument that is for the last stage, but changes what modules are given.

    Args:
        name: of the argument.
        one: calls of units.
        other: the same with another value of the argument alone.

    Raises:
        PlanError: a module is given something else.
    """
    for mine, theirs in zip(one, other, strict=False):
        if mine.path != theirs.path or not _same(list(mine.given.values()), list(theirs.given.values())):
            raise PlanError(
                f"parallelize: what {mine.path} is given depends on {name!r}; a pipeline hands one input through its stages, and "
                "the last one gets what only the loss needs; set pp to 1"
            )


def must_hand_on(
    module: nn.Module, one: Sequence[Visit], other: Sequence[Visit], units: Sequence[str], blocks: Sequence[str]
) -> None:
    """Refuses a module whose blocks depend on more than the hidden states of the block before.

    Args:
        module: for its name.
        one: calls of its units.
        other: the same with other values.
        units: paths that should be called.
        blocks: those of them that follow each other.

    Raises:
        PlanError: a unit is called never, again or out of order, is given something that depends on inputs or on hidden states
            beyond its first argument, or something is computed between units.
    """
    name, order = type(module).__name__, [visit.path for visit in one]
    for path in units:
        if order.count(path) != 1:
            times = f"{order.count(path)} times" if path in order else "never"
            raise PlanError(
                f"parallelize: {name} calls {path} {times} in a forward; a pipeline runs each module once; set pp to 1"
            )
    if (called := [path for path in order if path in blocks]) != list(blocks):
        raise PlanError(f"parallelize: {name} calls its blocks as {', '.join(called)}; give blocks= in the order of their use")
    start = order.index(blocks[0])
    if order[start : start + len(blocks)] != called:
        other_one = next(path for path in order[start:] if path not in blocks)
        raise PlanError(f"parallelize: {name} calls {other_one} between its blocks, which no stage holds alone; set pp to 1")
    if start == 0 or start + len(blocks) == len(order):
        raise PlanError("parallelize: a pipeline needs modules with parameters before the blocks and after them; set pp to 1")
    for at in range(start, len(one)):
        path, given, first = one[at].path, one[at].given, next(iter(one[at].given), "")
        before = [one[at - 1]] if at <= start + len(blocks) else one[start + len(blocks) - 1 : at]
        for argument in list(given)[1:]:
            if not _same(given[argument], other[at].given.get(argument)):
                raise PlanError(
                    f"parallelize: {path} is given {argument!r}, which depends on inputs or hidden states; a pipeline hands on "
                    f"only {first!r}, the output of the module before; set pp to 1"
                )
        if not any(_same(given.get(first), visit.out) for visit in before):
            raise PlanError(
                f"parallelize: {name} cannot be cut into stages: it computes something on the hidden states between its modules "
                f"({before[-1].path} and {path}), which every stage would repeat; {ADVICE}"
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
    """Other values of the same kind. They meet no parameters, so they may be out of a table's range."""
    if not isinstance(leaf, Tensor) or leaf.dtype == torch.bool:
        return leaf
    return leaf + seed if not leaf.is_floating_point() else leaf + torch.randn(leaf.shape, generator=_generator(seed)).to(leaf)


def _same_kind(leaf: Tensor) -> Tensor:
    """Other values out of those that are there; of a constant 0 or 1."""
    if leaf.dtype == torch.bool:
        return ~leaf
    if (rolled := leaf.flatten().roll(1).view(leaf.shape)).ne(leaf).any():
        return rolled
    return torch.zeros_like(leaf) if leaf.any() else torch.ones_like(leaf)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Passing(nn.Module):
    """Stands where another stage's module would."""

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        """The first argument."""
        return hidden


class PipelineModule(nn.Module):
    """Mixed into the class of a foreign module: describes itself, leaves modules out, and takes what a pipeline gives."""

    unit_paths: tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]
    width: int
    first_input: str | None
    """Of the arguments of forward, what the first stage gets; None: the only one."""
    last_inputs: frozenset[str]
    """What the last stage gets, such as labels."""

    def specs(self) -> Specs:
        """Of the modules that are here."""
        entry, blocks, leaving = (tuple(path for path in paths if self._here(path)) for paths in self.unit_paths)
        return replace(describe(self, blocks), units={"embed": self.width}, entry=entry, exit=leaving)

    def _here(self, path: str) -> bool:
        return not isinstance(self.get_submodule(path), Passing)

    def leave_out(self, path: str) -> None:
        """Puts a module in the place of another one that hands on what it is given; no other changes its name."""
        above, _, name = path.rpartition(".")
        self.get_submodule(above)._modules[name] = Passing()

    def split_inputs(self, batch: Mapping[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """What the first stage gets of a batch, and what the last one gets.

        Raises:
            PlanError: an argument was not in the example that the module was laid out by.
        """
        others = dict(batch)
        first = others.pop(self.first_input if self.first_input in others else next(iter(others), ""), None)
        if first is None or others.keys() - self.last_inputs:
            raise PlanError(
                "a pipeline hands one input to the first stage, and to the last one what parallelize's example has besides, but "
                f"a batch has {', '.join(sorted(batch)) or 'nothing'}; name all of them in parallelize(..., example={{...}}), "
                "give what only the loss needs as targets=, or set pp to 1"
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
        """Inputs or hidden states -> hidden states, or what `objective` makes of the output."""
        others = {} if objective is None else objective.arguments(labels)
        out = super().forward(x) if self.first_input is None else super().forward(**{self.first_input: x}, **others)
        if objective is not None:
            return objective(self, out, labels)
        return out if isinstance(out, Tensor) else out[0]


@cache
def _staged(original: type[nn.Module]) -> type[nn.Module]:
    return type(f"{original.__name__}Staged", (PipelineModule, original), {})


def stage(module: nn.Module, blocks: list[str], example: Example) -> None:
    """Makes a foreign module, on the meta device but for its buffers, one that a pipeline can cut.

    Raises:
        PlanError: it is not clear what comes before and after the blocks, a block is given more than the hidden states, or the
            module does more than to call its modules.
    """
    units = units_of(module, blocks)
    if own := [
        path for path in units if path not in blocks and any(not path or block.startswith(f"{path}.") for block in blocks)
    ]:
        raise PlanError(
            f"parallelize: {own[0] or 'the root'} holds parameters outside the blocks directly, which no single stage can hold; "
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
            "parallelize: a pipeline needs one input (rows, length), such as token ids, and hidden states (rows, length, width); "
            f"{type(module).__name__} is called with {shape}, and {entry[-1]} makes {tuple(hidden.shape)}; set pp to 1"
        )
    width = hidden.shape[-1]
    module.__class__ = _staged(type(module))
    module.unit_paths, module.width = (entry, tuple(blocks), leaving), width  # type: ignore[assignment]
    module.first_input, module.last_inputs = first_input, last_inputs  # type: ignore[assignment]
    _must_pass(module, (*entry, *blocks, *leaving), width)


def _inputs(module: nn.Module, example: Example) -> tuple[str | None, frozenset[str]]:
    """Of the example's arguments that are tensors, the first one of forward, and the others."""
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
            found = empty(given.clone())
    except Exception as cause:
        raise PlanError(
            f"parallelize: {type(module).__name__} cannot be cut into stages: without its modules its forward fails: {cause}; "
            f"{ADVICE}"
        ) from cause
    if found.shape != given.shape or not torch.equal(found, given):
        raise PlanError(
            f"parallelize: {type(module).__name__} cannot be cut into stages: it computes something on the hidden states between "
            f"its modules, which every stage would repeat; {ADVICE}"
        )
