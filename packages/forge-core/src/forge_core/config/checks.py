"""Runs the rules across sections: every function of the group `forge.checks`, on (job, layout)."""

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from forge_core.config.tree import Table, origin_at
from forge_core.errors import BrokenPlugin, Fault
from forge_core.layout import Layout
from forge_core.registry import Entry, Registry, canonical

GROUP = "forge.checks"


def run_checks(
    job: Any, layout: Layout, registry: Registry, tree: Table, used: Iterable[tuple[str, str]] = ()
) -> tuple[list[Fault], list[str]]:
    """What the rules say about a recipe that is right in itself.

    A check that cannot run stops the recipe only when its distribution also offers something that the recipe uses:
    a stranger's broken package must not stop a run that does not ask for it.

    Args:
        job: the typed recipe.
        layout: of the world that it is meant for.
        registry: where the checks are found.
        tree: the resolved tree; gives faults their origins.
        used: (group, name) of the chosen components.

    Returns:
        (faults, warnings about checks that could not run).
    """
    asked = {canonical(registry.find(group, name).distribution) for group, name in used}
    faults: list[Fault] = []
    warnings: list[str] = []
    for entry in registry.of(GROUP):
        try:
            faults += [_placed(fault, tree) for fault in _run(entry, job, layout, registry)]
        except BrokenPlugin as error:
            if canonical(entry.distribution) in asked:
                faults.append(Fault(entry.qualified, str(error)))
            else:
                warnings.append(str(error))
    return faults, warnings


def _run(entry: Entry, job: Any, layout: Layout, registry: Registry) -> list[Fault]:
    check = registry.load_entry(entry)
    try:
        return list(check(job, layout))
    except Exception as cause:  # whatever a stranger's rule raises; the caller decides what it stops
        whose = f"check {entry.name!r} of {entry.distribution} {entry.version} ({entry.target})"
        raise BrokenPlugin(f"{whose} failed: {type(cause).__name__}: {cause}") from cause


def _placed(fault: Fault, tree: Table) -> Fault:
    key = re.sub(r"\[(\d+)\]", r".\1", fault.key)  # `hooks[0]` is `hooks.0`, as overrides write it
    return replace(fault, key=key, origin=fault.origin or origin_at(tree, key))
