"""Runs the rules across sections: every function of the group `forge.checks`, on (job, layout)."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from forge_core.config.tree import Table, origin_at
from forge_core.errors import Absent, BrokenPlugin, Caution, Fault
from forge_core.layout import Layout
from forge_core.protocols.job import Job
from forge_core.registry import Entry, Registry, canonical

GROUP = "forge.checks"


class _Missing(Exception):
    """A check needs a section that is invalid and has already been reported."""


class Parts:
    """The valid fields of a recipe or section that has faults; a check that reads another field ends there."""

    def __init__(self, parts: Mapping[str, Any]) -> None:
        self._parts = parts

    def has(self, names: Iterable[str]) -> bool:
        """Whether all of these fields are valid."""
        return set(names) <= self._parts.keys()

    def __getattr__(self, name: str) -> Any:
        try:
            return self._parts[name]
        except KeyError:
            raise _Missing(name) from None


def run_checks(
    job: Job | Parts,
    layout: Layout | None,
    registry: Registry,
    tree: Table,
    used: Iterable[tuple[str, str]] = (),
    here: bool | None = False,
) -> tuple[list[Fault], list[str]]:
    """What the rules say about a recipe, so that all its faults are told in one round: those of a check up to where it asks for
    something that is not right in itself.

    A check that cannot run stops the recipe only when its distribution also offers something that the recipe uses:
    an unrelated broken package must not stop a run that does not use it.

    Args:
        job: the typed recipe, or `Parts` of one.
        layout: of the world that it is meant for; None when its sizes do not fit.
        registry: where the checks are found.
        tree: the resolved tree; gives faults their origins.
        used: (group, name) of the chosen components.
        here: the run is to start on this machine, so files have to be there; None: it reads none of them, as a plan.

    Returns:
        (faults, warnings: what stops nothing, and checks that could not run).
    """
    asked = {canonical(registry.find(group, name).distribution) for group, name in used}
    faults: list[Fault] = []
    warnings: list[str] = []
    for entry in registry.of(GROUP):
        try:
            for found in _run(entry, job, layout, registry):
                if here is None and isinstance(found, Absent):
                    continue
                if isinstance(placed := _placed(found, tree), Caution) and not (here and isinstance(placed, Absent)):
                    warnings.append(str(placed))
                else:
                    faults.append(placed)
        except BrokenPlugin as error:
            if canonical(entry.distribution) in asked:
                faults.append(Fault(entry.qualified, str(error)))
            else:
                warnings.append(str(error))
    return faults, warnings


def _run(entry: Entry, job: Job | Parts, layout: Layout | None, registry: Registry) -> list[Fault]:
    check, found = registry.load_entry(entry), []
    try:
        for fault in check(job, Parts({}) if layout is None else layout):
            found.append(fault)  # noqa: PERF402 (those before the end of a check that cannot go on are kept)
        return found
    except _Missing:
        return found
    except Exception as cause:
        if isinstance(job, Parts):  # it met a section of which a part is missing; it runs again when the recipe is whole
            return found  # a plugin's rule may raise anything; the caller decides what it stops
        whose = f"check {entry.name!r} of {entry.distribution} {entry.version} ({entry.target})"
        raise BrokenPlugin(f"{whose} failed: {type(cause).__name__}: {cause}") from cause


def _placed(fault: Fault, tree: Table) -> Fault:
    key = re.sub(r"\[(\d+)\]", r".\1", fault.key)  # `hooks[0]` is `hooks.0`, as overrides write it
    return replace(fault, key=key, origin=fault.origin or origin_at(tree, key))
