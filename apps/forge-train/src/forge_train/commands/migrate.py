"""`forge-train migrate FILE`: writes a recipe from a configuration of another framework, and accounts for its keys. No torch."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from forge_core.terminal import Console
    from forge_train.migration.engine import KeyOutcome, Migration


def migrate(
    file: Annotated[Path, typer.Argument(help="TOML, Python, shell script, argument file, YAML or JSON.", show_default=False)],
    from_: Annotated[
        str | None,
        typer.Option("--from", help="kempnerforge, torchtitan, megatron, nanogpt or trainer. Default: recognized by its keys."),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Write the recipe to this file instead of standard output.")] = None,
    world: Annotated[
        int | None,
        typer.Option("--world", min=1, help="Number of processes of the run. Default: what the file says."),
    ] = None,
    function: Annotated[
        str | None, typer.Option("--function", help="The function of a torchtitan Python file that returns the configuration.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file of --out.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")] = False,
) -> None:
    """Write a recipe from a configuration of another framework, and list what became of each key.

    Reads KempnerForge TOML, torchtitan TOML and Python, Megatron-LM arguments in scripts and YAML, nanoGPT configurations, and
    TrainingArguments of transformers. No code of the file is executed: values that are not literal are listed as not read.

    Keys without counterpart, keys whose meaning differs, and unknown keys are listed with the reason or what to do instead. The
    recipe is checked; faults that remain are listed as well.

    Examples: forge-train migrate train_gpt2.py --out gpt2.toml
    forge-train migrate pretrain.sh --from megatron --world 64 --out recipe.toml
    """
    from forge_core.config.toml import shown_path
    from forge_core.errors import ForgeError
    from forge_core.files import replace_file
    from forge_core.terminal import Console
    from forge_train.migration.engine import Migration
    from forge_train.migration.formats import read_source
    from forge_train.migration.writer import recipe_text

    console = Console(as_json=as_json)
    if force and out is None:
        raise ForgeError("--force replaces the file of --out; add --out, or remove --force")
    if out is not None:
        if out.is_dir():
            raise ForgeError(f"--out {out} is a directory; name a file such as {out / 'recipe.toml'}")
        if out.exists() and not force:
            raise ForgeError(f"--out {out} exists; choose another name, or add --force to replace it")
    framework, source = read_source(file, from_, function)
    migration = Migration(framework, source, world)
    try:
        migration.run()
    except ForgeError as error:
        raise ForgeError(f"{shown_path(file)}: {error}") from error
    text = recipe_text(migration, file.name)
    faults, warnings = _checked(text, migration)
    if out is not None:
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            replace_file(out, text.encode())
        except OSError as cause:
            raise ForgeError(f"the recipe cannot be written to {out}: {cause.strerror}; choose another --out") from cause
    if as_json:
        console.document(_document(migration, text, faults, warnings, out))
        return
    if out is None:
        console.text(text.rstrip("\n"))
    _report(migration, faults, warnings, console, out)


def _checked(text: str, migration: "Migration") -> tuple[list[str], list[str]]:
    """Returns the faults and warnings of the recipe, for the number of processes that it was written for."""
    import tomllib

    from forge_core.config.tree import Table, build
    from forge_core.errors import ConfigError, ForgeError
    from forge_train.migration.concepts import world_of
    from forge_train.recipe.load import load_recipe

    tree = build(tomllib.loads(text), (), lambda _: "recipe", Path.cwd())
    assert isinstance(tree, Table)
    try:
        return [], list(load_recipe(tree, (), world_of(migration), None, here=None).warnings)
    except ConfigError as error:
        open_keys = {blank.path for blank in migration.blanks}
        return [str(fault) for fault in error.faults if fault.key not in open_keys], []
    except ForgeError as error:
        return [str(error)], []


_HEADS = {
    "converted": "Translated with another meaning",
    "cannot": "Not written: Forge has no such value",
    "without": "Without counterpart",
    "unknown": "Unknown keys",
    "unread": "Not read, because code is not executed",
}


def _report(migration: "Migration", faults: list[str], warnings: list[str], console: "Console", out: Path | None) -> None:
    say = console.text if out is not None else console.note
    title = migration.framework.title
    say(f"{title}: {len(migration.source.settings)} keys" + (f", written to {out}" if out is not None else ""))
    translated = migration.of("translated")
    say(f"\nTranslated ({len(translated)})")
    for outcome in translated:
        say(f"  {_line(outcome)}")
    for kind, head in _HEADS.items():
        outcomes = migration.of(kind)  # pyright: ignore[reportArgumentType]
        if outcomes:
            say(f"\n{head} ({len(outcomes)})")
            for outcome in outcomes:
                say(f"  {_line(outcome)}")
    assumed = [outcome for outcome in migration.of("default") if outcome.note]
    if assumed:
        say(f"\nDefaults of {title} with another meaning ({len(assumed)})")
        for outcome in assumed:
            say(f"  {_line(outcome)}")
    if migration.blanks:
        say(f"\nTo fill in ({len(migration.blanks)})")
        for blank in migration.blanks:
            say(f"  {blank.path}: {blank.what}")
    for warning in warnings:
        say(f"\nwarning: {warning}")
    if faults:
        say(f"\nforge-train check finds {len(faults)} fault{'s' if len(faults) != 1 else ''} in the recipe:")
        for fault in faults:
            say(f"  {fault}")
    else:
        say("\nforge-train check finds no fault in the recipe" + (", but keys are to be filled in" if migration.blanks else ""))


def _line(outcome: "KeyOutcome") -> str:
    from forge_train.migration.engine import shown

    text = outcome.key if outcome.kind == "unread" else f"{outcome.key} = {shown(outcome.value)}"
    if outcome.line is not None and outcome.kind in ("unknown", "unread"):
        text += f" (line {outcome.line})"
    if outcome.to:
        text += f" -> {outcome.to} = {shown(outcome.result)}"
    return f"{text}: {outcome.note}" if outcome.note else text


def _document(migration: "Migration", text: str, faults: list[str], warnings: list[str], out: Path | None) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "framework": migration.framework.name,
        "out": None if out is None else str(out),
        "recipe": text,
        "keys": [asdict(outcome) for outcome in migration.of("translated", *_HEADS, "default")],  # pyright: ignore[reportArgumentType]
        "fill_in": [{"key": blank.path, "what": blank.what} for blank in migration.blanks],
        "faults": faults,
        "warnings": warnings,
    }
