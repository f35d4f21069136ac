"""`forge-train generate CHECKPOINT`: continues a prompt, a file, several prompts, or lines from the terminal."""

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forge_core.terminal import Console

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forge_core.protocols.data import Tokenizer
    from forge_core.protocols.weights import Weights
    from forge_core.registry import Registry
    from forge_data.chat.conversation import Chat
    from forge_parallel.launch.environment import Launch
    from forge_train.inference.continuation import Continuation
    from forge_vlm.data.prompts import Prompts


def generate(
    context: typer.Context,
    checkpoint: Annotated[
        str, typer.Argument(help="A run's directory, a checkpoint, or the URL of one of them; or a Hugging Face folder.")
    ],
    prompt: Annotated[str | None, typer.Option(help="Text to continue. Default: read line by line from the terminal.")] = None,
    file: Annotated[Path | None, typer.Option(help="A text file to continue; - reads standard input.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="A text file of prompts, one a line, continued in one batch.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Maximum number of new tokens.")] = 100,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy decoding.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Sample from the k most likely tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample from the fewest tokens whose probabilities sum to this.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Exclude tokens below this share of the largest probability.")] = None,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1, tokens that already occurred become less likely.")] = 1.0,
    chat: Annotated[bool, typer.Option("--chat", help="Format prompts as user turns with the weights' chat template.")] = False,
    template: Annotated[str | None, typer.Option(help="Chat template to use instead: a name, a file or a folder.")] = None,
    image: Annotated[
        list[str] | None,
        typer.Option(help="An image file for the prompt, in place of <image>; may be given several times."),
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="Stop where the continuation contains this text; may be given several times.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed of sampling.")] = 0,
    speculate: Annotated[
        bool, typer.Option("--speculate", help="Draft with the modules of [model.mtp]: the same tokens in fewer forwards.")
    ] = False,
    prefill: Annotated[int | None, typer.Option(help="Prompt tokens per forward; limits memory, changes no result.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="A tokenizer.json or sentencepiece model to use instead.")] = None,
    weights: Annotated[str, typer.Option(help="Weights to use: `model`, or `ema` for the average of hook ema.")] = "model",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")] = False,
) -> None:
    """Continue text with the newest checkpoint of a run, and print each token as it is generated.

    The images of --image replace the <image> marks of the prompt. Without marks, all images come before the prompt, or before
    the whole conversation if --chat uses a template without a place for images.

    Runs as one process, or under torchrun on any layout for a model that is too large for one: --parallel.tp=2. The tokens are
    the same.
    """
    from forge_core.errors import ForgeError
    from forge_core.registry import Registry
    from forge_models.generation import Sampling
    from forge_parallel.launch.environment import read_launcher
    from forge_train.inference.continuation import Continuation
    from forge_train.inference.stored import open_weights
    from forge_train.inference.tokenizer import chat_for, check_tokenizer, ends_of_texts, tokenizer_for
    from forge_train.process.ranks import on_ranks

    where, console, registry = read_launcher(os.environ), Console(as_json=as_json), Registry()
    first = where.rank == 0
    note: Callable[[str], None] = console.note if first else lambda _: None

    def body() -> None:
        texts = _texts(where.size, prompt, file, prompts, speculate)
        if image and (prompts is not None or speculate):
            raise ForgeError(f"--image cannot be combined with {'--prompts' if prompts else '--speculate'}; remove one of them")
        sampling = Sampling(
            repetition_penalty=repetition_penalty,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
        )
        opened = open_weights(checkpoint, registry, weights)
        for said in opened.facts.notes:
            note(said)
        coder = tokenizer_for(opened, tokenizer, registry, note)
        check_tokenizer(coder, opened, note)
        talk = chat_for(opened, coder, template) if chat or template is not None else None
        illustrated = _illustrated(opened, coder, talk, image, note) if image else None
        with _model(opened, context.args, where, registry) as (model, agree):
            begun = Continuation(
                model,
                coder,
                sampling,
                max_tokens=max_tokens,
                stops=tuple(stop or ()),
                ends=ends_of_texts(opened, coder),
                prefill=prefill,
                speculate=speculate,
                agree=agree,
                chat=talk,
                illustrated=illustrated,
            )
            if texts is None and file is None and not as_json and sys.stdin.isatty():
                _converse(begun)
                return
            answer: dict[str, Any] = {"checkpoint": opened.facts.origin} | ({"images": image} if image else {})
            if prompts is None:
                text = sys.stdin.read() if texts is None else texts[0]
                made = _shown("" if talk else text, begun(text), quiet=as_json or not first)
                answer |= {"prompt": text, "text": made, "tokens": begun.tokens}
            else:
                made = begun.together(texts or [])
                answer |= {"texts": [{"prompt": text, "text": more} for text, more in zip(texts or [], made, strict=True)]}
                answer |= {"tokens": begun.tokens}
                for text, more in zip(texts or [], made, strict=True) if first and not as_json else ():
                    print(f"{text}\n{more}" if talk else text + more, end="\n\n")
        if (drafts := begun.drafts) is not None:
            answer["drafts"] = {"drafted": drafts.drafted, "accepted": drafts.accepted, "rounds": drafts.rounds}
            note(
                f"{drafts.accepted} of {drafts.drafted} drafts were right: {begun.tokens} tokens in {drafts.rounds + 1} forwards"
            )
        if as_json and first:
            console.document(answer)

    on_ranks(where, console, body)


def _texts(size: int, prompt: str | None, file: Path | None, prompts: Path | None, speculate: bool) -> list[str] | None:
    """Returns the texts to continue; None if the text comes from standard input.

    Raises:
        ForgeError: options exclude each other, a file cannot be read, or several processes cannot do what the options request.
    """
    from forge_core.errors import ForgeError
    from forge_core.files import lines_of

    given = [name for name, value in (("--prompt", prompt), ("--file", file), ("--prompts", prompts)) if value is not None]
    if len(given) > 1:
        raise ForgeError(f"{' and '.join(given)} exclude each other; give one")
    if speculate and (size > 1 or prompts is not None):
        raise ForgeError("--speculate supports only one text on one process; remove it, or --prompts and torchrun")
    if size > 1 and (not given or str(file) == "-"):
        raise ForgeError("standard input reaches only one process; under torchrun pass --prompt, --file or --prompts")
    if prompt is not None:
        return [prompt]
    if prompts is not None:
        lines = [line for line in lines_of(_content(prompts)) if line]
        if not lines:
            raise ForgeError(f"--prompts {prompts}: the file has no line with text; write one prompt per line")
        return lines
    return None if file is None or str(file) == "-" else [_content(file)]


@contextmanager
def _model(
    weights: "Weights", overrides: Sequence[str], where: "Launch", registry: "Registry"
) -> "Iterator[tuple[Any, Callable[[Any], Any] | None]]":
    """Collective: yields the model, and the function by which ranks agree on a token (None for one process)."""
    from forge_core.errors import ForgeError
    from forge_parallel.launch import process_group
    from forge_train.inference.stored import load_model, load_sharded_model, recipe_to_generate
    from forge_train.process.ranks import content_of

    if where.size == 1:
        if overrides:
            if not all(given.startswith("--parallel.") for given in overrides):
                recipe_to_generate(weights, overrides, 1, registry)  # raises an error that explains a misspelled override
            raise ForgeError(f"{overrides[0]} has no effect on one process; start several with torchrun, or remove it")
        yield load_model(weights), None
        return
    resolved = recipe_to_generate(weights, overrides, where.size, registry)
    device = process_group.init_process_groups(
        where, resolved.job.parallel.timeout, content=lambda: content_of(resolved, registry)
    )
    model = load_sharded_model(weights, resolved, device, registry)
    with model.inference(whole_sequences=True):
        yield model.whole(), model.topology.from_first


def _illustrated(
    weights: "Weights", coder: "Tokenizer", chat: "Chat | None", images: Sequence[str], note: Callable[[str], None]
) -> "Prompts":
    """Returns the builder of prompts with images, which formats them like the documents that the weights were trained on."""
    from forge_vlm.data.prompts import Prompts, image_inputs

    inputs = image_inputs(weights)
    if "data" not in weights.facts.recipe and inputs.native is None:
        note("these weights do not record how images are cut into tiles; each is shown as one tile")
    return Prompts(coder, chat, images, inputs)


def _content(file: Path) -> str:
    from forge_core.errors import ForgeError

    try:
        return file.read_bytes().decode("utf-8")  # reading in text mode would change line endings
    except (OSError, UnicodeDecodeError) as cause:
        raise ForgeError(f"{file} cannot be read: {cause}") from cause


def _converse(begun: "Continuation") -> None:
    """Reads prompts line by line until the end of input; continues each alone, or as the next turn of a chat."""
    turns: list[Any] = []
    while True:
        try:
            text = input("prompt> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if not text:
            continue
        answer = _shown("" if begun.chat else text, begun(text, turns), quiet=False)
        if begun.chat is not None:
            from forge_data.chat.conversation import ASSISTANT, Turn

            turns += [Turn("user", text), Turn(ASSISTANT, answer)]


def _shown(text: str, pieces: Iterable[str], quiet: bool) -> str:
    """Prints a text and then its continuation as it grows; returns the continuation."""
    printed: list[str] = []
    if not quiet:
        print(text, end="", flush=True)
    for piece in pieces:
        printed.append(piece)
        if not quiet:
            print(piece, end="", flush=True)
    if not quiet:
        print()
    return "".join(printed)
