"""The errors of Forge.

Every one is a `ForgeError` with a message that says what is wrong and what to do. A command prints the
message without a traceback and exits with `exit_code`; 2 means "your input", the code that shells and argument
parsers use for it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches


class ForgeError(Exception):
    """A refusal with a message for the user."""

    exit_code = 2


@dataclass(frozen=True)
class Fault:
    """One thing wrong in a configuration: `key` is its dotted path, `origin` where the value came from."""

    key: str
    message: str
    origin: str = ""
    hint: str = ""

    def __str__(self) -> str:
        where = f" [{self.origin}]" if self.origin else ""
        hint = f"; {self.hint}" if self.hint else ""
        return f"{self.key}: {self.message}{hint}{where}"


class RecipeWarning(Fault):
    """What stops nothing and is told: a check yields it where a recipe may be meant so."""


class MissingFile(RecipeWarning):
    """A file that is named and is not on this machine: it stops a run here, and not a check for a run elsewhere."""


class ConfigError(ForgeError):
    """All faults of one configuration, reported together."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.faults = tuple(faults)
        count = len(self.faults)
        title = "1 fault in the configuration" if count == 1 else f"{count} faults in the configuration"
        super().__init__("\n".join([f"{title}:", *(f"  {fault}" for fault in self.faults)]))


class LayoutError(ForgeError):
    """Sizes of parallel axes that do not fit the world; the message names the legal ones."""


class PlanError(ForgeError):
    """Transforms that clash, match nothing, or leave an axis or a parameter unclaimed."""


class DataError(ForgeError):
    """Data that cannot be read as what it claims to be; the message names file and offset where there is one."""


class CheckpointError(ForgeError):
    """A checkpoint that is absent, damaged, or does not fit the model."""


class PluginError(ForgeError):
    """Base of what can go wrong when a component is looked up by name."""


class UnknownComponent(PluginError):
    """No installed distribution offers this name in this group."""


class PluginConflict(PluginError):
    """Two distributions claim one name; `dist:name` chooses."""


class BrokenPlugin(PluginError):
    """A component that was asked for cannot be loaded; names its distribution, version and cause."""


class UntrustedCode(PluginError):
    """A component is Python code in a file that stored data name, and that the user did not grant."""


@dataclass
class Faults:
    """Collects faults under a common key prefix."""

    items: list[Fault] = field(default_factory=list)

    def add(self, key: str, message: str, origin: str = "", hint: str = "") -> None:
        self.items.append(Fault(key, message, origin, hint))

    def raise_if_any(self) -> None:
        if self.items:
            raise ConfigError(self.items)


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """A hint naming the closest known words, or all of them when there are few, or nothing."""
    close = get_close_matches(word, known, n=3, cutoff=0.6)
    if close:
        return "did you mean " + " or ".join(repr(name) for name in close) + "?"
    if known and len(known) <= 12:
        return "known: " + ", ".join(sorted(known))
    return ""
