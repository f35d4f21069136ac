"""Compares the recipe in a checkpoint with the recipe of a resume, key by key.

The class of a key says what a resume does with a different value (`forge_core.component.KeyClass`). Differences that change the
trained function are refused unless `checkpoint.allow` names the key; all other differences are listed once.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_ckpt.checkpoint.read import VerifiedCheckpoint
from forge_core.component import KeyClass
from forge_core.config.changes import Change, changes, class_of, keys_of, vanished
from forge_core.config.toml import value_text
from forge_core.config.tree import Table, build, join, origin_at
from forge_core.config.validation import Resolution, walk
from forge_core.errors import CheckpointError, ConfigError, DataError, Fault, did_you_mean
from forge_core.protocols.data import Stream
from forge_core.registry import Registry, canonical, home_of
from forge_train.recipe.load import without_auto
from forge_train.recipe.schema import Job

if TYPE_CHECKING:
    from forge_train.recipe.load import Recipe


@dataclass(frozen=True)
class RecipeDifferences:
    """Differences between a checkpoint and the recipe of a resume, one line each.

    Attributes:
        anchored: differences in values that a resume can never change.
        refused: differences that are not allowed, by key.
        noted: all other differences.
    """

    anchored: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    noted: tuple[str, ...] = ()


def anchors(job: Job) -> dict[str, int]:
    """Returns the values that cannot change between stop and resume, unlike the number of ranks and the micro-batch size."""
    return {"train.global_batch": job.train.global_batch, "data.sequence_length": job.data.sequence_length}


def check_resume(found: VerifiedCheckpoint, recipe: "Recipe", registry: Registry, data: Stream) -> tuple[str, ...]:
    """Compares a checkpoint with the recipe, components and data position of a resume; returns the allowed differences.

    Raises:
        ConfigError: an entry of `checkpoint.allow` is not a key.
        CheckpointError: a difference changes what is trained; the message lists all such differences.
    """
    compared = compare_recipes(found.meta, recipe, registry)
    faults, ways = [*compared.anchored, *compared.refused.values()], ["restore the values"]
    if not compared.anchored:  # else the data position is already known to differ
        try:
            data.from_cursor(found.meta["cursor"])
        except DataError as cause:
            faults.append(str(cause))
    if not faults:
        return compared.noted
    if compared.refused:
        keys = list(compared.refused)
        one = f"--checkpoint.allow={keys[0]}" if len(keys) == 1 else f"checkpoint.allow = {value_text(keys)}"
        ways.append(f"allow the differences by name: {one}")
    listed = "\n  ".join(faults)
    raise CheckpointError(
        f"{found.name} was trained with other values; resuming would not continue the same run:\n  {listed}\n"
        f"{'; '.join(ways).capitalize()}; start over with --fresh; or use another job.name"
    )


def check_without_checkpoint(recipe: "Recipe") -> tuple[str, ...]:
    """Checks `checkpoint.allow` if there is no checkpoint; returns no differences.

    Raises:
        ConfigError: an entry of `checkpoint.allow` is not a key.
    """
    _refuse_unknown(recipe, keys_of(recipe.outcome))
    return ()


def compare_recipes(meta: Mapping[str, Any], recipe: "Recipe", registry: Registry) -> RecipeDifferences:
    """Compares the metadata of a checkpoint with a recipe. A checkpoint without a recipe is accepted with a note.

    Raises:
        ConfigError: an entry of `checkpoint.allow` is not a key.
    """
    old = dict(meta.get("anchors", {}))
    fixed = {key: (old.get(key), value) for key, value in anchors(recipe.job).items() if old.get(key) != value}
    anchored = tuple(
        f"{key} was {was}, is {now}: the data position would refer to other samples" for key, (was, now) in fixed.items()
    )
    config = meta.get("config")
    if not isinstance(config, Mapping):
        return RecipeDifferences(anchored, {}, ("the checkpoint has no recipe: nothing else was compared",))
    tree = build(dict(config), (), lambda _: "checkpoint", Path.cwd())
    assert isinstance(tree, Table)
    tree = without_auto(tree, meta.get("reduce"))
    before, now = walk(Job, tree, registry), recipe.outcome
    gone = vanished(tree, before)
    found = {change.key: change for change in _other_distributions(meta, now, before, registry)}
    found |= {change.key: change for change in changes(before, now, registry) if change.key not in fixed}
    # Keys that an earlier start allowed may no longer exist in the recipe or in the checkpoint.
    earlier = allowed_keys(config.get("checkpoint", {}).get("allow", ()))
    _refuse_unknown(recipe, {*keys_of(now), *keys_of(before), *gone, *found, *earlier})
    allowed = allowed_keys(recipe.job.checkpoint.allow)
    stopped = {key: change for key, change in found.items() if change.key_class is KeyClass.IDENTITY and key not in allowed}
    noted = [str(change) for key, change in found.items() if key not in stopped and not key.startswith("checkpoint.allow")]
    noted += [f"{key} was {value!r}; this version does not have this key" for key, value in gone.items()]
    return RecipeDifferences(
        anchored, {key: str(change) for key, change in stopped.items()}, (*noted, *_other_versions(meta, recipe, registry))
    )


def allowed_keys(allow: Any) -> tuple[str, ...]:
    """Returns `checkpoint.allow` as a tuple."""
    return (allow,) if isinstance(allow, str) else tuple(allow)


def _refuse_unknown(recipe: "Recipe", known: Collection[str]) -> None:
    """Raises a ConfigError that lists each entry of `checkpoint.allow` that is not a key."""
    origin = origin_at(recipe.tree, "checkpoint.allow")
    unknown = [key for key in allowed_keys(recipe.job.checkpoint.allow) if key not in known]
    message = "{!r} is not a key of this recipe, nor of the checkpoint"
    if unknown:
        raise ConfigError(
            Fault("checkpoint.allow", message.format(key), origin, did_you_mean(key, sorted(known))) for key in unknown
        )


def _other_distributions(meta: Mapping[str, Any], now: Resolution, before: Resolution, registry: Registry) -> list[Change]:
    """Returns components that have the same name as before but come from a different distribution."""
    recorded = {(item["group"], item["name"]): item["distribution"] for item in meta.get("plugins", ())}
    found = []
    for table, (group, name) in now.chosen.items():
        entry = registry.find(group, name)
        old_group, old_name = before.chosen.get(table, ("", ""))
        distribution, _, bare = ("", "", old_name) if ".py:" in old_name else old_name.rpartition(":")
        was = home_of(group, bare, distribution or recorded.get((group, bare), entry.distribution))
        if (old_group, bare) == (group, entry.name) and canonical(was) != canonical(entry.distribution):
            key = join(table, "name")
            found.append(Change(key, f"{was}:{bare}", entry.qualified, class_of(key, before, now, registry)))
    return found


def _other_versions(meta: Mapping[str, Any], recipe: "Recipe", registry: Registry) -> list[str]:
    """Returns the distributions and files whose version has changed; files of one name are compared together."""
    old: dict[str, set[str]] = {}
    new: dict[str, set[str]] = {}
    for versions, items in ((old, meta.get("plugins", ())), (new, registry.used(recipe.used))):
        for item in items:
            versions.setdefault(item["distribution"], set()).add(item["version"])
    return [
        f"{name} was {' and '.join(sorted(old[name]))}, is {' and '.join(sorted(versions))}"
        for name, versions in new.items()
        if old.get(name, versions) != versions
    ]
