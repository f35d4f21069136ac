"""Reads examples from files: JSON lines, JSON lists, Parquet and Arrow, plain or compressed, in parts as `Records`."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from forge_core.errors import DataError
from forge_core.protocols.data import Tokenizer
from forge_data.chat.conversation import Chat, chat_of
from forge_data.chat.formats import Example, UnusableRecord, examples_of
from forge_data.chat.masks import EncodedExample, ExampleEncoder
from forge_data.sources import columns, jsonl
from forge_data.sources.records import CorpusPart, Records, Skips, Wanted, in_split
from forge_data.storage.files import File, find, local_path

READER = "forge_data.chat.records"
"""Name of this module in `Wanted`; fingerprints contain it."""
LISTS = (".json",)
SUFFIXES = (*jsonl.SUFFIXES, *LISTS, *columns.PARQUET, *columns.ARROW)
GENERATION = "generation_config.json"
Row = tuple[str, Callable[[], str], "Mapping[str, Any] | str"]
"""Name, place for messages, and the record; or a message that says why the record is invalid."""


@dataclass(frozen=True)
class ConversationSettings:
    """How records become tokens. It is plain data, so that worker processes receive it as JSON.

    Attributes:
        form: one of `formats.FORMATS`.
        train: `all`, `last` or `each`.
        key: key of the conversation, or None.
        template, tokens, complete: the chat template, as in `Chat`; None if there is none.
        stops: ids at which generation stops.
        pad: id of the tokenizer's pad token, or None.
    """

    form: str
    train: str = "all"
    key: str | None = None
    template: str | None = None
    tokens: Mapping[str, str] = field(default_factory=dict)
    complete: bool = False
    stops: Sequence[int] = ()
    pad: int | None = None

    @property
    def chat(self) -> Chat | None:
        """The chat template."""
        return None if self.template is None else Chat(self.template, tuple(sorted(self.tokens.items())), self.complete)

    @property
    def pairs(self) -> bool:
        """Whether a record becomes two documents, of which one is preferred."""
        return self.form == "preference"


def settings_for(
    tokenizer: Tokenizer | None, form: str, train: str, key: str | None, template: str | None, stop: Sequence[str]
) -> ConversationSettings:
    """Returns the settings for a tokenizer. By default, its folder has the template and names the stop tokens.

    Args:
        tokenizer: the tokenizer of the recipe.
        form, train: see `ConversationSettings`.
        key: key of the conversation, or None.
        template: see `chat_of`; None: the folder of the tokenizer.
        stop: spellings of the stop tokens; by default those of `generation_config.json` and the tokenizer.

    Raises:
        DataError: the settings exclude each other, there is no tokenizer, a file cannot be read, or a stop token is not one
            token.
    """
    if form == "preference" and train == "each":
        raise DataError("train = 'each' would separate the two answers of a preference pair; set 'all' or 'last'")
    if tokenizer is None:
        raise DataError("a source of conversations needs a tokenizer; set data.tokenizer.path to its tokenizer.json")
    folder = getattr(tokenizer, "folder", None)
    chat, known = None, dict(tokenizer.special_tokens)
    if template is not None or (folder is not None and has_template(Path(folder))):
        chat = chat_of(template or str(folder)).knowing(known)
        known |= dict(chat.tokens)
    stops = [_token(spelling, tokenizer) for spelling in stop]
    for spelling, index in zip(stop, stops, strict=True):
        if index is None:
            raise DataError(f"the stop token {spelling!r} is not one token of the tokenizer; check its spelling")
    if not stops:
        named = [known["eos_token"]] if "eos_token" in known else []
        stops = [*_generation(template, folder), *(_token(each, tokenizer) for each in named), tokenizer.eos]
    pad = _token(known["pad_token"], tokenizer) if "pad_token" in known else None
    kept = tuple(dict.fromkeys(index for index in stops if index is not None))
    if chat is None:
        return ConversationSettings(form, train, key, stops=kept, pad=pad)
    return ConversationSettings(form, train, key, chat.template, dict(chat.tokens), chat.complete, kept, pad)


def has_template(folder: Path) -> bool:
    """Whether a folder has a chat template."""
    try:
        chat_of(str(folder))
    except DataError:
        return False
    return True


def _token(spelling: str, tokenizer: Tokenizer) -> int | None:
    ids, _ = tokenizer.encode_pieces([(spelling, True)])
    return int(ids[0]) if len(ids) == 1 else None


def _generation(template: str | None, folder: Path | None) -> list[int]:
    """Returns the ids at which generation stops, from the `generation_config.json` beside the template or the tokenizer."""
    places = [] if template is None or "{" in template else [Path(template.rpartition(":")[0] or template), Path(template)]
    for place in [*places, *([folder] if folder else [])]:
        path = (place if place.is_dir() else place.parent) / GENERATION
        if not path.is_file():
            continue
        try:
            value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        except (OSError, ValueError, AttributeError) as error:
            raise DataError(f"{path} is not a JSON object: {error}; restore or remove it") from error
        return [index for index in (value if isinstance(value, list) else [value]) if type(index) is int]
    return []


def open_conversations(path: str, settings: ConversationSettings, split: str, held_out: float, skip: int) -> Records:
    """Opens the records at a path.

    Raises:
        DataError: there is no file, or all files are empty.
    """
    files = find(path, SUFFIXES, "conversation")
    if not any(file.size for file in files):
        raise DataError(f"{path} has no records: all {len(files)} files are empty; check the path")
    options = {**vars(settings), "tokens": dict(settings.tokens), "stops": list(settings.stops)}
    return Records(files, Wanted(READER, "", False, split, held_out, options), f"{path} ({split})", cut, skip)


def cut(files: Sequence[File], size: int) -> list[CorpusPart]:
    """Returns parts of about `size` bytes; see the readers of the formats. A JSON list is one part."""
    parts: list[CorpusPart] = []
    for file in files:
        if file.where.endswith(LISTS):
            parts.append(CorpusPart((file,), 0, -1, file.size))
        else:
            reader = columns if file.where.endswith((*columns.PARQUET, *columns.ARROW)) else jsonl
            parts += reader.cut([file], size)
    return parts


def settings_of(wanted: Wanted) -> ConversationSettings | None:
    """Returns the settings of records of conversations; None for other records."""
    return ConversationSettings(**wanted.options) if wanted.reader == READER else None


def rows(part: CorpusPart) -> Iterator[Row]:
    """Yields the records of a part.

    Raises:
        DataError: the file is damaged.
    """
    (file,) = part.files
    if file.where.endswith((*columns.PARQUET, *columns.ARROW)):
        yield from columns.objects(part)
    elif file.where.endswith(LISTS):
        yield from _listed(file)
    else:
        yield from jsonl.objects(part)


def _listed(file: File) -> Iterator[Row]:
    try:
        content = json.loads(local_path(file).read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{file.where} is not a JSON list: {error}; name a file of JSON lines .jsonl") from error
    if not isinstance(content, list):
        raise DataError(f"{file.where} is not a JSON list of records; name a file of JSON lines .jsonl")
    for number, record in enumerate(content):
        yield f"{file.name}:{number}", partial("{}, record {}".format, file.where, number + 1), record


def examples(part: CorpusPart, wanted: Wanted, skips: Skips) -> Iterator[tuple[str, Callable[[], str], list[Example]]]:
    """Yields (name, place, examples) of every record of a part that is in the split.

    Raises:
        DataError: more records are broken than `skips` allows.
    """
    settings = settings_of(wanted)
    assert settings is not None, "these are no conversations"
    for name, place, record in rows(part):
        if not in_split(name, wanted.split, wanted.held_out):
            continue
        try:
            if isinstance(record, str):
                raise UnusableRecord(record)
            yield name, place, examples_of(record, settings.form, settings.train, settings.key)
        except UnusableRecord as error:
            skips.broken(f"{place()} {error}")


def encoded(part: CorpusPart, wanted: Wanted, tokenizer: Tokenizer, skips: Skips) -> Iterator[tuple[str, list[EncodedExample]]]:
    """Yields (name, documents) of every record of a part: one document, several, or the two of a pair.

    Raises:
        DataError: more records are broken, or refused by the template, than `skips` allows.
    """
    settings = settings_of(wanted)
    assert settings is not None, "these are no conversations"
    encoder = ExampleEncoder(settings.chat, tokenizer, settings.stops)
    for name, place, own in examples(part, wanted, skips):
        try:
            made = [encoder.encode(example) for example in own]
        except DataError as error:
            skips.broken(f"{place()}: {error}")
            continue
        if any(not document.learned[1:].any() for document in made):
            skips.broken(f"{place()}: the chat template writes none of the assistant's words; use another template")
            continue
        yield name, made
