"""What the commands share: a path that means checkpoints, one of them by its step, and how a refusal is said."""

from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from forge_ckpt.errors import Damaged
from forge_core.errors import CheckpointError, ForgeError

if TYPE_CHECKING:
    from forge_ckpt.format.manifest import Manifest
    from forge_ckpt.saving.locate import AnyStore

Directory = Annotated[
    str, typer.Argument(metavar="DIR", help="A run's directory, a directory of checkpoints, or one checkpoint; or its URL.")
]
Step = Annotated[
    str | None, typer.Argument(metavar="[STEP]", help="A step or a name. Default: DIR itself, or the newest checkpoint in it.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Foreign = Annotated[bool, typer.Option("--foreign", help="Accept a directory that belongs to another user.")]


def opened(directory: str, foreign: bool) -> "tuple[AnyStore, str | None]":
    """The checkpoints that a path or URL means, and the name of the one that it is, where it is one."""
    from forge_ckpt.saving.locate import store_of

    try:
        return store_of(directory, foreign)
    except CheckpointError as cause:
        refuse(cause)


def named(store: "AnyStore", step: str | None) -> str:
    """The checkpoint that a step or a name means; the newest without one."""
    from forge_ckpt.ranks.world import SingleProcessWorld
    from forge_ckpt.saving.resume import resolve

    try:
        return resolve(store, int(step) if step is not None and step.isdecimal() else step, SingleProcessWorld())
    except ForgeError as cause:
        refuse(cause)
    except OSError as cause:
        refuse(CheckpointError(f"{store.root} cannot be read: {cause}"))


def manifest_of(store: "AnyStore", name: str) -> "Manifest":
    """The manifest of a checkpoint.

    Raises:
        Damaged: it is damaged; the message names the checkpoint.
    """
    from forge_ckpt.saving.locate import CheckpointLocation

    try:
        return CheckpointLocation(store, name, None).manifest()
    except Damaged:  # `verify` reports it as its result
        raise
    except ForgeError as cause:
        refuse(cause)
    except OSError as cause:
        refuse(CheckpointError(f"{store.root} cannot be read: {cause}"))


def read_manifest(store: "AnyStore", step: str | None) -> "tuple[str, Manifest]":
    """`named` and its `manifest_of`."""
    name = named(store, step)
    return name, manifest_of(store, name)


def refuse(cause: ForgeError) -> NoReturn:
    """Says it and ends with the code of the error."""
    typer.echo(f"error: {cause}", err=True)
    raise typer.Exit(cause.exit_code)
