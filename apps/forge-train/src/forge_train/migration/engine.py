"""Translates a foreign configuration to a recipe, and accounts for each of its keys.

A framework is a table of `Key`s and a function `translate`. A key without a rule is copied, or has no counterpart; all others are
translated by the function, which reads values with `Migration.get` and records what became of each key. A key that is not in the
table is unknown. No key of a file is left without an outcome.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from forge_core.errors import ForgeError

UNKNOWN = "fill in"
"""Value of a key that has no sensible value without the source's."""

Kind = Literal["translated", "converted", "cannot", "without", "unknown", "unread", "default"]
"""What became of a key.

translated: the Forge key means the same.
converted: the meaning differs; the note says how the value was converted.
cannot: Forge has the feature, but not this value of it.
without: Forge has no such key; the note says why, or what to do instead.
unknown: the table of the framework does not have the key.
unread: the value is computed by code, which is not executed.
default: the file does not set the key; the recipe states the framework's default, because Forge's may differ.
"""


@dataclass(frozen=True)
class SourceSetting:
    """A key that a file sets. `line` counts from 1, or is None if unknown."""

    value: Any
    line: int | None = None


@dataclass(frozen=True)
class Unread:
    """A part of a file that is not a literal value, such as a function call: its text, its line, and why it was not read."""

    text: str
    line: int | None
    why: str


@dataclass(frozen=True)
class Source:
    """What a file sets.

    Attributes:
        settings: key of the framework -> value.
        unread: parts of the file that would need to be executed.
        name: name of the run, from the file's name.
    """

    settings: Mapping[str, SourceSetting]
    unread: tuple[Unread, ...] = ()
    name: str = "migrated"


@dataclass(frozen=True)
class Key:
    """A key of a framework.

    Attributes:
        name: the key as its configuration names it.
        default: the framework's value if the file does not set the key; None if it has none.
        to: the Forge key, or several with commas; empty if there is none.
        note: what differs, or for a key without counterpart, why it has none and what to do instead.
        values: value of the framework -> value of Forge; other values cannot be expressed.
        rule: whether the framework's `translate` handles the key, instead of a copy of the value.
        many: whether the value may be a list or a table although the default is not.
    """

    name: str
    default: Any = None
    to: str = ""
    note: str = ""
    values: Mapping[Any, Any] | None = None
    rule: bool = False
    many: bool = False


def without(prefix: str, names: str, note: str) -> tuple[Key, ...]:
    """Returns keys without counterpart that share a reason; `names` are separated by spaces."""
    return tuple(Key(f"{prefix}{name}", None, "", note) for name in names.split())


@dataclass(frozen=True)
class Framework:
    """A framework whose configurations are read.

    Attributes:
        name: value of `--from`.
        title: name in messages.
        files: what a configuration file of the framework is, for messages.
        keys: all keys that are known.
        translate: handles the keys with a rule.
    """

    name: str
    title: str
    files: str
    keys: tuple[Key, ...]
    translate: "Callable[[Migration], None]"

    @property
    def table(self) -> dict[str, Key]:
        """Returns the keys by name."""
        return {key.name: key for key in self.keys}


@dataclass(frozen=True)
class KeyOutcome:
    """What became of one key. `to` is the Forge key with its `result`; both are empty if nothing was written."""

    kind: Kind
    key: str
    value: Any
    to: str = ""
    result: Any = None
    note: str = ""
    line: int | None = None


@dataclass(frozen=True)
class Blank:
    """A key of the recipe that the source does not define: its dotted path, an example value, and what to fill in.

    With `active` the example is the value of the key; otherwise the key is a comment. `UNKNOWN` as an active example makes
    `forge-train check` refuse the recipe until the key is filled in: without it, Forge's default would be trained silently.
    """

    path: str
    example: Any
    what: str
    active: bool = False


Fields = Mapping[str, tuple[Any, str]]
"""Field of a component -> its value, and the key of the framework that it comes from."""


@dataclass
class Migration:
    """A translation in progress.

    Attributes:
        framework: the framework of the source.
        source: what the file sets.
        world: number of processes of the run; None if the user did not say.
    """

    framework: Framework
    source: Source
    world: int | None = None
    recipe: dict[str, Any] = field(default_factory=dict[str, Any], init=False)
    comments: dict[str, str] = field(default_factory=dict[str, str], init=False)
    blanks: list[Blank] = field(default_factory=list[Blank], init=False)
    outcomes: list[KeyOutcome] = field(default_factory=list[KeyOutcome], init=False)
    _table: dict[str, Key] = field(init=False)

    def __post_init__(self) -> None:
        self._table = self.framework.table

    def get(self, key: str) -> Any:
        """Returns the value of a key: that of the file, or the framework's default."""
        setting = self.source.settings.get(key)
        return self._table[key].default if setting is None else setting.value

    def integer(self, key: str) -> int:
        """Returns the value of a key that is an integer.

        Raises:
            ForgeError: the value is not an integer.
        """
        value = self.get(key)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(key, value, "an integer")
        return value

    def positive(self, key: str) -> int:
        """Returns the value of a key that is an integer above 0.

        Raises:
            ForgeError: the value is not an integer above 0.
        """
        value = self.integer(key)
        if value < 1:
            raise self.wrong(key, value, "an integer above 0")
        return value

    def tables(self, key: str) -> list[dict[str, Any]]:
        """Returns the value of a key that is a list of tables.

        Raises:
            ForgeError: the value is not a list of tables.
        """
        value = self.get(key)
        if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):  # pyright: ignore[reportUnknownVariableType]
            raise self.wrong(key, value, "a list of tables")
        return value  # pyright: ignore[reportUnknownVariableType]

    def entry(self, key: str, table: Mapping[str, Any], name: str, kind: type | tuple[type, ...], default: Any) -> Any:
        """Returns a value of a table in the value of a key.

        Raises:
            ForgeError: the value has another type.
        """
        value = table.get(name, default)
        if (isinstance(value, bool) and kind is not bool) or not isinstance(value, kind):
            raise self.wrong(f"{key}: {name}", value, "another type")
        return value

    def number(self, key: str) -> float:
        """Returns the value of a key that is a number.

        Raises:
            ForgeError: the value is not a number.
        """
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(key, value, "a number")
        return value

    def flag(self, key: str) -> bool:
        """Returns the value of a key that is true or false.

        Raises:
            ForgeError: the value is neither.
        """
        value = self.get(key)
        if not isinstance(value, bool):
            raise self.wrong(key, value, "true or false")
        return value

    def wrong(self, key: str, value: Any, expected: str) -> ForgeError:
        """Returns the error for a value that the framework itself would refuse."""
        setting = self.source.settings.get(key)
        line = "" if setting is None or setting.line is None else f" (line {setting.line})"
        return ForgeError(
            f"{key} = {shown(value)}{line}: {self.framework.title} expects {expected} there; correct the file, or remove the key"
        )

    def has(self, key: str) -> bool:
        """Whether the file sets a key."""
        return key in self.source.settings

    def write(self, path: str, value: Any, *keys: str, note: str = "") -> None:
        """Writes a key of the recipe.

        Args:
            path: dotted key; an index selects a table of an array, such as `data.sources.0.path`.
            value: a plain TOML value.
            keys: keys of the framework that the value comes from.
            note: how the value was converted, if the meaning differs.
        """
        self._set(path, value)
        stated = [key for key in keys if self.has(key)]
        parts = [f"{key} = {shown(self.get(key))}" for key in stated]
        if keys and not stated:
            parts = [f"default of {self.framework.title}"]
        if text := ", ".join(parts):
            self.comments[path] = text
        for key in keys:
            kind: Kind = "default" if key not in stated else "converted" if note else "translated"
            self._record(kind, key, path, value, note)

    def cannot(self, key: str, why: str) -> None:
        """Records that Forge cannot express the value of a key. A key that the file does not set is recorded, too."""
        self._record("cannot" if self.has(key) else "default", key, note=why)

    def drop(self, key: str, why: str = "") -> None:
        """Records that a key has no counterpart; without `why`, the note of the table is the reason."""
        if self.has(key):
            self._record("without", key, note=why or self._table[key].note)

    def write_nothing(self, key: str, why: str) -> None:
        """Records that a key is translated by leaving a table or key of the recipe out."""
        if self.has(key):
            self._record("translated", key, note=why)

    def unused(self, *keys: str, because: str) -> None:
        """Records keys that have no effect in the source either, because of another key."""
        for key in keys:
            self.drop(key, f"has no effect in {self.framework.title}, because {because}")

    def must_fill_in(self, path: str, what: str) -> None:
        """Adds a key that the user must fill in before the recipe is accepted."""
        self.fill_in(path, UNKNOWN, what, active=True)

    def fill_in(self, path: str, example: Any, what: str, *, active: bool = False) -> None:
        """Adds a key that the user must fill in."""
        self.blanks.append(Blank(path, example, what, active))
        if active:
            self._set(path, example)
            self.comments[path] = f"FILL IN: {what}"

    def remark(self, path: str, text: str) -> None:
        """Sets the comment of a key of the recipe."""
        self.comments[path] = text

    def hook(self, name: str, *keys: str, note: str = "", more: Fields | None = None, **fields: tuple[Any, str]) -> None:
        """Adds a hook; `fields` and `more` map a field to its value and the key that it comes from, which may be empty."""
        self.table("hooks", name, *keys, note=note, more=more, **fields)

    def table(
        self, array: str, name: str, *keys: str, note: str = "", more: Fields | None = None, **fields: tuple[Any, str]
    ) -> str:
        """Adds a table to an array of tables such as `data.sources`, and returns its path."""
        path = f"{array}.{len(self._items(array))}"
        self.write(f"{path}.name", name, *keys, note=note)
        for item, (value, key) in {**fields, **(more or {})}.items():
            self.write(f"{path}.{item}", value, *([key] if key else []))
        return path

    def run(self) -> None:
        """Translates all keys."""
        for name, setting in self.source.settings.items():
            if name not in self._table:
                self.outcomes.append(
                    KeyOutcome(
                        "unknown",
                        name,
                        hashable(setting.value),
                        note=f"no key of {self.framework.title} that is known",
                        line=setting.line,
                    )
                )
        for key in self.framework.keys:
            self._check(key)
        for key in self.framework.keys:
            if not key.rule:
                self._copy(key)
        self.framework.translate(self)
        recorded = {outcome.key for outcome in self.outcomes}
        for name in self.source.settings:
            if name not in recorded:
                self.drop(name, self._table[name].note or "has no effect with the other settings of this file")
        for part in self.source.unread:
            self.outcomes.append(KeyOutcome("unread", part.text, None, note=part.why, line=part.line))

    def of(self, *kinds: Kind) -> list[KeyOutcome]:
        """Returns the outcomes of some kinds, each once, in the order of the table."""
        return [outcome for outcome in dict.fromkeys(self._ordered()) if outcome.kind in kinds]

    def _ordered(self) -> Iterable[KeyOutcome]:
        order = {name: index for index, name in enumerate(self._table)}
        return sorted(self.outcomes, key=lambda outcome: order.get(outcome.key, len(order)))

    def _check(self, key: Key) -> None:
        """Checks that a value has the type of the default.

        Raises:
            ForgeError: it has another type.
        """
        if key.name not in self.source.settings or not (key.to or key.rule):
            return
        value = self.get(key.name)
        if not is_plain(value):
            raise self.wrong(key.name, value, "text, numbers, true and false")
        if value is None or key.many:
            return
        scalar = isinstance(value, str | int | float)
        for kind, expected in ((bool, "true or false"), (list, "a list"), (dict, "a table")):
            if isinstance(key.default, kind) and not isinstance(value, kind):
                raise self.wrong(key.name, value, expected)
        if not scalar and not isinstance(key.default, list | dict):
            raise self.wrong(key.name, value, "a single value")

    def _copy(self, key: Key) -> None:
        value = self.get(key.name)
        if not key.to or value is None:
            self.drop(key.name)
        elif key.values is None:
            self.write(key.to, value, key.name, note=key.note)
        elif (item := hashable(value)) in key.values:
            self.write(key.to, key.values[item], key.name, note=key.note)
        else:
            known = ", ".join(shown(item) for item in key.values)
            self.cannot(key.name, f"{key.to} can express {known} only" + (f"; {key.note}" if key.note else ""))

    def _record(self, kind: Kind, key: str, path: str = "", result: Any = None, note: str = "") -> None:
        setting = self.source.settings.get(key)
        line = None if setting is None else setting.line
        self.outcomes.append(KeyOutcome(kind, key, hashable(self.get(key)), path, hashable(result), note, line))

    def _items(self, array: str) -> list[Any]:
        table: Any = self.recipe
        *parents, last = array.split(".")
        for name in parents:
            table = table.setdefault(name, {})
        return table.setdefault(last, [])

    def _set(self, path: str, value: Any) -> None:
        table: Any = self.recipe
        *parents, last = path.split(".")
        for name, following in zip(parents, [*parents[1:], last], strict=True):
            if isinstance(table, list):
                index = int(name)
                if index == len(table):
                    table.append({})
                table = table[index]
            else:
                table = table.setdefault(name, [] if following.isdigit() else {})
        table[last] = value


def is_plain(value: Any) -> bool:
    """Whether a value consists of text, numbers, booleans, lists and tables; None is allowed at the top only."""
    if isinstance(value, list | tuple):
        return all(item is not None and is_plain(item) for item in value)  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, dict):
        return all(isinstance(name, str) and item is not None and is_plain(item) for name, item in value.items())  # pyright: ignore[reportUnknownVariableType]
    return value is None or isinstance(value, str | int | float)


def hashable(value: Any) -> Any:
    """Returns a value whose lists are tuples and whose tables are text, so that equal outcomes are found."""
    if isinstance(value, list | tuple):
        return tuple(hashable(item) for item in value)
    return str(value) if isinstance(value, dict) else value


def shown(value: Any) -> str:
    """Returns a value of a framework on one line."""
    if isinstance(value, bool):
        return str(value).lower()
    text = f'"{value}"' if isinstance(value, str) else str(list(value) if isinstance(value, tuple) else value)
    text = " ".join(text.split())
    return text if len(text) <= 60 else f"{text[:57]}..."
