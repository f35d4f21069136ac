"""How each parameter is trained, by global name. No torch.

Patterns are resolved here, once, against the names of the whole model; optimizers see parameters and numbers only.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import NamedTuple, Protocol

from forge_core.errors import PlanError
from forge_parallel.placement.shares import collapsed


class Setting(NamedTuple):
    """Of one parameter.

    Attributes:
        lr: factor of the learning rate.
        weight_decay: in place of the optimizer's; None = the optimizer's, of what it decays.
        decay: factor of either.
        warmup: steps from the first of its stage over which its rate rises.
    """

    lr: float = 1.0
    weight_decay: float | None = None
    decay: float = 1.0
    warmup: int = 0


PLAIN = Setting()


@dataclass(frozen=True)
class Settings:
    """Of a model.

    Attributes:
        each: settings by global name; names that are not there have `PLAIN`.
        frozen: parameters that are not trained.
        std: standard deviation of initial weights that differs from the model's own.
        stages: of a run in stages (`optim.stages`), the settings of each, in their order.
        first: of a stage, its first step, counted from 0.
    """

    each: Mapping[str, Setting] = field(default_factory=dict)
    frozen: frozenset[str] = frozenset()
    std: Mapping[str, float] = field(default_factory=dict)
    stages: "tuple[Settings, ...]" = ()
    first: int = 0

    def of(self, name: str) -> Setting:
        """Of one parameter."""
        return self.each.get(name, PLAIN)


NO_SETTINGS = Settings()


class Group(Protocol):
    """As `forge_parallel.components.parameters.ParameterGroup`."""

    @property
    def match(self) -> str: ...
    @property
    def lr(self) -> float | None: ...
    @property
    def weight_decay(self) -> float | None: ...
    @property
    def frozen(self) -> bool | None: ...


def grouped(groups: Iterable[Group], names: Sequence[str], ties: Mapping[str, str], before: Settings = NO_SETTINGS) -> Settings:
    """The settings of `before`, changed by each group in turn: where several match, a later one counts, key by key.

    Args:
        groups: patterns and what they change.
        names: of every parameter of the whole model.
        ties: name of a tied copy -> name of its original, which stands for both.
        before: factors of rates are multiplied with these.

    Raises:
        PlanError: a pattern matches nothing, or everything is frozen.
    """
    chosen: dict[str, dict[str, float | bool | None]] = {name: {} for name in names}
    for index, group in enumerate(groups):
        matches = [name for name in names if fnmatchcase(name, group.match)]
        if not matches:
            raise PlanError(f"parameters.groups.{index}.match: {group.match!r} {nearest(group.match, names, ties)}")
        keys = {"lr": group.lr, "weight_decay": group.weight_decay, "frozen": group.frozen}
        for name in matches:
            chosen[name] |= {key: value for key, value in keys.items() if value is not None}
    frozen = frozenset(name for name, keys in chosen.items() if keys.pop("frozen", False))
    if names and frozen == set(names):
        raise PlanError(
            "parameters.groups: every parameter of the model is frozen, so nothing would be trained; narrow a pattern"
        )
    each = dict(before.each)
    for name, keys in chosen.items():
        old, factor = before.of(name), keys.pop("lr", 1.0)
        if (new := old._replace(lr=old.lr * float(factor or 1.0), **keys)) != PLAIN:  # type: ignore[arg-type]
            each[name] = new
    return replace(before, each=each, frozen=frozen)


def nearest(pattern: str, names: Sequence[str], ties: Mapping[str, str], roles: Sequence[str] = ()) -> str:
    """Why a pattern matches nothing, and what is near to it: names, patterns of them, and `roles`, names for several."""
    for copy, original in ties.items():
        if fnmatchcase(copy, pattern):
            return f"matches only {copy}, which is tied to {original}; name {original}"
    near = [pattern for name in collapsed(names) for pattern in _patterns(name)]
    close = get_close_matches(pattern, list(dict.fromkeys([*roles, *near, *names])), n=3, cutoff=0.5)
    known = ", ".join([*roles, *collapsed(names)])
    hint = f"did you mean {' or '.join(map(repr, close))}?" if close else f"there are {known}"
    return f"matches no parameter of the model; {hint}"


def _patterns(name: str) -> Iterable[str]:
    """A name, and the patterns of all that stands below each of its modules."""
    words = name.split(".")
    return [name, *(".".join([*words[:end], "*"]) for end in range(1, len(words)))]
