"""Starting a run from some of the weights of another: `[start]`. What is not taken begins as drawn, and is named.

Everything is compared first: an error lists all that does not fit, and nothing has changed then.
"""

from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch

from forge_core.errors import ForgeError
from forge_core.protocols.weights import Weights
from forge_core.registry import Registry
from forge_parallel.build.parallel_model import ParallelModel
from forge_parallel.build.realize import initialize
from forge_train.inference.stored import open_weights
from forge_train.recipe.schema import Start

_SHOWN = 20


def warm_start(
    start: Start, seed: int, registry: Registry, report: Callable[[str], None], component: Any = None, parts: tuple[str, ...] = ()
) -> Callable[[ParallelModel], None]:
    """What `realize` takes as its source; `report` is told what was taken, what begins as drawn, and what was left.

    `component` is the model's: one with a method `starts_from(weights)` says what it takes of the weights of another kind of
    model. `parts` are modules whose weights come from elsewhere.
    """
    path = start.weights
    assert path is not None, "the caller asks only where weights are given"

    def restore(model: ParallelModel) -> None:
        weights = open_weights(path, registry, start.section)
        if hasattr(component, "starts_from"):
            weights = component.starts_from(weights)
        for note in weights.facts.notes:
            report(f"{path}: {note}")
        taken = chosen(start, weights.tensors)
        if twice := [part for part in parts if any(name.startswith(f"{part}.") for name in taken)]:
            raise ForgeError(
                f"start.weights and the weights of model.{twice[0]} both have its tensors; leave them out with "
                f"start.exclude = ['{twice[0]}.*'], or take a model.{twice[0]} without weights"
            )
        left = check(taken, weights, model)
        drawn = [name for name in model.specs.tensors if name not in taken and name.partition(".")[0] not in parts]
        check_drawn(drawn, left, start, weights, len(model.specs.tensors))
        initialize(model, seed)
        copy(taken, weights, model)
        unused = sorted(set(weights.tensors) - set(taken.values()))
        report(f"{path}: {len(taken)} of {len(model.specs.tensors)} tensors are those of step {weights.facts.step}")
        if drawn:
            report(f"drawn from job.seed: {_some(drawn)}")
        if unused:
            report(f"not taken from {path}: {_some(unused)}")

    return restore


def chosen(start: Start, stored: Iterable[str]) -> dict[str, str]:
    """The model's name -> the stored name of each tensor that is taken.

    Raises:
        ForgeError: a pattern or a renaming has no part in it, two tensors get one name, or nothing is left.
    """
    renames = [_pair(text) for text in start.rename]
    if len(dict(renames)) < len(renames):
        raise ForgeError(f"start.rename has a name twice: {', '.join(start.rename)}")
    renames.sort(key=lambda pair: -len(pair[0]))
    idle = {*start.include, *start.exclude, *start.rename}
    names: dict[str, str] = {}
    for old in stored:
        rule = next((pair for pair in renames if old.startswith(pair[0])), None)
        new = old if rule is None else rule[1] + old.removeprefix(rule[0])
        idle -= {f"{rule[0]}={rule[1]}"} if rule is not None else set()
        hits = [pattern for pattern in start.include if fnmatchcase(new, pattern)]
        misses = [pattern for pattern in start.exclude if fnmatchcase(new, pattern)]
        idle -= {*hits, *misses}
        if not hits or misses:
            continue
        if new in names:
            raise ForgeError(f"start.rename gives {names[new]} and {old} one name, {new}")
        names[new] = old
    if idle:
        raise ForgeError(f"[start]: {', '.join(map(repr, sorted(idle)))} fits no tensor of {start.weights}; check the names")
    if not names:
        raise ForgeError(f"[start] takes no tensor of {start.weights}; start.exclude has all that start.include has")
    return names


def check(taken: dict[str, str], weights: Weights, model: ParallelModel) -> list[str]:
    """Compares what is to be taken with the model. What the model does not have is left out of `taken`, and returned.

    Raises:
        ForgeError: one error with every tensor of another shape or kind of number; or the model has none of them.
    """
    left = [name for name in taken if name not in model.specs.tensors]
    for name in left:
        del taken[name]
    if not taken:
        raise ForgeError(f"the model has no tensor of {weights.facts.origin} under its name; see start.rename")
    faults = []
    for name, tensor in model.tensors():
        if name not in taken:
            continue
        shape, entry = tuple(model.piece(name, tensor).shape), weights.tensors[taken[name]]
        if entry.shape != shape:
            faults.append(f"{name}: shape {shape}, in the weights {entry.shape}")
        if getattr(torch, entry.dtype).is_floating_point != tensor.dtype.is_floating_point:
            faults.append(f"{name}: dtype {str(tensor.dtype).removeprefix('torch.')}, in the weights {entry.dtype}")
    if faults:
        listed = "\n  ".join(faults)
        raise ForgeError(
            f"{weights.facts.origin} does not fit [model]; nothing was loaded. Leave these out with start.exclude, or change "
            f"[model]:\n  {listed}"
        )
    return left


def check_drawn(drawn: list[str], left: list[str], start: Start, weights: Weights, total: int) -> None:
    """Refuses to draw what the weights have under another name, as those of another fusion or kind of layer do.

    Args:
        drawn: tensors of the model that begin as drawn.
        left: names in the weights that are to be taken, and that the model does not have.
        start: `start.draw` names tensors that may be drawn all the same.
        weights: where they come from.
        total: tensors of the model.

    Raises:
        ForgeError: with the numbers; or a pattern of `start.draw` fits nothing that is drawn.
    """
    if idle := [pattern for pattern in start.draw if not any(fnmatchcase(name, pattern) for name in drawn)]:
        raise ForgeError(f"start.draw: {', '.join(map(repr, idle))} fits no tensor that is drawn; check the names")
    by_block: dict[tuple[str, ...], list[str]] = {}
    for name in left:
        by_block.setdefault(_parts(name)[:2], []).append(name)
    found = {}
    for name in drawn:
        other = next((other for other in by_block.get(_parts(name)[:2], ()) if _differ_by_parts(name, other)), None)
        if other is not None and not any(fnmatchcase(name, pattern) for pattern in start.draw):
            found[name] = other
    if found:
        name, other = next(iter(found.items()))
        raise ForgeError(
            f"start.weights: {len(drawn)} of {total} tensors would be drawn from job.seed, and {weights.facts.origin} has "
            f"{len(found)} of them under other names, as of another fusion or another kind of layer: {name} is {other} there. "
            "Take the model of the weights, give names with start.rename, or say by start.draw which tensors may be drawn, such "
            f"as start.draw = ['{name}'], with * and ?"
        )


def _parts(name: str) -> tuple[str, ...]:
    """Of a name, without the end that every layer has: experts have one tensor where a linear layer has a `weight`."""
    return tuple(name.removesuffix(".weight").split("."))


def _differ_by_parts(one: str, other: str) -> bool:
    """Whether the longer of two names is the shorter with further parts in between, such as a modality."""
    few, many = sorted((_parts(one), _parts(other)), key=len)
    rest = iter(many)
    return all(part in rest for part in few)


@torch.no_grad()
def copy(taken: Mapping[str, str], weights: Weights, model: ParallelModel) -> None:
    """Fills this rank's boxes of what is taken; values are converted to the dtype of the model's state."""
    for name, tensor in model.tensors():
        piece = model.piece(name, tensor)
        if name in taken and piece.local.numel():
            piece.local.copy_(weights.box(taken[name], piece.offset, tuple(piece.local.shape)))


def _pair(text: str) -> tuple[str, str]:
    old, sign, new = text.partition("=")
    if not sign or not old:
        raise ForgeError(f"start.rename {text!r}: write OLD=NEW, such as encoder.=blocks.")
    return old, new


def _some(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
