"""Hooks of a run: made from a recipe, and their states in a checkpoint.

A checkpoint keeps pairs [key, state] in the order of the hooks. A key is the registered name, which a change of the class's name
does not touch. Checkpoints of earlier versions have the class's name as the key.
"""

import logging
from collections.abc import Iterator, Sequence
from typing import Any

from forge_core.protocols.checkpoint import Piece
from forge_core.protocols.run import Hook
from forge_core.registry import Entry, Registry
from forge_parallel.model.parallel_model import ParallelModel
from forge_train.recipe.load import Resolved

State = tuple[str, Any]

_log = logging.getLogger(__name__)


def build_hooks(resolved: Resolved, registry: Registry) -> list[Hook]:
    """The hooks of a recipe, each with the key of its state."""
    hooks: list[Hook] = []
    for index, component in enumerate(resolved.job.hooks):
        hook = component.build()
        hook.state_key = _registered(registry.find(*resolved.outcome.chosen[f"hooks.{index}"]))
        hooks.append(hook)
    return hooks


def states_of(hooks: Sequence[Hook]) -> list[State]:
    """What a checkpoint keeps of the hooks: JSON. One that only observes and cannot say its state has none, and a warning."""
    return [(hook.state_key or type(hook).__name__, _state_of(hook)) for hook in hooks]


def _state_of(hook: Hook) -> dict[str, Any]:
    try:
        return dict(hook.state())
    except Exception as cause:
        if not hook.observes:
            raise
        name = hook.state_key or type(hook).__name__
        _log.warning("hook %r has no state in this checkpoint: %s: %s", name, type(cause).__name__, cause)
        return {}


def kept_by(hooks: Sequence[Hook], model: ParallelModel) -> Iterator[tuple[str, str, Piece]]:
    """(section, name, box) of every tensor that hooks keep; in a checkpoint it is called `section/name`."""
    for hook in hooks:
        for section, tensors in hook.tensors(model).items():
            for name, tensor in tensors.items():
                yield section, name, model.piece(f"{section}/{name}", tensor)


def restore_hooks(hooks: Sequence[Hook], saved: Sequence[Sequence[Any]]) -> list[str]:
    """Gives each hook the first state under its key that is left; a hook without one starts anew.

    Returns:
        The keys of the states that no hook took and that hold something.
    """
    left: list[State] = [(key, state) for key, state in saved]
    for hook in hooks:
        names = (hook.state_key, type(hook).__name__)
        found = next((item for name in names for item in left if item[0] == name), None)
        if found:
            left.remove(found)
            hook.load_state(found[1])
    return [key for key, state in left if state]


def _registered(entry: Entry) -> str:
    """`forge-train:evaluate`; `mine.py:Largest` for a class in a file, wherever the file lies."""
    return f"{entry.distribution}:{entry.name.rpartition(':')[2]}"
