"""`ckpt list | show | verify | convert`: inspect and verify checkpoints, and convert weights between formats."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from forge_core.errors import CheckpointError, ForgeError

if TYPE_CHECKING:
    from forge_ckpt.format.manifest import Manifest
    from forge_ckpt.store.store import LocalStore

app = typer.Typer(name="ckpt", help="Inspect and verify checkpoints.", no_args_is_help=True, add_completion=False)

Directory = Annotated[
    Path, typer.Argument(metavar="DIR", help="A run's directory, a directory of checkpoints, or one checkpoint.")
]
Step = Annotated[
    str | None, typer.Argument(metavar="[STEP]", help="A step or a name. Default: DIR itself, or the newest checkpoint in it.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Foreign = Annotated[bool, typer.Option("--foreign", help="Accept a directory that belongs to another user.")]


@app.command("list")
def list_(directory: Directory, as_json: AsJson = False, foreign: Foreign = False) -> None:
    """List every checkpoint of a directory, newest first; lengths and manifests are checked, contents are not."""
    store, rows = _open(directory, foreign)[0], []
    from forge_ckpt.format.names import DAMAGED, SUPERSEDED, committed
    from forge_ckpt.store.verify import open_manifest

    names = store.list()
    for entry in committed(names):
        row: dict[str, Any] = {"name": entry.name, "step": entry.step, "state": "complete"}
        try:
            manifest = open_manifest(store, entry.name)[0]
            row |= {"bytes": manifest.bytes, "tensors": len(manifest.tensors), "world": manifest.world}
        except (CheckpointError, OSError) as cause:
            row |= {"state": "unusable", "reason": str(cause)}
        rows.append(row)
    rows += [{"name": name, "state": "set aside"} for name in names if name.startswith((DAMAGED, SUPERSEDED))]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    if not rows:
        typer.echo(f"no checkpoints in {store.root}")
    for row in rows:
        held = f"{row['bytes']:>16,} bytes  {row['tensors']:>6} tensors  {row['world']:>4} ranks" if "bytes" in row else ""
        typer.echo(f"{row['name']:<24} {row['state']:<10} {held}{row.get('reason', '')}".rstrip())


@app.command()
def show(directory: Directory, step: Step = None, as_json: AsJson = False, foreign: Foreign = False) -> None:
    """Show the tensors of one checkpoint and the trainer's metadata."""
    store, only = _open(directory, foreign)
    from forge_ckpt.errors import Damaged

    try:
        name, manifest = _read(store, step or only)
    except Damaged as cause:
        _refuse(cause)
    _, borders = manifest.by_tensor
    pieces = (borders[1:] - borders[:-1]).tolist()
    if as_json:
        tensors = [
            {"name": info.name, "dtype": info.dtype, "shape": list(info.shape), "bytes": info.bytes, "pieces": count}
            for info, count in zip(manifest.tensors, pieces, strict=True)
        ]
        head = {"name": name, "step": manifest.step, "world": manifest.world, "generation": manifest.generation}
        typer.echo(json.dumps({**head, "bytes": manifest.bytes, "tensors": tensors, "meta": manifest.meta}, indent=2))
        return
    typer.echo(f"{name}: step {manifest.step}, {manifest.bytes:,} bytes, written by {manifest.world} ranks")
    for info, count in zip(manifest.tensors, pieces, strict=True):
        typer.echo(f"  {info.name:<60} {info.dtype:<10} {'x'.join(map(str, info.shape)) or 'scalar':<16} {count:>4} pieces")
    typer.echo("meta:\n" + json.dumps(manifest.meta, indent=2))


@app.command()
def verify(directory: Directory, step: Step = None, as_json: AsJson = False, foreign: Foreign = False) -> None:
    """Read every byte of one checkpoint and compare it with its checksums; exit code 1 when it is damaged."""
    store, only = _open(directory, foreign)
    step = step or only
    from forge_ckpt.errors import Damaged
    from forge_ckpt.ranks.world import SingleProcessWorld
    from forge_ckpt.store.verify import agreed_fault

    name, manifest, fault = step or "", None, None
    try:
        name, manifest = _read(store, step)
        fault = agreed_fault(store, name, manifest, SingleProcessWorld())
    except Damaged as cause:
        fault = str(cause)
    result = {"name": name, "verified": fault is None, "bytes": manifest.bytes if manifest else None, "reason": fault}
    if as_json:
        typer.echo(json.dumps(result, indent=2))
    elif fault is None and manifest:
        typer.echo(f"{name} is verified: {manifest.bytes:,} bytes in {len(manifest.tensors)} tensors")
    else:
        typer.echo(f"{name} is damaged: {fault}", err=True)
    if fault:
        raise typer.Exit(1)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)
def convert(context: typer.Context) -> None:
    """Convert weights to another format: --from hf --to forge SOURCE TARGET. The command `convert` of forge-train."""
    from typer.main import get_command

    from forge_core.registry import Registry

    try:
        loaded = Registry().load("forge.commands", "convert")
    except ForgeError as cause:
        _refuse(cause)
    command = typer.Typer(add_completion=False, rich_markup_mode=None)
    command.command("convert")(loaded)
    try:
        code = get_command(command).main(args=list(context.args), prog_name="ckpt convert", standalone_mode=False)
    except ForgeError as cause:
        _refuse(cause)
    raise typer.Exit(code if isinstance(code, int) else 0)


def _open(directory: Path, foreign: bool) -> "tuple[LocalStore, str | None]":
    """The checkpoints that a path means, and the name of the one that it is, where it is one."""
    from forge_ckpt.saving.locate import store_of
    from forge_ckpt.store.store import LocalStore

    try:
        store, name = store_of(directory)
    except CheckpointError as cause:
        _refuse(cause)
    return LocalStore(store, allow_foreign_owner=foreign), name


def _read(store: "LocalStore", step: str | None) -> "tuple[str, Manifest]":
    from forge_ckpt.errors import Damaged
    from forge_ckpt.ranks.world import SingleProcessWorld
    from forge_ckpt.saving.resume import resolve
    from forge_ckpt.store.verify import open_manifest

    try:
        name = resolve(store, int(step) if step is not None and step.isdecimal() else step, SingleProcessWorld())
        return name, open_manifest(store, name)[0]
    except Damaged:  # `verify` reports it as its result
        raise
    except ForgeError as cause:
        _refuse(cause)
    except OSError as cause:
        _refuse(CheckpointError(f"{store.root} cannot be read: {cause}"))


def _refuse(cause: ForgeError) -> NoReturn:
    typer.echo(f"error: {cause}", err=True)
    raise typer.Exit(cause.exit_code)
