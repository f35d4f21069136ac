"""The tokenizer of stored weights: found, checked against the vocabulary, written next to converted weights."""

import json
from collections.abc import Callable
from pathlib import Path

from forge_core.errors import DataError
from forge_core.protocols.convert import Weights
from forge_core.protocols.data import Tokenizer
from forge_core.registry import Registry
from forge_train.inference.forge_weights import ForgeWeights, job_of
from forge_train.run.directory import run_directory

SENTENCEPIECE = ".model"


def tokenizer_for(weights: Weights, path: Path | None, registry: Registry, report: Callable[[str], None]) -> Tokenizer:
    """The tokenizer that belongs to some weights: a given file, the run's prepared data, or the folder next to them.

    Raises:
        ForgeError: there is none; says how to give one.
    """
    from forge_data.loading.open_sources import context_of, open_sources
    from forge_data.loading.spec import LoadSpec

    if path is None and weights.facts.tokenizer is not None:
        path = weights.facts.tokenizer / "tokenizer.json"
        if not path.is_file():
            raise DataError(f"{path.parent} has no tokenizer.json; pass --tokenizer tokenizer.json")
    if path is not None:
        return _read(path, weights)
    if isinstance(weights, ForgeWeights) and _is_of_run(weights):
        job = job_of(weights.meta, registry, "data", "job", origin=weights.facts.origin)
        spec = LoadSpec(job.data, (weights.place.run or run_directory(job)) / "data")
        context = context_of(spec, report)
        found = context.tokenizer or open_sources(spec, context).tokenizer
        if found is not None:
            return found
    raise DataError(f"no tokenizer found for {weights.facts.origin}; pass --tokenizer tokenizer.json")


def _is_of_run(weights: ForgeWeights) -> bool:
    """Whether a run's recipe says what the data are; converted weights bring the files of their tokenizer."""
    return "data" in weights.facts.recipe


def check_tokenizer(tokenizer: Tokenizer, weights: Weights, report: Callable[[str], None]) -> None:
    """Compares the ids of a tokenizer with a model's; reports rows without an id.

    Raises:
        DataError: the tokenizer has ids that the model lacks.
    """
    ids, rows = tokenizer.vocab_size, getattr(weights.model, "vocab_size", tokenizer.vocab_size)
    if ids > rows:
        raise DataError(f"the tokenizer has {ids} ids, but {weights.facts.origin} has {rows}; pass another one with --tokenizer")
    if ids < rows:
        report(f"the tokenizer has {ids} ids; the last {rows - ids} of the model's {rows} ids are padding")


def write_tokenizer(weights: Weights, folder: Path, registry: Registry) -> bool:
    """Writes the tokenizer of a run's data into `folder`, in the files of the tokenizers library.

    Returns whether there is one: other weights bring their own files, and bytes as tokens have no such file.
    """
    if weights.facts.tokenizer is not None or not isinstance(weights, ForgeWeights) or not _is_of_run(weights):
        return False
    try:
        tokenizer = tokenizer_for(weights, None, registry, lambda _: None)
    except DataError:
        return False  # the run's data are elsewhere by now, or it was trained on numbers
    content = json.loads(tokenizer.dump())
    if "model" not in content:
        return False
    texts = {entry["id"]: entry["content"] for entry in content.get("added_tokens", [])}
    (folder / "tokenizer.json").write_bytes(tokenizer.dump())
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"} | (
        {"eos_token": texts[tokenizer.eos]} if tokenizer.eos in texts else {}
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
    return True


def bos_tokens(weights: Weights, path: Path | None = None) -> list[int]:
    """Special tokens that a text begins with, as the `tokenizer.json` next to imported weights says; none for Forge's runs.

    A sentencepiece model does not say so; its `tokenizer_config.json` does, if it exists.
    """
    if path is None:
        if weights.facts.tokenizer is None:
            return []
        path = weights.facts.tokenizer / "tokenizer.json"
    if path.suffix == SENTENCEPIECE:
        settings = path.with_name("tokenizer_config.json")
        first = weights.facts.special_tokens.get("bos_token_id")
        wanted = settings.is_file() and json.loads(settings.read_text(encoding="utf-8")).get("add_bos_token")
        return [first] if wanted and isinstance(first, int) else []
    try:
        processor = json.loads(path.read_text(encoding="utf-8")).get("post_processor") or {}
    except (OSError, ValueError, AttributeError) as cause:
        raise DataError(f"{path} is not a valid tokenizer.json: {cause}") from cause
    found: list[int] = []
    for step in processor.get("processors", [processor]):
        if step.get("type") != "TemplateProcessing":
            continue
        for entry in step["single"]:
            if "SpecialToken" not in entry:
                break
            found += step["special_tokens"][entry["SpecialToken"]["id"]]["ids"]
    return found


def _read(path: Path, weights: Weights) -> Tokenizer:
    """A `tokenizer.json`, of the tokenizers library or as a store carries it, or a `.model` of sentencepiece."""
    from forge_data.tokenizers.restore import restore
    from forge_data.tokenizers.sentencepiece import SentencePieceTokenizer

    try:
        content = path.read_bytes()
    except OSError as cause:
        raise DataError(f"tokenizer {path} cannot be read: {cause.strerror}") from cause
    if path.suffix == SENTENCEPIECE:
        ids = weights.facts.special_tokens.get("eos_token_id")
        return SentencePieceTokenizer(content, ids if isinstance(ids, int) else None, str(path))
    return restore(content, _end(content, path, weights), str(path))


def _end(content: bytes, path: Path, weights: Weights) -> int | None:
    """Id of the token that ends a document in a `tokenizer.json` of the tokenizers library; our own files say it themselves."""
    try:
        parsed = json.loads(content)
        added = parsed.get("added_tokens", [])
    except (ValueError, AttributeError) as cause:
        raise DataError(f"{path} is not a valid tokenizer.json: {cause}") from cause
    if "model" not in parsed or "type" in parsed:
        return None
    texts = {entry["id"]: entry["content"] for entry in added}
    ids = weights.facts.special_tokens.get("eos_token_id")
    for wanted in ids if isinstance(ids, list) else [ids]:
        if wanted in texts:
            return wanted
    for text in ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>"):
        for index, own in texts.items():
            if own == text:
                return index
    raise DataError(f"{path} has no known end-of-text token; set eos_token_id in the checkpoint's config")
