"""Implements `data prepare`: tokenizes a corpus into a new store."""

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

from forge_core.errors import DataError
from forge_core.protocols.data import SourceContext, Texts, Tokenizer
from forge_data.chat.records import open_conversations, settings_for
from forge_data.order.cursor import differences_of
from forge_data.preparation.tokenization import tokenize
from forge_data.sources.formats import RECORD_FORMATS, open_records
from forge_data.sources.huggingface import open_dataset
from forge_data.sources.records import Records
from forge_data.sources.scan import unigram_entropy
from forge_data.sources.store import MANIFEST, StoreSource
from forge_data.sources.text import stdlib_files, text_files
from forge_data.storage.workspace import remove_left
from forge_data.tokenizers import bpe, sentencepiece
from forge_data.tokenizers.bytes import ByteTokenizer
from forge_data.tokenizers.tiktoken import load_encoding

HELD_OUT = 0.05
"""Fraction of records in the split `held_out`."""
Report = Callable[[str], None]


def prepare(
    source: str | None,
    path: str | None,
    out: Path,
    tokenizer: str,
    *,
    vocab_size: int = 4096,
    eos: str | None = None,
    workers: int | None = None,
    report: Report,
    **options: Any,
) -> dict[str, Any]:
    """Writes one store.

    Args:
        source: name of a component; by default detected from the names of the files.
        path: path of the corpus.
        out: the new store.
        tokenizer: `bpe` (trained), `bytes`, `tiktoken:NAME`, a `tokenizer.json`, or a `.model` of sentencepiece; for
            records of ids the tokenizer that encoded them, or `none`.
        vocab_size: vocabulary size of a trained tokenizer.
        eos: the token that ends a document; for records of ids with tokenizer `none`, its id.
        workers: number of parallel workers.
        report: called with progress messages.
        options: fields of the component; None means the default.

    Raises:
        DataError: the input is invalid, or the directory is not writable.
    """
    chosen = {key: value for key, value in options.items() if value is not None}
    coder = _tokenizer_of_conversations(tokenizer, eos) if source == "chat" else None
    texts = _texts(source, path, chosen) if coder is None else _conversations(path, coder, chosen)
    remove_left(out)
    request = _request(source or source_of(str(path)), texts, tokenizer, vocab_size, eos, chosen)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        return _finished(out, request, report)
    context = SourceContext(out.parent / f".{out.name}.work", None, 1, report, (texts,))
    ids = isinstance(texts, Records) and texts.wanted.ids
    built = coder or _tokenizer(tokenizer, vocab_size, eos, context, ids)
    end = (built.eos if built else _id(eos)) if ids else None
    what = getattr(texts, "what", str(path))
    store = tokenize(texts, built, out, source=what, workers=workers, report=report, eos=end, request=request)
    return _answer(out, store)


def _request(
    source: str, texts: Texts, tokenizer: str, vocab_size: int, eos: str | None, options: dict[str, Any]
) -> dict[str, str]:
    """Returns the settings that the store depends on, by name."""
    request = {"source": source, "corpus": texts.fingerprint, "tokenizer": tokenizer, "eos": str(eos)}
    request |= {name: str(value) for name, value in sorted(options.items())}
    if tokenizer == "bpe":
        request["vocab_size"] = str(vocab_size)
    elif Path(tokenizer).is_file():
        request["tokenizer"] = f"sha256 {sha256(Path(tokenizer).read_bytes()).hexdigest()}"
    return request


def _finished(out: Path, request: dict[str, str], report: Report) -> dict[str, Any]:
    """Returns the answer for an existing store, if it was prepared with the same request.

    Raises:
        DataError: it is not a store, or was prepared with another request; the message lists the differences.
    """
    exists = f"{out} exists and is not empty; choose another directory or remove it"
    if not (out / MANIFEST).is_file():
        raise DataError(exists)
    store = StoreSource(out)
    recorded = store.manifest.request
    if recorded is None:
        raise DataError(f"{exists}: it is a store that does not record what it was prepared from")
    if differences := differences_of(recorded, request):
        listed = "; ".join(f"{name} was {was}, is {now}" for name, (was, now) in differences.items())
        raise DataError(f"{exists}: it is a finished store with other settings: {listed}")
    report(f"{out} is complete: it was prepared from the same corpus with the same settings")
    return _answer(out, store)


def _answer(out: Path, store: StoreSource) -> dict[str, Any]:
    mask = store.manifest.mask
    trained = {"trained_tokens": mask.trained, "turns": mask.turns, "ended_turns": mask.ended} if mask else {}
    return {
        "path": str(out),
        "tokens": store.tokens,
        "documents": store.documents,
        **trained,
        "vocab_size": store.vocab_size,
        "unigram_entropy": unigram_entropy([store.counts()]),
        "fingerprint": store.fingerprint,
    }


def source_of(path: str) -> str:
    """Returns the name of the source that reads the files at a path, by their names.

    Raises:
        DataError: the directory has files of several formats.
    """
    directory = Path(path)
    if directory.is_dir() and any((directory / name).exists() for name in ("dataset_dict.json", "state.json")):
        return "huggingface"
    suffixes = {name: form.suffixes for name, form in RECORD_FORMATS.items()} | {"text": (".txt", ".md")}
    names = [file.name for file in directory.rglob("*")] if directory.is_dir() else [path]
    formats = {name for name, ends in suffixes.items() if any(file.endswith(ends) for file in names)}
    if len(formats) > 1:
        raise DataError(f"{path} has files of several formats ({', '.join(sorted(formats))}); choose one with --source")
    return formats.pop() if formats else "text"


def _texts(source: str | None, path: str | None, options: dict[str, Any]) -> Texts:
    if source != "stdlib" and path is None:
        raise DataError("the path of the corpus is missing; add --path with a file, directory, pattern or URL")
    chosen = source or source_of(str(path))
    allowed = {
        "stdlib": ("split",),
        "text": ("split", "skip"),
        "huggingface": ("split", "skip", "text", "ids", "subset", "dataset_split"),
    }
    for option in options:
        if option not in allowed.get(chosen, ("split", "skip", "text", "ids")):
            raise DataError(f"source {chosen!r} has no {option.replace('_', ' ')}; remove --{option.replace('_', '-')}")
    if chosen == "stdlib":
        return stdlib_files(**options)
    if chosen == "text":
        return text_files(str(path), **options)
    if chosen == "huggingface":
        return open_dataset(str(path), **options)
    if chosen not in RECORD_FORMATS:
        raise DataError(f"unknown source {chosen!r}; known: text, stdlib, {', '.join(RECORD_FORMATS)}, huggingface")
    return open_records(str(path), chosen, **options)


def _conversations(path: str | None, tokenizer: Tokenizer, options: dict[str, Any]) -> Texts:
    """Returns records of conversations.

    Raises:
        DataError: the path is missing, an option has no effect, or see `settings_for` and `open_conversations`.
    """
    if path is None:
        raise DataError("the path of the conversations is missing; add --path with a file, directory, pattern or URL")
    known = ("format", "template", "train", "stop", "split", "skip")
    if strange := next((option for option in options if option not in known), None):
        raise DataError(f"source 'chat' has no {strange.replace('_', ' ')}; remove --{strange.replace('_', '-')}")
    given = {"format": "messages", "train": "all", "template": None, "stop": (), "split": "all", "skip": 0} | options
    settings = settings_for(tokenizer, given["format"], given["train"], None, given["template"], given["stop"])
    return open_conversations(path, settings, given["split"], HELD_OUT, given["skip"])


def _tokenizer_of_conversations(name: str, eos: str | None) -> Tokenizer:
    if name == "bpe":
        raise DataError("conversations need the tokenizer of their model; add --tokenizer with the path of its tokenizer.json")
    context = SourceContext(Path(), None, 1, lambda _: None)
    built = _tokenizer(name, 0, eos, context, False)
    assert built is not None, "only records of ids have no tokenizer"
    return built


def _tokenizer(name: str, vocab_size: int, eos: str | None, context: SourceContext, ids: bool) -> Tokenizer | None:
    if ids and name in ("none", "bpe"):
        return None  # records of ids have no text to train a tokenizer on
    if name == "bytes":
        return ByteTokenizer()
    if name.endswith(".model"):
        return sentencepiece.load(name, eos)
    end = "<|endoftext|>" if eos is None else eos
    if name.startswith("tiktoken:"):
        return load_encoding(name.removeprefix("tiktoken:"), end)
    if name != "bpe":
        return bpe.load(name, end)
    return bpe.trained(bpe.BpeSettings(vocab_size=vocab_size, eos=end), context)


def _id(eos: str | None) -> int | None:
    if eos is not None and not eos.isdigit():
        raise DataError(f"--eos must be a token id for records of ids without a tokenizer, got {eos}")
    return None if eos is None else int(eos)
