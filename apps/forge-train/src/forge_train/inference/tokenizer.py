"""The tokenizer and the chat template of stored weights."""

import json
from base64 import b64decode
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_core.config.tree import UNSET
from forge_core.errors import DataError
from forge_core.protocols.data import Tokenizer
from forge_core.protocols.weights import Weights
from forge_core.registry import Registry
from forge_data.tokenizers.bytes import ByteTokenizer
from forge_data.tokenizers.sentencepiece import KIND as SENTENCEPIECE_KIND
from forge_data.tokenizers.tiktoken import TiktokenTokenizer
from forge_models.hf.reader import GENERATION
from forge_train.directory import run_directory
from forge_train.formats.forge import ForgeWeights, job_of

if TYPE_CHECKING:
    from forge_data.chat.conversation import Chat

SENTENCEPIECE = ".model"
SETTINGS = "tokenizer_config.json"


def tokenizer_for(weights: Weights, path: Path | None, registry: Registry, report: Callable[[str], None]) -> Tokenizer:
    """Returns the tokenizer of weights: from `path`, else from the folder of the weights, else from the run's prepared data.

    Raises:
        ForgeError: no tokenizer was found.
    """
    from forge_data.loading.sources import LoadSpec, context_of, open_sources

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
        tokenizer = context.tokenizer or open_sources(spec, context).tokenizer
        if tokenizer is not None:
            return tokenizer
    raise DataError(f"no tokenizer found for {weights.facts.origin}; pass --tokenizer tokenizer.json")


def _is_of_run(weights: ForgeWeights) -> bool:
    """Returns True for the weights of a run, whose recipe has [data]; converted weights have tokenizer files instead."""
    return "data" in weights.facts.recipe


def check_tokenizer(tokenizer: Tokenizer, weights: Weights, report: Callable[[str], None]) -> None:
    """Checks that a tokenizer's ids fit into the model's vocabulary; reports unused rows of the vocabulary.

    Raises:
        DataError: the tokenizer has more ids than the model.
    """
    ids, rows = tokenizer.vocab_size, getattr(weights.model, "vocab_size", tokenizer.vocab_size)
    if ids > rows:
        raise DataError(
            f"the tokenizer has {ids} ids, but {weights.facts.origin} has {rows}; pass another tokenizer with --tokenizer"
        )
    if ids < rows:
        report(f"the tokenizer has {ids} ids; the last {rows - ids} of the model's {rows} ids are padding")


def ends_of_texts(weights: Weights, coder: Tokenizer) -> frozenset[int]:
    """Returns the ids that end a text: those of the generation settings, else of the weights, else of the tokenizer; and the stop
    tokens that the run's conversations list."""
    listed = stops_of(weights, coder)
    if weights.facts.ends:
        return listed | frozenset(weights.facts.ends)
    named = weights.facts.special_tokens.get("eos_token_id")
    if named is None:
        return listed | frozenset(() if coder.eos is None else (coder.eos,))
    return listed | (frozenset(named) if isinstance(named, list) else frozenset((named,)))


def write_tokenizer(weights: Weights, folder: Path, registry: Registry, report: Callable[[str], None] = lambda _: None) -> bool:
    """Writes the tokenizer of a run's data to `folder` for transformers: its files, the chat template of the weights that the
    run started from or of its data, and the generation settings.

    Returns True if files were written; if the tokenizer cannot be written, `report` receives the reason. Weights that are not of
    a run have tokenizer files of their own.
    """
    if weights.facts.tokenizer is not None or not isinstance(weights, ForgeWeights) or not _is_of_run(weights):
        return False
    try:
        tokenizer = tokenizer_for(weights, None, registry, lambda _: None)
    except DataError:
        return False  # the run's data no longer exists here, or it was trained on token ids
    content = json.loads(tokenizer.dump())
    kind = content.get("type")
    if isinstance(tokenizer, TiktokenTokenizer):
        try:
            content = json.loads(tokenizer.as_json())
        except DataError as cause:
            report(f"no tokenizer was written: {cause}; pass the folder of a tokenizer with --tokenizer")
            return False
    folder.mkdir(parents=True, exist_ok=True)
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    if kind == ByteTokenizer.kind:
        content = bytes_as_json(tokenizer.eos)
    elif kind == SENTENCEPIECE_KIND:
        (folder / "tokenizer.model").write_bytes(b64decode(content["model"]))
        around = {"add_bos_token": bool(content.get("begins")), "add_eos_token": bool(content.get("ends"))}
        settings = {"tokenizer_class": "LlamaTokenizer", "legacy": False, **around} | dict(tokenizer.special_tokens)
        content = {}
    elif "model" not in content:
        return False
    elif not tokenizer.prefix and not tokenizer.suffix and (content.get("post_processor") or {}).get("type") != "ByteLevel":
        content["post_processor"] = None  # the run's documents do not have the tokens that it adds
    if content:
        texts = {entry["id"]: entry["content"] for entry in content.get("added_tokens", [])}
        written = (
            json.dumps(content, ensure_ascii=False).encode() if content != json.loads(tokenizer.dump()) else tokenizer.dump()
        )
        (folder / "tokenizer.json").write_bytes(written)
        named = {name: text for name, text in tokenizer.special_tokens.items() if text in texts.values()}
        settings |= {"eos_token": texts[tokenizer.eos]} if tokenizer.eos in texts else {}
        settings |= (
            {"bos_token": texts[tokenizer.prefix[0]]} if len(tokenizer.prefix) == 1 and tokenizer.prefix[0] in texts else {}
        )
        # Special tokens of the model's configuration take precedence over those of the tokenizer.
        configured = {
            key.removesuffix("_id"): texts.get(index) for key, index in weights.facts.special_tokens.items() if type(index) is int
        }
        settings |= named | {key: text for key, text in configured.items() if text is not None}
    if (template := weights.meta.get("chat_template")) is not None:
        settings["chat_template"] = template
    else:
        with suppress(DataError):  # the data has no template, or several
            settings["chat_template"] = chat_for(weights, tokenizer).template
    (folder / SETTINGS).write_text(json.dumps(settings, indent=2, ensure_ascii=False), encoding="utf-8")
    if (generation := weights.meta.get("generation")) is not None:
        (folder / GENERATION).write_text(json.dumps(generation, indent=2), encoding="utf-8")
    return True


def bytes_as_json(eos: int | None) -> dict[str, Any]:
    """Returns the byte tokenizer in the format of the tokenizers library: token i is byte i, without merges."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = {letter: value for value, letter in byte_letters().items()}
    backend = Tokenizer(models.BPE(letters, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # type: ignore[assignment]
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    backend.add_special_tokens([AddedToken("<|endoftext|>", special=True, normalized=False)])
    assert backend.token_to_id("<|endoftext|>") == eos, "the end of a document follows the bytes"
    return json.loads(backend.to_str())


def byte_letters() -> dict[int, str]:
    """Returns the character of each byte in byte-level encodings (Radford et al., 2019): the byte itself if it is printable."""
    printed = [*range(ord("!"), ord("~") + 1), *range(ord("\u00a1"), ord("\u00ac") + 1), *range(ord("\u00ae"), ord("\u00ff") + 1)]
    others = [value for value in range(256) if value not in printed]
    return {value: chr(value) for value in printed} | {value: chr(256 + place) for place, value in enumerate(others)}


def _read(path: Path, weights: Weights) -> Tokenizer:
    """Reads a `tokenizer.json` of the tokenizers library or of a data store, or a `.model` of sentencepiece."""
    from forge_data.tokenizers.bpe import BpeTokenizer, named_tokens
    from forge_data.tokenizers.dump import restore
    from forge_data.tokenizers.sentencepiece import SentencePieceTokenizer

    try:
        content = path.read_bytes()
    except OSError as cause:
        raise DataError(f"tokenizer {path} cannot be read: {cause.strerror}") from cause
    if path.suffix == SENTENCEPIECE:
        ids, settings = weights.facts.special_tokens.get("eos_token_id"), settings_of(path.parent)
        around = (settings.get("add_bos_token") is True, settings.get("add_eos_token") is True)
        return SentencePieceTokenizer(content, ids if isinstance(ids, int) else None, str(path), *around)
    tokenizer = restore(content, _end(content, path, weights), str(path))
    if isinstance(tokenizer, BpeTokenizer):
        tokenizer.special_tokens = dict(tokenizer.special_tokens) | (named_tokens(path.parent) or {})
    return tokenizer


def settings_of(folder: Path) -> dict[str, Any]:
    """Reads the `tokenizer_config.json` of a folder; returns an empty table if there is no such file.

    Raises:
        DataError: the file is not a JSON object.
    """
    path = folder / SETTINGS
    if not path.is_file():
        return {}
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as cause:
        raise DataError(f"{path} is not valid JSON: {cause}; restore or remove it") from cause
    if not isinstance(settings, dict):
        raise DataError(f"{path} is not a JSON object; restore or remove it")
    return settings


def _end(content: bytes, path: Path, weights: Weights) -> int | None:
    """Returns the id of the end-of-text token in a `tokenizer.json` of the tokenizers library; None for Forge's own files."""
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


def chat_for(weights: Weights, coder: Tokenizer, template: str | None = None) -> "Chat":
    """Returns the chat template of weights, with the special tokens of their tokenizer.

    Args:
        weights: a folder with a template, a run that started from one, or a run with conversations in its data.
        coder: the tokenizer of the weights.
        template: a template to use instead: a name, a file or a folder.

    Raises:
        DataError: the weights have no template, or several.
    """
    from forge_data.chat.conversation import Chat, chat_of

    if template is not None:
        return chat_of(template).knowing(coder.special_tokens)
    if weights.facts.tokenizer is not None:
        return chat_of(str(weights.facts.tokenizer)).knowing(coder.special_tokens)
    kept = weights.meta.get("chat_template") if isinstance(weights, ForgeWeights) else None
    if isinstance(kept, str):
        return Chat(kept).knowing(coder.special_tokens)
    names = _of_the_data(weights)
    if len(names) != 1:
        problem = f"several chat templates in its data: {', '.join(names)}" if names else "no chat template"
        raise DataError(f"{weights.facts.origin} has {problem}; choose one with --template")
    return chat_of(names[0]).knowing(coder.special_tokens)


def stops_of(weights: Weights, coder: Tokenizer) -> frozenset[int]:
    """Returns the ids of the stop tokens that the sources of a run list."""
    spelled = [each for source in _sources(weights) for each in source.get("stop") or ()]
    return frozenset(int(ids[0]) for ids in (coder.encode_pieces([(each, True)])[0] for each in spelled) if len(ids) == 1)


def _sources(weights: Weights) -> list[Mapping[str, Any]]:
    data: Any = weights.facts.recipe.get("data") or {}
    return [source for source in data.get("sources") or () if isinstance(source, Mapping)]


def _of_the_data(weights: Weights) -> list[str]:
    """Returns the names of the chat templates of a run's data sources; conversations use that of the tokenizer by default."""
    data: Any = weights.facts.recipe.get("data") or {}
    path = (data.get("tokenizer") or {}).get("path")
    folder = str(Path(path).parent) if isinstance(path, str) and path != UNSET else None
    templates = [
        folder if source.get("name") == "chat" and source.get("template") in (None, UNSET) else source.get("template")
        for source in _sources(weights)
    ]
    return list(dict.fromkeys(name for name in templates if isinstance(name, str) and name != "none"))
