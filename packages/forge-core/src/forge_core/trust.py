"""Controls which Python files may run as components (`./mine.py:Muon`).

A file runs if the user named it on the command line or in a recipe. Checkpoints, run directories and data folders can also name
files, which their authors chose. Such a file runs only if the user has trusted its sha256 after reading it:
`--trust-code SHA256`. Trust lasts for the process, like imported modules; a trusted sha256 also applies to child processes.
"""

import os
import re
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

from forge_core.errors import ForgeError, UntrustedCode

OPTION = "--trust-code"
GRANTED = "FORGE_TRUST_CODE"
"""Environment variable with the sha256 of every trusted content, separated by spaces."""

_files: set[Path] = set()


def trust_file(path: Path | str) -> None:
    """Trusts a file that the user named, with any content; a relative path starts at the working directory."""
    _files.add(Path(path).resolve())


def trust_name(name: str) -> None:
    """Trusts the file of a component that the user named as `./mine.py:Thing`; does nothing for other names."""
    file, _, attribute = name.rpartition(":")
    if file.endswith(".py") and attribute.isidentifier():
        trust_file(file)


def trust_digest(digest: str) -> None:
    """Trusts every file whose content has this sha256 (64 hexadecimal digits).

    Raises:
        ForgeError: `digest` is not a complete sha256.
    """
    if not re.fullmatch(r"[0-9a-fA-F]{64}", digest):
        raise ForgeError(f"{OPTION} {digest}: expected a complete sha256 (64 hexadecimal digits), as the error message prints it")
    os.environ[GRANTED] = " ".join({*_digests(), digest.lower()})


def trusted_content(path: Path, what: str) -> bytes:
    """Returns the content of a trusted file. Execute these bytes, because the file may change later.

    Args:
        path: the file.
        what: name of the component for messages.

    Raises:
        UntrustedCode: neither the file nor its content is trusted.
    """
    content = path.read_bytes()
    digest = sha256(content).hexdigest()
    if path.resolve() in _files or digest in _digests() or any(_same(file, content) for file in _files):
        return content
    other = f" ({OPTION} was given for other content)" if _digests() else ""
    raise UntrustedCode(
        f"{what} is Python code in {path}, sha256 {digest}. Stored data name it, not your recipe or command line, so it "
        f"does not run unasked{other}. Read the file; if you trust it, add {OPTION} {digest}"
    )


def _same(file: Path, content: bytes) -> bool:
    """Whether a file that the user named has this content, such as another copy of the same project."""
    try:
        return file.stat().st_size == len(content) and file.read_bytes() == content
    except OSError:
        return False


def _digests() -> list[str]:
    return os.environ.get(GRANTED, "").split()


def with_trust_option(command: Any) -> Any:
    """Adds the option `--trust-code` to a typer command and to all its subcommands. Returns the command.

    It is added to all commands in one place, because every command may open files of other authors.
    """
    import typer
    from typer.main import get_command

    def grant(digests: list[str] | None) -> None:
        for digest in digests or ():
            trust_digest(digest)

    help_text = "Allow stored data to run the Python file with this sha256; may be repeated."
    declaration = typer.Option(OPTION, metavar="SHA256", callback=grant, show_default=False, help=help_text)

    def carrier(trust_code: Annotated[list[str] | None, declaration] = None) -> None:
        """Carries the option."""

    app = typer.Typer(add_completion=False)
    app.command()(carrier)
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
