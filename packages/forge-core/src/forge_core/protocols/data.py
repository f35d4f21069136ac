"""What sources, tokenizers and the trainer agree on."""

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
        name: for messages.
        vocab_size: ids are smaller.
        eos: ends a document, or None.
        prefix, suffix: ids that the tokenizer's own rule puts before and after a text, such as a BOS. They stand around each
            document of text, and `prefix` before a prompt; `suffix` never ends with `eos`, which documents get anyway.
        special_tokens: spelling of the named special tokens, as far as they are known, such as `{"eos_token": "</s>"}`; a chat
            template may write them.
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
        """Token ids without any special token added; text that spells a special token is ordinary text."""
        ...

    def encode_pieces(self, pieces: "Sequence[tuple[str, bool]]", cuts: "Sequence[int]" = ()) -> "tuple[np.ndarray, np.ndarray]":
        """Token ids of the concatenation of some pieces, encoded as one text. Nothing is put before or after it.

        The control tokens that trusted pieces spell become their ids. What untrusted pieces spell is ordinary text, as in
        `encode`, and so is a control token of which only a part stands in trusted pieces. Where no untrusted piece spells a
        control token, the ids are those of the tokenizer's library for the whole text.

        Args:
            pieces: (text, trusted) of each, in their order. A chat template is trusted; what users write is not.
            cuts: numbers of pieces. Something that is not text, such as an image, stands before each of these, as if a control
                token stood there: no token holds characters of both sides.

        Returns:
            (ids, places): (N,) int64, and (N, 2) int64: the first and the last piece that the text of each id lies in.

        Raises:
            DataError: the tokenizer cannot tell control tokens in trusted and in untrusted pieces apart.
        """
        ...

    def decode(self, ids: "Sequence[int]") -> str: ...

    def dump(self) -> bytes:
        """The whole tokenizer as a JSON file; a store keeps a copy, so that it can be read alone."""
        ...


class Source(Protocol):
    """Tokens with random access: one long stream cut into documents.

    Attributes:
        name: for messages.
        fingerprint: equal for equal tokens and document borders, wherever they lie.
        tokens: length of the stream.
        vocab_size: of the tokenizer that made the tokens, where it is known.
        max_id: the largest token id, or None when only reading everything would tell; a row with a larger one is refused.
        tokenizer: fingerprint of the tokenizer that made the tokens, where it is known.
    """

    name: str
    fingerprint: str
    tokens: int
    vocab_size: int | None
    max_id: int | None
    tokenizer: str | None

    def ends(self, start: int = 0, stop: int | None = None) -> "np.ndarray":
        """Document ends e with start < e <= stop, ascending uint64: token e - 1 is the last of its document."""
        ...

    def borders(self, starts: "np.ndarray", length: int) -> "tuple[np.ndarray, np.ndarray]":
        """Document ends inside many windows at once: `forge_data.storage.document_ends.borders_in` does it from an array of ends.

        Args:
            starts: (N,) uint64 first tokens of the windows.
            length: of each window.

        Returns:
            (rows, columns), int64, sorted by row then column: window r has a document end e with
            column = e - starts[r] and 1 <= column <= length.
        """
        ...

    def read(self, start: int, stop: int) -> "np.ndarray":
        """Token ids [start, stop) of the stream, in the stored dtype."""
        ...

    def windows(self, starts: "np.ndarray", length: int) -> "np.ndarray":
        """(N, length) token ids: what `read` gives from each of `starts` (N,) int64 on. A loader asks for many rows at once."""
        ...


@runtime_checkable
class SourceWithItems(Source, Protocol):
    """What a `Source` offers too whose documents hold more than text: items, such as images, that stand at places of the stream.

    An item's tokens are placeholders; what the item is goes with the batch. Documents are never cut, so they need a packing
    that keeps them whole.

    Attributes:
        extras: names in `Batch.extras`: of the items of a batch, stacked (n, ...), and of the numbers of each row's items (B, M)
            int64, -1 where a row has fewer. A batch without an item has neither.
        item_shape: of one item.
    """

    extras: tuple[str, str]
    item_shape: tuple[int, ...]

    def learned(self, start: int, stop: int) -> "np.ndarray":
        """(stop - start,) bool: whether a token is predicted; placeholders, and such as a question of a user, are not."""
        ...

    def items_before(self, tokens: "np.ndarray") -> "np.ndarray":
        """How many items begin before each of `tokens` (N,) int64: items a to b - 1 are those of tokens [s, t) where these are
        the numbers a of s and b of t."""
        ...

    def load(self, first: int, stop: int) -> "np.ndarray":
        """(stop - first, *item_shape) float32: items [first, stop). It is called by several threads.

        Raises:
            DataError: one of them is not there, or damaged; names it.
        """
        ...


@runtime_checkable
class StreamedSource(Protocol):
    """Documents that can only be read in order, in shards: files of a remote data set, a generator, a live stream.

    `forge_data.packing.readers` shuffles and cuts them, and takes up any position again. Attributes as in `Source`; the number
    of tokens is not known.

    Attributes:
        shards: parts that can be read independently of each other; how they are numbered never changes.
    """

    name: str
    fingerprint: str
    vocab_size: int | None
    max_id: int | None
    tokenizer: str | None
    shards: int

    def stream(self, shard: int, start: int = 0) -> "Iterator[np.ndarray]":
        """Token ids of documents `start`, `start` + 1, ... of a shard, each with its end-of-document token if it has one.

        The same documents in the same order at every call; skipping `start` documents may cost time.
        """
        ...


@runtime_checkable
class StatefulIterable(Protocol):
    """A foreign data loader: any object with the interface of torchdata's `StatefulDataLoader`."""

    def __iter__(self) -> Iterator[Any]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class Texts(Protocol):
    """Documents as text, in a fixed order, readable as often as needed."""

    @property
    def fingerprint(self) -> str:
        """Changes with the text, and with nothing else."""
        ...

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """(name, text) of every document."""
        ...


@dataclass(frozen=True, kw_only=True)
class SourceComponent(Component):
    """Base of every component of `forge.sources`: the keys that the mixture reads."""

    key_class: ClassVar = DATA

    weight: Annotated[float, Ge(0)] = 1.0
    """Share of the mixture relative to the other sources; 0 means never."""
    max_epochs: Annotated[float, Gt(0)] | None = None
    """Reads the source at most so often; from then on its share goes to the others in proportion to theirs."""
    label: str | None = None
    """Name of the source in logs and phases; by default derived from the component's name."""
    too_long: Literal["error", "skip", "truncate"] | None = None
    """What a packing that keeps documents whole does with one that is longer than a row: refuse it, leave it out, or keep its
    first row. By default it goes on in further rows; documents with images, which are never cut, are refused."""

    @classmethod
    def passed(cls) -> tuple[str, ...]:
        """All fields but those of the mixture."""
        return tuple(name for name in super().passed() if name not in SourceComponent.__dataclass_fields__)


@runtime_checkable
class TextComponent(Protocol):
    """A source component that has text: a tokenizer can be trained on it."""

    def texts(self) -> Texts | None:
        """None where this one holds token ids already."""
        ...


@dataclass(frozen=True)
class SourceContext:
    """What a source or tokenizer may use while it is built.

    Attributes:
        workspace: a directory of the run where prepared data may be kept.
        tokenizer: of `[data.tokenizer]`, or None; None while the tokenizer itself is built.
        sequence_length: tokens of one sample.
        report: called with progress messages.
        texts: of the recipe's text-like training sources; what a tokenizer is trained on by default.
        workers: threads that may prepare data; the result does not depend on it.
        rank, ranks: of the data axis; only a foreign loader, which shards its samples itself, has a use for them.
        global_batch, micro_batch: rows per step over all ranks and rows of one batch; likewise.
        model: the recipe's model component, for sources that prepare what it takes besides tokens; None where there is none.
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
"""Position in the data: a few integers and a fingerprint, JSON as it stands.

The same on every rank, except that each rank knows only the position of its own foreign loader, under "foreign";
`forge_data.order.cursor.merged` makes one cursor of those of all ranks.
"""


class Stream(Protocol):
    """What the loop reads: endless, or ending after the last full global batch of the last epoch.

    Attributes:
        tokenizer: what the tokens were made with, or None when nothing says.
        fingerprint: of everything that fixes the order of samples.
        tokens: in all sources together, each counted once.
        steps: until the stream ends, counted from step 0; None = endless.
    """

    tokenizer: Tokenizer | None
    fingerprint: str
    tokens: int
    steps: int | None

    def start(self) -> Cursor:
        """The cursor of step 0."""
        ...

    def from_cursor(self, cursor: Cursor) -> "Iterator[tuple[list[Batch], Cursor]]":
        """Per optimizer step: this rank's micro-batches and the cursor *after* them.

        Raises:
            DataError: the cursor belongs to other data; names the difference.
        """
        ...

    def lr_scale(self, step: int) -> float:
        """Factor that the phases of the data put on the learning rate of a step."""
        ...

    def tokens_at(self, step: int) -> int:
        """Tokens of the global batch of a step, with or without a label; padding is none. Known once the step has been read."""
        ...

    def describe(self, steps: int | None = None) -> Mapping[str, Any]:
        """What is read, JSON as it stands; with `steps` also tokens and epochs of each source in so many steps."""
        ...

    def entropy(self) -> float | None:
        """Unigram entropy of the mixture in nats per token: the loss of a model that knows token frequencies only.

        None where they cannot be counted, as in a stream.
        """
        ...


class EvaluationSet(Protocol):
    """Held-out rows, each read exactly once.

    Attributes:
        tokens: in the set.
        text_bytes: of the text behind them, where it is known.
    """

    name: str
    tokens: int
    rows: int
    text_bytes: int | None

    def predicted(self) -> tuple[int, int] | None:
        """How many tokens are predicted, and the bytes of the text that these tokens say; `bits_per_byte` takes both.

        None where the size of the text is not known.
        """
        ...

    def batches(self, rank: int, ranks: int, micro_batch: int) -> "Iterator[Batch]":
        """This rank's share: equally many batches on every rank, filler rows carry no label."""
        ...
