"""Reads a recipe with its bases, overrides and `[model] from_hf`, and checks it; every command uses it. Does not import torch."""

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, make_dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from forge_core.component import Component, Slot
from forge_core.config.layers import load_layers
from forge_core.config.toml import to_toml
from forge_core.config.tree import DEFAULT, UNSET, Array, Leaf, Node, Table, given_at, leaves, origin_at, plain
from forge_core.config.validation import PartialRecipe, Resolution, run_checks, walk
from forge_core.errors import ConfigError, Fault, ForgeError, LayoutError, MissingFile
from forge_core.layout import SIZES, Layout
from forge_core.registry import Registry
from forge_train.recipe.schema import Job

_HEADER = "# The resolved recipe: every key with the value that it had. It is complete and loads to the same run.\n\n"


@dataclass(frozen=True)
class Recipe:
    """A recipe without faults.

    Attributes:
        job: the typed tree.
        tree: every key with its value and origin, defaults included.
        layout: the layout for the requested number of processes; None if no number was given.
        used: (group, name) of every chosen component, without repetitions; `Registry.used` adds distributions and versions.
        outcome: the result of `walk`, for explanations of keys.
        files: every file that was read, the recipe last.
        warnings: warnings of checks, and failures of checks from distributions that the recipe does not use.
        registry: the registry in which the components were found.
    """

    job: Job
    tree: Table
    layout: Layout | None
    used: tuple[tuple[str, str], ...]
    outcome: Resolution
    files: tuple[Path, ...]
    warnings: tuple[str, ...]
    registry: Registry = field(compare=False, repr=False)

    def as_json(self) -> dict[str, Any]:
        """Returns the resolved tree as plain values; `"none"` means unset."""
        return plain(self.tree)

    def origins(self) -> list[dict[str, Any]]:
        """Returns `{key, value, origin}` of every value, for reports."""
        return [{"key": key, "value": value, "origin": origin} for key, value, origin in leaves(self.tree)]

    def as_toml(self, *, origins: bool = False) -> str:
        """Returns the resolved tree as TOML text that loads to an equal job, with each value's origin as a comment on request."""
        notes = {key: origin for key, _, origin in leaves(self.tree)} if origins else None
        return ("" if origins else _HEADER) + to_toml(plain(self.tree), notes)


def load_recipe(
    recipe: str | Path | Table,
    overrides: Sequence[str] = (),
    world: int | None = None,
    registry: Registry | None = None,
    *,
    here: bool | None = False,
) -> Recipe:
    """Reads and checks a recipe with its bases and overrides.

    Args:
        recipe: path of a TOML file that the user gave, or name of a preset; or a tree that was read from elsewhere, such as a
            checkpoint. Python files that such a tree names do not run without the user's permission (`forge_core.trust`).
        overrides: `--section.key=value`, as on the command line.
        world: number of processes. Without it the result has no layout, and the checks, which need a layout, do not run.
        registry: where components are found; by default all that are installed.
        here: True if the run starts on this machine now: missing files are faults. False: missing files are warnings. None:
            no file is read, and missing files are not reported.

    Raises:
        ConfigError: the recipe has faults; the error lists all of them.
    """
    registry = registry or Registry()
    if isinstance(recipe, Table):
        recipe = without_auto(recipe)
    layered = load_layers(recipe, overrides, Job, registry)
    tree, unread = fill_from_hf(layered.tree, registry)
    tree, undescribed = fill_described(tree, registry)
    unread += undescribed
    outcome = walk(Job, tree, registry)
    faults = [*layered.faults, *unread, *outcome.faults]
    layout, misfits = _layout(outcome, world)
    faults += misfits
    warnings: list[str] = []
    if world is not None:
        job = outcome.value if not outcome.faults else PartialRecipe(outcome.parts)
        check_faults, warnings = run_checks(job, layout, registry, outcome.tree, outcome.used, here)
        faults += check_faults
        if not outcome.faults:
            from forge_train.recipe.checks import kernels_fit_the_machine

            for fault in kernels_fit_the_machine(outcome.value, os.environ):
                placed = replace(fault, origin=origin_at(outcome.tree, fault.key))
                if isinstance(fault, MissingFile) and not here:
                    warnings.append(str(placed))
                else:
                    faults.append(placed)
    if faults:
        raise ConfigError(_once(faults))
    used = tuple(dict.fromkeys(outcome.used))
    return Recipe(outcome.value, outcome.tree, layout, used, outcome, layered.files, tuple(warnings), registry)


def without_auto(stored: Table, reduce: str | None = None) -> Table:
    """Returns a stored recipe without the values "auto" of `[transforms.shard]`, which earlier versions allowed.

    Args:
        stored: the tree of a run or a checkpoint.
        reduce: the value of `reduce` that the run chose, from its checkpoint; None keeps the default.
    """
    transforms = stored.items.get("transforms")
    shard = transforms.items.get("shard") if isinstance(transforms, Table) else None
    if not isinstance(transforms, Table) or not isinstance(shard, Table):
        return stored
    automatic = {key for key, node in shard.items.items() if isinstance(node, Leaf) and node.value == "auto"}
    stated = {key: node for key, node in shard.items.items() if key not in automatic}
    if reduce is not None and "reduce" in automatic:
        stated["reduce"] = Leaf(reduce, shard.items["reduce"].origin)
    shard = replace(shard, items=stated)
    transforms = replace(transforms, items={**transforms.items, "shard": shard})
    return replace(stored, items={**stored.items, "transforms": transforms})


def _layout(outcome: Resolution, world: int | None) -> tuple[Layout | None, list[Fault]]:
    """Returns the layout of `[parallel]` and its faults; works even if other sections have faults."""
    parallel = outcome.parts.get("parallel")
    axes = [axis for axis in SIZES if f"parallel.{axis}" in outcome.fields]
    if world is None or parallel is None or (isinstance(parallel, PartialRecipe) and not parallel.has(axes)):
        return None, []
    try:
        return Layout.of({axis: getattr(parallel, axis) for axis in axes}, world), []
    except LayoutError as error:
        message = str(error)
        named = re.match(r"(parallel\.\w+)( = -?\d+)?: ", message)
        if named:
            return None, [Fault(named[1], message[named.end() :], origin_at(outcome.tree, named[1]))]
        return None, [Fault("parallel", message, given_at(outcome.tree.items["parallel"]))]


def _once(faults: Iterable[Fault]) -> list[Fault]:
    return list(dict.fromkeys(faults))


FROM_HF = "from_hf"
FROM_HF_IGNORE = "from_hf_ignore"


def fill_from_hf(tree: Table, registry: Registry) -> tuple[Table, list[Fault]]:
    """Fills keys of `[model]` that the recipe does not set from the Hugging Face folder `model.from_hf`, if that is set.

    Returns the tree and its faults: either settings of the folder that Forge does not support (the tree is unchanged then), or
    faults of the recipe's own keys of `[model]`.
    """
    model = tree.items.get("model")
    given = model.items.get(FROM_HF) if isinstance(model, Table) else None
    if not isinstance(model, Table) or not isinstance(given, Leaf) or not isinstance(given.value, str) or given.value == UNSET:
        return tree, []
    from forge_models.hf.reader import read_model

    try:
        default = read_model(Path(given.value), _ignored_keys(model.items.get(FROM_HF_IGNORE)))
    except ConfigError as refusal:
        return tree, [
            Fault(f"model.{FROM_HF}", f"{fault.key}: {fault.message}", fault.origin, fault.hint) for fault in refusal.faults
        ]
    except ForgeError as refusal:
        return tree, [Fault(f"model.{FROM_HF}", str(refusal), given.origin)]
    slot = Annotated[Component, Slot("forge.models")]
    schema = make_dataclass("Recipe", [("model", slot, field(default=default))], frozen=True)
    # The recipe's own keys override those of the folder and keep their origins.
    outcome = walk(schema, Table({"model": model}, tree.origin), registry)
    fill_from_hf = _with_origin(outcome.tree.items["model"], f"{given.value}/config.json")
    return Table({**tree.items, "model": fill_from_hf}, tree.origin), list(outcome.faults)


def fill_described(tree: Table, registry: Registry) -> tuple[Table, list[Fault]]:
    """Fills keys of `[model]` that files determine: those that the class method `described(given)` of its component returns."""
    model = tree.items.get("model")
    chosen = model.items.get("name") if isinstance(model, Table) else None
    if not isinstance(model, Table) or not isinstance(chosen, Leaf) or chosen.value not in registry.names("forge.models"):
        return tree, []
    described = getattr(registry.load("forge.models", chosen.value), "described", None)
    if described is None:
        return tree, []
    given = {name: node.value for name, node in model.items.items() if isinstance(node, Leaf)}
    try:
        found = described(given)
    except ForgeError as refusal:
        return tree, [Fault("model", str(refusal), model.origin)]
    items = {**{name: Leaf(value, model.origin) for name, value in found.items()}, **model.items}
    return Table({**tree.items, "model": Table(items, model.origin)}, tree.origin), []


def _ignored_keys(node: Node | None) -> tuple[str, ...]:
    """Returns the keys of config.json to ignore; skips values that are not strings, which a type check reports elsewhere."""
    items = node.items if isinstance(node, Array) else []
    return tuple(item.value for item in items if isinstance(item, Leaf) and isinstance(item.value, str))


def _with_origin(node: Node, origin: str) -> Node:
    """Returns the node with `origin` in place of the origin "default", at all depths."""
    place = origin if node.origin == DEFAULT else node.origin
    if isinstance(node, Table):
        return Table({name: _with_origin(item, origin) for name, item in node.items.items()}, place)
    if isinstance(node, Array):
        return Array([_with_origin(item, origin) for item in node.items], place)
    return Leaf(node.value, place)
