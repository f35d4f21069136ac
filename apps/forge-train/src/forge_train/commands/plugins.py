"""`forge-train plugins list|show|doctor`: lists, shows and tests installed plugins."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from forge_core.plugins import KeyDescription
    from forge_core.terminal import Console

plugins = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="List installed plugins, show one, and test them.",
)

_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@plugins.command(name="list")
def list_(
    group: Annotated[str, typer.Argument(help="A group such as forge.optimizers or optimizers.", show_default=False)] = "",
    as_json: _Json = False,
) -> None:
    """List every plugin by group, with its distribution, without importing it."""
    from forge_core.registry import GROUPS, Registry
    from forge_core.terminal import Console

    console = Console(as_json=as_json)
    registry = Registry()
    chosen = [group if group.startswith("forge.") else f"forge.{group}"] if group else list(GROUPS)
    entries = [entry for name in chosen for entry in registry.of(name)]
    if as_json:
        console.document([{**entry.as_json(), "target": entry.target} for entry in entries])
        return
    rows = [(entry.group, entry.name, f"{entry.distribution} {entry.version}", entry.target) for entry in entries]
    console.table(("group", "name", "distribution", "target"), rows)


@plugins.command()
def show(
    name: Annotated[str, typer.Argument(help="A name such as adamw, dist:name, or ./mine.py:Thing with --group.")],
    group: Annotated[str, typer.Option("--group", help="Only this group.", show_default=False)] = "",
    as_json: _Json = False,
) -> None:
    """Show a plugin and its keys."""
    from forge_core.plugins import describe_plugin, find_everywhere
    from forge_core.registry import Registry
    from forge_core.terminal import Console

    console = Console(as_json=as_json)
    registry = Registry()
    found = [describe_plugin(entry, registry) for entry in find_everywhere(registry, name, group)]
    if as_json:
        console.document([item.as_json() for item in found])
        return
    for item in found:
        console.text(
            f"{item.entry.group} {item.entry.name}: {item.entry.distribution} {item.entry.version} ({item.entry.target})"
        )
        if item.doc:
            console.text(f"    {item.doc}")
        _list_keys(console, item.keys, "    ")


def _list_keys(console: "Console", keys: "Iterable[KeyDescription]", indent: str) -> None:
    for key in keys:
        default = f"; default {key.default}" if key.default is not None else ""
        console.text(f"{indent}{key.name}: {key.expected}{default}")
        if key.doc:
            console.text(f"{indent}    {key.doc}")
        _list_keys(console, key.keys, f"{indent}    ")


@plugins.command()
def doctor(
    name: Annotated[str, typer.Argument(help="Only plugins of this name, or of this distribution.", show_default=False)] = "",
    conform: Annotated[bool, typer.Option("--conform", help="Also run the conformance checks of each group.")] = False,
    as_json: _Json = False,
) -> None:
    """Load every plugin and report broken plugins, duplicate names and, with --conform, failed conformance checks."""
    from forge_core.conformance import examine
    from forge_core.machine import slow_bf16
    from forge_core.plugins import diagnose
    from forge_core.registry import GROUPS, Registry
    from forge_core.terminal import Console

    console = Console(as_json=as_json)
    registry = Registry()
    reports = diagnose(registry, name, conform=conform)
    wrong = sum(1 for report in reports if report.problems)
    sound = [report.entry for report in reports if not report.problems and GROUPS[report.entry.group].build is not None]
    verdicts = [examine(entry, registry) for entry in sound] if conform else []
    failed = sum(1 for verdict in verdicts if verdict.problems)
    if slow := slow_bf16():
        console.note(f"warning: {slow}; set precision.compute = 'fp32' to train on it")
    if as_json:
        documents = {report.entry: report.as_json() for report in reports}
        for verdict in verdicts:
            documents[verdict.entry] |= verdict.as_json()
        console.document({"ok": not wrong and not failed, "plugins": list(documents.values())})
    else:
        for report in reports:
            for problem in report.problems:
                console.text(f"{report.entry.group} {report.entry.qualified}: {problem}")
        for verdict in verdicts:
            for line in verdict.lines():
                console.text(line)
        console.text(f"{len(reports)} plugins, {wrong} with problems" + (f", {failed} do not conform" if conform else ""))
    if wrong or failed:
        raise typer.Exit(2 if wrong else 1)
