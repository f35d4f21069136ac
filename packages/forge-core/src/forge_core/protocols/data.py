"""Interfaces of tokenizers, sources, streams and held-out data."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol, runtime_checkable

from annotated_types import Ge, Gt

from forge_core.batch import Batch
from forge_core.component import DATA, Component

if TYPE_CHECKING:
    import numpy as np


class Tokenizer(Protocol):
    """Text to token ids and back.

    Attributes:
        name: name for messages.
        vocab_size: exclusive upper limit of the ids.
        eos: id that ends a document, or None.
        prefix, suffix: ids that the tokenizer's own rule adds before and after a text, such as a BOS. They are added to every
            document of text, and `prefix` to prompts. `suffix` never ends with `eos`, which documents get anyway.
        special_tokens: spellings of the known special tokens by name, such as `{"eos_token": "</s>"}`; chat templates may use
            them.
        fingerprint: sha256 of `dump()`, in hexadecimal.
    """

    name: str
    vocab_size: int
    eos: int | None
    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    special_tokens: Mapping[str, str]
    fingerprint: str

    def encode(self, text: str) -> "np.ndarray":
        """Returns token ids without added special tokens; the spelling of a special token in the text is ordinary text."""
        ...

    def encode_pieces(self, pieces: "Sequence[tuple[str, bool]]", cuts: "Sequence[int]" = ()) -> "tuple[np.ndarray, np.ndarray]":
        """Encodes the concatenation of pieces as one text, without prefix and suffix.

        Control tokens that are spelled in trusted pieces become their ids. In untrusted pieces the same spelling is ordinary
        text, as in `encode`; so is a control token that lies only partly in trusted pieces. If no untrusted piece spells a
        control token, the ids equal those of the tokenizer's library for the whole text.

        Args:
            pieces: (text, trusted) of each piece, in order. A chat template is trusted, text of users is not.
            cuts: numbers of the pieces that follow an item that is not text, such as an image. A cut separates text like a
                control token: no token spans it.

        Returns:
            (ids, places): (N,) int64, and (N, 2) int64: the first and the last piece that the text of each id overlaps.

        Raises:
            DataError: the tokenizer cannot distinguish control tokens in trusted and untrusted pieces.
        """
        ...

    def decode(self, ids: "Sequence[int]") -> str: ...

    def dump(self) -> bytes:
        """Returns the whole tokenizer as the content of a JSON file; stores keep a copy, so that they are self-contained."""
        ...


class Source(Protocol):
    """Tokens with random access: one long stream cut into documents.

    Attributes:
        name: name for messages.
        fingerprint: equal for equal tokens and document borders, independent of their location.
        tokens: length of the stream.
        vocab_size: vocabulary size of the tokenizer that encoded the tokens, or None if unknown.
        max_id: the largest token id, or None if it is unknown without reading all tokens; rows with a larger id are refused.
        tokenizer: fingerprint of the tokenizer that encoded the tokens, or None if unknown.
    """

    name: str
    fingerprint: str
    tokens: int
    vocab_size: int | None
    max_id: int | None
    tokenizer: str | None

    def ends(self, start: int = 0, stop: int | None = None) -> "np.ndarray":
        """Returns the document ends e with start < e <= stop, ascending uint64: token e - 1 is the last of its document."""
        ...

    def borders(self, starts: "np.ndarray", length: int) -> "tuple[np.ndarray, np.ndarray]":
        """Returns the document ends in many windows. `forge_data.storage.shards.borders_in` computes them from an array
        of ends.

        Args:
            starts: (N,) uint64 first tokens of the windows.
            length: length of each window.

        Returns:
            (rows, columns), int64, sorted by row then column: window r has a document end e with
            column = e - starts[r] and 1 <= column <= length.
        """
        ...

    def read(self, start: int, stop: int) -> "np.ndarray":
        """Returns token ids [start, stop) of the stream, in the stored dtype."""
        ...

    def windows(self, starts: "np.ndarray", length: int) -> "np.ndarray":
        """Returns (N, length) token ids: one window from each of `starts` (N,) int64. Loaders read many rows with one call."""
        ...


@runtime_checkable
class SourceWithMask(Source, Protocol):
    """A `Source` that says which tokens are trained, such as the assistant's words of conversations.

    Its documents must not be cut, because an answer is predicted from the question before it; so they need a packing that keeps
    documents whole. Documents longer than a row are refused, unless `too_long` of the source says otherwise.
    """

    def learned(self, start: int, stop: int) -> "np.ndarray":
        """Returns (stop - start,) bool: whether each token is predicted; the words of users, for example, are not."""
        ...


@runtime_checkable
class SourceWithItems(SourceWithMask, Protocol):
    """A `Source` whose documents contain items, such as images, at positions of the stream.

    The tokens of an item are placeholders; its content is part of the batch. Documents must not be cut, so they need a packing
    that keeps documents whole.

    Attributes:
        extras: two names in `Batch.extras`: the items of a batch, stacked (n, ...); and the item numbers of each row (B, M)
            int64, padded with -1. A third one is optional: a number of each item, (n,) float32, such as the time of a frame; then
            `item_values(first, stop)` returns those of items [first, stop). A batch without items has none of them.
        item_shape: shape of one item.
    """

    extras: tuple[str, ...]
    item_shape: tuple[int, ...]

    def learned(self, start: int, stop: int) -> "np.ndarray":
        """Returns (stop - start,) bool: whether each token is predicted; placeholders and, for example, user turns are not."""
        ...

    def items_before(self, tokens: "np.ndarray") -> "np.ndarray":
        """Returns the number of items that begin before each of `tokens` (N,) int64. With the results a for s and b for t,
        tokens [s, t) have items [a, b)."""
        ...

    def load(self, first: int, stop: int) -> "np.ndarray":
        """Returns items [first, stop): (stop - first, *item_shape) float32. Several threads may call it.

        Raises:
            DataError: an item is missing or damaged; the message names it.
        """
        ...


@runtime_checkable
class StreamedSource(Protocol):
    """Documents that can only be read in order, in shards: files of a remote dataset, a generator, a live stream.

    `forge_data.packing.readers` shuffles and cuts the documents, and resumes at any position. The attributes are those of
    `Source`, without the number of tokens, which is unknown.

    Attributes:
        shards: number of parts that can be read independently; the numbers of the parts never change.
    """

    name: str
    fingerprint: str
    vocab_size: int | None
    max_id: int | None
    tokenizer: str | None
    shards: int

    def stream(self, shard: int, start: int = 0) -> "Iterator[np.ndarray]":
        """Yields the token ids of documents `start`, `start` + 1, ... of a shard, each with its end-of-document token, if any.

        Every call must yield the same documents in the same order. Skipping `start` documents may take time.
        """
        ...


@runtime_checkable
class StatefulIterable(Protocol):
    """A foreign data loader: any object with the interface of torchdata's `StatefulDataLoader`."""

    def __iter__(self) -> Iterator[Any]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class Texts(Protocol):
    """Documents as text in a fixed order. Iterating again yields the same documents."""

    @property
    def fingerprint(self) -> str:
        """Changes if and only if the text changes."""
        ...

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """Yields (name, text) of every document."""
        ...


@dataclass(frozen=True, kw_only=True)
class SourceComponent(Component):
    """Base class of the components of `forge.sources`, with the keys of the mixture."""

    key_class: ClassVar = DATA

    weight: Annotated[float, Ge(0)] = 1.0
    """Share of the mixture relative to the other sources; 0 means never."""
    max_epochs: Annotated[float, Gt(0)] | None = None
    """Maximum number of epochs; after that, the other sources get this source's share, in proportion to their weights."""
    label: str | None = None
    """Name of the source in logs and phases; by default derived from the component's name."""
    too_long: Literal["error", "skip", "truncate"] | None = None
    """Treatment of documents longer than a row by packings that keep documents whole: refuse them, leave them out, or keep only
    their first row. By default they continue in further rows; documents with images, which are never cut, are refused."""

    @classmethod
    def passed(cls) -> tuple[str, ...]:
        """All fields but those of the mixture."""
        return tuple(name for name in super().passed() if name not in SourceComponent.__dataclass_fields__)


@runtime_checkable
class TextComponent(Protocol):
    """A source component with text, on which a tokenizer can be trained."""

    def texts(self) -> Texts | None:
        """Returns the documents as text, or None if the source has token ids."""
        ...


@dataclass(frozen=True)
class SourceContext:
    """Arguments for building sources and tokenizers.

    Attributes:
        workspace: a directory of the run for prepared data.
        tokenizer: tokenizer of `[data.tokenizer]`, or None; always None while a tokenizer is built.
        sequence_length: tokens per sample.
        report: called with progress messages.
        texts: texts of the recipe's training sources, on which a tokenizer is trained by default.
        workers: number of threads that may prepare data; the result does not depend on it.
        rank, ranks: rank and size of the data axis, for foreign loaders, which shard their samples themselves.
        global_batch, micro_batch: rows per step over all ranks, and rows per batch, for foreign loaders.
        model: the recipe's model component, for sources that prepare inputs besides tokens; None if there is no model.
    """

    workspace: Path
    tokenizer: Tokenizer | None
    sequence_length: int
    report: Callable[[str], None]
    texts: tuple[Texts, ...] = ()
    workers: int = 1
    rank: int = 0
    ranks: int = 1
    global_batch: int = 1
    micro_batch: int = 1
    model: Any = None


Cursor = Mapping[str, Any]
"""Position in the data as JSON: a few integers and a fingerprint.

A cursor is equal on all ranks, except for the key "foreign", the position of a rank's own foreign loader.
`forge_data.order.cursor.merge_cursors` merges the cursors of all ranks.
"""


class Stream(Protocol):
    """The batches of a run: endless, or ending with the last full global batch of the last epoch.

    Attributes:
        tokenizer: tokenizer that encoded the tokens, or None if unknown.
        fingerprint: fingerprint of all settings that determine the order of samples.
        tokens: total tokens of all sources, each counted once.
        steps: number of steps from step 0 to the end of the stream; None = endless.
    """

    tokenizer: Tokenizer | None
    fingerprint: str
    tokens: int
    steps: int | None

    def start(self) -> Cursor:
        """Returns the cursor of step 0."""
        ...

    def from_cursor(self, cursor: Cursor) -> "Iterator[tuple[list[Batch], Cursor]]":
        """Yields, for each optimizer step, this rank's micro-batches and the cursor *after* them.

        Raises:
            DataError: the cursor belongs to other data; the message names the differences.
        """
        ...

    def lr_scale(self, step: int) -> float:
        """Returns the factor of the data phases on the learning rate of a step."""
        ...

    def tokens_at(self, step: int) -> int:
        """Returns the number of tokens of a step's global batch, with or without a label, without padding. Call it after the
        step has been read."""
        ...

    def describe(self, steps: int | None = None) -> Mapping[str, Any]:
        """Returns a description of the data as JSON; with `steps`, also tokens and epochs of each source in this many steps."""
        ...

    def entropy(self) -> float | None:
        """Returns the unigram entropy of the mixture in nats per token: the loss of a model that predicts token frequencies.

        None if the tokens cannot be counted, as for streamed sources.
        """
        ...


class EvaluationSet(Protocol):
    """Held-out rows, each read exactly once.

    Attributes:
        tokens: number of tokens.
        rows: number of rows.
        text_bytes: size of the text of these tokens, or None if unknown.
    """

    name: str
    tokens: int
    rows: int
    text_bytes: int | None

    def predicted(self) -> tuple[int, int] | None:
        """Returns the number of predicted tokens and the UTF-8 bytes of their text, the arguments of `bits_per_byte`.

        None if the size of the text is unknown.
        """
        ...

    def batches(self, rank: int, ranks: int, micro_batch: int) -> "Iterator[Batch]":
        """Yields this rank's batches. Every rank has the same number of batches; filler rows have no labels."""
        ...
