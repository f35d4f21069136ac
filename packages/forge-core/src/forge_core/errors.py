"""The errors of Forge.

Every error is a `ForgeError` whose message says what is wrong and what to do. A command prints the message without a
traceback and exits with `exit_code`; 2 means invalid input, as for shells and argument parsers.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches


class ForgeError(Exception):
    """Base class of errors with a message for the user."""

    exit_code = 2


@dataclass(frozen=True)
class Fault:
    """One error in a configuration. `key` is its dotted path; `origin` is the file and line, or the option, that set it."""

    key: str
    message: str
    origin: str = ""
    hint: str = ""

    def __str__(self) -> str:
        where = f" [{self.origin}]" if self.origin else ""
        hint = f"; {self.hint}" if self.hint else ""
        return f"{self.key}: {self.message}{hint}{where}"


class RecipeWarning(Fault):
    """A warning: the recipe is valid but may not be what the user meant."""


class MissingFile(RecipeWarning):
    """A named file does not exist on this machine. It is an error for a run here, and a warning for a run elsewhere."""


class ConfigError(ForgeError):
    """All faults of one configuration, reported together."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.faults = tuple(faults)
        count = len(self.faults)
        title = "1 fault in the configuration" if count == 1 else f"{count} faults in the configuration"
        super().__init__("\n".join([f"{title}:", *(f"  {fault}" for fault in self.faults)]))


class LayoutError(ForgeError):
    """Sizes of parallel axes do not match the world size; the message names legal sizes."""


class PlanError(ForgeError):
    """Transforms conflict, match nothing, or leave an axis or a parameter unclaimed."""


class DataError(ForgeError):
    """Data cannot be read, or do not match their description; the message names file and offset if known."""


class CheckpointError(ForgeError):
    """A checkpoint is missing or damaged, or does not match the model."""


class Damaged(CheckpointError):
    """The files of a checkpoint are damaged; a search continues with the next older checkpoint."""


class NewerFormat(CheckpointError):
    """A later version of Forge wrote the checkpoint. This version cannot read it, and must not skip or rename it."""


class Superseded(CheckpointError):
    """Another job has taken over the directory; this one must not be restarted."""

    exit_code = 4


class PluginError(ForgeError):
    """Base class of errors in the lookup of a component by name."""


class UnknownComponent(PluginError):
    """No installed distribution registers this name in this group."""


class PluginConflict(PluginError):
    """Two distributions register the same name; `distribution:name` selects one."""


class BrokenPlugin(PluginError):
    """A requested component cannot be loaded; the message names its distribution, version and the cause."""


class UntrustedCode(PluginError):
    """Stored data name a component in a Python file that the user has not trusted."""


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
    """Returns a hint that lists the closest known words, or all known words if there are few, or an empty string."""
    close = get_close_matches(word, known, n=3, cutoff=0.6)
    if close:
        return "did you mean " + " or ".join(repr(name) for name in close) + "?"
    if known and len(known) <= 12:
        return "known: " + ", ".join(sorted(known))
    return ""
