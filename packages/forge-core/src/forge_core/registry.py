"""The registry: the groups of components, and the component that a name in a recipe refers to.

A distribution of Forge lists its parts in one table, `PARTS` in its module `parts`. Other distributions list theirs as entry
points, whose group is the group of the part. `Group.build` lists the positional arguments that Forge passes to a component's
`build`; the registry compares them with the signature when it loads a component, so a plugin with a different signature is
refused before anything runs. If a component names an implementation instead, it is imported and compared when it is built.
Nothing is imported until it is needed.
"""

import inspect
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.metadata import EntryPoint, distributions
from importlib.util import module_from_spec
from pathlib import Path
from pkgutil import resolve_name
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

from forge_core.component import Component, decorator_fault, fields_of
from forge_core.errors import BrokenPlugin, PluginConflict, UnknownComponent, UntrustedCode, did_you_mean
from forge_core.trust import trusted_content


class Group(NamedTuple):
    """One kind of plugin: how a recipe chooses it, the arguments of its `build`, and the type that `build` returns."""

    name: str
    chosen_by: str
    build: tuple[str, ...] | None
    returns: str
    doc: str

    @property
    def kind(self) -> str:
        """Singular noun for messages: `forge.optimizers` -> `optimizer`."""
        return self.name.removeprefix("forge.").replace("_", " ").removesuffix("s")


_TABLE = (
    Group("forge.models", "[model]", (), "torch.nn.Module that answers specs()", "A whole model, built on the meta device"),
    Group("forge.attentions", "[model] attention", ("context",), "torch.nn.Module", "A block's attention"),
    Group("forge.mlps", "[model] mlp", ("context",), "torch.nn.Module", "A block's feed-forward layer"),
    Group("forge.norms", "[model] norm", ("dim",), "torch.nn.Module", "A normalization over the last dimension"),
    Group("forge.routers", "[model.moe] router", ("context",), "torch.nn.Module", "Chooses experts per token"),
    Group("forge.fusions", "[model] fusion", ("context",), "block factory", "How images enter a decoder"),
    Group("forge.encoders", "[model] encoder", (), "torch.nn.Module", "Images to features"),
    Group("forge.adapters", "[model] adapter", ("context",), "torch.nn.Module", "Encoder features to model width"),
    Group("forge.frame_scorers", "scorer of a source", (), "callable (frames, question) -> scores", "How frames fit a question"),
    Group("forge.transforms", "[transforms.NAME]", (), "forge_core.protocols.model.Transform", "A strategy applied to a model"),
    Group("forge.pipeline_schedules", "[parallel.pipeline]", (), "schedule factory", "Order of pipeline work"),
    Group("forge.optimizers", "[optimizer]", ("model",), "forge_core.protocols.model.Optimizer", "Updates parameters"),
    Group("forge.schedules", "[schedule]", ("steps",), "function of the step", "Factor on the learning rate"),
    Group("forge.objectives", "[objective]", (), "forge_core.protocols.model.Objective", "What is minimized"),
    Group("forge.sources", "[[data.sources]]", ("context",), "forge_core.protocols.data.Source", "Where documents come from"),
    Group("forge.tokenizers", "[data.tokenizer]", ("context",), "forge_core.protocols.data.Tokenizer", "Text to token ids"),
    Group("forge.hooks", "[[hooks]]", (), "forge_core.protocols.run.Hook", "Something that happens around a step"),
    Group("forge.trackers", "[[trackers]]", ("run",), "forge_core.protocols.run.Tracker", "Where numbers are written"),
    Group("forge.stores", "[checkpoint.store]", ("path",), "forge_core.protocols.checkpoint.Store", "Where checkpoints are"),
    Group("forge.converters", "--from / --to", (), "forge_core.protocols.weights.Converter", "A format of weights"),
    Group("forge.hf_models", "--family / config.json", (), "forge_core.protocols.weights.HfModel", "A Hugging Face folder"),
    Group("forge.presets", "base", None, "path of a TOML file", "A recipe shipped with a distribution"),
    Group("forge.commands", "forge-train NAME", None, "typer application or function", "A subcommand"),
    Group("forge.proofs", "always", None, "path of a folder", "Receipts of `forge-train parity --record`"),
    Group("forge.conformance", "plugins doctor", None, "module or class of check_* functions", "Checks of the parts of a group"),
    Group("forge.checks", "always", None, "function (job, layout) -> faults", "A rule across sections"),
)

GROUPS = MappingProxyType({group.name: group for group in _TABLE})
"""Groups by name. Groups with `build=None` contain plain objects: preset files, commands and check functions."""

HOMES: MappingProxyType[str, tuple[str, ...]] = MappingProxyType(
    {
        "forge-ckpt": ("forge.stores",),
        "forge-data": ("forge.sources", "forge.tokenizers"),
        "forge-models": (
            *("forge.models", "forge.attentions", "forge.mlps", "forge.norms", "forge.routers", "forge.objectives"),
            "forge.converters",
        ),
        "forge-parallel": ("forge.transforms", "forge.pipeline_schedules", "forge.optimizers"),
        "forge-train": (
            *("forge.schedules", "forge.hooks", "forge.trackers", "forge.converters", "forge.presets", "forge.commands"),
        ),
        "forge-interp": ("forge.hooks", "forge.commands"),
        "forge-vlm": (
            *("forge.models", "forge.fusions", "forge.encoders", "forge.adapters", "forge.hooks", "forge.sources"),
            *("forge.frame_scorers", "forge.hf_models", "forge.presets"),
        ),
        "forge-lab": ("forge.commands",),
    }
)
"""Groups in which each distribution of Forge has parts, so that the error for an unknown name can say what to install. The first
distribution with a group defines it; the checks of the group need this distribution."""

FORGE = frozenset({"forge-core", "forge-testing", *HOMES})
"""The distributions of Forge."""

MOVED: MappingProxyType[tuple[str, str], tuple[str, str]] = MappingProxyType(
    {
        ("forge.hooks", "inside"): ("forge-train", "forge-interp"),
        ("forge.commands", "compare"): ("forge-train", "forge-lab"),
        ("forge.commands", "fit"): ("forge-train", "forge-lab"),
        ("forge.commands", "lens"): ("forge-train", "forge-interp"),
        ("forge.commands", "neuro"): ("forge-train", "forge-interp"),
        ("forge.commands", "probe"): ("forge-train", "forge-interp"),
        ("forge.commands", "sae"): ("forge-train", "forge-interp"),
        ("forge.commands", "similarity"): ("forge-train", "forge-interp"),
        ("forge.commands", "sweep"): ("forge-train", "forge-lab"),
    }
)
"""(group, name) -> former and current distribution, for parts that moved between distributions of Forge. In recipes and
checkpoints, the former distribution means the current one."""


def home_of(group: str, name: str, distribution: str) -> str:
    """Returns the current distribution of a part, given the distribution that a recipe or checkpoint names."""
    former, present = MOVED.get((group, name), ("", ""))
    return present if former and canonical(distribution) == former else distribution


TABLE = "forge.parts"
"""Entry-point group in which a distribution of Forge names its table of parts: `{group: {name: "module:object"}}`."""


@dataclass(frozen=True)
class Entry:
    """Metadata of one plugin, known without importing it."""

    group: str
    name: str
    distribution: str
    version: str
    target: str

    @property
    def qualified(self) -> str:
        return f"{self.distribution}:{self.name}"

    @property
    def is_forge(self) -> bool:
        """Whether it belongs to a distribution of Forge."""
        return canonical(self.distribution) in FORGE

    def as_json(self) -> dict[str, str]:
        """Returns `{group, name, distribution, version}`, as a checkpoint records it."""
        return {"group": self.group, "name": self.name, "distribution": self.distribution, "version": self.version}


def installed() -> Iterator[Entry]:
    """Yields the entries of all installed distributions in groups of `GROUPS`; a distribution that is found twice counts once."""
    seen: set[str] = set()
    for distribution in distributions():
        try:
            if "forge." not in (distribution.read_text("entry_points.txt") or ""):
                continue  # skips most distributions, because reading the metadata of all would take a tenth of a second
            metadata = distribution.metadata
            name, version = metadata["Name"], metadata["Version"]
            points = list(distribution.entry_points)
        except Exception:  # noqa: BLE001 - damaged metadata of an unrelated package must not break a run that does not use it
            continue
        if not name or canonical(name) in seen:
            continue
        seen.add(canonical(name))
        for point in points:
            if point.group in GROUPS:
                yield Entry(point.group, point.name, name, version or "unknown", point.value)
            elif point.group == TABLE and canonical(name) in FORGE:
                yield from _parts(point, name, version or "unknown")


def _parts(point: EntryPoint, distribution: str, version: str) -> Iterator[Entry]:
    """Yields the entries of a table of parts. Its module contains only the table, so no part is imported.

    Raises:
        BrokenPlugin: the table cannot be read.
    """
    try:
        table = point.load()
    except Exception as cause:
        raise BrokenPlugin(
            f"{distribution} {version} is damaged: its table of parts {point.value} cannot be read: "
            f"{type(cause).__name__}: {cause}; install {distribution} again"
        ) from cause
    for group, parts in table.items():
        for name, target in parts.items():
            yield Entry(group, name, distribution, version, target)


def canonical(distribution: str) -> str:
    """Returns a distribution's name in the form that packaging compares: `Forge_Extra` becomes `forge-extra`."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


@dataclass
class Registry:
    """All plugins that can be chosen. `Registry()` has those that are installed; tests pass their own entries."""

    entries: list[Entry] = field(default_factory=lambda: list(installed()))
    _loaded: dict[Entry, Any] = field(default_factory=dict, repr=False)

    def names(self, group: str) -> list[str]:
        """Returns the names in `group` as a recipe must write them: qualified if the bare name means another entry or none."""
        entries = self.of(group)
        claims: dict[str, list[Entry]] = {}
        for entry in entries:
            claims.setdefault(entry.name, []).append(entry)
        return sorted(entry.name if _meant(claims[entry.name]) == entry else entry.qualified for entry in entries)

    def spelled(self, entry: Entry) -> str:
        """Returns the name of an entry in a user's recipe: bare, or with its distribution if the bare name means another."""
        if entry.is_forge:
            return entry.name
        return entry.name if _meant([e for e in self.of(entry.group) if e.name == entry.name]) == entry else entry.qualified

    def of(self, group: str) -> list[Entry]:
        """Returns the entries of one group, sorted by name.

        Raises:
            UnknownComponent: there is no such group.
        """
        if group not in GROUPS:
            hint = did_you_mean(group, list(GROUPS)) or f"groups: {', '.join(GROUPS)}"
            raise UnknownComponent(f"unknown plugin group {group!r}; {hint}")
        return sorted((e for e in self.entries if e.group == group), key=lambda e: (e.name, e.distribution))

    def find(self, group: str, name: str, owner: str = "") -> Entry:
        """Returns the entry that `name` refers to.

        Args:
            owner: distribution whose preset or default contains the name; its own part is preferred.

        Raises:
            UnknownComponent: no distribution has it; the message lists similar names, and the package that has it if known.
            PluginConflict: several distributions have it, but neither the owner nor Forge; the message lists them.
        """
        kind = GROUPS[group].kind
        if ".py:" in name:
            return _file_entry(group, name)
        if name.endswith(".py"):
            raise UnknownComponent(f"{kind} {name!r} names a file; add the class in it: {name}:ClassName")
        distribution, _, bare = name.rpartition(":")
        distribution = canonical(home_of(group, bare, distribution))
        matches = [e for e in self.of(group) if e.name == bare and distribution in ("", canonical(e.distribution))]
        if (meant := _meant(matches, owner)) is not None:
            return meant
        if len(matches) > 1:
            claims = " and ".join(f"{e.distribution} {e.version}" for e in matches)
            choices = " or ".join(repr(e.qualified) for e in matches)
            raise PluginConflict(f"{kind} {name!r} is claimed by {claims}; choose with name = {choices}")
        if not matches:
            present = {canonical(e.distribution) for e in self.entries}
            absent = [home for home, groups in HOMES.items() if group in groups and home not in present]
            _, home = MOVED.get((group, bare), ("", ""))
            if home in absent:
                raise UnknownComponent(f"{kind} {bare!r} is part of {home}, which is not installed: pip install {home}")
            hints = [did_you_mean(name, self.names(group)), *(f"to get those of {home}: pip install {home}" for home in absent)]
            raise UnknownComponent("; ".join([f"unknown {kind} {name!r}", *filter(None, hints)]))
        raise AssertionError("one match is what is meant")

    def load(self, group: str, name: str, owner: str = "") -> Any:
        """Returns the component class (or plain object, for groups without `build`) that `name` refers to; `owner` as for `find`.

        Raises:
            BrokenPlugin: the plugin cannot be imported, is not a component, or its `build` has different arguments.
            UntrustedCode: the plugin is a class in a file, and the user has trusted neither the file nor its content.
        """
        return self.load_entry(self.find(group, name, owner))

    def load_entry(self, entry: Entry) -> Any:
        """Loads the object of an entry; later calls return the same object. Raises the errors of `load`."""
        if entry not in self._loaded:
            try:
                loaded = _load_file(entry) if ".py:" in entry.target else _load_point(entry)
                _conform(entry, loaded)
            except (BrokenPlugin, UntrustedCode):
                raise
            except (Exception, SystemExit) as cause:  # a plugin's module may raise anything on import; scripts call sys.exit
                why = f"{type(cause).__name__}: {cause}{_where(cause, entry)}"
                raise BrokenPlugin(f"{_described(entry)} cannot be loaded: {why}") from cause
            self._loaded[entry] = loaded
        return self._loaded[entry]

    def used(self, names: Iterable[tuple[str, str]]) -> list[dict[str, str]]:
        """Returns `{group, name, distribution, version}` of each chosen (group, name), as a checkpoint records them."""
        return [self.find(group, name).as_json() for group, name in names]


def _meant(claims: Sequence[Entry], owner: str = "") -> Entry | None:
    """Returns the entry that a name refers to, from all entries with this name; None if it is ambiguous or there is none."""
    for homes in ({canonical(owner)}, FORGE):
        own = [entry for entry in claims if canonical(entry.distribution) in homes]
        if len(own) == 1:
            return own[0]
    return claims[0] if len(claims) == 1 else None


def _described(entry: Entry) -> str:
    """Returns the description of an entry in messages: kind, name, and distribution or file."""
    kind = GROUPS[entry.group].kind
    if ".py:" in entry.target:
        return f"{kind} {entry.name!r} ({entry.version})"
    return f"{kind} {entry.name!r} of {entry.distribution} {entry.version} ({entry.target})"


def _load_point(entry: Entry) -> Any:
    return EntryPoint(entry.name, entry.target, entry.group).load()


def _file_entry(group: str, name: str) -> Entry:
    file, _, attribute = name.rpartition(":")
    path = Path(file)
    if not path.is_file():
        near = did_you_mean(path.name, [other.name for other in path.parent.glob("*.py") if other.is_file()])
        raise UnknownComponent(
            f"{GROUPS[group].kind} {name!r}: the file does not exist; "
            + (near or "a relative path starts at the folder of the recipe, on the command line at the working directory")
        )
    if not attribute.isidentifier():
        raise UnknownComponent(f"{GROUPS[group].kind} {name!r}: write it as file.py:ClassName")
    digest = sha256(path.read_bytes()).hexdigest()[:12]
    return Entry(group, name, str(path.name), f"sha256:{digest}", f"{path.resolve()}:{attribute}")


def _load_file(entry: Entry) -> Any:
    file, _, attribute = entry.target.rpartition(":")
    content = trusted_content(Path(file), f"{GROUPS[entry.group].kind} {entry.name!r}")
    name = _module_name(file, sha256(content).hexdigest())
    module = sys.modules.get(name) or run_file(name, Path(file), content)
    if not hasattr(module, attribute):
        offered = [name for name, value in vars(module).items() if inspect.isclass(value) and value.__module__ == module.__name__]
        hint = did_you_mean(attribute, offered) or f"it defines {'other classes' if offered else 'no class'}; {_DEFINE}"
        raise AttributeError(f"the file has no {attribute!r}; {hint}")
    return getattr(module, attribute)


_DEFINE = "derive a class from forge_core.Component, below @dataclass(frozen=True, kw_only=True)"


def _module_name(file: str, digest: str) -> str:
    """Returns the module of a plugin file. A file that was edited gets another one, so its old code does not pass for the new."""
    return f"forge_file_{sha256(file.encode()).hexdigest()[:12]}_{digest[:12]}"


def content_that_ran(entry: Entry) -> bytes | None:
    """Returns the content of an entry's plugin file; None if this process has not loaded it, or if the entry has no file."""
    name = _module_name(entry.target.rpartition(":")[0], entry.version.removeprefix("sha256:"))
    loader = getattr(sys.modules.get(name), "__loader__", None)
    return loader.content if isinstance(loader, FileLoader) else None


def _where(cause: BaseException, entry: Entry) -> str:
    """Returns the line of a plugin file that failed, and what to do about a file beside it that it cannot import."""
    if ".py:" not in entry.target or isinstance(cause, SyntaxError):  # Python names the line of a wrong syntax itself
        return ""
    file = Path(entry.target.rpartition(":")[0])
    lines = [frame.lineno for frame in traceback.extract_tb(cause.__traceback__) if frame.filename == str(file)]
    place = f" (line {lines[-1]})" if lines else ""
    missing = cause.name if isinstance(cause, ModuleNotFoundError) else None
    if missing and (file.with_name(f"{missing}.py").is_file() or (file.parent / missing).is_dir()):
        place += f"; a plugin file cannot import what lies beside it: move {missing} into the file, or both into a wheel"
    return place


class FileLoader(SourceFileLoader):
    """Loads a plugin file from bytes that were read before. Ignores compiled code next to it, which the user has not seen."""

    def __init__(self, name: str, path: str, content: bytes) -> None:
        super().__init__(name, path)
        self.content = content

    def get_code(self, fullname: str) -> Any:
        return self.source_to_code(self.content, self.get_filename(fullname))


def run_file(name: str, path: Path, content: bytes) -> ModuleType:
    """Imports a plugin file as a module under a unique name, so that pickling and type hints resolve; returns the module."""
    loader = FileLoader(name, str(path), content)
    spec = ModuleSpec(name, loader, origin=str(path))
    spec.has_location = True
    module = module_from_spec(spec)
    sys.modules[name] = module
    try:
        loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _conform(entry: Entry, loaded: Any) -> None:
    """Checks that a loaded object has the type and signature that its group requires.

    Raises:
        BrokenPlugin: it does not.
    """
    group = GROUPS[entry.group]

    def refuse(why: str) -> BrokenPlugin:
        return BrokenPlugin(f"{_described(entry)} {why}")

    if group.build is None:
        if group.returns.startswith("path"):
            if not isinstance(loaded, str | os.PathLike):
                raise refuse(f"is not a {group.returns}")
        elif group.returns.startswith("module"):
            if not isinstance(loaded, ModuleType | type) or not any(name.startswith("check_") for name in vars(loaded)):
                raise refuse(f"is not a {group.returns}")
        elif not callable(loaded):
            raise refuse("is not callable")
        return
    if not (inspect.isclass(loaded) and issubclass(loaded, Component)):
        raise refuse(f"is not a forge_core.component.Component; {_DEFINE}")
    if (fault := decorator_fault(loaded)) and (loaded.keeps_state or "__dataclass_fields__" not in vars(loaded)):
        raise refuse(fault)
    fields_of(loaded)  # raises if a field's type cannot be resolved; the caller adds the plugin's name
    if loaded.build is Component.build:
        if fault := _implementation_fault(loaded, group):
            raise refuse(fault)
        return
    if not callable(loaded.build):
        raise refuse("has no build method")
    parameters = list(inspect.signature(loaded.build).parameters.values())[1:]
    positional = [item for item in parameters if item.kind in (item.POSITIONAL_ONLY, item.POSITIONAL_OR_KEYWORD)]
    given = positional[: len(group.build)]
    needed = [
        item
        for item in parameters
        if item not in given and item.default is item.empty and item.kind not in (item.VAR_POSITIONAL, item.VAR_KEYWORD)
    ]
    if tuple(item.name for item in given) != group.build or needed:
        wanted = ", ".join(("self", *group.build))
        raise refuse(f"has build{inspect.signature(loaded.build)}; its group calls build({wanted})")


def _implementation_fault(cls: type[Component], group: Group) -> str:
    """Returns why a component without its own `build` is refused; empty if it is valid. Does not import the implementation."""
    target: Any = cls.implementation
    if target is not None:
        is_path = isinstance(target, str) and re.fullmatch(r"\w+(\.\w+)*:\w+(\.\w+)*", target)
        return "" if is_path else f"names the implementation {target!r}; write it as 'module:name'"
    needed = f"has no build method; define build({', '.join(('self', *(group.build or ())))}), or set `implementation`"
    if group.build or not group.returns.startswith("forge_core.protocols."):
        return needed
    methods = [
        name
        for name, value in vars(resolve_name(group.returns)).items()
        if callable(value) and (name == "__call__" or not name.startswith("_"))
    ]
    absent = [name for name in methods if not any(name in vars(base) for base in cls.__mro__)]
    kind = group.returns.rpartition(".")[2]
    return f"{needed}; it is no {kind} itself, because it has no {', '.join(absent)}" if absent else ""
