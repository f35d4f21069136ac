"""Writes the recipe of a newcomer: from answers to five questions to a commented TOML file. No torch.

    from forge_train.recipe.data_path import DataPath
    from forge_train.recipe.draft import RecipeAnswers, draft

    print(draft(RecipeAnswers("mine.toml", DataPath.of("stdlib"), "bpe", scale=125_000_000, gpus=8)).text)

The five questions: what to train on, which tokenizer, how large, on how many GPUs, on how many tokens. The text has the keys
that a newcomer may want to change, with the reasons for their values.
"""

import json
import re
import shlex
import tomllib
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from types import MappingProxyType
from typing import Any

from forge_core.errors import ForgeError
from forge_core.registry import Registry
from forge_train.recipe.data_path import HELD_OUT, STDLIB, TEXTS, DataPath
from forge_train.recipe.scale import FEWEST_STEPS, INIT_STD, UNTIED, WARMUP, Scale, batch_of, optimal_tokens, spell

TOKENIZERS = ("bpe", "bytes", "gpt2")
ENCODINGS = MappingProxyType({"bytes": 257, "gpt2": 50257})
"""Ids of the tokenizers that need no file."""
VOCABULARY = MappingProxyType({0: 2048, 10_000_000: 8192, 100_000_000: 32768})
"""Ids of a tokenizer that is trained, by the least number of parameters."""
MULTIPLE = 64
"""The vocabulary of a model is a multiple of this number, so that the head's matrix fills the tiles of GPUs."""

PRESET = "demo"
"""The model, the optimizer and the schedule without --scale are those of this preset."""
NODE = 8
"""GPUs of a node."""
GPU_MEMORY = 80e9
STATE = 16
"""Bytes of a parameter: weight, gradient and two moments in fp32."""


@dataclass(frozen=True)
class RecipeAnswers:
    """Answers to the five questions.

    Attributes:
        file: path of the recipe; its stem is the name of the run.
        corpus: what to train on.
        tokenizer: `bpe`, `bytes`, `gpt2` or the path of a tokenizer's file; None if the data are tokens.
        vocab_size: number of token ids if the data are tokens that do not record it.
        scale: number of parameters; None for the model of the preset `demo`.
        gpus: number of GPUs; 0 trains on the CPU.
        tokens: tokens of the run; None for 20 for each parameter, or for the steps of the preset `demo`.
    """

    file: str
    corpus: DataPath
    tokenizer: str | None = None
    vocab_size: int | None = None
    scale: int | None = None
    gpus: int = 0
    tokens: int | None = None


@dataclass(frozen=True)
class RecipeDraft:
    """A recipe as text.

    Attributes:
        text: the TOML file.
        notes: what its author should know: laws beyond their range, memory, time.
        parameters: parameters of the model.
        scale: what the laws gave; None without --scale.
    """

    text: str
    notes: tuple[str, ...]
    parameters: int
    scale: Scale | None = field(default=None)


def check_tokenizer(given: str) -> str:
    """Returns the name or path of a tokenizer.

    Raises:
        ForgeError: it is neither a known name nor an existing file of a known format.
    """
    if given in TOKENIZERS or (given.endswith((".json", ".model")) and Path(given).expanduser().is_file()):
        return given
    known = ", ".join(TOKENIZERS)
    what = "is no tokenizer.json or SentencePiece .model" if Path(given).exists() else "does not exist"
    raise ForgeError(f"--tokenizer {given}: the file {what}; give such a file, or one of: {known}")


def draft(answers: RecipeAnswers) -> RecipeDraft:
    """Writes a recipe that `forge-train check` accepts.

    Raises:
        ForgeError: answers do not fit together; the message names the flag to change.
    """
    _quoted(answers.file)  # it is in comments, too
    tokenizer, ids = _tokenizer(answers)
    vocab_size = ceil(ids / MULTIPLE) * MULTIPLE
    sizes = _scaled(answers, vocab_size) if answers.scale is not None else _small(answers, vocab_size)
    corpus, name = answers.corpus, Path(answers.file).stem
    evaluates, steps, batch = corpus.held_out, sizes.steps, sizes.batch * sizes.length
    every = min(1000, steps // 4)
    lines = [
        "# Written by `forge-train init`. Check it, look at memory and traffic, then train it:",
        *(f"#   {command}" for command in commands(answers.file, answers.gpus)),
        "# `forge-train config explain FILE KEY` describes any key, also those that are not here.",
        "",
        "[job]",
        f"name = {_quoted(name)} # the run's directory is runs/{name}",
        "seed = 1",
        "",
        *sizes.model,
        "",
        *_data(corpus, tokenizer, sizes.length, evaluates),
        "",
        "[train]",
        f"max_steps = {steps} # {spell(steps * batch)} tokens: {sizes.reason}",
        f"global_batch = {sizes.batch} # sequences of a step over all ranks: {batch:,} tokens{sizes.batch_note}",
        f"micro_batch = {sizes.micro} # sequences in one forward pass; lower it if memory is short",
        *sizes.grad_clip,
        "",
        "[parallel]",
        "dp_shard = -1 # weights, gradients and optimizer state are sharded over all ranks",
        "",
        *_precision(answers.gpus),
        "",
        *sizes.transforms,
        *sizes.training,
        "",
        "[checkpoint]",
        f"every = {every} # steps",
        "keep = 2 # the newest ones",
        "",
        *_hooks(evaluates, corpus, tokenizer, every),
    ]
    return RecipeDraft(
        "\n".join(lines) + "\n", (*sizes.notes, *_machine_notes(sizes, answers.gpus)), sizes.parameters, sizes.scale
    )


def commands(file: str, gpus: int) -> tuple[str, str, str]:
    """Returns the three commands that follow: check, plan, run."""
    path, world = shlex.quote(file), max(1, gpus)
    ranks = f" --world {world}" if world > 1 else ""
    if world > NODE:
        each = max(size for size in range(1, NODE + 1) if world % size == 0)
        run = f"forge-train launch slurm {path} --nodes {world // each} --gpus-per-node {each}"
    else:
        run = f"forge-train launch local {path} --processes {world}" if world > 1 else f"forge-train run {path}"
    return f"forge-train check {path}{ranks}", f"forge-train plan {path}{ranks}", run


@dataclass(frozen=True)
class _Sizes:
    """What differs between a model of the laws and the small one."""

    model: list[str]
    training: list[str]
    length: int
    steps: int
    batch: int
    micro: int
    reason: str
    parameters: int
    batch_note: str = ""
    grad_clip: tuple[str, ...] = ()
    transforms: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    scale: Scale | None = None


def _tokenizer(answers: RecipeAnswers) -> tuple[list[str], int]:
    """Returns the table of the tokenizer, empty if the data are tokens, and the number of ids.

    Raises:
        ForgeError: the number of ids is not known.
    """
    corpus, given = answers.corpus, answers.tokenizer
    if not corpus.is_text:
        if given is not None:
            raise ForgeError(f"--tokenizer {given}: the data are token ids ({corpus.source}) already; leave it out")
        ids = answers.vocab_size or corpus.vocab_size
        if ids is None:
            raise ForgeError(
                f"--vocab-size is missing: {corpus.path} does not record how many token ids its tokenizer has; give the number"
            )
        if corpus.vocab_size is not None and ids < corpus.vocab_size:
            raise ForgeError(f"--vocab-size {ids}: {corpus.path} has {corpus.vocab_size} token ids; leave the option out")
        return [], ids
    if answers.vocab_size is not None and given not in (None, "bpe"):
        raise ForgeError(
            "--vocab-size has an effect only on a tokenizer that is trained (bpe), or on data of token ids; remove it"
        )
    if given in (None, "bpe"):
        if answers.vocab_size is not None and answers.vocab_size < 257:
            raise ForgeError(
                f"--vocab-size {answers.vocab_size}: a tokenizer has 256 bytes and the end of document; give at least 257"
            )
        ids = answers.vocab_size or max(size for least, size in VOCABULARY.items() if (answers.scale or 0) >= least)
        return ['name = "bpe"', f"vocab_size = {ids} # trained once on the text, at the start of the first run"], ids
    if given in ENCODINGS:
        named = {
            "bytes": ['name = "bytes" # 256 bytes and the end of document'],
            "gpt2": ['name = "tiktoken"', 'encoding = "gpt2"'],
        }
        return named[given], ENCODINGS[given]
    return _tokenizer_file(check_tokenizer(str(given)))


def _tokenizer_file(path: str) -> tuple[list[str], int]:
    """Reads the number of ids of a tokenizer's file.

    Raises:
        ForgeError: the file cannot be read.
    """
    from forge_core.protocols.data import SourceContext

    name = "sentencepiece" if path.endswith(".model") else "bpe"
    component: Any = Registry().load("forge.tokenizers", name)(path=path)
    ids: int = component.build(SourceContext(Path(), None, 1, lambda _: None)).vocab_size
    return [f'name = "{name}"', f"path = {_quoted(path)} # {ids:,} ids"], ids


def _scaled(answers: RecipeAnswers, vocab_size: int) -> _Sizes:
    """Returns the sizes that the laws give."""
    assert answers.scale is not None
    scale = Scale.of(answers.scale, vocab_size, answers.tokens)
    shape, wish = scale.shape, spell(answers.scale)
    most = 8 if answers.scale < UNTIED else 2 if answers.scale < 5 * UNTIED else 1
    batch, micro = batch_of(scale.sequences, max(1, answers.gpus), most)
    steps = _steps(scale.tokens, batch * scale.length, answers.tokens)
    model = [
        f"# {shape.parameters:,} parameters for --scale {wish}, {shape.non_embedding:,} of them outside of the embeddings.",
        "# docs/concepts/scale.md has the laws, their sources and their ranges.",
        *(f"# Beyond the fitted range: {note}." for note in scale.outside),
        "[model]",
        'name = "decoder"',
        f"dim = {shape.dim} # ln dim is about 5.039 + 0.0555 layers (Levine et al., 2020); a multiple that suits GPUs",
        f"layers = {shape.layers}",
        f"heads = {shape.heads} # {shape.head_dim} wide",
        f"kv_heads = {shape.kv_heads}" + (" # grouped queries (Ainslie et al., 2023)" if shape.kv_heads < shape.heads else ""),
        f"ffn_dim = {shape.ffn_dim} # 8/3 of dim (Touvron et al., 2023)",
        f"vocab_size = {vocab_size} # ids of the tokenizer, rounded up to a multiple of {MULTIPLE}",
        f"max_length = {scale.length}",
        f"tied_embeddings = {'true' if shape.tied else 'false'} # one table for embedding and head below a billion parameters",
        f"init_std = {INIT_STD} # as in the runs of the laws below",
    ]
    training = [
        "# The laws of learning rate and batch were fitted with these settings of optimizer and schedule (Bi et al., 2024).",
        "[optimizer]",
        'name = "adamw"',
        f"lr = {scale.lr:g} # 0.3118 C^-0.125 with C = {scale.compute:.2e} FLOPs (Bi et al., 2024)",
        "betas = [0.9, 0.95]",
        "weight_decay = 0.1",
        "",
        "[schedule]",
        'name = "multi_step" # lower rates from 80 % and 90 % of the run on',
        f"warmup = {min(WARMUP, steps // 20)} # {WARMUP:,} steps, but at most a twentieth of the run",
    ]
    by_law = "20 for each parameter (Hoffmann et al., 2022)"
    return _Sizes(
        model=model,
        training=training,
        length=scale.length,
        steps=steps,
        batch=batch,
        micro=micro,
        reason=by_law if answers.tokens is None else f"--tokens; {by_law} would be {spell(optimal_tokens(shape.parameters))}",
        parameters=shape.parameters,
        batch_note=f"; 0.292 C^0.3271 = {scale.batch:,.0f} (Bi et al., 2024)",
        grad_clip=("grad_clip = 1.0",),
        transforms=_transforms(answers.scale),
        notes=tuple(f"beyond the fitted range: {note}" for note in scale.outside),
        scale=scale,
    )


def _transforms(parameters: int) -> tuple[str, ...]:
    """Returns the transforms that a model of this size needs to fit into the memory of GPUs."""
    lines: tuple[str, ...] = ()
    if parameters >= 13 * UNTIED:
        lines += ("[transforms.shard]", 'reduce = "each" # whole gradients in fp32 would not fit beside the rest', "")
    if parameters >= UNTIED:
        policy = "full" if parameters >= 5 * UNTIED else "selective"
        lines += ("[transforms.recompute]", f'policy = "{policy}" # less memory for activations', "")
    return lines


def _small(answers: RecipeAnswers, vocab_size: int) -> _Sizes:
    """Returns the sizes of the preset `demo`."""
    from forge_train import presets

    preset = tomllib.loads(getattr(presets, PRESET).read_text(encoding="utf-8"))
    table, train, length = preset["model"] | {"vocab_size": vocab_size}, preset["train"], preset["data"]["sequence_length"]
    batch, micro = batch_of(train["global_batch"], max(1, answers.gpus), train["micro_batch"])
    tokens = answers.tokens or train["max_steps"] * batch * length
    steps = _steps(tokens, batch * length, answers.tokens)
    schedule = preset["schedule"] | {"warmup": min(preset["schedule"]["warmup"], steps // 20)}
    parameters = _decoder(table)
    return _Sizes(
        model=[
            f"# {parameters:,} parameters: the model of the preset `{PRESET}`, which learns in minutes on a CPU.",
            "# `--scale 125m` derives a larger one, with batch, learning rate and tokens.",
            *_table("model", table),
        ],
        training=[*_table("optimizer", preset["optimizer"]), "", *_table("schedule", schedule)],
        length=length,
        steps=steps,
        batch=batch,
        micro=micro,
        reason=f"as in the preset `{PRESET}`" if answers.tokens is None else "--tokens",
        parameters=parameters,
    )


def _decoder(table: dict[str, Any]) -> int:
    """Returns the parameters of the small decoder."""
    config: Any = Registry().load("forge.models", table["name"])
    shape = config(**{key: value for key, value in table.items() if key != "name"}).shape
    return shape.elements + (2 * shape.layers + 1) * shape.dim  # with the norms


def _table(section: str, values: dict[str, Any]) -> list[str]:
    return [f"[{section}]", *(f"{key} = {_quoted(value) if isinstance(value, str) else value}" for key, value in values.items())]


def _steps(tokens: int, batch: int, given: int | None) -> int:
    """Returns the steps of a run.

    Raises:
        ForgeError: there are too few of them.
    """
    steps = ceil(tokens / batch)
    if steps < FEWEST_STEPS:
        raise ForgeError(
            f"--tokens {spell(given or tokens)}: with {batch:,} tokens in a batch, the run would have {steps} steps, but needs "
            f"{FEWEST_STEPS}; ask for at least {spell(FEWEST_STEPS * batch)} tokens"
        )
    return steps


def _data(corpus: DataPath, tokenizer: list[str], length: int, evaluates: bool) -> list[str]:
    """Returns the tables of the data."""
    lines = ["[data]", f"sequence_length = {length}", ""]
    if tokenizer:
        lines += ["[data.tokenizer]", *tokenizer, ""]
    source = [f'name = "{corpus.source}"'] + ([f"path = {_quoted(corpus.path)}"] if corpus.path else [])
    share = 0.02 if corpus.source == STDLIB else HELD_OUT
    lines += ["[[data.sources]]", *source]
    if evaluates:
        lines += [
            'split = "train"',
            f"held_out = {share} # of the files; the same in both tables, so that each file is in one of them",
        ]
        lines += ["", "[data.evaluation.held_out]", *source, 'split = "held_out"', f"held_out = {share}"]
    elif corpus.source in TEXTS[2:]:
        lines += [
            "# To evaluate on a part of the records, remove the `#` of these lines, and add the hook `evaluate` below.",
            '# split = "train"',
            "# [data.evaluation.held_out]",
            *(f"# {line}" for line in source),
            '# split = "held_out"',
        ]
    return lines


def _precision(gpus: int) -> list[str]:
    if gpus == 0:
        return ["[precision]", 'compute = "fp32" # every CPU has it']
    return ["[precision]", 'compute = "bf16"', 'state = "fp32" # master weights and moments']


def _hooks(evaluates: bool, corpus: DataPath, tokenizer: list[str], every: int) -> list[str]:
    lines = ["[[hooks]]", 'name = "log" # metrics.jsonl', "every = 10", ""]
    if evaluates:
        lines += ["[[hooks]]", 'name = "evaluate"', f"every = {every}", ""]
    lines += ["[[hooks]]", 'name = "save"', ""]
    if tokenizer:
        prompt = "def " if corpus.source == STDLIB else "The "
        lines += ["[[hooks]]", 'name = "sample" # text in the report', f"prompts = [{_quoted(prompt)}]", "max_tokens = 64", ""]
    return [*lines, "[[hooks]]", 'name = "progress"']


def _machine_notes(sizes: _Sizes, gpus: int) -> tuple[str, ...]:
    """Returns what the answers mean for the machine: memory of GPUs, hours of a CPU."""
    notes: tuple[str, ...] = ()
    state = STATE * sizes.parameters
    if gpus and state / gpus > GPU_MEMORY / 2:
        least = 1 << ceil(state / (GPU_MEMORY / 2) - 1).bit_length()
        notes += (
            f"memory: weights, gradients and AdamW states take {state / gpus / 1e9:,.0f} GB of each of {gpus} GPUs; with {least} "
            "GPUs of 80 GB they leave room for activations",
        )
    if not gpus and sizes.scale is not None and (hours := sizes.scale.compute / 1e11 / 3600) > 1:
        notes += (f"time: {sizes.scale.compute:.1e} FLOPs are about {hours:,.0f} hours of a CPU with 100 GFLOP/s",)
    return notes


def _quoted(text: str) -> str:
    """Returns a basic string of TOML."""
    if re.search(r"[\x00-\x1f\x7f\ud800-\udfff]", text):
        raise ForgeError(f"{text!r} has a control character, or is not UTF-8, and cannot be in a recipe; rename the file")
    return json.dumps(text, ensure_ascii=False)
