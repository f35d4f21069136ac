"""`forge-train init [FILE]`: asks five questions and writes a commented recipe. No torch."""

import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from forge_core.errors import ForgeError
from forge_core.machine import hides_accelerators
from forge_core.terminal import Console

if TYPE_CHECKING:
    from forge_train.recipe.draft import RecipeAnswers, RecipeDraft

Answer = TypeVar("Answer")

_EXISTS = "{} exists; give another name, or replace it with --force"
LONGEST = 200
"""Bytes of the longest name of a run."""
SMALL = "small"
"""Answer to the question of the size: the model of the preset `demo`."""


def init(
    file: Annotated[str, typer.Argument(help="The recipe to write.", metavar="FILE")] = "recipe.toml",
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            help="What to train on: a file, directory or URL of text, JSON lines, Parquet, Arrow or token ids; "
            "huggingface:OWNER/NAME; or stdlib, the source of Python's standard library, which every machine has.",
            show_default="stdlib",
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            "--tokenizer",
            help="bpe (trained on the text), bytes, gpt2, or a tokenizer.json or SentencePiece .model.",
            show_default="bpe",
        ),
    ] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option(
            "--vocab-size", min=2, help="Number of token ids: of data that are ids, or of a trained bpe.", show_default=False
        ),
    ] = None,
    scale: Annotated[
        str | None,
        typer.Option(
            "--scale",
            help="Number of parameters, such as 125m, 1.3b or 7e9, from 10m to 500b: depth, width, batch, learning "
            "rate and tokens follow from published laws. Default: the small model of the preset demo.",
            show_default=False,
        ),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option("--gpus", min=0, help="Number of GPUs; 0 trains on the CPU.", show_default="those of this machine"),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(
            "--tokens",
            help="Tokens of the run, such as 2.5b. Default: 20 for each parameter with --scale, else a million.",
            show_default=False,
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Ask nothing: take the defaults of options that are not given.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace FILE if it exists.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document, and ask nothing.")] = False,
) -> None:
    """Write a commented recipe: five questions, or options that answer them.

    On a terminal, it asks for every answer that is not given as an option; elsewhere, it takes defaults. It prints the three
    commands that follow: check, plan and run.

    Example: forge-train init mine.toml --data texts/ --scale 125m --gpus 8
    """
    from forge_train.recipe.draft import commands, draft
    from forge_train.recipe.scale import spell

    console = Console(as_json=as_json)
    path = Path(file)
    _check_file(path, force)
    asks = not yes and not as_json and on_terminal()
    ask = Questions(asks)
    answers = _answers(ask, file, data, tokenizer, vocab_size, scale, gpus, tokens)
    written = draft(answers)
    _write(path, written.text, force)
    follow = commands(file, answers.gpus)
    if as_json:
        console.document(_as_json(written, file, follow))
        return
    for note in written.notes:
        console.note(f"note: {note}")
    console.text(f"wrote {file}: {spell(written.parameters)} parameters; next:")
    for command in follow:
        console.text(f"  {command}")


def on_terminal() -> bool:
    """Whether a person can answer."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def visible_gpus(root: Path = Path("/")) -> int:
    """Returns the number of NVIDIA GPUs of this machine that the environment does not hide, without torch."""
    if hides_accelerators(os.environ):
        return 0
    present = len(list((root / "dev").glob("nvidia[0-9]*")))
    listed = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return min(present, len(listed)) if listed else present


class Questions:
    """Asks a person, or takes defaults."""

    def __init__(self, asks: bool) -> None:
        self._asks = asks
        self._number = 0  # of the last question

    def answer(self, given: str | None, question: str, default: str, read: Callable[[str], Answer]) -> Answer:
        """Returns the answer to a question: `given` from an option, what a person says, or the default.

        Asks again if `read` refuses an answer of a person.

        Raises:
            ForgeError: `read` refuses an answer from an option, or the default.
        """
        if given is not None:
            return read(given)
        self._number += 1
        while self._asks:
            said = typer.prompt(f"{self._number}. {question}", default=default, err=True)
            try:
                return read(str(said).strip())
            except ForgeError as refusal:
                Console().note(f"   {refusal}")
        return read(default)


def _answers(
    ask: Questions,
    file: str,
    data: str | None,
    tokenizer: str | None,
    vocab_size: int | None,
    scale: str | None,
    gpus: int | None,
    tokens: str | None,
) -> "RecipeAnswers":
    """Asks the five questions.

    Raises:
        ForgeError: an option has an invalid value.
    """
    from forge_train.recipe.data_path import STDLIB, DataPath
    from forge_train.recipe.draft import RecipeAnswers, check_tokenizer
    from forge_train.recipe.scale import optimal_tokens, read_count, spell

    corpus = ask.answer(data, "What to train on? A path, huggingface:OWNER/NAME, or stdlib", STDLIB, DataPath.of)
    if corpus.is_text:
        tokenizer = ask.answer(tokenizer, "Which tokenizer? bpe, bytes, gpt2, or a file", "bpe", check_tokenizer)
    elif vocab_size is None and corpus.vocab_size is None:
        vocab_size = ask.answer(None, "How many token ids does the tokenizer of these data have?", "", _read_ids)
    size = ask.answer(scale, f"How many parameters? {SMALL} (1.3M, minutes on a CPU), or 10m to 500b", SMALL, _read_scale)
    ranks = ask.answer(None if gpus is None else str(gpus), "On how many GPUs? 0 is the CPU", str(visible_gpus()), _read_gpus)
    usual = "1M" if size is None else spell(optimal_tokens(size))
    length = ask.answer(tokens, "On how many tokens?", usual, lambda said: None if said == usual else read_count(said))
    return RecipeAnswers(file, corpus, tokenizer, vocab_size, size, ranks, length)


def _read_scale(said: str) -> int | None:
    from forge_train.recipe.scale import read_parameters

    return None if said == SMALL else read_parameters(said)


def _read_gpus(said: str) -> int:
    if not said.isdecimal():
        raise ForgeError(f"--gpus {said}: give a number of GPUs; 0 trains on the CPU")
    return int(said)


def _read_ids(said: str) -> int:
    if not said.isdecimal() or int(said) < 2:
        raise ForgeError(
            "--vocab-size is missing: the data do not record how many token ids their tokenizer has; give the number"
        )
    return int(said)


def _check_file(path: Path, force: bool) -> None:
    """Refuses a file that exists, or whose name is no recipe's.

    Raises:
        ForgeError: the message says what to change.
    """
    if path.suffix != ".toml" or not path.stem or path.stem.startswith("."):
        raise ForgeError(f"{path}: the name of a recipe ends with .toml")
    if len(path.stem.encode(errors="replace")) > LONGEST:
        raise ForgeError(f"{path}: the name of a run has at most {LONGEST} bytes; give a shorter name")
    if path.is_dir():
        raise ForgeError(f"{path} is a directory; give the path of a file")
    if path.exists() and not force:
        raise ForgeError(_EXISTS.format(path))


def _write(path: Path, text: str, force: bool) -> None:
    """Writes the recipe.

    Raises:
        ForgeError: the file cannot be written, or appeared meanwhile.
    """
    from forge_core.files import replace_file

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not force:
            path.open("x").close()  # fails if the file exists by now
        replace_file(path, text.encode())
    except FileExistsError as cause:
        if path.exists():
            raise ForgeError(_EXISTS.format(path)) from cause
        raise ForgeError(f"{path} cannot be written: {path.parent} is no directory; give another path") from cause
    except OSError as cause:
        raise ForgeError(f"{path} cannot be written: {cause.strerror}; give another path") from cause


def _as_json(written: "RecipeDraft", file: str, follow: tuple[str, ...]) -> dict[str, object]:
    scale = written.scale
    found: dict[str, object] = {"ok": True, "file": file, "parameters": written.parameters}
    if scale is not None:
        sizes = {name: getattr(scale.shape, name) for name in ("heads", "kv_heads", "head_dim", "ffn_dim", "non_embedding")}
        found["scale"] = asdict(scale) | {"shape": asdict(scale.shape) | sizes}
    return found | {"notes": list(written.notes), "next": list(follow)}
