"""`ckpt ls | show | verify | diff | prune | average | convert`: inspect, verify, compare, thin out and average checkpoints."""

import typer

from forge_ckpt.commands.average import average
from forge_ckpt.commands.convert import convert
from forge_ckpt.commands.diff import diff
from forge_ckpt.commands.look import list_, show, verify
from forge_ckpt.commands.prune import prune

app = typer.Typer(name="ckpt", help="Inspect, verify and compare checkpoints.", no_args_is_help=True, add_completion=False)
app.command("ls")(list_)
app.command("list", hidden=True)(list_)
for function in (show, verify, diff, prune, average):
    app.command()(function)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, add_help_option=False)(convert)
