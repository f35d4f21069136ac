"""Merges the layers of a recipe, lowest first: `base` files, the recipe, the command line (arguments `--section.key=value`).

One rule of the merge needs the schema: if a layer changes the `name` of a component, the keys that lower layers set for the
previous component are dropped. `[optimizer] name` is the name of a component, as is the default name of a slot that no layer
sets; `[job] name` is not.

`plugins` is a list of Python files at the top of a file. Components may then be named by a class alone, in this file, in
files based on it, and on the command line: `name = "Mine"` becomes `name = "/path/mine.py:Mine"`. The files are parsed for
their classes, and run only if a section names one of these or misspells it.
"""

import ast
import datetime
import tomllib
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from forge_core.component import Slot
from forge_core.config.fields import LEAF, Shape, shapes_in
from forge_core.config.toml import read_toml, shown_path
from forge_core.config.tree import DEEPEST, DEFAULT, TOO_DEEP, Array, Leaf, Node, Table, build, is_too_deep, join, plugin_files
from forge_core.errors import ConfigError, Fault, PluginError, UnknownComponent
from forge_core.registry import Registry
from forge_core.trust import trust_file

Children = Callable[[str], Shape | None]

Classes = Mapping[str, Sequence[str]]
"""Classes of the files in `plugins`: every place `/path/mine.py:Mine` of a class name."""

PRESETS = "forge.presets"


class Layered(NamedTuple):
    """A merged recipe.

    Attributes:
        tree: the merged keys; keys that no layer sets are absent.
        faults: faults of the merge; validation may find more.
        files: every file that was read, the recipe last.
    """

    tree: Table
    faults: tuple[Fault, ...]
    files: tuple[Path, ...]


def load_layers(
    recipe: str | Path | Table, overrides: Sequence[str], schema: type, registry: Registry, folder: Path | None = None
) -> Layered:
    """Merges the recipe (a TOML file or a preset's name) with its bases and the command line.

    Args:
        recipe: path of a TOML file from the user, or name of a preset; Python files that it names may run. Or a tree from
            another place, such as a checkpoint or the recipe in a run's directory (`read_toml`), whose files may not run.
        overrides: arguments `--section.key=value`; Python files that they name may run.
        schema: dataclass of the whole recipe; defines which tables hold components.
        registry: finds presets and components.
        folder: base of relative plugin files in overrides; by default the working directory.

    Raises:
        ConfigError: a file is missing, is not TOML, or the bases form a cycle.
    """
    layers = {} if isinstance(recipe, Table) else _files(str(recipe), registry)
    tree, faults = Table({}, DEFAULT), []
    extra, wrong = parse_overrides(overrides, folder or Path.cwd())
    files = [(layer, owner, file.parent) for file, (layer, owner) in reversed(layers.items())]
    classes: Classes = {}
    upward = [(recipe, "", classes)] if isinstance(recipe, Table) else []
    for layer, owner, beside in [*files, (extra, "", folder or Path.cwd())]:
        for name, place in _take_plugins(layer, beside):
            classes = {**classes, name: tuple(dict.fromkeys((*classes.get(name, ()), place)))}
        for file in plugin_files(layer):
            trust_file(file)
        upward.append((layer, owner, classes))
    for layer, owner, known in upward:  # after all files are trusted, because a merge loads components
        tree, found = merge(tree, layer, schema, registry, owner, known)
        faults += found
    return Layered(tree, (*wrong, *faults), tuple(reversed(layers)))


def _files(recipe: str, registry: Registry) -> dict[Path, tuple[Table, str]]:
    """Returns the tables of the recipe's file and its bases, each with the distribution of the preset, the recipe first."""
    layers: dict[Path, tuple[Table, str]] = {}
    following, owner = _found(recipe, registry, "RECIPE", "command line", Path())
    while following is not None:
        if following in layers:
            chain = list(layers)
            circle = " -> ".join(shown_path(file) for file in [*chain[chain.index(following) :], following])
            raise ConfigError([Fault("base", f"the bases form a cycle: {circle}", shown_path(chain[-1]))])
        layers[following] = read_toml(following), owner
        following, owner = _base(layers[following][0], following, registry, owner)
    return layers


def find_recipe(recipe: str, registry: Registry, key: str, origin: str, folder: Path) -> Path:
    """Returns the absolute path of a TOML file (relative to `folder`) or of a preset.

    Raises:
        ConfigError: neither a file nor a preset has this name.
    """
    return _found(recipe, registry, key, origin, folder)[0]


def _found(recipe: str, registry: Registry, key: str, origin: str, folder: Path, owner: str = "") -> tuple[Path, str]:
    """Returns the result of `find_recipe`, and the distribution of the file: for a preset its own distribution ("" for
    Forge's), for a file the `owner` of the recipe that names it ("" for the user's).

    Raises:
        ConfigError: neither a file nor a preset has this name.
    """
    if recipe.endswith(".toml") or "/" in recipe:
        path = (folder / recipe).resolve()
        if path.is_dir():
            raise ConfigError([_directory(recipe, path, key, origin)])
        if not path.is_file():
            near = {file.stem: file.name for file in path.parent.glob("*.toml")} if path.parent.is_dir() else {}
            close = get_close_matches(path.stem, near, n=1)
            hint = f"did you mean {near[close[0]]!r}?" if close else ""
            raise ConfigError([Fault(key, f"file {recipe} does not exist", origin, hint)])
        return path, owner
    if recipe.startswith("-"):
        raise ConfigError([Fault(key, f"expected a recipe before {recipe!r}", origin, "overrides come after the recipe")])
    try:
        entry = registry.find(PRESETS, recipe, owner)
        preset = registry.load_entry(entry)
    except PluginError as error:
        if recipe and (folder / recipe).is_dir():
            raise ConfigError([_directory(recipe, folder / recipe, key, origin)]) from error
        hint = "a recipe is a .toml file or the name of a preset"
        raise ConfigError([Fault(key, str(error), origin, hint)]) from error
    path = Path(str(preset() if callable(preset) else preset))
    if not path.is_file():
        raise ConfigError([Fault(key, f"preset {recipe!r} points at {path}, which is not a file", origin)])
    return path.resolve(), "" if entry.is_forge else entry.distribution


def _base(table: Table, path: Path, registry: Registry, owner: str) -> tuple[Path | None, str]:
    """Removes `base` from the table, and returns its file and distribution. A preset may have the name of its base."""
    base: Any = table.items.pop("base", None)
    if base is None:
        return None, ""
    if not isinstance(base, Leaf) or not isinstance(base.value, str):
        raise ConfigError([Fault("base", "expected the path of a TOML file or the name of a preset", base.origin)])
    found = _found(base.value, registry, "base", base.origin, path.parent, owner)
    return _found(base.value, registry, "base", base.origin, path.parent) if owner and found[0] == path else found


def _take_plugins(table: Table, folder: Path) -> list[tuple[str, str]]:
    """Removes `plugins` from the table of a file; returns (class name, `/path/mine.py:ClassName`) of every class in its files.

    The files are trusted, because the user names them, and parsed, but not run.

    Raises:
        ConfigError: `plugins` is not a list of Python files, or a file does not exist, is not Python, or defines no class.
    """
    given = table.items.pop("plugins", None)
    if given is None:
        return []
    items = given.items if isinstance(given, Array) else [given]
    files = [(item.value, item.origin) for item in items if isinstance(item, Leaf) and isinstance(item.value, str)]
    if not isinstance(given, Array) or len(files) < len(items):
        raise ConfigError([Fault("plugins", 'expected a list of Python files, such as ["./mine.py"]', given.origin)])
    found: list[tuple[str, str]] = []
    for index, (name, origin) in enumerate(files):
        file, key = (folder / name).resolve(), f"plugins.{index}"
        if not name.endswith(".py"):
            hint = "write a file, such as ./mine.py; parts of installed packages are found by their entry points"
            raise ConfigError([Fault(key, f"{name!r} is not a Python file", origin, hint)])
        if not file.is_file():
            near = get_close_matches(file.name, [other.name for other in file.parent.glob("*.py")], n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"a relative path starts at {folder}"
            raise ConfigError([Fault(key, f"file {name} does not exist", origin, hint)])
        try:
            parsed = ast.parse(file.read_bytes(), file.name)
        except (OSError, SyntaxError, ValueError, RecursionError) as cause:
            raise ConfigError([Fault(key, f"{name} cannot be read as Python: {cause}", origin)]) from cause
        classes = [node.name for node in parsed.body if isinstance(node, ast.ClassDef)]
        if not classes:
            hint = "a component is a class at the top level of the file; the file is not run for anything else"
            raise ConfigError([Fault(key, f"{name} defines no class", origin, hint)])
        trust_file(file)
        found += [(one, f"{file}:{one}") for one in classes]
    return found


def _directory(recipe: str, path: Path, key: str, origin: str) -> Fault:
    inside = sorted(str(Path(recipe) / file.name) for file in path.glob("*.toml") if file.is_file())
    hint = f"use the file in it: {' or '.join(inside[:5])}" if inside else "use the path of a TOML file"
    return Fault(key, f"{recipe} is a directory", origin, hint)


def merge(
    lower: Table, upper: Table, schema: type, registry: Registry, owner: str = "", classes: Classes | None = None
) -> tuple[Table, list[Fault]]:
    """Merges `upper` over `lower`: tables are merged, arrays and values replaced. Also returns the faults of list indexes.

    Args:
        owner: the distribution of the preset `upper`, whose components take precedence for names in it. Such names are
            qualified by the distribution if they would mean another component in a user's recipe.
        classes: classes of Python files that `upper` may name without their file.
    """
    merger = _Merger(registry, owner, classes)
    merged = merger.node("", "", lower, upper, Shape("section", schema))
    assert isinstance(merged, Table)
    return merged, merger.faults


def merge_node(key: str, lower: Table, upper: Table, shape: Shape, registry: Registry) -> Node:
    """Merges the table of one field; see `merge`."""
    return _Merger(registry).node(key, "", lower, upper, shape)


class _Merger:
    def __init__(self, registry: Registry, owner: str = "", classes: Classes | None = None) -> None:
        self.registry, self.owner, self.classes = registry, owner, classes or {}
        self.faults: list[Fault] = []

    def node(self, key: str, part: str, lower: Node | None, upper: Node, shape: Shape | None) -> Node:
        if isinstance(upper, Array) and (self.owner or self.classes) and shape is not None and shape.inner is not None:
            items = [self.node(join(key, str(index)), "", None, item, shape.inner) for index, item in enumerate(upper.items)]
            return Array(items, upper.origin)
        if not isinstance(upper, Table):
            return upper
        if (self.owner or self.classes) and shape is not None and shape.slot is not None and shape.kind == "component":
            upper = self.in_full(key, upper, shape.slot, part)
        if upper.edits and (
            isinstance(lower, Array) or (lower is None and shape is not None and shape.kind in ("list", "tuple"))
        ):
            return self.items(key, lower if isinstance(lower, Array) else Array([], upper.origin), upper, shape)
        if not isinstance(lower, Table):
            lower = Table({}, upper.origin)
        before = _name_in(lower, shape, part)
        after = _name_in(upper, None, part) or before
        named = shape is None or shape.kind == "component"
        if named and before is not None and after != before and not self.same(shape, before, after):
            lower = Table({}, upper.origin)
        child = self.children(shape, after)
        merged = dict(lower.items)
        for name, value in upper.items.items():
            merged[name] = self.node(join(key, name), name, merged.get(name), value, child(name))
        return Table(merged, lower.origin if lower.items else upper.origin)

    def in_full(self, key: str, table: Table, slot: Slot, part: str) -> Table:
        """Returns a component's table with its name in full: with the file of a class in `plugins`, and with the owner's
        distribution if the bare name would mean another component than the owner's."""
        given = table.items.get("name")
        bare = given.value if isinstance(given, Leaf) else part if given is None and slot.named_by_key else None
        if not isinstance(bare, str) or ":" in bare:
            return table
        origin = given.origin if given else table.origin
        if places := self.classes.get(bare):
            name = places[0]
            also = [repr(entry.qualified) for entry in self.registry.of(slot.group) if entry.name == bare]
            if len(choices := [*map(repr, places), *also]) > 1:
                fault = Fault(join(key, "name"), f"{bare!r} has several meanings", origin, f"write {' or '.join(choices)}")
                self.faults.append(fault)
        else:
            try:
                entry = self.registry.find(slot.group, bare, self.owner)
                name = self.registry.spelled(entry) if self.owner else bare
            except PluginError as error:  # reported, with its origin, when the merged tree is validated
                known = [*self.classes, *self.registry.names(slot.group)] if isinstance(error, UnknownComponent) else []
                close = get_close_matches(bare, known, n=1)
                if not close or close[0] not in self.classes:
                    return table
                name = f"{self.classes[close[0]][0].rpartition(':')[0]}:{bare}"  # loading it fails, and suggests a class
        return table if name == bare else Table({**table.items, "name": Leaf(name, origin)}, table.origin, table.edits)

    def items(self, key: str, lower: Array, edits: Table, shape: Shape | None) -> Node:
        """Applies `--key.INDEX...=value` to a list; the index after the last item appends."""
        merged = list(lower.items)
        inner = (shape.inner or LEAF) if shape is not None else None
        for part, value in sorted(edits.items.items(), key=lambda item: (len(item[0]), item[0])):
            if not part.isdecimal() or int(part) > len(merged):
                legal = f"0 to {len(merged)} (the last appends)" if merged else "0 (the list is empty)"
                self.faults.append(Fault(join(key, part), "is not an item of the list", value.origin, f"indexes are {legal}"))
                continue
            index = int(part)
            below = merged[index] if index < len(merged) else None
            item = self.node(join(key, part), part, below, value, inner)
            merged[index : index + 1] = [item]
        return Array(merged, lower.origin if lower.items else edits.origin)

    def children(self, shape: Shape | None, name: str | None) -> Children:
        """Returns a function from a key of a table to its shape, or None if the schema does not define it."""
        if shape is None:
            return lambda _: None
        if shape.kind == "leaf":
            return lambda _: LEAF
        if shape.kind == "dict":
            return lambda _: shape.inner
        cls = shape.type
        if shape.kind == "component":
            try:
                cls = self.registry.load(shape.slot.group, name) if shape.slot and name else None
            except PluginError:  # reported, with its origin, when the merged tree is validated
                cls = None
        if cls is None or shape.kind in ("list", "tuple"):
            return lambda _: None
        fields = shapes_in(cls)
        return lambda part: fields[part][1] if part in fields else None

    def same(self, shape: Shape | None, before: str, after: str | None) -> bool:
        """Whether two spellings (`muon`, `forge-extra:muon`) mean one component."""
        if shape is None or shape.slot is None or after is None:
            return False
        try:
            return self.registry.find(shape.slot.group, before) == self.registry.find(shape.slot.group, after)
        except PluginError:
            return False


def _name_in(table: Table, shape: Shape | None, part: str) -> str | None:
    found = table.items.get("name")
    if isinstance(found, Leaf) and isinstance(found.value, str):
        return found.value
    if shape is None or shape.slot is None:
        return None
    return part if shape.slot.named_by_key else shape.slot.default


ORIGIN = "command line"


def parse_overrides(arguments: Sequence[str], folder: Path) -> tuple[Table, list[Fault]]:
    """Returns the layer of the command line and its faults; plugin files in it are relative to `folder`."""
    root = Table({}, ORIGIN, edits=True)
    faults: list[Fault] = []
    given: set[str] = set()
    skip = False
    for position, argument in enumerate(arguments):
        if skip:
            skip = False
            continue
        if not argument.startswith("--"):
            faults.append(_bare(argument))
            continue
        name, equals, text = argument.partition("=")
        if not equals:
            following = arguments[position + 1] if position + 1 < len(arguments) else "--"
            skip = not following.startswith("-")
            hint = f"write {name}={following}" if skip else f"write {name}=VALUE (a switch: {name}=true)"
            faults.append(Fault(name[2:] or argument, "has no value", argument, hint))
            continue
        try:
            path = _path(name[2:])
        except ValueError:
            faults.append(Fault(argument, "is not a key", argument, "overrides are written --section.key=value"))
            continue
        dotted = ".".join(path)
        try:
            value = _value(text)
        except RecursionError:
            value = None
        if value is None or len(path) > DEEPEST or is_too_deep(value):
            faults.append(Fault(dotted[:80], TOO_DEEP, name[:80]))
            continue
        if dotted in given:
            faults.append(Fault(dotted, "is given twice", name, "keep one of them"))
            continue
        given.add(dotted)
        try:
            _insert(root, path, build(value, tuple(path), lambda _, name=name: name, folder), name)
        except KeyError as clash:
            faults.append(Fault(dotted, f"is set both as a value and as a table ({clash.args[0]})", name, "keep one of them"))
    return root, faults


def _bare(argument: str) -> Fault:
    key, equals, _ = argument.partition("=")
    hint = f"write --{argument.lstrip('-')}" if equals and "." in key else "overrides are written --section.key=value"
    return Fault(argument, "is a bare argument", ORIGIN, hint)


def _path(text: str) -> list[str]:
    """Returns the parts of a dotted TOML key."""
    try:
        parsed: Any = tomllib.loads(f"{text} = 0")
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ValueError(text) from error
    path: list[str] = []
    while isinstance(parsed, dict):
        if len(parsed) != 1:
            raise ValueError(text)
        ((part, parsed),) = parsed.items()
        path.append(part)
    return path


def _value(text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    value = parsed["value"]
    commented = "#" in text and not isinstance(value, str | list | dict)
    dates = isinstance(value, datetime.date | datetime.time)
    return text if len(parsed) != 1 or commented or dates else value


def _insert(table: Table, path: list[str], node: Node, origin: str) -> None:
    for depth, part in enumerate(path[:-1]):
        found = table.items.setdefault(part, Table({}, origin, edits=True))
        if not isinstance(found, Table):
            raise KeyError(join("--" + ".".join(path[:depth]), part) if depth else f"--{part}")
        table = found
    last = path[-1]
    if last in table.items:
        raise KeyError("--" + ".".join(path))
    table.items[last] = Leaf(node.value, origin) if isinstance(node, Leaf) else node
