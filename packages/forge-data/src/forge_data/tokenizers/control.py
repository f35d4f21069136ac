"""Control tokens: spelled in trusted text they become ids, in other text they remain ordinary text.

A text consists of pieces, and only trusted pieces may spell control tokens. `TextPieces` finds them for tokenizers that encode
the text between two control tokens independently; `Controlled` does so for a `tokenizer.json`.

The `tokenizers` library recognizes control tokens by their spelling anywhere. So if the untrusted pieces spell none, the text
is encoded unchanged, with the ids of transformers. Otherwise a second tokenizer encodes it. It differs only in the spellings of
its control tokens, which the text does not contain: the control tokens of trusted text are replaced by these spellings, and all
other text is ordinary.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from forge_core.errors import DataError
from forge_core.protocols.data import Tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

Encoded = tuple[np.ndarray, np.ndarray, np.ndarray]
"""(ids, starts, stops) of a text: the ids and their characters [start, stop), each (N,) int64."""
_PRIVATE = range(0x10FFFD, 0xF0000, -1)
"""Private-use characters; each new spelling begins and ends with one that the text does not contain."""
ADDED = ("encode_pieces", "prefix", "suffix", "special_tokens")
"""Attributes that tokenizers of older plugins lack."""


class TextPieces:
    """The concatenation of (text, trusted) pieces.

    Attributes:
        text: text of all pieces.
        cuts: positions in the text where an item that is not text is inserted, ascending.
        runs: longest stretches [start, stop) of trusted characters without a cut inside.
    """

    def __init__(self, pieces: Sequence[tuple[str, bool]], cuts: Sequence[int] = ()) -> None:
        """
        Args:
            pieces: (text, trusted) of each piece.
            cuts: numbers of the pieces that follow an item that is not text, such as an image.
        """
        self.text = "".join(text for text, _ in pieces)
        self._ends = np.cumsum([len(text) for text, _ in pieces], dtype=np.int64)
        self._trusted = [trusted for _, trusted in pieces]
        starts = [0, *self._ends.tolist()]
        self.cuts = sorted({starts[cut] for cut in cuts})
        self.runs = list(self._runs())

    def places(self, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        """Returns the first and the last piece of each stretch of characters [start, stop).

        Args:
            starts, stops: (N,) int64.

        Returns:
            (N, 2) int64. An empty stretch belongs to the piece of the next character.
        """
        if not len(self._ends):
            return np.zeros((len(starts), 2), dtype=np.int64)
        last = len(self._ends) - 1
        first_pieces = np.searchsorted(self._ends, starts, side="right")
        last_pieces = np.searchsorted(self._ends, np.maximum(starts, stops - 1), side="right")
        return np.minimum(np.stack([first_pieces, last_pieces], axis=1), last)

    def trusted(self, start: int, stop: int) -> bool:
        """Whether characters [start, stop) are all in trusted pieces, without a cut between them."""
        return any(begin <= start and stop <= end for begin, end in self.runs)

    def encode(self, controls: Mapping[str, int], encode: Callable[[str], Encoded]) -> tuple[np.ndarray, np.ndarray]:
        """Returns ids and pieces of the text, for tokenizers that encode the text between two control tokens independently.

        Args:
            controls: id of every control token by its spelling, for trusted pieces; the longest match wins.
            encode: encodes ordinary text.
        """
        spelled = re.compile("|".join(map(re.escape, sorted(filter(None, controls), key=len, reverse=True))) or "(?!)")
        spans = [match.span() for begin, end in self.runs for match in spelled.finditer(self.text, begin, end)]
        parts: list[Encoded] = []
        done = 0
        for start, stop in sorted([*spans, *((cut, cut) for cut in self.cuts), (len(self.text), len(self.text))]):
            if start > done:
                ids, starts, stops = encode(self.text[done:start])
                parts.append((ids, starts + done, stops + done))
            if stop > start:
                parts.append((np.array([controls[self.text[start:stop]]]), np.array([start]), np.array([stop])))
            done = stop
        nothing = np.empty(0, dtype=np.int64)
        parts.append((nothing, nothing, nothing))
        ids, starts, stops = map(np.concatenate, zip(*parts, strict=True))
        return ids, self.places(starts, stops)

    def _runs(self) -> Iterator[tuple[int, int]]:
        begin = start = 0
        for end, trusted in zip(self._ends.tolist(), self._trusted, strict=True):
            if not trusted and end > start:
                yield from self._parted(begin, start)
                begin = end
            start = end
        yield from self._parted(begin, start)

    def _parted(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        for cut in (*(cut for cut in self.cuts if begin < cut < end), end):
            if cut > begin:
                yield begin, cut
            begin = cut


def characters_of(text: str, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the characters [start, stop) of ids with `sizes` UTF-8 bytes each; a part of a character counts as a whole."""
    stops = np.cumsum(sizes, dtype=np.int64)
    starts = stops - sizes
    if text.isascii():
        return starts, stops
    data = np.frombuffer(text.encode("utf-8"), dtype=np.uint8)
    character = np.cumsum((data & 0xC0) != 0x80) - 1
    padded = np.append(character, len(text))
    return padded[starts], padded[np.maximum(stops - 1, 0)] + 1


def load_backend(content: bytes, where: str) -> "Backend":
    """Parses the content of a `tokenizer.json`, without padding and truncation.

    Raises:
        DataError: the content is not a `tokenizer.json`.
    """
    from tokenizers import Tokenizer as Backend

    try:
        backend: Backend = Backend.from_str(content.decode("utf-8"))
    except Exception as error:  # the library raises bare Exception for any invalid file
        raise DataError(f"{where} is not a tokenizer.json of the tokenizers library: {error}") from error
    backend.no_padding()
    backend.no_truncation()
    return backend


def controls_of(content: Mapping[str, Any], eos: str) -> dict[str, int]:
    """Returns the control tokens of a parsed `tokenizer.json`, spelling to id: special tokens and the end of document."""
    added = content.get("added_tokens") or ()
    return {token["content"]: token["id"] for token in added if token.get("special") or token["content"] == eos}


def text_makes_controls(content: Mapping[str, Any], eos: str) -> bool:
    """Whether ordinary text can become a control token even with the library's `encode_special_tokens`.

    That setting covers neither an end of document that is not marked as special nor control tokens in the model's vocabulary.
    """
    controls = controls_of(content, eos)
    added = content.get("added_tokens") or ()
    if any(token["content"] in controls and not token.get("special") for token in added):
        return True
    model = content.get("model") or {}
    vocabulary = model.get("vocab") or ()
    inside = {spelling for spelling in map(_spelling, vocabulary) if spelling in controls}
    if not inside or model.get("type") != "BPE":
        return bool(inside)
    single = model.get("ignore_merges") or any(len(spelling) == 1 for spelling in inside)
    return bool(single) or any("".join(_pair(merge)) in inside for merge in model.get("merges") or ())


class _Named(NamedTuple):
    """A tokenizer of the library with new spellings of control tokens.

    Attributes:
        backend: the tokenizer.
        gap: id of the token inserted at cuts.
        original: ids that differ from those of the original tokenizer, mapped to the original ones.
    """

    backend: "Backend"
    gap: int
    original: Mapping[int, int]


class Controlled:
    """Encodes pieces of a text with the `tokenizers` library. Safe to use from several threads."""

    def __init__(self, content: bytes, eos: str, where: str) -> None:
        """
        Args:
            content: content of a `tokenizer.json`.
            eos: the token that ends a document.
            where: name of the tokenizer for messages.
        """
        self._content, self._where = content, where
        parsed = json.loads(content)
        backend = load_backend(content, where)
        # The library's ids may differ from those in the file if the latter are not consecutive.
        self._controls = {spelling: _control_id(backend, spelling) for spelling in controls_of(parsed, eos)}
        self._spellings = {index: spelling for spelling, index in self._controls.items()}
        self._unknown = _unknown(parsed["model"])
        self._known: dict[tuple[str, bool], _Named] = {}
        self._lock = Lock()

    def encode(self, pieces: TextPieces) -> tuple[np.ndarray, np.ndarray]:
        """See `forge_core.protocols.data.Tokenizer.encode_pieces`.

        Raises:
            DataError: the text contains all private-use characters, so none is left to mark control tokens.
        """
        mark = _mark(pieces.text)
        gaps = [(cut, cut, 2 * mark) for cut in pieces.cuts]
        encoded = _Fed(pieces.text, gaps).encode(self._named(mark, renamed=False))
        if not all(pieces.trusted(*span) for span in self._spelled(pieces.text, encoded)):
            encoded = self._encode_apart(pieces, mark)
        return encoded.ids, pieces.places(encoded.starts, encoded.stops)

    def encode_ordinary(self, text: str) -> list[int]:
        """Returns the ids of a text without any control tokens.

        Raises:
            DataError: see `encode`.
        """
        named = self._named(_mark(text), renamed=True)
        ids = named.backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return [named.original.get(index, index) for index in ids]

    def _encode_apart(self, pieces: TextPieces, mark: str) -> "_Encoded":
        """Encodes a text whose untrusted pieces spell control tokens."""
        whole, apart = self._named(mark, renamed=False), self._named(mark, renamed=True)
        numbers = {spelling: number for number, spelling in enumerate(self._controls)}
        marks = [(cut, cut, 2 * mark) for cut in pieces.cuts]
        for begin, end in pieces.runs:
            run = pieces.text[begin:end]
            for start, stop in self._spelled(run, _Fed(run, []).encode(whole)):
                if (spelling := run[start:stop]) in numbers:
                    marks.append((begin + start, begin + stop, _name(mark, numbers[spelling])))
        while True:
            fed = _Fed(pieces.text, sorted(marks))
            encoded = fed.encode(apart)
            # A token with `single_word` is not recognized next to some untrusted texts; then it is ordinary text.
            recognized = fed.recognized(encoded, self._spellings)
            remaining = [span for span, is_token in zip(sorted(marks), recognized, strict=True) if is_token]
            if len(remaining) == len(marks):
                return encoded
            marks = remaining

    def _spelled(self, text: str, encoded: "_Encoded") -> list[tuple[int, int]]:
        """Returns the characters [start, stop) of each control token in a text, without stripped white space."""
        spans = []
        for place in np.flatnonzero(np.isin(encoded.ids, list(self._spellings))).tolist():
            spelling = self._spellings[int(encoded.ids[place])]
            start, stop = int(encoded.starts[place]), int(encoded.stops[place])
            at = text.find(spelling, start, stop)
            if at >= 0:
                spans.append((at, at + len(spelling)))
            elif spelling != self._unknown:  # the unknown token also replaces text that the vocabulary lacks
                spans.append((start, stop))
        return spans

    def _named(self, mark: str, renamed: bool) -> _Named:
        """Returns the tokenizer whose new spellings use this character; the last few are cached."""
        with self._lock:
            if (named := self._known.get((mark, renamed))) is None:
                if len(self._known) > 3:
                    self._known.clear()
                names = {old: _name(mark, number) if renamed else old for number, old in enumerate(self._controls)}
                backend = load_backend(_with_names(json.loads(self._content), names, 2 * mark), self._where)
                own = {_control_id(backend, names[old]): index for old, index in self._controls.items()}
                original = {index: other for index, other in own.items() if index != other}
                named = self._known[mark, renamed] = _Named(backend, _control_id(backend, 2 * mark), original)
            return named


class _Encoded(NamedTuple):
    """Ids of the original tokenizer, without gaps; their characters [start, stop) in the original text and in the fed text."""

    ids: np.ndarray
    starts: np.ndarray
    stops: np.ndarray
    fed: np.ndarray


class _Fed:
    """A text in which some stretches are replaced by new spellings, with a map back to the original characters.

    Attributes:
        text: text with the new spellings.
    """

    def __init__(self, text: str, marks: Sequence[tuple[int, int, str]]) -> None:
        """
        Args:
            text: original text.
            marks: (start, stop, new spelling) of each replaced stretch, ascending.
        """
        parts: list[str] = []
        starts, stops, self._spans, done, size = [], [], [], 0, 0
        for start, stop, spelling in (*marks, (len(text), len(text), "")):
            parts += [text[done:start], spelling]
            plain = np.arange(done, start)
            starts += [plain, np.full(len(spelling), start)]
            stops += [plain + 1, np.full(len(spelling), stop)]
            size += start - done + len(spelling)
            self._spans.append((size - len(spelling), size, start == stop))
            done = stop
        self._spans.pop()
        self.text = "".join(parts)
        self._starts = np.append(np.concatenate(starts), len(text))
        self._stops = np.append(np.concatenate(stops), len(text))

    def encode(self, named: _Named) -> _Encoded:
        """Encodes the text."""
        encoding = named.backend.encode(self.text, add_special_tokens=False)
        is_text = np.array(encoding.ids, dtype=np.int64) != named.gap
        ids = np.array([named.original.get(index, index) for index in encoding.ids], dtype=np.int64)
        fed = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)[is_text]
        starts = self._starts[fed[:, 0]]
        stops = np.where(fed[:, 1] > fed[:, 0], self._stops[np.maximum(fed[:, 1] - 1, 0)], starts)
        return _Encoded(ids[is_text], starts, stops, fed)

    def recognized(self, encoded: _Encoded, controls: Mapping[int, str]) -> list[bool]:
        """Returns whether each new spelling became a token; always True for gaps, whose tokens are left out."""
        own = encoded.fed[np.isin(encoded.ids, list(controls))]
        return [gap or bool(((own[:, 0] <= start) & (own[:, 1] >= stop)).any()) for start, stop, gap in self._spans]


def _with_names(content: Mapping[str, Any], names: Mapping[str, str], gap: str) -> bytes:
    """Returns a `tokenizer.json` with new spellings of control tokens, a token for gaps, and no post-processor."""
    model = dict(content["model"])
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, Mapping):
        model["vocab"] = {names.get(spelling, spelling): index for spelling, index in vocabulary.items()}
    elif vocabulary is not None:
        model["vocab"] = [[names.get(spelling, spelling), score] for spelling, score in vocabulary]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    changed = {old for old, new in names.items() if old != new}
    if changed and model.get("merges"):
        merges = map(_pair, model["merges"])
        model["merges"] = [merge for merge in merges if changed.isdisjoint(("".join(merge), *merge))]
    added = [token | {"content": names.get(token["content"], token["content"])} for token in content.get("added_tokens") or ()]
    last = max([*(token["id"] for token in added), *_indices(vocabulary)], default=-1)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added.append({"id": last + 1, "content": gap, "special": True} | flags)
    tokenizer = dict(content) | {"model": model, "added_tokens": added, "post_processor": None}
    return json.dumps(tokenizer, ensure_ascii=False).encode("utf-8")


def _control_id(backend: "Backend", spelling: str) -> int:
    index = backend.token_to_id(spelling)
    assert index is not None, spelling
    return index


def _name(mark: str, number: int) -> str:
    return f"{mark}{number}{mark}"


def _mark(text: str) -> str:
    """Returns a private-use character that the text does not contain."""
    mark = next((chr(code) for code in _PRIVATE if chr(code) not in text), None)
    if mark is None:
        raise DataError("the text contains all private-use characters from U+F0001 to U+10FFFD; remove one of them")
    return mark


def _pair(merge: str | Sequence[str]) -> list[str]:
    """Returns the two parts of a merge; older files join them by a space."""
    return merge.split(" ") if isinstance(merge, str) else list(merge)


def _spelling(entry: str | Sequence[Any]) -> str:
    """Returns the spelling of a vocabulary entry, which is a name, or a list of name and score."""
    return entry if isinstance(entry, str) else entry[0]


def _indices(vocabulary: Any) -> list[int]:
    return list(vocabulary.values()) if isinstance(vocabulary, Mapping) else list(range(len(vocabulary or ())))


def _unknown(model: Mapping[str, Any]) -> str | None:
    """Returns the spelling of the model's unknown token, or None."""
    if model.get("unk_id") is not None:
        return _spelling(model["vocab"][model["unk_id"]])
    return model.get("unk_token")


def adapted(tokenizer: Any) -> Tokenizer:
    """Returns a tokenizer with all attributes of the protocol. Call this on every tokenizer that a recipe builds.

    Tokenizers of older plugins may lack `encode_pieces`, `prefix` and `suffix`, which were added to the protocol later.
    """
    older: Any = _OlderTokenizer
    return tokenizer if all(hasattr(tokenizer, name) for name in ADDED) else older(tokenizer)


def identity_of(tokenizer: Tokenizer) -> str:
    """Returns an identity of the ids that a tokenizer produces: its fingerprint, and the ids that it adds around a text.

    Names of prepared data contain it. It includes the `revision` of a tokenizer whose ids have changed for the same
    fingerprint.
    """
    around = f" {list(tokenizer.prefix)} {list(tokenizer.suffix)}" if tokenizer.prefix or tokenizer.suffix else ""
    revision = getattr(tokenizer, "revision", 1)
    return tokenizer.fingerprint + around + (f" {revision}" if revision > 1 else "")


class _OlderTokenizer:
    """Adapts a tokenizer without `encode_pieces`: it adds nothing around a text and has no control tokens.

    It encodes a single untrusted piece, and refuses several pieces, because the piece of an id would be unknown.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.prefix = tuple(getattr(tokenizer, "prefix", ()))
        self.suffix = tuple(getattr(tokenizer, "suffix", ()))
        self.special_tokens = dict(getattr(tokenizer, "special_tokens", {}))

    def encode_pieces(self, pieces: Sequence[tuple[str, bool]], cuts: Sequence[int] = ()) -> "tuple[np.ndarray, np.ndarray]":
        """See `forge_core.protocols.data.Tokenizer`.

        Raises:
            DataError: there are several pieces, or trusted ones.
        """
        import numpy as np

        if len(pieces) > 1 or any(trusted for _, trusted in pieces):
            raise DataError(
                f"tokenizer {self._tokenizer.name!r} has no encode_pieces, which conversations and text around images require; "
                "add the method to its class, see forge_core.protocols.data.Tokenizer"
            )
        ids = np.asarray(self._tokenizer.encode(pieces[0][0]) if pieces else [], dtype=np.int64)
        return ids, np.zeros((len(ids), 2), dtype=np.int64)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)
