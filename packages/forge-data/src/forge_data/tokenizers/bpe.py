"""Byte-level byte-pair encoding with the `tokenizers` library: trained once or loaded from a file, with a cache of words."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from forge_core.errors import DataError
from forge_core.files import replace_file
from forge_core.protocols.data import SourceContext, Texts
from forge_data.sources.text import text_files
from forge_data.storage.workspace import locked
from forge_data.tokenizers.control import Controlled, TextPieces, load_backend, text_makes_controls

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_WORD = re.compile(r"'(?:[stmd]|re|ve|ll)| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+", re.ASCII)
"""The pattern by which `ByteLevel` of the tokenizers library splits text, from GPT-2 (Radford et al., 2019), for ASCII."""
PARTING = re.compile(r"(?<=[!-~])(?=\n)")
"""Matches places where cutting a text does not change its ids."""
_MOST_WORDS = 1 << 18
"""Maximum number of cached words, about 40 MB."""
_LONGEST_WORD = 64
"""Longer words are not cached, because they rarely occur again."""


@dataclass(frozen=True, kw_only=True)
class BpeSettings:
    """Settings of the training of a tokenizer.

    Attributes:
        vocab_size: largest vocabulary: 256 bytes, the end of document, and merges.
        files: text files or patterns to train on; by default the texts of the context.
        eos: the token that ends a document.
        min_frequency: minimum number of occurrences of a pair that is merged.
        train_bytes: bytes of text to train on; documents are read in order until this size is reached.
    """

    vocab_size: int = 4096
    files: tuple[str, ...] = ()
    eos: str = "<|endoftext|>"
    min_frequency: int = 2
    train_bytes: int = 1_000_000_000


class BpeTokenizer:
    """A tokenizer of the `tokenizers` library. `encode` treats the spelling of a special token in a text as ordinary text.

    Attributes:
        prefix, suffix: ids that the file's post-processor adds around a text; `suffix` leaves out the end of document.
        parting: matches places where cutting a text does not change its ids; None if unknown.
        folder: folder of the file, which may have a chat template; None if unknown.
        revision: 2 if older versions of Forge encoded ordinary text to control tokens, else 1.
    """

    name = "bpe"

    def __init__(
        self, content: bytes, eos: str = "<|endoftext|>", where: str = "tokenizer.json", add_special_tokens: bool = True
    ) -> None:
        """Parses the content of a `tokenizer.json`.

        Args:
            content: content of the file.
            eos: the token that ends a document.
            where: name of the file for messages.
            add_special_tokens: whether `prefix` and `suffix` are those of the file, or empty.

        Raises:
            DataError: the content is not a `tokenizer.json`, or has no token `eos`.
        """
        self._content = content
        self._backend = load_backend(content, where)
        self._backend.encode_special_tokens = True
        self.eos: int | None = self._backend.token_to_id(eos)
        if self.eos is None:
            raise DataError(f"{where} has no token {eos!r}; set data.tokenizer.eos to its end-of-document token")
        self.vocab_size: int = max(self._backend.get_vocab(with_added_tokens=True).values()) + 1
        self.fingerprint = sha256(content).hexdigest()
        self.prefix, self.suffix = _around(self._backend, self.eos) if add_special_tokens else ((), ())
        parsed = json.loads(content)
        self._makes_controls = text_makes_controls(parsed, eos)
        self.special_tokens: Mapping[str, str] = {"eos_token": eos}
        self.folder: Path | None = None
        self.revision = 2 if self._makes_controls else 1
        self._words = WordCache(self._backend) if cuts_into_words(parsed) and not self._makes_controls else None
        self.parting = PARTING if self._words is not None else None
        self._controlled = cache(lambda: Controlled(content, eos, where))

    def encode(self, text: str) -> np.ndarray:
        """Returns (tokens,) int64 ids, without special tokens."""
        if self._words is not None:
            return self._words.encode(text)
        if self._makes_controls:
            return np.array(self._controlled().encode_ordinary(text), dtype=np.int64)
        # The batched form returns the same ids without computing offsets, in about a third less time.
        return np.array(self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids, dtype=np.int64)

    def encode_pieces(self, pieces: Sequence[tuple[str, bool]], cuts: Sequence[int] = ()) -> tuple[np.ndarray, np.ndarray]:
        """See `forge_core.protocols.data.Tokenizer`; the ids equal those of transformers for the whole text."""
        if self._words is not None and _are_apart(pieces, cuts):
            parts = [self._words.encode(text) for text, _ in pieces]
            numbers = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
            return np.concatenate([np.empty(0, dtype=np.int64), *parts]), np.stack([numbers, numbers], axis=1)
        return self._controlled().encode(TextPieces(pieces, cuts))

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of `ids`, without special tokens."""
        return self._backend.decode(list(ids), skip_special_tokens=True)

    def dump(self) -> bytes:
        return self._content


def load(path: str, eos: str, add_special_tokens: bool = True) -> BpeTokenizer:
    """Loads a tokenizer from a file.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"tokenizer {path} cannot be read: {error.strerror}") from error
    tokenizer = BpeTokenizer(content, eos, path, add_special_tokens)
    tokenizer.folder = Path(path).parent
    tokenizer.special_tokens = dict(tokenizer.special_tokens) | (named_tokens(tokenizer.folder) or {})
    return tokenizer


def named_tokens(folder: Path) -> dict[str, str] | None:
    """Returns the named special tokens of a transformers folder, such as `bos_token`; None if no file lists them.

    Raises:
        DataError: a file is not valid JSON.
    """
    files = [path for name in ("special_tokens_map.json", "tokenizer_config.json") if (path := folder / name).is_file()]
    tokens: dict[str, str] = {}
    for path in files:
        try:
            settings = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(f"{path} is not valid JSON: {error}; restore or remove it") from error
        settings = settings if isinstance(settings, dict) else {}
        more = settings.get("extra_special_tokens")
        values = settings | (more if isinstance(more, dict) else {})
        spelled = {name: value.get("content") if isinstance(value, dict) else value for name, value in values.items()}
        tokens |= {name: value for name, value in spelled.items() if name.endswith("_token") and isinstance(value, str)}
    return tokens if files else None


def trained(settings: BpeSettings, context: SourceContext) -> BpeTokenizer:
    """Trains a tokenizer; equal text and settings result in equal bytes.

    Raises:
        DataError: there is no text to train on.
    """
    texts = _texts(settings, context)
    context.report(f"training a byte-level BPE tokenizer with up to {settings.vocab_size} tokens")
    return BpeTokenizer(_backend(settings, texts).to_str(pretty=True).encode("utf-8"), settings.eos)


def train(settings: BpeSettings, context: SourceContext) -> BpeTokenizer:
    """Trains on the component's files or the recipe's text, or loads the result of an earlier, equal training.

    Raises:
        DataError: there is no text to train on.
    """
    texts = _texts(settings, context)
    key = sha256(repr((1, settings, [text.fingerprint for text in texts])).encode()).hexdigest()[:16]
    path = context.workspace / "tokenizers" / f"bpe-{key}.json"
    with locked(context.workspace):
        if not path.exists():
            tokenizer = trained(settings, context)
            _write(path, tokenizer.dump())
            context.report(f"wrote tokenizer {path}")
            return tokenizer
    return load(str(path), settings.eos)


def _texts(settings: BpeSettings, context: SourceContext) -> tuple[Texts, ...]:
    if settings.files:
        return tuple(text_files(pattern) for pattern in settings.files)
    if not context.texts:
        raise DataError(
            "tokenizer 'bpe' has no text to train on: set data.tokenizer.path to a tokenizer.json, set data.tokenizer.files, "
            "or add a source of text"
        )
    return context.texts


def _backend(settings: BpeSettings, texts: tuple[Texts, ...]) -> "Backend":
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=settings.vocab_size,
        min_frequency=settings.min_frequency,
        special_tokens=[settings.eos],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(_up_to(texts, settings.train_bytes), trainer=trainer)
    return backend


def _up_to(texts: tuple[Texts, ...], size: int) -> Iterator[str]:
    """Yields documents in order until `size` bytes of text are reached."""
    for documents in texts:
        for _, text in documents:
            if size <= 0:
                return
            size -= len(text.encode("utf-8"))
            yield text


def _write(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content)
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror}; choose another directory") from error


def _are_apart(pieces: Sequence[tuple[str, bool]], cuts: Sequence[int]) -> bool:
    """Whether all text is untrusted and a cut separates any two pieces, as in a text with images."""
    parted = {0, *cuts}
    joined = False
    for number, (text, trusted) in enumerate(pieces):
        joined = joined and number not in parted
        if text and (trusted or joined):
            return False
        joined = joined or bool(text)
    return True


def _around(backend: "Backend", eos: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the ids that the library adds before and after a text."""
    for text in ("a", *backend.get_vocab()):  # some vocabularies cannot encode "a"
        try:
            encoding = backend.encode(text, add_special_tokens=True)
        except Exception:  # noqa: BLE001 (the library raises it for text that a vocabulary cannot encode)
            continue
        if places := [place for place, sequence in enumerate(encoding.sequence_ids) if sequence is not None]:
            break
    else:
        return (), ()
    first, last = places[0], places[-1] + 1
    before, after = tuple(encoding.ids[:first]), tuple(encoding.ids[last:])
    return before, after[:-1] if after[-1:] == (eos,) else after


def cuts_into_words(content: Mapping[str, Any]) -> bool:
    """Whether a parsed `tokenizer.json` splits text by `_WORD` and encodes each word independently."""
    before, model = content.get("pre_tokenizer") or {}, content.get("model") or {}
    return (
        content.get("normalizer") is None
        and before.get("type") == "ByteLevel"
        and before.get("use_regex", True) is True
        and before.get("add_prefix_space") is False
        and model.get("type") == "BPE"
        and not model.get("dropout")
        and all(token.get("special") is True for token in content.get("added_tokens") or ())
    )


class WordCache:
    """Encodes with a cache of words: the same ids as the library, several times as fast. Safe to use from several threads.

    A byte-level tokenizer splits text into words by a pattern and encodes each word independently. Natural text has few
    different words, so their ids are cached, and only the splitting remains. ASCII text is split here, because its character
    classes are unambiguous; the library encodes all other text. A text may be cut between a printable ASCII character and a
    line feed: no word contains this place, and the words before it do not depend on the text after it, because the pattern
    looks ahead only from white space.
    """

    def __init__(self, backend: "Backend") -> None:
        """
        Args:
            backend: a tokenizer for which `cuts_into_words` holds; it must treat special tokens in a text as ordinary text.
        """
        self._backend = backend
        self._ids: dict[str, bytes] = {}

    def encode(self, text: str) -> np.ndarray:
        """Returns (tokens,) int64 ids, without special tokens."""
        if text.isascii():
            return np.frombuffer(self._ascii(text), dtype=np.uint32).astype(np.int64)
        parts = b"".join(self._ascii(part) if ascii_only else self._library(part) for part, ascii_only in _ascii_parts(text))
        return np.frombuffer(parts, dtype=np.uint32).astype(np.int64)

    def _ascii(self, text: str) -> bytes:
        """Returns the ids of ASCII text as bytes of uint32."""
        words = _WORD.findall(text)
        try:
            return b"".join(map(self._ids.__getitem__, words))
        except KeyError:
            known = dict(self._learned(set(words)))
            return b"".join(map(known.__getitem__, words))

    def _learned(self, words: Iterable[str]) -> Iterator[tuple[str, bytes]]:
        """Yields (word, ids) of each word, and caches new ones."""
        unknown = []
        for word in words:
            if (ids := self._ids.get(word)) is None:
                unknown.append(word)
            else:
                yield word, ids
        if len(self._ids) + len(unknown) > _MOST_WORDS:
            self._ids = {}
        for word, encoding in zip(unknown, self._backend.encode_batch_fast(unknown, add_special_tokens=False), strict=True):
            ids = _ids_as_bytes(encoding.ids)
            if len(word) <= _LONGEST_WORD:
                self._ids[word] = ids
            yield word, ids

    def _library(self, text: str) -> bytes:
        return _ids_as_bytes(self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)


def _ascii_parts(text: str) -> Iterator[tuple[str, bool]]:
    """Yields the text in order as the longest stretches of lines that are all ASCII, or all not."""
    for ascii_only, lines in groupby(PARTING.split(text), key=str.isascii):
        yield "".join(lines), ascii_only


def _ids_as_bytes(ids: list[int]) -> bytes:
    return np.array(ids, dtype=np.uint32).tobytes()
