"""The option `--trust-code` of every command (`forge_core.trust`)."""

from typing import Annotated, Any

import typer
from typer.main import get_command

from forge_core.trust import OPTION, trust_digest


def with_option(command: Any) -> Any:
    """A command of typer, and all commands below it, with the option `--trust-code`. Returns the command.

    It is added in one place, since every command may open what others wrote.
    """
    app = typer.Typer(add_completion=False)
    app.command()(_option)
    option = next(item for item in get_command(app).params if OPTION in item.opts)
    option.expose_value = False
    waiting = [command]
    while waiting:
        item = waiting.pop()
        below = list(getattr(item, "commands", {}).values())
        waiting += below
        if not below and not any(OPTION in known.opts for known in item.params):
            item.params.append(option)
    return command


def _grant(digests: list[str] | None) -> None:
    for digest in digests or ():
        trust_digest(digest)


def _option(
    trust_code: Annotated[
        list[str] | None,
        typer.Option(
            OPTION,
            metavar="SHA256",
            callback=_grant,
            show_default=False,
            help="Run the Python file with this sha256 that stored data name; may be given several times.",
        ),
    ] = None,
) -> None:
    """Carries the option."""
