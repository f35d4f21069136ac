"""The command `forge-train`: its subcommands are plugins of the group `forge.commands`.

A command's module is imported only when that command is invoked; `--help` reads the first line of docstrings from
source files. A command is a typer application or a plain function; a function that takes a `typer.Context` is given
what typer does not know as `context.args`: the overrides `--section.key=value`.
"""

import ast
import gc
import inspect
import os
import platform
import re
import sys
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from forge_core.errors import BrokenPlugin, ForgeError
from forge_core.registry import Entry, Registry
from forge_core.terminal import Console
from forge_core.trust import with_trust_option
from forge_train.commands.options import OverridesCommand

GROUP = "forge.commands"
COMPLETE = "_FORGE_TRAIN_COMPLETE"
"""Environment variable by which a shell asks what could follow."""
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Where a user sets the allocator of GPUs, under its names of today and before. torch reads them when it is imported."""


NATIVE_LOG = "TORCH_CPP_LOG_LEVEL"
"""What torch's C++ writes to the terminal, by its level; read when torch is imported. Its warnings of a lost connection are pages
of native frames in front of the one line in which Forge says which rank has ended."""

NOT_GIVEN = 2
"""Exit code without a command, as of every group of commands: a script that lost its arguments must not go on."""
FIRST = """\
Forge trains foundation models in plain PyTorch, from a laptop CPU to a cluster.

Three commands to begin with:
  forge-train run demo    Train a small model on real text: minutes on a CPU, no download.
  forge-train init        Write a recipe of your own, from five questions.
  forge-train doctor      Find what is missing, wrong or slow on this machine.

All commands: forge-train --help. Options of one: forge-train COMMAND --help."""
"""What `forge-train` alone prints."""

COLLECTIONS = (50_000, 20, 100)
"""Thresholds of the garbage collector. With Python's own (700 objects), a fifth of the time of a short command goes into looking
through modules that were just imported. Training collects between steps (`forge_train.run.loop`)."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs `forge-train`; a refusal is printed without a traceback and ends the process with its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given and COMPLETE not in os.environ:
        print(FIRST)
        sys.exit(NOT_GIVEN)
    before = gc.get_threshold()
    gc.set_threshold(*COLLECTIONS)
    if not any(name in os.environ for name in ALLOCATOR):
        os.environ[ALLOCATOR[0]] = "expandable_segments:True"  # less of a GPU's memory lies idle between tensors of odd sizes
    os.environ.setdefault(NATIVE_LOG, "ERROR")
    try:
        listing = not given or given[0].startswith("-") or COMPLETE in os.environ
        root(Registry(), listing=listing).main(args=given, prog_name="forge-train")
    except ForgeError as refusal:
        sys.exit(Console(as_json="--json" in given).error(refusal))
    finally:
        gc.set_threshold(*before)


def root(registry: Registry, listing: bool = True) -> TyperGroup:
    """The command with every registered subcommand, none of them imported.

    `listing` adds what only the list of commands needs: their summaries, and the options that install completion. A command that
    is invoked starts sooner without.
    """
    app = typer.Typer(cls=_Commands, add_completion=listing, no_args_is_help=True, rich_markup_mode=None)
    app.callback(help="Train foundation models: dense, mixture-of-experts and vision-language.")(_options)
    group = get_command(app)
    assert isinstance(group, _Commands)
    group.registry = registry
    for name in registry.names(GROUP):
        line = summary(registry.find(GROUP, name)) if listing else ""
        group.add_command(_placeholder(name, line), name)
    return group


class _Commands(TyperGroup):
    """Holds placeholders; the real command takes its place when it is invoked."""

    registry: Registry

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        claims = {entry.name for entry in self.registry.of(GROUP)} | set(self.registry.names(GROUP))
        if args and args[0] in claims:
            self.add_command(command(self.registry.find(GROUP, args[0]), self.registry), args[0])
        elif args and not args[0].startswith("-") and not ctx.resilient_parsing:
            self.registry.find(GROUP, args[0])  # raises: says what is near, or which package has the command
        return super().resolve_command(ctx, args)


def command(entry: Entry, registry: Registry) -> Any:
    """The command that an entry points at, imported.

    Raises:
        BrokenPlugin: it cannot be imported, or is neither a typer application nor a function.
    """
    loaded = registry.load_entry(entry)
    app = loaded
    if not isinstance(loaded, typer.Typer):
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        open_ended = any(
            item.annotation in (typer.Context, "typer.Context") for item in inspect.signature(loaded).parameters.values()
        )
        settings = {"allow_extra_args": True, "ignore_unknown_options": True} if open_ended else {}
        app.command(entry.name, cls=OverridesCommand if open_ended else None, context_settings=settings)(loaded)
    try:
        return with_trust_option(get_command(app))
    except Exception as cause:  # typer may raise anything about a plugin's signature
        raise BrokenPlugin(
            f"command {entry.name!r} of {entry.distribution} {entry.version} ({entry.target}) has a signature that typer "
            f"refuses: {type(cause).__name__}: {cause}"
        ) from cause


def summary(entry: Entry) -> str:
    """The first line of a command's docstring, its typer application's `help` or its module's docstring; imports nothing."""
    module, _, attribute = entry.target.partition(":")
    try:
        path = _source(module)
        doc = _documentation(path.read_text(encoding="utf-8"), attribute) if path is not None else ""
    except (OSError, SyntaxError, ValueError, ImportError):  # a broken command still has its place in the list
        doc = ""
    line = re.sub(r"^`.*?`: *", "", doc.strip().partition("\n")[0])  # module docstrings say how the command is called
    return line[:1].upper() + line[1:] or f"from {entry.distribution} {entry.version}"


def _documentation(source: str, name: str) -> str:
    """What a module says of `name`, a function or `typer.Typer(..., help="...")`; else what it says of itself.

    Only the statement that defines the name is parsed, up to the next line that begins at the margin: parsing the modules of all
    commands takes longer than the rest of `--help`. Where that is no statement, the module is parsed.

    Raises:
        SyntaxError: the module is no Python.
    """
    found = re.search(rf"^(?:def {name}\b|{name} = ).*\n(?:(?:[ )\]}}].*)?\n)*", source, re.MULTILINE)
    try:
        (item,) = ast.parse(found[0]).body if found else (None,)
    except (SyntaxError, ValueError):
        bodies = ast.parse(source).body
        item = next((each for each in bodies if isinstance(each, ast.FunctionDef) and each.name == name), None)
    if isinstance(item, ast.FunctionDef):
        doc = ast.get_docstring(item)
    else:
        call = item.value if isinstance(item, ast.Assign) else None
        words = call.keywords if isinstance(call, ast.Call) else []
        texts = [word.value.value for word in words if word.arg == "help" and isinstance(word.value, ast.Constant)]
        doc = next((text for text in texts if isinstance(text, str)), None)
    return doc or ast.get_docstring(ast.parse(source)) or ""


def _source(module: str) -> Path | None:
    """The source file of a dotted module; only its top-level package is looked up, nothing is imported."""
    top, *rest = module.split(".")
    spec = find_spec(top)
    if spec is None:
        return None
    if not rest:
        return Path(spec.origin) if spec.origin else None
    for folder in spec.submodule_search_locations or ():
        stem = Path(folder).joinpath(*rest)
        for path in (stem.with_suffix(".py"), stem / "__init__.py"):
            if path.is_file():
                return path
    return None


def _placeholder(name: str, line: str) -> Any:
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(name, help=line)(_nothing)
    return get_command(app)


def _nothing() -> None:
    """Stands for a command that was not imported."""


def _options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=lambda given: _version(given), help="Print versions and exit.")
    ] = False,
) -> None:
    """Options of the whole command."""


def _version(given: bool) -> None:
    """One line, without importing torch: `forge-train 2.0.0 (torch 2.13.0, Python 3.11.7)`."""
    if given:
        print(f"forge-train {version('forge-train')} (torch {version('torch')}, Python {platform.python_version()})")
        raise typer.Exit
