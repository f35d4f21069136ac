"""`forge-train data ...`, also as `python -m forge_data ...`: prepare, inspect, verify."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import typer

from forge_core.errors import DataError

app = typer.Typer(name="data", help="Prepare, look at and check training data.", no_args_is_help=True)

AsJson = Annotated[bool, typer.Option("--json", help="Answer as JSON.")]


@app.command()
def prepare(
    out: Annotated[Path, typer.Option(help="Directory of the new store.", show_default=False)],
    source: Annotated[Literal["text", "stdlib"], typer.Option(help="Where text comes from.")] = "text",
    path: Annotated[str | None, typer.Option(help="Text file, directory or pattern, for source text.")] = None,
    tokenizer: Annotated[str, typer.Option(help="`bpe`, `bytes`, or a tokenizer.json to load.")] = "bpe",
    vocab_size: Annotated[int, typer.Option(min=257, help="Largest vocabulary of a trained tokenizer.")] = 4096,
    split: Annotated[
        Literal["all", "train", "held_out"] | None, typer.Option(help="Files to take, by a hash of their path.")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Threads; the result does not depend on it.")] = None,
    as_json: AsJson = False,
) -> None:
    """Tokenise text into a token store. (`forge-train prepare RECIPE` does it for a recipe.)"""
    from forge_data import preparing

    found = preparing.prepare(source, path, out, tokenizer, vocab_size, split, workers, _say(as_json))
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
