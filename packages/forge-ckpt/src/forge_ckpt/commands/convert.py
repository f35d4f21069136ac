"""`ckpt convert`: the command `convert` of forge-train, where that is installed."""

import typer

from forge_ckpt.commands.arguments import refuse
from forge_core.errors import ForgeError


def convert(context: typer.Context) -> None:
    """Convert weights to another format: --from hf --to forge SOURCE TARGET. The command `convert` of forge-train."""
    from typer.main import get_command

    from forge_core.registry import Registry

    try:
        loaded = Registry().load("forge.commands", "convert")
    except ForgeError as cause:
        refuse(cause)
    command = typer.Typer(add_completion=False, rich_markup_mode=None)
    command.command("convert")(loaded)
    try:
        code = get_command(command).main(args=list(context.args), prog_name="ckpt convert", standalone_mode=False)
    except ForgeError as cause:
        refuse(cause)
    raise typer.Exit(code if isinstance(code, int) else 0)
