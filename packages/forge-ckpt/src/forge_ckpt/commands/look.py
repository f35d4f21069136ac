"""`ckpt ls | show | verify`: look at checkpoints; nothing is changed."""

import json
from typing import Any

import typer

from forge_ckpt.commands.arguments import AsJson, Directory, Foreign, Step, manifest_of, named, opened, read_manifest, refuse
from forge_core.errors import CheckpointError


def list_(directory: Directory, as_json: AsJson = False, foreign: Foreign = False) -> None:
    """List every checkpoint of a directory, newest first; lengths and manifests are checked, contents are not."""
    store, rows = opened(directory, foreign)[0], []
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


def show(directory: Directory, step: Step = None, as_json: AsJson = False, foreign: Foreign = False) -> None:
    """Show the tensors of one checkpoint and the trainer's metadata."""
    store, only = opened(directory, foreign)
    from forge_ckpt.errors import Damaged

    try:
        name, manifest = read_manifest(store, step or only)
    except Damaged as cause:
        refuse(cause)
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


def verify(directory: Directory, step: Step = None, as_json: AsJson = False, foreign: Foreign = False) -> None:
    """Read every byte of one checkpoint and compare it with its checksums; exit code 1 when it is damaged."""
    store, only = opened(directory, foreign)
    from forge_ckpt.errors import Damaged
    from forge_ckpt.ranks.world import SingleProcessWorld
    from forge_ckpt.store.verify import agreed_fault

    name, manifest = named(store, step or only), None
    try:
        manifest = manifest_of(store, name)
        fault = agreed_fault(store, name, manifest, SingleProcessWorld())
        reason = f"{store.root}/{name} is damaged: {fault}"
    except Damaged as cause:
        fault = reason = str(cause)
    result = {"name": name, "verified": fault is None, "bytes": manifest.bytes if manifest else None, "reason": fault}
    if as_json:
        typer.echo(json.dumps(result, indent=2))
    elif fault is None and manifest:
        typer.echo(f"{name} is verified: {manifest.bytes:,} bytes in {len(manifest.tensors)} tensors")
    else:
        typer.echo(reason, err=True)
    if fault:
        raise typer.Exit(1)
