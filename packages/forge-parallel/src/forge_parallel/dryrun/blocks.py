"""Leaves out repeated blocks of a model, whose memory and traffic follow from those of the blocks that stay.

A run is a sequence of blocks that repeats: equal blocks, or periods of different ones such as local and global attention. Of
each run the first repetitions and the last one stay. `shorten` does nothing unless model and transforms declare that they treat
equal blocks alike; see `declared`.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from forge_core.protocols.model import Observer
from forge_core.specs import Specs
from forge_parallel.dryrun.record import Irregular, StepRecord, Unit
from forge_parallel.model.plan import Plan
from forge_parallel.model.realize import Blueprint
from forge_parallel.optim.groups import Settings
from forge_parallel.pipeline.stages import StageSplit, remove
from forge_parallel.torch_private import not_persistent

KEPT = (4, 6)
"""Repetitions of a run that stay: the first and the last, whose neighbors differ, and between them two to compare. More are
needed where a block affects the one after the next, as when experts are gathered ahead."""

LONGEST = 16
"""Number of blocks in the longest period that is looked for."""


@dataclass(frozen=True)
class Repeats:
    """The repeated blocks of a shortened model.

    Attributes:
        units: path of a repeated block -> its unit.
        left_out: run -> number of repetitions that were left out.
        kept: run -> number of repetitions that stay.
        missing: unit -> number of repetitions like it that were left out behind it.
    """

    units: Mapping[str, Unit] = field(default_factory=dict)
    left_out: Mapping[int, int] = field(default_factory=dict)
    kept: Mapping[int, int] = field(default_factory=dict)
    missing: Mapping[Unit, int] = field(default_factory=dict)

    @property
    def edges(self) -> frozenset[Unit]:
        """The first and the last unit of each run."""
        return frozenset(Unit(run, number) for run, kept in self.kept.items() for number in (0, kept - 1))

    def unit_of(self, name: str) -> Unit | None:
        """Returns the unit of the block that contains a tensor or module; None for what is in no repeated block."""
        words = name.split(".") if self.units else []
        paths = (".".join(words[:count]) for count in range(len(words), 0, -1))
        return next((self.units[path] for path in paths if path in self.units), None)

    def times_of(self, name: str) -> int:
        """Returns the number of tensors of the whole model that a tensor of the shortened one stands for."""
        return 1 if (unit := self.unit_of(name)) is None else 1 + self.missing.get(unit, 0)

    def total(self, summands: Iterable[tuple[Unit | None, int]]) -> int:
        """Returns the sum over the whole model of numbers of the shortened one, by unit."""
        return sum(number * (1 + self.missing.get(unit, 0) if unit is not None else 1) for unit, number in summands)

    def standing_for_all(self, records: Sequence[StepRecord], tables: Sequence[Sequence[tuple[Unit | None, int]]]) -> "Repeats":
        """Returns the repeats with a unit of each run that stands for those that were left out: one that does the same as the
        next one, in every record, and has the same numbers, in every table.

        Raises:
            Irregular: a run has no such unit.
        """
        missing = dict[Unit, int]()
        for run, times in self.left_out.items():
            # From the middle: neighbors of edges may differ. What belongs to an edge itself is not told from the rest of the
            # step.
            candidates = sorted(range(1, self.kept[run] - 2), key=lambda number: abs(2 * number - self.kept[run] + 2))
            why = ""
            for unit in (Unit(run, number) for number in candidates):
                try:
                    for record in records:
                        record.compare(unit)
                    for table in tables:
                        _compare(unit, table)
                except Irregular as difference:
                    why = why or str(difference)
                else:
                    missing[unit] = times
                    break
            else:
                raise Irregular(why)
        return replace(self, missing=missing)


NO_REPEATS = Repeats()


def declared(value: Any) -> bool:
    """Whether the class of a model or an optimizer declares that it treats equal blocks alike. What the class inherits does not
    count, since it may have changed what it inherits."""
    return vars(type(value)).get("treats_blocks_alike") is True


def shorten(blueprint: Blueprint, plan: Plan, settings: Settings, kept: int) -> tuple[Blueprint, Plan, Repeats] | None:
    """Leaves out blocks of a blueprint, which is consumed; the plan that it returns splits it where `plan` splits the whole
    model.

    Returns:
        None if nothing is left out; the blueprint has not changed then.

    Raises:
        PlanError: the pipeline cannot be cut; see `StageSplit.of`.
    """
    module, specs = blueprint.module, blueprint.specs
    if not (specs.entry and specs.exit and declared(module)):
        return None
    if not all("block_variant" in vars(type(transform)) for transform in plan.transforms):
        return None
    stages: Sequence[Sequence[str]] = [specs.blocks]
    if plan.pipeline is not None:
        stages = StageSplit.of(module, specs, plan.pipeline, plan.layout.pp, 0).stages
    # Blocks after the last repeated one, such as those of multi-token prediction, are no repetitions.
    outside = (*(f"{path}." for path in specs.entry + specs.exit),)
    stages = [[path for path in paths if path in specs.blocks and not path.startswith(outside)] for paths in stages]
    shared = _shared(module, specs)
    units: dict[str, Unit] = {}
    left_out: dict[int, int] = {}
    for paths in stages:
        kinds = [_kind(path, index, module, specs, plan, settings, shared) for index, path in enumerate(paths)]
        for start, period, times in runs(kinds, kept):
            run = len(left_out)
            left_out[run] = times - kept
            for number in range(times):
                at = number if number < kept - 1 else kept - 1 if number == times - 1 else None
                for path in paths[start + number * period : start + (number + 1) * period]:
                    if at is None:
                        remove(module, path)
                    else:
                        units[path] = Unit(run, at)
    if not left_out:
        return None
    short: Specs = module.specs()  # type: ignore[operator]
    if plan.pipeline is not None:
        sizes = [sum(path in short.blocks for path in paths) for paths in stages]
        plan = replace(plan, pipeline=replace(plan.pipeline, split=",".join(map(str, sizes))))
    return Blueprint(module, short), plan, Repeats(units, left_out, dict.fromkeys(left_out, kept))


def runs(kinds: Sequence[Hashable], kept: int) -> list[tuple[int, int, int]]:
    """Returns (first, period, repetitions) of stretches in which the kinds repeat more often than `kept` times, from left to
    right: each has the period that leaves out most."""
    found, start = list[tuple[int, int, int]](), 0
    while start < len(kinds):
        options = [(period, _repetitions(kinds, start, period)) for period in range(1, LONGEST + 1)]
        period, times = max(options, key=lambda option: ((option[1] - kept) * option[0], -option[0]))
        if times > kept:
            found.append((start, period, times))
            start += period * times
        else:
            start += 1
    return found


def _repetitions(kinds: Sequence[Hashable], start: int, period: int) -> int:
    times = 1
    while all(
        place < len(kinds) and kinds[place] == kinds[start + at]
        for at in range(period)
        for place in [start + times * period + at]
    ):
        times += 1
    return times


def _shared(module: nn.Module, specs: Specs) -> frozenset[str]:
    """Returns the blocks that share a module, a tensor or a tie with something outside of them."""
    owners: dict[int, str] = {}
    found: set[str] = set()
    for path in specs.blocks:
        block = module.get_submodule(path)
        for part in (*block.modules(), *block.parameters(), *block.buffers()):
            if owners.setdefault(id(part), path) != path:
                found |= {path, owners[id(part)]}
    inside = tuple(f"{path}." for path in specs.blocks)
    tied = {name for tie in specs.ties.items() for name in tie if name.startswith(inside)}
    return frozenset(found | {path for path in specs.blocks if any(name.startswith(f"{path}.") for name in tied)})


def _kind(
    path: str, index: int, module: nn.Module, specs: Specs, plan: Plan, settings: Settings, shared: frozenset[str]
) -> Hashable:
    """Returns a description of a block, equal for blocks that do the same in a step."""
    if path in shared:
        return path
    block, inside = module.get_submodule(path), f"{path}."
    if any(isinstance(part, Observer) and not declared(part) for part in block.modules()):
        return path  # a step calls it outside of its block
    names = [name for name, _ in block.named_modules() if name]
    every = (settings, *settings.stages)
    tensors = tuple(
        (name.removeprefix(inside), spec.dims, spec.group, spec.stacked, spec.fused, *(_settings(own, name) for own in every))
        for name, spec in specs.tensors.items()
        if name.startswith(inside)
    )
    roles = tuple(
        (name.removeprefix(path), specs.modules[name]) for name in specs.modules if name == path or name.startswith(inside)
    )
    variants = tuple(transform.block_variant(index, path, names) for transform in plan.transforms)  # type: ignore[attr-defined]
    return path.rpartition(".")[0], _described(block, 0), tensors, roles, variants


def _settings(settings: Settings, name: str) -> Hashable:
    return settings.of(name), name in settings.frozen


OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
"""Attributes in which torch keeps tensors, modules and hooks."""

DEPTH = 24
"""Depth of nested attributes up to which blocks are compared."""


def _described(value: Any, depth: int) -> Hashable:
    """Returns a value that is equal for modules and attributes that do the same; a unique one for what cannot be compared."""
    if value is None or isinstance(value, bool | int | float | str | bytes | complex | torch.dtype | torch.device | type):
        return type(value), value
    if depth > DEPTH:
        return object()
    inner = partial(_described, depth=depth + 1)
    if isinstance(value, torch.Tensor):
        return type(value), tuple(value.shape), value.dtype, value.device, value.requires_grad
    if isinstance(value, nn.Module):
        hooks = [kept for name, kept in vars(value).items() if name in OF_TORCH and "hook" in name and kept]
        own = {name: kept for name, kept in vars(value).items() if name not in OF_TORCH}
        if declared(value):
            own = {name: kept.of_any_layer() if hasattr(kept, "of_any_layer") else kept for name, kept in own.items()}
        slots = (value._parameters, value._buffers, value._modules, sorted(not_persistent(value)))
        return type(value), inner(own), *map(inner, slots), object() if hooks else None
    if isinstance(value, Mapping):
        return type(value), tuple((inner(key), inner(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return type(value), tuple(map(inner, value))
    if isinstance(value, set | frozenset):
        return (type(value), value) if isinstance(value, frozenset) else (type(value), frozenset(value))
    if isinstance(value, partial):
        return type(value), inner(value.func), inner(value.args), inner(value.keywords)
    if isinstance(value, MethodType):
        return type(value), value.__func__, object() if isinstance(value.__self__, nn.Module) else inner(value.__self__)
    if isinstance(value, FunctionType | BuiltinFunctionType):
        return type(value), value
    if hasattr(value, "__dict__") and not hasattr(type(value), "__slots__"):
        return type(value), inner(vars(value))
    return _hashable(value)


def _hashable(value: Any) -> Hashable:
    try:
        hash(value)
    except TypeError:
        return object()
    return value


def _compare(unit: Unit, table: Sequence[tuple[Unit | None, int]]) -> None:
    own, other = (sum(number for each, number in table if each == one) for one in (unit, unit.next))
    if own != other:
        raise Irregular(f"{unit} has {own} bytes or elements, and {unit.next} {other}")


def by_parameter(optimizer: Any) -> Sequence[tuple[Sequence[str], torch.Tensor]]:
    """Returns what an optimizer's method of this name returns, see `forge_core.protocols.model.Optimizer`.

    Raises:
        Irregular: its class has no such method of its own, or it returns None.
    """
    found = optimizer.by_parameter() if "by_parameter" in vars(type(optimizer)) else None
    if found is None:
        raise Irregular(f"{type(optimizer).__name__} does not declare that it does the same for equal parameters")
    return found
