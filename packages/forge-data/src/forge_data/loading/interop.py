"""Streams of Forge and loaders and models of other libraries.

torchdata's `StatefulDataLoader` interface works both ways: a stream of Forge as such a loader, and a foreign loader as a
`Stream`. The interface: iterate for batches; `state_dict()` between two batches says what has been handed out; after
`load_state_dict`, the next `iter()` goes on behind it; any other `iter()` begins at the beginning.
"""

from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from forge_core.batch import IGNORE, Batch
from forge_core.errors import DataError
from forge_core.protocols.data import Cursor, StatefulIterable, Stream, Tokenizer
from forge_data import accelerator
from forge_data.order.cursor import VERSION

_TAG = "__forge__"


class StatefulLoader:
    """The micro-batches of a stream, one after the other, for any training loop.

    The state is elastic between optimizer steps: it may be loaded with other ranks, micro-batches and workers. In the
    middle of a step it may not, and is refused.
    """

    def __init__(self, stream: Any) -> None:
        """`stream` as `open_stream` returns it."""
        self.stream = stream
        self._shape = [getattr(stream, name, None) for name in ("rank", "ranks", "micro_batch")]
        self._cursor: Cursor = stream.start()
        self._taken = 0
        self._loaded = False

    def __iter__(self) -> Iterator[Batch]:
        if not self._loaded:
            self._cursor, self._taken = self.stream.start(), 0
        self._loaded = False
        skipped = self._taken
        for batches, after in self.stream.from_cursor(self._cursor):
            for index, batch in enumerate(batches):
                if index < skipped:
                    continue
                self._taken = index + 1
                if self._taken == len(batches):
                    self._cursor, self._taken = after, 0
                yield batch
            skipped = 0

    def __len__(self) -> int:
        """Micro-batches of this rank in the whole stream.

        Raises:
            TypeError: it is endless.
        """
        steps = self.stream.steps
        if steps is None:
            raise TypeError("the stream is endless; set data.epochs to give it an end")
        return sum(self.stream.batches_at(step) for step in range(steps))

    def state_dict(self) -> dict[str, Any]:
        """What has been handed out so far; JSON as it stands."""
        return {"cursor": dict(self._cursor), "taken": self._taken, "shape": self._shape}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Has the next `iter()` go on behind a state.

        Raises:
            DataError: it lies in the middle of a step that other ranks or micro-batches had.
        """
        taken, shape = int(state_dict["taken"]), list(state_dict["shape"])
        if taken and shape != self._shape:
            was, now = (f"rank {rank} of {ranks} with micro_batch {micro}" for rank, ranks, micro in (shape, self._shape))
            raise DataError(f"the state is in the middle of a step of {was}, this is {now}; save between optimizer steps")
        self._cursor, self._taken, self._loaded = state_dict["cursor"], taken, True


class ForeignStream:
    """A foreign loader as a `Stream`: exactly as resumable as the loader is, and on the same number of ranks only.

    The loader yields `Batch`, or mappings with the names of its fields; labels are already shifted. Its shards, order and
    randomness are its own affair; a component that builds one finds rank, ranks and batch sizes in its context.
    """

    tokenizer: Tokenizer | None = None

    def __init__(
        self, loader: StatefulIterable, label: str, *, rank: int, ranks: int, global_batch: int, micro_batch: int
    ) -> None:
        self.loader, self.label = loader, label
        self.rank, self.ranks = rank, ranks
        self.global_batch, self.micro_batch = global_batch, micro_batch
        self.tokens = int(getattr(loader, "tokens", 0))
        self.steps: int | None = None
        self.fingerprint = str(getattr(loader, "fingerprint", label))
        self._length = 0
        self._first = as_plain(loader.state_dict(), label)

    def start(self) -> Cursor:
        """The cursor of step 0."""
        return self._cursor(0, self._first)

    def from_cursor(self, cursor: Cursor) -> Iterator[tuple[list[Batch], Cursor]]:
        """Per optimizer step: this rank's micro-batches and the cursor after them.

        Raises:
            DataError: at once, when the cursor is of another loader or another number of ranks.
        """
        states = cursor.get("foreign", {}).get(self.label)
        if cursor.get("version") != VERSION or states is None or cursor.get("fingerprint") != self.fingerprint:
            raise DataError(f"this cursor does not belong to the loader {self.label!r}: {dict(cursor)!r}")
        if (cursor.get("ranks"), cursor.get("global_batch")) != (self.ranks, self.global_batch):
            raise DataError(
                f"the position of the foreign loader {self.label!r} is valid for {cursor.get('ranks')} data ranks and a global "
                f"batch of {cursor.get('global_batch')} only, not for {self.ranks} and {self.global_batch}"
            )
        if str(self.rank) not in states:
            raise DataError(
                f"the cursor has no state of rank {self.rank}; keep forge_data.order.cursor.merged of all ranks' cursors"
            )
        return self._steps_from(int(cursor["step"]), states[str(self.rank)])

    def lr_scale(self, step: int) -> float:
        """1: a foreign loader has no phases."""
        return 1.0

    def tokens_at(self, step: int) -> int:
        """Positions of the global batch of the newest step; what other ranks' rows have of padding is unknown, so it counts."""
        return self.global_batch * self._length

    def batches_at(self, step: int) -> int:
        """Micro-batches of this rank in a step."""
        return self.global_batch // self.ranks // self.micro_batch

    def describe(self, steps: int | None = None) -> Mapping[str, Any]:
        """What little is known."""
        return {"fingerprint": self.fingerprint, "tokens": self.tokens, "steps": None, "sources": [{"label": self.label}]}

    def entropy(self) -> float | None:
        """None: the token counts of a foreign loader are unknown."""
        return None

    def _steps_from(self, step: int, state: Any) -> Iterator[tuple[list[Batch], Cursor]]:
        self.loader.load_state_dict(from_plain(state))
        found: list[Batch] = []
        for item in self.loader:
            found.append(self._batch(item))
            if len(found) < self.batches_at(step):
                continue
            step += 1
            self._length = found[0].tokens.shape[1]
            yield found, self._cursor(step, as_plain(self.loader.state_dict(), self.label))
            found = []

    def _batch(self, item: Any) -> Batch:
        batch = item if isinstance(item, Batch) else Batch(**item) if isinstance(item, Mapping) else None
        if batch is None:
            raise DataError(
                f"the loader {self.label!r} yields {type(item).__name__}; it must be a Batch or a mapping of its fields"
            )
        if batch.tokens.ndim != 2 or batch.tokens.shape != batch.labels.shape or len(batch.tokens) != self.micro_batch:
            tokens, labels = tuple(batch.tokens.shape), tuple(batch.labels.shape)
            raise DataError(
                f"the loader {self.label!r} gave tokens {tokens} and labels {labels}; both must be ({self.micro_batch}, length)"
            )
        counted = accelerator.is_used() and batch.documents is not None and batch.documents.device.type == "cpu"
        return batch.with_document_starts() if counted else replace(batch, document_starts=None)

    def _cursor(self, step: int, state: Any) -> Cursor:
        return {
            "version": VERSION,
            "step": step,
            "fingerprint": self.fingerprint,
            "ranks": self.ranks,
            "global_batch": self.global_batch,
            "foreign": {self.label: {str(self.rank): state}},
        }


def _conforms(stream: ForeignStream) -> Stream:
    """For the type checker: what the loop reads."""
    return stream


def for_transformers(batch: Batch) -> dict[str, Any]:
    """The keyword arguments of a causal language model of transformers whose loss is then that of the batch.

    A `Batch` has labels that are shifted already; such a model shifts `labels` again, and would learn to predict the token
    after the next one. `labels` here are not shifted: the label of a position stands one place to the right. The label of the
    last position of a row then has no place; `shift_labels`, which transformers takes as it is where a model passes it on to its
    loss, has it. So with both the loss is the mean over all labels of the batch; without `shift_labels` (drop it for a model
    that does not take it) it is the mean over all but those of the last positions.

    Positions begin anew in every document: from them transformers makes the mask that keeps documents apart, as long as no
    attention mask is given and no cache is used, which it otherwise begins by itself.

    Returns:
        `input_ids`, `labels`, `shift_labels` (B, T) int64; where the batch has positions, `position_ids` (B, T) int64 too; and
        `use_cache`, False.
    """
    labels = batch.labels.new_full(tuple(batch.labels.shape), IGNORE)
    labels[:, 1:] = batch.labels[:, :-1]
    found = {"input_ids": batch.tokens, "labels": labels, "shift_labels": batch.labels, "use_cache": False}
    return found if batch.positions is None else found | {"position_ids": batch.positions.long()}


def as_plain(value: Any, owner: str) -> Any:
    """The state of a foreign loader as JSON, exactly: what JSON lacks is written as a tagged object.

    Raises:
        DataError: it contains something else than numbers, text, bytes, lists, tuples, dictionaries, arrays and tensors.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [as_plain(item, owner) for item in value]
    if isinstance(value, tuple):
        return {_TAG: "tuple", "items": [as_plain(item, owner) for item in value]}
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value) and _TAG not in value:
            return {key: as_plain(item, owner) for key, item in value.items()}
        return {_TAG: "dict", "items": [[as_plain(key, owner), as_plain(item, owner)] for key, item in value.items()]}
    if isinstance(value, bytes):
        return {_TAG: "bytes", "data": b64encode(value).decode()}
    kind = type(value).__module__.split(".")[0]
    if kind in ("torch", "numpy") and hasattr(value, "shape"):
        array = value.detach().cpu().numpy() if kind == "torch" else value
        if array.dtype.kind in "biufc":
            data = b64encode(array.tobytes()).decode()
            return {_TAG: kind, "dtype": array.dtype.str, "shape": list(array.shape), "data": data}
    raise DataError(f"the state of the loader {owner!r} has a {type(value).__name__}, which a checkpoint cannot store")


def from_plain(value: Any) -> Any:
    """The value that `as_plain` was given."""
    if isinstance(value, list):
        return [from_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_TAG)
    if kind is None:
        return {key: from_plain(item) for key, item in value.items()}
    if kind == "tuple":
        return tuple(from_plain(item) for item in value["items"])
    if kind == "dict":
        return {from_plain(key): from_plain(item) for key, item in value["items"]}
    data = b64decode(value["data"])
    if kind == "bytes":
        return data
    import numpy as np

    array = np.frombuffer(data, dtype=value["dtype"]).reshape(value["shape"]).copy()
    if kind == "numpy":
        return array if array.ndim else array[()]
    import torch

    return torch.from_numpy(array)
