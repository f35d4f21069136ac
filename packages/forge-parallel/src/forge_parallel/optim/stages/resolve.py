"""Stages of training: what is frozen, and how the rest is trained, as a function of the step. No torch.

Names are resolved here, once, against those of the whole model, so every rank decides alike and exchanges nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Protocol

from forge_core.errors import PlanError
from forge_core.specs import Specs
from forge_parallel.optim.settings import PLAIN, Setting, Settings, nearest


class Stage(Protocol):
    """As `forge_parallel.components.parameters.TrainingStage`."""

    @property
    def until(self) -> int | None: ...
    @property
    def train(self) -> Sequence[str]: ...
    @property
    def lr(self) -> Mapping[str, float]: ...
    @property
    def weight_decay(self) -> Mapping[str, float]: ...
    @property
    def warmups(self) -> Mapping[str, int]: ...


def staged(stages: Sequence[Stage], names: Sequence[str], specs: Specs, settings: Settings) -> Settings:
    """The settings of a run in stages. What they freeze is frozen in every stage; `stages` has each stage's own.

    Args:
        stages: in their order.
        names: of every parameter of the whole model.
        specs: of the model, for its roles and ties.
        settings: of what no stage changes, frozen parameters among them.

    Raises:
        PlanError: a name or pattern matches nothing, a stage trains nothing, or sets something of what it does not train.
    """
    if not stages:
        return settings
    found: list[Settings] = []
    first = 0
    for index, stage in enumerate(stages):
        found.append(_one(f"train.stages.{index}", stage, first, names, specs, settings))
        first = stage.until or first
    frozen = frozenset.intersection(*(one.frozen for one in found))
    # Where a plan looks at one setting of each parameter: that of the first stage which trains it.
    each = {
        name: one.of(name)
        for name in names
        for one in [next((one for one in found if name not in one.frozen), settings)]
        if one.of(name) != PLAIN
    }
    return replace(settings, each=each, frozen=frozen, stages=tuple(found))


def stage_at(stages: Sequence[Settings], step: int) -> int:
    """The number of the stage that optimizer step `step`, counted from 0, belongs to."""
    return max(index for index, stage in enumerate(stages) if stage.first <= step)


def _one(key: str, stage: Stage, first: int, names: Sequence[str], specs: Specs, before: Settings) -> Settings:
    wanted: set[str] = set()
    for name in stage.train:
        matches = _matches(f"{key}.train", name, names, specs)
        if not matches - before.frozen:
            raise PlanError(f"{key}.train: all that {name!r} matches is frozen by parameters.groups or by the model itself")
        wanted |= matches - before.frozen
    each = dict(before.each)
    for what, values in (("lr", stage.lr), ("weight_decay", stage.weight_decay), ("warmup", stage.warmups)):
        chosen: dict[str, float] = {}
        for name, value in values.items():
            matches = _matches(f"{key}.{what}", name, names, specs) & wanted
            if not matches:
                raise PlanError(f"{key}.{what}: the stage trains nothing of {name!r}; add it to {key}.train, or remove it")
            chosen |= dict.fromkeys(matches, value)
        for name, value in chosen.items():
            each[name] = _with(each.get(name, PLAIN), before.of(name), what, value)
    each = {name: setting for name, setting in each.items() if name in wanted and setting != PLAIN}
    return replace(before, each=each, frozen=frozenset(names) - wanted, first=first)


def _with(now: Setting, before: Setting, what: str, value: float) -> Setting:
    if what == "lr":
        return now._replace(lr=before.lr * value)
    return now._replace(weight_decay=value) if what == "weight_decay" else now._replace(warmup=int(value))


def _matches(key: str, name: str, names: Sequence[str], specs: Specs) -> set[str]:
    if name in specs.roles:
        return set(specs.roles[name]) & set(names)
    matches = {one for one in names if fnmatchcase(one, name)}
    if not matches:
        raise PlanError(f"{key}: {name!r} {nearest(name, names, specs.ties, tuple(specs.roles))}")
    return matches
