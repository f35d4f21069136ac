"""`ckpt diff A B`: what differs between two checkpoints."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from forge_ckpt.commands.arguments import AsJson, Foreign, opened, read_manifest, refuse
from forge_core.errors import ForgeError

if TYPE_CHECKING:
    from forge_ckpt.offline.difference import CheckpointDifference

_SHOWN = 40


def diff(
    a: Annotated[
        str, typer.Argument(metavar="A", help="A run's directory, a directory of checkpoints, or one checkpoint; or its URL.")
    ],
    b: Annotated[str, typer.Argument(metavar="B", help="Another one.")],
    only_tensors: Annotated[bool, typer.Option("--only-tensors", help="Compare no metadata, such as the recipe.")] = False,
    as_json: AsJson = False,
    foreign: Foreign = False,
) -> None:
    """Compare two checkpoints: tensors, their values bit by bit, and metadata. Exit code 0 when equal, 1 when they differ."""
    from dataclasses import asdict, replace

    from forge_ckpt.offline.difference import ABSENT, difference
    from forge_ckpt.offline.stored import StoredTensors

    try:
        stores = [opened(path, foreign) for path in (a, b)]
        sides = [StoredTensors(store, read_manifest(store, name)[0]) for store, name in stores]
        found = difference(*sides)
    except ForgeError as cause:
        refuse(cause)
    if only_tensors:
        found = replace(found, facts={})
    if as_json:
        facts = {
            key: {side: value for side, value in zip("ab", pair, strict=True) if value is not ABSENT}
            for key, pair in found.facts.items()
        }
        values = [asdict(each) | {"share": each.share} for each in found.values]
        body = asdict(replace(found, facts={}, values=())) | {"values": values, "facts": facts}
        typer.echo(json.dumps({"a": sides[0].origin, "b": sides[1].origin, "same": found.none, **body}, indent=2))
    else:
        typer.echo(f"a: {sides[0].origin}\nb: {sides[1].origin}")
        for line in _lines(found):
            typer.echo(line)
    if not found.none:
        raise typer.Exit(1)


def _lines(found: "CheckpointDifference") -> list[str]:
    total = found.equal + len(found.values)
    lines = [f"only in {side}: {name}" for side, names in (("a", found.only_a), ("b", found.only_b)) for name in names]
    lines += [f"another form: {name}: {a} in a, {b} in b" for name, a, b in found.forms]
    lines = _cut(lines)
    if found.values:
        lines.append(f"{'tensor':<52} {'differ':>9} {'largest':>10} {'relative':>10}")
        worst = sorted(found.values, key=lambda each: (-each.relative, each.name))
        lines += _cut(
            [
                f"{each.name:<52} {each.share:>9.3%} {each.absolute:>10.3g} {each.relative:>10.3g}"
                + (f"  and {each.not_finite} not finite" if each.not_finite else "")
                for each in worst
            ]
        )
    lines.append(f"{found.equal} of {total} tensors of the same form are equal, bit by bit")
    lines += _cut([f"{key}: {a!r} in a, {b!r} in b" for key, (a, b) in sorted(found.facts.items())])
    return lines


def _cut(lines: list[str]) -> list[str]:
    more = len(lines) - _SHOWN
    return lines if more <= 0 else [*lines[:_SHOWN], f"and {more} more; --json has all"]
