"""`forge-train generate CHECKPOINT`: text from a checkpoint, from a prompt, a file, or line by line."""

import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forge_core.terminal.console import Console

if TYPE_CHECKING:
    from forge_core.protocols.convert import Weights
    from forge_core.protocols.data import Tokenizer


def generate(
    checkpoint: Annotated[Path, typer.Argument(help="A run's directory, a checkpoint, or a Hugging Face folder.")],
    prompt: Annotated[str | None, typer.Option(help="Text to continue. Default: read line by line from the terminal.")] = None,
    file: Annotated[Path | None, typer.Option(help="A text file to continue; - reads standard input.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Maximum number of new tokens.")] = 100,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy decoding.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Sample from the k most likely tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample from the fewest tokens whose probabilities sum to this.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Exclude tokens below this share of the largest probability.")] = None,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1, tokens that already occurred become less likely.")] = 1.0,
    stop: Annotated[list[str] | None, typer.Option(help="Text at which generation ends; may be given several times.")] = None,
    seed: Annotated[int, typer.Option(help="Random seed of sampling.")] = 0,
    speculate: Annotated[
        bool, typer.Option("--speculate", help="Draft with the modules of [model.mtp]: the same tokens in fewer forwards.")
    ] = False,
    prefill: Annotated[int | None, typer.Option(help="Prompt tokens per forward; limits memory, changes no result.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="A tokenizer.json or sentencepiece model to use instead.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")] = False,
) -> None:
    """Continue text with the newest checkpoint of a run, token by token as it is made."""
    from forge_core.errors import ForgeError
    from forge_core.registry import Registry
    from forge_models.generation.sampling import Sampling
    from forge_train.inference.continuation import Continuation
    from forge_train.inference.open import load_model, open_weights
    from forge_train.inference.tokenizer import bos_tokens, check_tokenizer, tokenizer_for
    from forge_train.single_process import require_single_process

    require_single_process("generate")
    console, registry = Console(as_json=as_json), Registry()
    if prompt is not None and file is not None:
        raise ForgeError("--prompt and --file exclude each other; give one")
    sampling = Sampling(
        repetition_penalty=repetition_penalty,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
    )
    weights = open_weights(checkpoint, registry)
    for note in weights.facts.notes:
        console.note(note)
    coder = tokenizer_for(weights, tokenizer, registry, console.note)
    check_tokenizer(coder, weights, console.note)
    begun = Continuation(
        load_model(weights),
        coder,
        sampling,
        max_tokens=max_tokens,
        stops=tuple(stop or ()),
        ends=_ends(weights, coder),
        begin=bos_tokens(weights, tokenizer),
        prefill=prefill,
        speculate=speculate,
    )
    if prompt is None and file is None and not as_json and sys.stdin.isatty():
        _converse(begun)
        return
    text = prompt if prompt is not None else _content(file)
    pieces = _shown(text, begun(text), as_json)
    answer = {"checkpoint": weights.facts.origin, "prompt": text, "text": pieces, "tokens": begun.tokens}
    if (drafts := begun.drafts) is not None:
        answer["drafts"] = {"drafted": drafts.drafted, "accepted": drafts.accepted, "rounds": drafts.rounds}
        console.note(
            f"{drafts.accepted} of {drafts.drafted} drafts were right: {begun.tokens} tokens in {drafts.rounds + 1} forwards"
        )
    if as_json:
        console.document(answer)


def _ends(weights: "Weights", coder: "Tokenizer") -> frozenset[int]:
    """Ids that end a text: what the settings of generation say, else what travels with the weights, else the tokenizer's."""
    if weights.facts.ends:
        return frozenset(weights.facts.ends)
    named = weights.facts.special_tokens.get("eos_token_id")
    if named is None:
        return frozenset(() if coder.eos is None else (coder.eos,))
    return frozenset(named) if isinstance(named, list) else frozenset((named,))


def _content(file: Path | None) -> str:
    from forge_core.errors import ForgeError

    if file is None or str(file) == "-":
        return sys.stdin.read()
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as cause:
        raise ForgeError(f"{file} cannot be read: {cause}") from cause


def _converse(begun: "Callable[[str], Iterator[str]]") -> None:
    """A prompt a line until the end of input; each is continued on its own."""
    while True:
        try:
            text = input("prompt> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if text:
            _shown(text, begun(text), quiet=False)


def _shown(text: str, pieces: Iterable[str], quiet: bool) -> str:
    """Prints a text as it grows; returns what was added."""
    made: list[str] = []
    if not quiet:
        print(text, end="", flush=True)
    for piece in pieces:
        made.append(piece)
        if not quiet:
            print(piece, end="", flush=True)
    if not quiet:
        print()
    return "".join(made)
