"""`forge-train data ...`, also as `python -m forge_data ...`: prepare, inspect, verify."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import typer

from forge_core.errors import DataError

app = typer.Typer(name="data", help="Prepare, look at and check training data.", no_args_is_help=True)

AsJson = Annotated[bool, typer.Option("--json", help="Answer as JSON.")]


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def prepare(
    context: typer.Context,
    recipe: Annotated[str | None, typer.Argument(help="A recipe whose text is tokenised, as its run would do.")] = None,
    source: Annotated[Literal["text", "stdlib"], typer.Option(help="Without a recipe: where text comes from.")] = "text",
    path: Annotated[str | None, typer.Option(help="Text file, directory or pattern, for source text.")] = None,
    out: Annotated[Path | None, typer.Option(help="Directory of the new store.")] = None,
    tokenizer: Annotated[str, typer.Option(help="`bpe`, `bytes`, or a tokenizer.json to load.")] = "bpe",
    vocab_size: Annotated[int, typer.Option(min=257, help="Largest vocabulary of a trained tokenizer.")] = 4096,
    split: Annotated[
        Literal["all", "train", "held_out"] | None, typer.Option(help="Files to take, by a hash of their path.")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Threads; the result does not depend on it.")] = None,
    as_json: AsJson = False,
) -> None:
    """Tokenise text into a token store: for RECIPE, or from --path to --out."""
    from forge_data import preparing

    say = _say(as_json)
    if recipe is not None and recipe.startswith("-"):
        raise DataError(f"unknown option {recipe}; see `data prepare --help`")
    if recipe is not None:
        if path is not None or out is not None:
            raise DataError("give a recipe, or --path and --out, not both")
        _answer(preparing.recipe(recipe, context.args, say), as_json)
        return
    if context.args:
        raise DataError(f"unknown arguments: {' '.join(context.args)}; see `data prepare --help`")
    if out is None:
        raise DataError("say where the store goes: --out DIRECTORY (or give a recipe)")
    found = preparing.standalone(source, path, out, tokenizer, vocab_size, split, workers, say)
    _answer(found, as_json)


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(help="A token store or a file of tokens.", show_default=False)],
    dtype: Annotated[str | None, typer.Option(help="Of a raw file: it is never guessed.")] = None,
    eos: Annotated[int | None, typer.Option(help="Of a file of tokens: the id that ends a document.")] = None,
    as_json: AsJson = False,
) -> None:
    """Format, dtype, documents, tokens, lengths of documents, and a sample."""
    from forge_data.inspecting import as_text
    from forge_data.inspecting import inspect as look

    found = look(path, dtype, eos)
    typer.echo(json.dumps(found) if as_json else as_text(found))


@app.command()
def verify(
    path: Annotated[Path, typer.Argument(help="A token store.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Read every byte of a store and compare it with the manifest."""
    from forge_data.sources.store import StoreSource

    store = StoreSource(path)
    faults = store.verify()
    if as_json:
        typer.echo(json.dumps({"path": str(path), "tokens": store.tokens, "faults": faults}))
    if faults:
        raise DataError("\n".join([f"{path} is damaged:", *(f"  {fault}" for fault in faults), "write the store again"]))
    if not as_json:
        typer.echo(f"{path}: {store.tokens:,} tokens in {len(store.manifest.shards)} shards are as the manifest says")


def _say(as_json: bool) -> Callable[[str], None]:
    def say(message: str) -> None:
        typer.echo(message, err=as_json)

    return say


def _answer(found: dict[str, object], as_json: bool) -> None:
    typer.echo(json.dumps(found) if as_json else "\n".join(f"{key}: {value}" for key, value in found.items()))
