"""`[model] from_hf = "folder"`: the model's keys follow the folder's `config.json`. Nothing here imports torch."""

from dataclasses import field, make_dataclass
from pathlib import Path
from typing import Annotated

from forge_core.component import Component, Slot
from forge_core.config.tree import DEFAULT, UNSET, Array, Leaf, Node, Table
from forge_core.config.validation import walk
from forge_core.errors import ConfigError, Fault, ForgeError
from forge_core.registry import Registry

KEY = "from_hf"
IGNORE = "from_hf_ignore"


def filled(tree: Table, registry: Registry) -> tuple[Table, list[Fault]]:
    """A recipe's tree in which keys of `[model]` that are not given are those of the folder `model.from_hf`, if it has one.

    The faults say what the folder's configuration holds that Forge does not have (the tree is as it was then), or what is
    wrong with the keys that were given.
    """
    model = tree.items.get("model")
    given = model.items.get(KEY) if isinstance(model, Table) else None
    if not isinstance(model, Table) or not isinstance(given, Leaf) or not isinstance(given.value, str) or given.value == UNSET:
        return tree, []
    from forge_models.hf.reader import read_model

    try:
        default = read_model(Path(given.value), _names(model.items.get(IGNORE)))
    except ConfigError as refusal:
        return tree, [
            Fault(f"model.{KEY}", f"{fault.key}: {fault.message}", fault.origin, fault.hint) for fault in refusal.faults
        ]
    except ForgeError as refusal:
        return tree, [Fault(f"model.{KEY}", str(refusal), given.origin)]
    slot = Annotated[Component, Slot("forge.models")]
    schema = make_dataclass("Recipe", [("model", slot, field(default=default))], frozen=True)
    # The recipe's own keys are laid over those of the folder, so they win, with their origins.
    outcome = walk(schema, Table({"model": model}, tree.origin), registry)
    filled = _from(outcome.tree.items["model"], f"{given.value}/config.json")
    return Table({**tree.items, "model": filled}, tree.origin), list(outcome.faults)


def _names(node: Node | None) -> tuple[str, ...]:
    """Keys that the recipe leaves out; none where it says something else, which its own type refuses."""
    items = node.items if isinstance(node, Array) else []
    return tuple(item.value for item in items if isinstance(item, Leaf) and isinstance(item.value, str))


def _from(node: Node, origin: str) -> Node:
    """The node with `origin` wherever it says "default"."""
    place = origin if node.origin == DEFAULT else node.origin
    if isinstance(node, Table):
        return Table({name: _from(item, origin) for name, item in node.items.items()}, place)
    if isinstance(node, Array):
        return Array([_from(item, origin) for item in node.items], place)
    return Leaf(node.value, place)
