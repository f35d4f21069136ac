"""`forge-train data ...` and `python -m forge_data ...`: prepare, inspect, verify, convert, diff, decontaminate, mix, show."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from forge_core.errors import DataError

app = typer.Typer(name="data", help="Prepare, inspect and check training data.", no_args_is_help=True)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Where = Annotated[str, typer.Argument(help="A token store or token files: path, directory, pattern or URL.", show_default=False)]
Format = Annotated[
    Literal["store", "megatron", "llmc", "datatrove", "tokens"] | None,
    typer.Option("--format", help="Format. Default: detected from the files."),
]
Dtype = Annotated[str | None, typer.Option(help="Data type of raw files; it is never guessed.")]
Eos = Annotated[int | None, typer.Option(help="The id that ends a document, for raw files and .npy.")]
Bos = Annotated[int | None, typer.Option(help="The id that begins a document, for raw files, .npy and llm.c.")]
Vocabulary = Annotated[int | None, typer.Option(min=1, help="Vocabulary size; ids at or above it are faults.")]
Workers = Annotated[int | None, typer.Option(min=1, help="Workers, by default one per core; the result does not depend on it.")]


@app.command()
def prepare(
    out: Annotated[Path, typer.Option(help="Directory of the new store.", show_default=False)],
    source: Annotated[
        Literal["text", "stdlib", "jsonl", "parquet", "arrow", "huggingface", "chat"] | None,
        typer.Option(help="Format of the files. Default: detected from their names. `chat`: conversations, of any format."),
    ] = None,
    path: Annotated[str | None, typer.Option(help="File, directory, pattern, URL, or name of a dataset.")] = None,
    tokenizer: Annotated[
        str, typer.Option(help="`bpe` (trained), `bytes`, `tiktoken:NAME`, a tokenizer.json, or a sentencepiece .model.")
    ] = "bpe",
    vocab_size: Annotated[int, typer.Option(min=257, help="Largest vocabulary of a trained tokenizer.")] = 4096,
    eos: Annotated[str | None, typer.Option(help="The token that ends a document; for records of ids, its id.")] = None,
    text: Annotated[str | None, typer.Option(help="Field or column of the text. Default: `text`.")] = None,
    ids: Annotated[str | None, typer.Option(help="Field or column of token ids to read instead of text.")] = None,
    subset: Annotated[str | None, typer.Option(help="Configuration of a dataset on the hub.")] = None,
    dataset_split: Annotated[str | None, typer.Option(help="Split of the dataset. Default: `train`.")] = None,
    split: Annotated[
        Literal["all", "train", "held_out"] | None, typer.Option(help="Documents to take, by a hash of their names.")
    ] = None,
    skip: Annotated[int | None, typer.Option(min=0, help="Maximum number of broken records to skip.")] = None,
    form: Annotated[
        Literal["messages", "sharegpt", "alpaca", "prompt_completion", "preference"] | None,
        typer.Option("--format", help="What a record of a conversation has. Default: `messages`."),
    ] = None,
    template: Annotated[
        str | None, typer.Option(help="Chat template: a folder, file or name. Default: that beside tokenizer.json.")
    ] = None,
    train: Annotated[
        Literal["all", "last", "each"] | None, typer.Option(help="Turns of the assistant that are trained. Default: `all`.")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="A token at which generation stops; may be repeated. Default: the tokenizer's.")
    ] = None,
    workers: Workers = None,
    as_json: AsJson = False,
) -> None:
    """Tokenize text or conversations into a token store. (`forge-train prepare RECIPE` does this for a recipe.)

    To continue a preparation that was killed, run the same command again.
    """
    from forge_data.commands import prepare

    options = {"text": text, "ids": ids, "subset": subset, "dataset_split": dataset_split, "split": split, "skip": skip}
    options |= {"format": form, "template": template, "train": train, "stop": tuple(stop) if stop else None}
    found = prepare.prepare(
        source, path, out, tokenizer, vocab_size=vocab_size, eos=eos, workers=workers, report=_say(as_json), **options
    )
    _answer(found, as_json)


@app.command()
def inspect(
    path: Where,
    kind: Format = None,
    dtype: Dtype = None,
    eos: Eos = None,
    bos: Bos = None,
    as_json: AsJson = False,
) -> None:
    """Show format, dtype, documents, tokens, document lengths, and a sample."""
    from forge_data.commands.inspect import inspect_tokens, inspection_text

    found = inspect_tokens(path, _open(path, kind, dtype, eos, bos))
    typer.echo(json.dumps(found) if as_json else inspection_text(found))


@app.command()
def verify(
    path: Where,
    kind: Format = None,
    dtype: Dtype = None,
    eos: Eos = None,
    bos: Bos = None,
    vocab_size: Vocabulary = None,
    as_json: AsJson = False,
) -> None:
    """Read every byte, check checksums, document index and ids, and count duplicates."""
    from forge_data.commands.inspect import verification_text, verify_tokens

    found = verify_tokens(_open(path, kind, dtype, eos, bos), vocab_size, _say(as_json))
    if as_json:
        typer.echo(json.dumps(found))
        raise typer.Exit(DataError.exit_code if found["faults"] else 0)  # an error would be a second document
    if found["faults"]:
        raise DataError(
            "\n".join([f"{path} is damaged:", *(f"  {fault}" for fault in found["faults"]), "restore it or write it again"])
        )
    typer.echo(verification_text(found))


@app.command()
def convert(
    path: Where,
    out: Annotated[Path, typer.Option(help="Directory of a store, prefix of Megatron's files, or a file.", show_default=False)],
    to: Annotated[Literal["store", "megatron", "npy", "bin"], typer.Option(help="Format to write.")] = "store",
    kind: Format = None,
    dtype: Dtype = None,
    eos: Eos = None,
    bos: Bos = None,
    vocab_size: Vocabulary = None,
    to_dtype: Annotated[str | None, typer.Option(help="Data type of the ids to write. Default: unchanged.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="tokenizer.json to copy into the new store.")] = None,
    tokenizer_eos: Annotated[str, typer.Option(help="End-of-document token of the tokenizer.")] = "<|endoftext|>",
    lose_documents: Annotated[
        bool, typer.Option("--lose-documents", help="Allow a format that cannot store document borders.")
    ] = False,
    join_sequences: Annotated[
        bool, typer.Option("--join-sequences", help="Join the sequences of each document (Megatron).")
    ] = False,
    skip_empty: Annotated[bool, typer.Option("--skip-empty", help="Skip and count documents without tokens.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write tokens and documents in another format. Ids do not change."""
    from forge_data.commands import convert

    loaded = None
    if tokenizer is not None:
        from forge_data.tokenizers.bpe import load

        loaded = load(tokenizer, tokenizer_eos)
    found = convert.convert(
        _open(path, kind, dtype, eos, bos, vocab_size),
        out,
        to,
        dtype=to_dtype,
        tokenizer=loaded,
        lose_documents=lose_documents,
        join_sequences=join_sequences,
        skip_empty=skip_empty,
        report=_say(as_json),
    )
    _answer(found, as_json)


@app.command()
def diff(
    one: Annotated[str, typer.Argument(help="A corpus, a run's directory, a checkpoint, or a recipe.", show_default=False)],
    other: Annotated[str, typer.Argument(help="A second one of the same kind.", show_default=False)],
    dtype: Dtype = None,
    eos: Eos = None,
    bos: Bos = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="For runs: number of steps to compare, even if the runs have done fewer.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find the first difference between two corpora in any format, or between the samples of two runs.

    Runs are compared up to the last step that both have reached, recipes up to train.max_steps.
    """
    from forge_data.commands.diff import compare_runs, corpora_text, diff_corpora, is_run, runs_text

    if is_run(one) or is_run(other):
        found = compare_runs(one, other, steps, _say(as_json))
        text = runs_text
    elif steps is not None:
        raise DataError(f"--steps applies only to runs, but {one} is neither a recipe nor a directory of a run or checkpoint")
    else:
        found = diff_corpora(_open(one, None, dtype, eos, bos), _open(other, None, dtype, eos, bos))
        text = corpora_text
    typer.echo(json.dumps(found) if as_json else text(found, (one, other)))
    if not found["equal"]:
        raise typer.Exit(1)


@app.command()
def decontaminate(
    path: Where,
    against: Annotated[list[str], typer.Option(help="JSON lines of an evaluation set; may be repeated.", show_default=False)],
    field: Annotated[list[str] | None, typer.Option(help="Keys of the text. Default: every text in a record.")] = None,
    words: Annotated[int, typer.Option(min=1, help="Number of consecutive shared words that count as an overlap.")] = 13,
    out: Annotated[Path | None, typer.Option(help="Write a new store without the overlapping documents.")] = None,
    report_to: Annotated[Path | None, typer.Option(help="Write every overlap to this file, as JSON lines.")] = None,
    as_json: AsJson = False,
) -> None:
    """Find documents that share sequences of words with an evaluation set."""
    from forge_data.commands import decontaminate

    found = decontaminate.decontaminate(path, against, tuple(field or ()), words, out, report_to, _say(as_json))
    typer.echo(json.dumps(found) if as_json else decontaminate.as_text(found))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def mix(
    context: typer.Context,
    recipe: Annotated[str, typer.Argument(help="A TOML file, or the name of a preset; --section.key=value may follow.")],
    plan: Annotated[bool, typer.Option("--plan", help="Print tokens and epochs of every source in every phase.")] = False,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of the run. Default: train.max_steps.")] = None,
    workspace: Annotated[Path | None, typer.Option(help="Directory for tokenized text. Default: the run's directory.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show what a recipe's mixture will read, before the run."""
    from forge_data.commands import mix

    if not plan:
        raise DataError("an option is missing; add --plan to print tokens and epochs of every source in every phase")
    found = mix.mix(recipe, context.args, steps, workspace, _say(as_json))
    typer.echo(json.dumps(found) if as_json else mix.as_text(found))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def show(
    context: typer.Context,
    recipe: Annotated[str, typer.Argument(help="A TOML file, or the name of a preset; --section.key=value may follow.")],
    rows: Annotated[int, typer.Option(min=1, help="Number of rows.")] = 4,
    color: Annotated[
        bool | None, typer.Option("--color/--no-color", help="Show trained tokens in color. Default: in a terminal.")
    ] = None,
    workspace: Annotated[Path | None, typer.Option(help="Directory for tokenized text. Default: the run's directory.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show the first rows of a recipe: which tokens are trained, context, or padding, and where documents end."""
    from forge_core.terminal import Console
    from forge_data.commands import show

    console = Console(as_json=as_json)
    found = show.show(recipe, context.args, rows, workspace, console.note)
    if as_json:
        typer.echo(json.dumps(found))
    else:
        show.print_rows(found, console, console.colors if color is None else color)


def _open(path: str, kind: str | None, dtype: str | None, eos: int | None, bos: int | None, vocab_size: int | None = None) -> Any:
    from forge_data.sources.formats import open_any

    return open_any(path, kind=kind, dtype=dtype, eos=eos, bos=bos, vocab_size=vocab_size)


def _say(as_json: bool) -> Callable[[str], None]:
    def say(message: str) -> None:
        typer.echo(message, err=as_json)

    return say


def _answer(found: dict[str, Any], as_json: bool) -> None:
    typer.echo(json.dumps(found) if as_json else "\n".join(f"{key}: {value}" for key, value in found.items()))
