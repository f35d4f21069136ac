"""Code blocks of pages, run as a reader runs them: from top to bottom in one directory."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from forge_core.config.layers import PRESETS, load_layers
from forge_core.config.validation import walk
from forge_core.errors import ForgeError
from forge_core.registry import Registry
from forge_train import cli
from forge_train.commands.options import OverridesCommand
from forge_train.recipe.schema import Job

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"# ([\w.-]+\.(?:py|toml))\n")
"""First line of a block that is a file."""
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def lines_of_shell(text: str) -> Iterator[str]:
    """Yields the commands of a block, without what it writes into files."""
    ends = None
    for line in text.replace("\\\n", " ").splitlines():
        if ends is None:
            yield line
            started = re.search(r"<<'?(\w+)'?", line)
            ends = started[1] if started else None
        elif line == ends:
            ends = None


PREFIXES = {("forge-train",): [], ("-m", "forge_train"): [], ("-m", "forge_data"): ["data"], ("-m", "forge_ckpt"): ["ckpt"]}
"""How a line calls forge-train -> the first words of the call."""


def calls(text: str) -> Iterator[list[str]]:
    """Yields the words of every call of forge-train in a block, up to what the shell takes."""
    for line in lines_of_shell(text):
        lexer = shlex.shlex(line.partition(" #")[0].replace(" 2>", " >"), posix=True, punctuation_chars=True)
        lexer.whitespace_split, lexer.commenters = True, ""
        command: list[str] = []
        for word in [*lexer, ";"]:
            if not word or set(word) - set("();<>|&"):
                command.append(word)
                continue
            for prefix, first in PREFIXES.items():
                starts = [at for at in range(len(command)) if tuple(command[at : at + len(prefix)]) == prefix]
                if starts and command[0] not in ("command", "which", "echo"):
                    yield [*first, *command[starts[0] + len(prefix) :]]
            command = ["#"] if set(word) & set("<>") else []  # a file, which is no command


def parse(call: Sequence[str]) -> None:
    """Parses a call without running it; a call with variables of the shell is not parsed.

    Raises:
        UsageError: an option does not exist, or an argument is missing.
        ForgeError: there is no such command, or an override is no key of a recipe.
    """
    name, *arguments = call
    if name.startswith("-") or "--help" in arguments or any(word.startswith("$") for word in arguments):
        return
    registry = Registry()
    command: Any = cli.command(registry.find(cli.GROUP, name), registry)
    if hasattr(command, "commands"):
        named = name == "skills" and arguments and not arguments[0].startswith("-")
        sub = arguments.pop(0) if arguments and arguments[0] in command.commands else "show" if named else "list"
        name, command = sub, command.commands[sub]
    context = command.make_context(name, list(arguments))
    recipe = context.params.get("recipe")
    if isinstance(command, OverridesCommand) and recipe in registry.names(PRESETS):
        overrides = [word for word in context.args if re.match(r"--\w+\.\S+=", word)]
        outcome = walk(Job, load_layers(recipe, overrides, Job, registry).tree, registry)
        if unknown := [fault.key for fault in outcome.faults if fault.message == "unknown key"]:
            raise ForgeError(f"{' '.join(call)}: {', '.join(unknown)} are no keys of the recipe")


def script_of(page: Path) -> str:
    """Shell that writes the files of a page where their blocks stand, and runs its shell and Python blocks in their order."""
    parts = []
    for number, (language, text) in enumerate(BLOCK.findall(page.read_text())):
        if named := NAMED.match(text):
            parts.append(f"cat > {named[1]} <<'FORGE_PAGE'\n{text}FORGE_PAGE\n")
        elif language == "python":
            parts.append(f"cat > block_{number}.py <<'FORGE_PAGE'\n{text}FORGE_PAGE\npython block_{number}.py\n")
        elif language == "bash":
            parts.append(text)
    return "".join(parts)


def run_shell(commands: str, directory: Path, programs: Path | None = None) -> str:
    """Runs commands in one shell, so that what a reader would set stays set; returns what they printed.

    Args:
        commands: the commands.
        directory: where they run.
        programs: folder of programs that are found before all others.

    Raises:
        AssertionError: a command failed; has the ends of both outputs.
    """
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([*([str(programs)] if programs else []), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "NO_COLOR": "1",
    }
    done = subprocess.run(
        ["bash", "-euxo", "pipefail", "-c", commands],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout
