"""Reads the file of a campaign and resolves its entries, each to a complete recipe or to the refusal of `check`.

The layers of an entry's recipe, lowest first: the base recipe, `[common]`, the sets that the entry names, the entry's own keys,
the command line, and the keys that the campaign sets itself: length, hooks, name and directory.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, cast

from annotated_types import Ge, Gt

from forge_core.config.layers import find_recipe, load_layers, merge, parse_overrides
from forge_core.config.toml import read_toml
from forge_core.config.tree import DEFAULT, Array, Leaf, Node, Table, leaves, origin_at, plain, plugin_files
from forge_core.config.validation import walk
from forge_core.errors import ConfigError, Fault, LayoutError, did_you_mean
from forge_core.layout import SIZES, Layout
from forge_core.registry import Registry
from forge_core.trust import trust_file
from forge_lab.sweep.points import named
from forge_train.recipe.load import Recipe, load_recipe
from forge_train.recipe.schema import Job

WORLD, RECIPE, ACCUMULATION = "world", "recipe", "accumulation"
SPECIAL = (WORLD, RECIPE, ACCUMULATION)
"""Names that are not keys of a recipe: number of ranks, base recipe, and micro-batches per rank and step."""
OWN_KEYS = ("job.name", "job.dir", "train.stop_at", "train.max_steps")
"""Keys of the recipe that a campaign sets itself."""
_BY_ACCUMULATION = "train.global_batch"
_NOT_MEASURED = (("hooks",), ("trackers",), ("data", "evaluation"))
"""Parts of a base recipe that a campaign leaves out: they cost time, and are not what it measures."""
_NO_SAVE = "hooks: hook 'save' is missing"
"""Begins the warning of runs without checkpoints, which campaigns leave out on purpose."""
MOST = 1000
"""Maximum number of entries of a campaign."""
SHIPPED = Path(__file__).parent / "files"


@dataclass(frozen=True, kw_only=True)
class CampaignFile:
    """Contents of the file of a campaign."""

    title: str
    """Title of the tables."""
    description: str = ""
    """What the campaign measures; it stands above the table."""
    dir: str | None = None
    """Directory of the results; by default `benches/<name of the file>`."""
    steps: Annotated[int, Gt(0)] = 20
    """Optimizer steps of each entry."""
    skip: Annotated[int, Ge(0)] = 10
    """First steps, which are left out of all numbers: compilation, first connections, growth of the allocator's pools."""
    every: Annotated[int, Gt(0)] = 1
    """Steps between measurements. Each one waits for the device; a larger number disturbs less, but gives fewer values."""
    limit_minutes: Annotated[float, Gt(0)] = 30.0
    """Time limit of each entry, from its start to its end. After it, all its processes are killed."""
    series: list[str] | None = None
    """Names that tell the curves of the scaling efficiency apart; by default all names but `world`."""
    common: dict[str, Any] = field(default_factory=dict)
    """Keys of the recipe for all entries, and `recipe`, `world` or `accumulation`."""
    sets: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    """Named sets of keys, in groups: `[sets.layout.tp4]` is what `layout = "tp4"` in an entry stands for."""
    matrix: dict[str, Any] = field(default_factory=dict)
    """Lists of values; each combination is an entry."""
    exclude: list[dict[str, Any]] = field(default_factory=list)
    """Combinations to leave out of the matrix, by a value or a list of values for some names."""
    entries: list[dict[str, Any]] = field(default_factory=list)
    """Single entries, in addition to those of the matrix."""


@dataclass(frozen=True)
class CampaignEntry:
    """One short run.

    Attributes:
        name: name, built from the values.
        values: value of each name: of groups of sets, of `world`, `recipe` and `accumulation`, and of keys of the recipe.
        world: number of ranks.
        recipe: the resolved recipe; None if `check` refuses it for this number of ranks.
        refusal: the faults of a refused recipe, one a line.
    """

    name: str
    values: Mapping[str, Any]
    world: int
    recipe: Recipe | None
    refusal: str = ""


@dataclass(frozen=True)
class Campaign:
    """A valid campaign.

    Attributes:
        name: name of the file without its ending.
        file: the TOML file.
        directory: directory of the results.
        settings: typed contents of the file.
        entries: entries in the order of the file: those of the matrix, then the single ones.
        series: names that tell curves apart.
        warnings: warnings of the recipes, without duplicates.
    """

    name: str
    file: Path
    directory: Path
    settings: CampaignFile
    entries: tuple[CampaignEntry, ...]
    series: tuple[str, ...]
    warnings: tuple[str, ...] = ()

    def folder(self, entry: CampaignEntry) -> Path:
        """Returns the directory of the raw records of an entry."""
        return self.directory / "entries" / entry.name


def shipped_campaigns() -> dict[str, Path]:
    """Returns the files of the campaigns that ship with forge-lab, by name."""
    return {path.stem: path for path in sorted(SHIPPED.glob("*.toml"))}


def find_campaign(given: str) -> Path:
    """Returns the file of a campaign: a path, or the name of a shipped one.

    Raises:
        ConfigError: there is no such file.
    """
    if not (given.endswith(".toml") or "/" in given):
        if (path := shipped_campaigns().get(given)) is not None:
            return path
        hint = did_you_mean(given, list(shipped_campaigns())) or "`forge-train bench --list-campaigns` lists them"
        raise ConfigError([Fault("CAMPAIGN", f"{given!r} is not a shipped campaign, and not a .toml file", "command line", hint)])
    path = Path(given)
    if not path.is_file():
        near = [file.name for file in path.parent.glob("*.toml")] if path.parent.is_dir() else []
        raise ConfigError([Fault("CAMPAIGN", f"file {given} does not exist", "command line", did_you_mean(path.name, near))])
    return path


def read_campaign(
    file: Path | str, overrides: Sequence[str] = (), directory: Path | None = None, registry: Registry | None = None
) -> Campaign:
    """Reads a campaign and resolves all its entries. Imports no torch.

    A recipe that is wrong for any number of ranks, such as one with an unknown key, is a fault of the campaign. A recipe that
    only its number of ranks or its combination of features refuses is an entry with a refusal.

    Args:
        file: TOML file, or name of a shipped campaign.
        overrides: `--section.key=value`, applied to the recipes of all entries.
        directory: directory of the results; overrides `dir` of the file.

    Raises:
        ConfigError: the campaign has faults; the error lists all of them.
    """
    registry = registry or Registry()
    file = find_campaign(str(file))
    tree = read_toml(file)
    outcome = walk(CampaignFile, tree, registry)
    if outcome.faults:
        raise ConfigError(outcome.faults)
    settings: CampaignFile = outcome.value
    faults = list(_own_faults(settings, tree))
    groups = {group: list(names) for group, names in settings.sets.items()}
    rows, wrong = _rows(tree, groups)
    faults += wrong
    if faults:
        raise ConfigError(faults)
    series = _series(settings, rows, tree)
    layers = _Layers(settings, tree, file.parent, overrides, registry)
    for path in plugin_files(tree):
        trust_file(path)
    target = directory or Path(settings.dir or Path("benches") / file.stem)
    names = [point.name for point in named([row.values for row in rows])]
    entries: list[CampaignEntry] = []
    warnings: list[str] = []
    seen: dict[tuple[str, str], tuple[Fault, list[str]]] = {}
    for row, name in zip(rows, names, strict=True):
        try:
            entry = layers.resolve(row, name, target)
        except ConfigError as refusal:
            for fault in refusal.faults:
                seen.setdefault((fault.key, fault.message), (fault, []))[1].append(name)
        else:
            entries.append(entry)
            warnings += [line for line in entry.recipe.warnings if not line.startswith(_NO_SAVE)] if entry.recipe else []
    if seen:
        raise ConfigError([_of_entries(fault, where, len(rows)) for fault, where in seen.values()])
    _refuse_repeated(entries, series, tree)
    return Campaign(file.stem, file, target, settings, tuple(entries), series, tuple(dict.fromkeys(warnings)))


def _own_faults(settings: CampaignFile, tree: Table) -> Iterator[Fault]:
    """Yields faults of keys of the campaign that involve several of them."""
    lines = sorted({1, *range(settings.every, settings.steps + 1, settings.every), settings.steps})  # of hook `log`
    last = lines[-2] if settings.steps > 1 else 0  # the last measurement begins after this step
    if settings.skip > last:
        hint = f"raise steps, or lower skip to at most {last}"
        yield Fault(
            "skip", f"of {settings.steps} steps none is measured after the first {settings.skip}", _at(tree, "skip"), hint
        )
    for group, names in settings.sets.items():
        if group in SPECIAL:
            yield Fault(f"sets.{group}", f"{group!r} has a meaning of its own", _at(tree, f"sets.{group}"), "rename the group")
        if not names:
            yield Fault(f"sets.{group}", "has no set", _at(tree, f"sets.{group}"), f"add [sets.{group}.NAME]")


@dataclass(frozen=True)
class _Row:
    """An entry before its recipe is resolved. `origin` is its place in the file."""

    values: Mapping[str, Any]
    nodes: Mapping[str, Node]
    origin: str


def _rows(tree: Table, groups: Mapping[str, Sequence[str]]) -> tuple[list[_Row], list[Fault]]:
    """Returns the rows of the matrix and the single ones, and their faults."""
    faults: list[Fault] = []
    axes: dict[str, list[Node]] = {}
    for name, node in _flat(tree.items.get("matrix")):
        if not isinstance(node, Array) or not node.items:
            message = "is an empty list" if isinstance(node, Array) else f"expected a list of values, not {plain(node)!r}"
            faults.append(Fault(f"matrix.{name}", message, node.origin, f"write {name} = [...]"))
            continue
        values = [plain(item) for item in node.items]
        if twice := [value for index, value in enumerate(values) if value in values[:index]]:
            faults.append(Fault(f"matrix.{name}", f"{twice[0]!r} is given twice", node.origin, "keep one of them"))
        faults += [fault for item in node.items for fault in _value_faults(f"matrix.{name}", name, item, groups)]
        axes[name] = list(node.items)
    count = 1
    for values in axes.values():
        count *= len(values)
    if count > MOST:
        faults.append(Fault("matrix", f"{count:,} entries exceed the maximum of {MOST:,}", _at(tree, "matrix"), "split it"))
        return [], faults
    combined = [dict(zip(axes, chosen, strict=True)) for chosen in itertools.product(*axes.values())] if axes else []
    kept = [_Row({name: plain(node) for name, node in nodes.items()}, nodes, _at(tree, "matrix")) for nodes in combined]
    if not faults:
        kept, wrong = _without_excluded(tree, kept, axes)
        faults += wrong
    listed = tree.items.get("entries")
    for index, item in enumerate(listed.items if isinstance(listed, Array) else ()):
        nodes = dict(_flat(item))
        faults += [
            fault for name, node in nodes.items() for fault in _value_faults(f"entries.{index}.{name}", name, node, groups)
        ]
        kept.append(_Row({name: plain(node) for name, node in nodes.items()}, nodes, item.origin))
    if not kept and not faults:
        faults.append(Fault("matrix", "the campaign has no entry", _at(tree, "matrix"), "add a [matrix] or [[entries]]"))
    texts = [repr(sorted(row.values.items())) for row in kept]
    for index, text in enumerate(texts):
        if text in texts[:index]:
            faults.append(
                Fault("entries", f"{_shown(kept[index].values)} is there twice", kept[index].origin, "keep one of them")
            )
    return kept, faults


def _without_excluded(tree: Table, rows: list[_Row], axes: Mapping[str, Sequence[Node]]) -> tuple[list[_Row], list[Fault]]:
    """Returns the rows that no item of `exclude` names, and the faults of items that exclude nothing."""
    faults: list[Fault] = []
    array = tree.items.get("exclude")
    gone: set[int] = set()
    for index, item in enumerate(array.items if isinstance(array, Array) else ()):
        at, wanted = f"exclude.{index}", dict[str, list[Any]]()
        before = len(faults)
        for name, node in _flat(item):
            if name not in axes:
                hint = did_you_mean(name, list(axes)) or f"the matrix has {', '.join(axes) or 'no name'}"
                faults.append(Fault(f"{at}.{name}", "is not a name of the matrix", node.origin, hint))
                continue
            wanted[name] = [plain(one) for one in node.items] if isinstance(node, Array) else [plain(node)]
            known = [plain(one) for one in axes[name]]
            for value in wanted[name]:
                if value not in known:
                    hint = did_you_mean(str(value), [str(one) for one in known]) or f"values: {', '.join(map(str, known))}"
                    faults.append(Fault(f"{at}.{name}", f"{value!r} is not a value of the matrix", node.origin, hint))
        if len(faults) > before:
            continue
        matches = {
            number
            for number, row in enumerate(rows)
            if wanted and all(row.values[name] in values for name, values in wanted.items())
        }
        if not matches - gone:
            message = "is empty" if not wanted else "excludes nothing that is left"
            faults.append(Fault(at, message, item.origin, "remove it, or correct its values"))
        gone |= matches
    if rows and len(gone) == len(rows) and not isinstance(tree.items.get("entries"), Array):
        faults.append(Fault("exclude", "every entry of the matrix is excluded", _at(tree, "exclude"), "exclude fewer of them"))
    return [row for number, row in enumerate(rows) if number not in gone], faults


def _value_faults(key: str, name: str, node: Node, groups: Mapping[str, Sequence[str]]) -> Iterator[Fault]:
    """Yields faults of one value: an unknown name, an unknown set, or an invalid number."""
    value = plain(node)
    if name in groups:
        if value not in groups[name]:
            hint = did_you_mean(str(value), groups[name]) or f"sets of {name}: {', '.join(groups[name])}"
            yield Fault(key, f"{value!r} is not a set of [sets.{name}]", node.origin, hint)
    elif name in (WORLD, ACCUMULATION):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            yield Fault(key, f"expected a positive integer, not {value!r}", node.origin)
    elif name == RECIPE:
        if not isinstance(value, str):
            yield Fault(key, f"expected a TOML file or the name of a preset, not {value!r}", node.origin)
    elif "." not in name:
        known = [*SPECIAL, *groups]
        hint = did_you_mean(name, known) or f"names: {', '.join(known)}; or a key of the recipe, such as train.micro_batch"
        yield Fault(key, f"{name!r} is neither a group of [sets] nor a key of a recipe", node.origin, hint)


def _flat(node: Node | None, path: str = "") -> Iterator[tuple[str, Node]]:
    """Yields (dotted name, value) of all values of a table; `model.dim` may be a quoted key or nested tables."""
    for name, item in node.items.items() if isinstance(node, Table) else ():
        key = f"{path}.{name}" if path else name
        if isinstance(item, Table) and item.items:
            yield from _flat(item, key)
        else:
            yield key, item


def _series(settings: CampaignFile, rows: Sequence[_Row], tree: Table) -> tuple[str, ...]:
    """Returns the names that tell curves apart.

    Raises:
        ConfigError: `series` has a name that no entry has.
    """
    names = list(dict.fromkeys(name for row in rows for name in row.values if name != WORLD))
    if settings.series is None:
        return tuple(names)
    unknown = [name for name in settings.series if name not in names]
    if unknown:
        hint = did_you_mean(unknown[0], names) or f"names: {', '.join(names) or 'none'}"
        raise ConfigError([Fault("series", f"{unknown[0]!r} is not a name of the entries", _at(tree, "series"), hint)])
    return tuple(settings.series)


def series_of(values: Mapping[str, Any], series: Sequence[str]) -> str:
    """Returns the name of the curve of an entry with these values."""
    return ", ".join(f"{name} {values[name]}" for name in series if name in values)


def _refuse_repeated(entries: Sequence[CampaignEntry], series: Sequence[str], tree: Table) -> None:
    """Checks that a curve has one entry for each number of ranks, since efficiency is relative to its smallest one."""
    found: dict[tuple[str, int], str] = {}
    for entry in entries:
        key = series_of(entry.values, series), entry.world
        if key in found:
            message = f"{found[key]} and {entry.name} have {entry.world} ranks and are in one series"
            raise ConfigError([Fault("series", message, _at(tree, "series"), "add the name that tells them apart")])
        found[key] = entry.name


@dataclass
class _Layers:
    """Merges the layers of the recipes."""

    settings: CampaignFile
    tree: Table
    folder: Path
    overrides: Sequence[str]
    registry: Registry
    bases: dict[str, Table] = field(default_factory=dict)

    def resolve(self, row: _Row, name: str, target: Path) -> CampaignEntry:
        """Returns the entry of a row.

        Raises:
            ConfigError: the recipe is wrong for any number of ranks, or a special name is missing.
        """
        special: dict[str, Any] = {}
        layers: list[Table] = []
        for source in self._sources(row):
            special |= {key: plain(item) for key, item in source.items.items() if key in SPECIAL}
            layers.append(Table({key: item for key, item in source.items.items() if key not in SPECIAL}, source.origin))
        faults = [
            Fault(key, "is missing", row.origin, f"set {key} in the entry, its sets or [common]")
            for key in (WORLD, RECIPE)
            if key not in special
        ]
        for key in (WORLD, ACCUMULATION):
            value = special.get(key)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                faults.append(Fault(key, f"expected a positive integer, not {value!r}", row.origin))
        if faults:
            raise ConfigError(faults)
        extra, wrong = parse_overrides(self.overrides, Path.cwd())
        tree, faults = self._base(special[RECIPE], row), [*wrong]
        for layer in (*layers, extra):
            for file in plugin_files(layer):
                trust_file(file)
            faults += list(_set_by_campaign(layer, ACCUMULATION in special))
            tree, found = merge(tree, layer, Job, self.registry)
            faults += found
        if faults:
            raise ConfigError(faults)
        return self._entry(row, name, target, tree, special)

    def _sources(self, row: _Row) -> Iterator[Table]:
        """Yields the tables of keys of an entry, lowest first."""
        common, sets = self.tree.items.get("common"), self.tree.items.get("sets")
        if isinstance(common, Table):
            yield common
        for name, value in row.values.items():
            if name in self.settings.sets and isinstance(sets, Table):
                yield cast(Table, cast(Table, sets.items[name]).items[value])
        own = {name: node for name, node in row.nodes.items() if name not in self.settings.sets}
        yield _nested(own, row.origin)

    def _base(self, recipe: str, row: _Row) -> Table:
        """Returns the keys of a base recipe, without those that a campaign leaves out."""
        if recipe not in self.bases:
            path = find_recipe(recipe, self.registry, RECIPE, row.origin, self.folder)
            given = str(path) if recipe.endswith(".toml") or "/" in recipe else recipe
            layered = load_layers(given, [], Job, self.registry)
            if layered.faults:
                raise ConfigError(layered.faults)
            tree = layered.tree
            for parts in _NOT_MEASURED:
                tree = _without(tree, parts)
            self.bases[recipe] = tree
        return self.bases[recipe]

    def _entry(self, row: _Row, name: str, target: Path, tree: Table, special: Mapping[str, Any]) -> CampaignEntry:
        """Returns the entry; a recipe that only this number of ranks refuses gives an entry with a refusal."""
        world = special[WORLD]
        tree = _with_own(tree, self.settings, name, target)
        first = load_recipe(tree, (), None, self.registry, here=None)
        length: dict[str, Any] = {"max_steps": max(first.job.train.max_steps, self.settings.steps)}
        try:
            if ACCUMULATION in special:
                sizes = {axis: getattr(first.job.parallel, axis) for axis in SIZES}
                data = Layout.of(sizes, world).data
                length["global_batch"] = first.job.train.micro_batch * special[ACCUMULATION] * data
            tree = _merged(tree, _nested({f"train.{key}": Leaf(value, f"campaign: {key}") for key, value in length.items()}))
            return CampaignEntry(name, row.values, world, load_recipe(tree, (), world, self.registry))
        except ConfigError as refusal:
            return CampaignEntry(name, row.values, world, None, "\n".join(map(str, dict.fromkeys(refusal.faults))))
        except LayoutError as refusal:
            return CampaignEntry(name, row.values, world, None, str(refusal))


def _set_by_campaign(layer: Table, accumulation: bool) -> Iterator[Fault]:
    """Yields a fault for each key of a layer that the campaign sets itself."""
    own = {
        "train.stop_at": "use `steps` of the campaign",
        "train.max_steps": "use `steps` of the campaign",
        "job.name": "remove it",
        "job.dir": "use `dir` of the campaign, or --dir",
    }
    for key, node in _flat(layer):
        if key in OWN_KEYS:
            yield Fault(key, "is set by the campaign itself", node.origin, own[key])
        if key == _BY_ACCUMULATION and accumulation:
            yield Fault(key, "follows from accumulation, micro_batch and the layout", node.origin, "remove one of them")


def _with_own(tree: Table, settings: CampaignFile, name: str, target: Path) -> Table:
    """Returns the recipe with the keys that the campaign sets itself; hooks of the campaign's layers come before hook `log`."""
    origin = "campaign"
    given = tree.items.get("hooks")
    hooks = [item for item in given.items if not _is_log(item)] if isinstance(given, Array) else []
    log = Table({"name": Leaf("log", origin), "every": Leaf(settings.every, "campaign: every")}, origin)
    own: dict[str, Node] = {
        "job.name": Leaf(name, origin),
        "job.dir": Leaf(str(target.absolute() / "entries" / name / "run"), origin),
        "train.stop_at": Leaf(settings.steps, "campaign: steps"),
        "hooks": Array([*hooks, log], origin),
    }
    return _merged(tree, _nested(own, origin))


def _is_log(node: Node) -> bool:
    return isinstance(node, Table) and isinstance(found := node.items.get("name"), Leaf) and found.value == "log"


def _nested(items: Mapping[str, Node], origin: str = DEFAULT) -> Table:
    """Returns a tree of the values of dotted keys."""
    root = Table({}, origin)
    for key, node in items.items():
        *path, last = key.split(".")
        table = root
        for part in path:
            below = table.items.setdefault(part, Table({}, node.origin))
            table = below if isinstance(below, Table) else Table({}, node.origin)
        table.items[last] = node
    return root


def _merged(lower: Table, upper: Table) -> Table:
    """Returns `lower` with the values of `upper`, whose tables name no component."""
    items = dict(lower.items)
    for name, node in upper.items.items():
        below = items.get(name)
        items[name] = _merged(below, node) if isinstance(node, Table) and isinstance(below, Table) else node
    return replace(lower, items=items)


def _without(tree: Table, parts: Sequence[str]) -> Table:
    first, *rest = parts
    below = tree.items.get(first)
    if rest and isinstance(below, Table):
        return replace(tree, items={**tree.items, first: _without(below, rest)})
    return replace(tree, items={name: item for name, item in tree.items.items() if name != first or rest})


def _of_entries(fault: Fault, names: Sequence[str], count: int) -> Fault:
    """Returns a fault with the names of its entries, unless all entries have it."""
    if len(names) == count:
        return fault
    return replace(fault, message=f"{fault.message} (entry {names[0]}" + (f" and {len(names) - 1} more)" if names[1:] else ")"))


def _shown(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} = {value!r}" for name, value in values.items())


def _at(tree: Table, key: str) -> str:
    return origin_at(tree, key)


def flat_values(recipe: Recipe) -> dict[str, Any]:
    """Returns every key of a resolved recipe with its value, without the name and the directory of the run."""
    return {key: value for key, value, _ in leaves(recipe.tree) if key not in ("job.name", "job.dir")}
