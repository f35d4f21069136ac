"""`python -m forge_data`: the commands of this distribution without the trainer."""

import sys

from typer.main import get_command

from forge_core.errors import ForgeError
from forge_core.terminal import Console
from forge_core.trust import with_trust_option
from forge_data.commands.cli import app


def main(arguments: list[str] | None = None) -> int:
    """Runs a command, by default the one on the command line. Errors of Forge are printed without a traceback.

    Returns:
        The exit code of the process.
    """
    try:
        with_trust_option(get_command(app)).main(arguments, prog_name="python -m forge_data")
    except ForgeError as error:
        return Console(as_json="--json" in (sys.argv if arguments is None else arguments)).error(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
