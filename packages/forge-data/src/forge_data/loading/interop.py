"""Adapters between streams of Forge and the loaders and models of other libraries.

torchdata's `StatefulDataLoader` interface works both ways: a stream of Forge as such a loader, and a foreign loader as a
`Stream`. The interface: iterating yields batches; `state_dict()` between two batches records the position; after
`load_state_dict`, the next `iter()` continues there; any other `iter()` starts from the beginning.
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

    A state from between two optimizer steps can be loaded with other numbers of ranks and workers and another micro-batch
    size. A state from the middle of a step requires the same ranks and micro-batch size.
    """

    def __init__(self, stream: Any) -> None:
        """
        Args:
            stream: the result of `open_stream`.
        """
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
        """Returns the number of micro-batches of this rank in the whole stream.

        Raises:
            TypeError: the stream is endless.
        """
        steps = self.stream.steps
        if steps is None:
            raise TypeError("the stream is endless and has no length; set data.epochs to limit it")
        return sum(self.stream.batches_at(step) for step in range(steps))

    def state_dict(self) -> dict[str, Any]:
        """Returns the position after the newest batch, as JSON."""
        return {"cursor": dict(self._cursor), "taken": self._taken, "shape": self._shape}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Makes the next `iter()` continue after a state.

        Raises:
            DataError: the state is in the middle of a step, and ranks or micro-batch size differ.
        """
        taken, shape = int(state_dict["taken"]), list(state_dict["shape"])
        if taken and shape != self._shape:
            was, now = (f"rank {rank} of {ranks} with micro_batch {micro}" for rank, ranks, micro in (shape, self._shape))
            raise DataError(
                f"the state is in the middle of a step of {was}, but this loader is {now}; save states between optimizer steps"
            )
        self._cursor, self._taken, self._loaded = state_dict["cursor"], taken, True


class ForeignStream:
    """A foreign loader as a `Stream`. It resumes as exactly as the loader does, and only on the same number of ranks.

    The loader yields `Batch` objects, or mappings with the names of its fields; labels are already shifted. The loader
    itself is responsible for sharding, order and randomness; the component that builds it gets rank, ranks and batch sizes
    from its context.
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
        """Returns the cursor of step 0."""
        return self._cursor(0, self._first)

    def from_cursor(self, cursor: Cursor) -> Iterator[tuple[list[Batch], Cursor]]:
        """Yields, for each optimizer step, this rank's micro-batches and the cursor after them.

        Raises:
            DataError: immediately, if the cursor belongs to another loader or another number of ranks.
        """
        states = cursor.get("foreign", {}).get(self.label)
        if cursor.get("version") != VERSION or states is None or cursor.get("fingerprint") != self.fingerprint:
            raise DataError(f"this cursor does not belong to the loader {self.label!r}: {dict(cursor)!r}")
        if (cursor.get("ranks"), cursor.get("global_batch")) != (self.ranks, self.global_batch):
            raise DataError(
                f"the position of the foreign loader {self.label!r} is valid only for {cursor.get('ranks')} data ranks and a "
                f"global batch of {cursor.get('global_batch')}, not for {self.ranks} and {self.global_batch}; resume with those"
            )
        if str(self.rank) not in states:
            raise DataError(
                f"the cursor has no state of rank {self.rank}; save forge_data.merge_cursors of the cursors of all ranks"
            )
        return self._steps_from(int(cursor["step"]), states[str(self.rank)])

    def lr_scale(self, step: int) -> float:
        """Returns 1: a foreign loader has no phases."""
        return 1.0

    def tokens_at(self, step: int) -> int:
        """Returns the number of positions of the global batch of the newest step, including padding."""
        return self.global_batch * self._length

    def batches_at(self, step: int) -> int:
        """Returns the number of micro-batches of this rank in a step."""
        return self.global_batch // self.ranks // self.micro_batch

    def describe(self, steps: int | None = None) -> Mapping[str, Any]:
        """Returns what is known about the loader: fingerprint, tokens and label."""
        return {"fingerprint": self.fingerprint, "tokens": self.tokens, "steps": None, "sources": [{"label": self.label}]}

    def entropy(self) -> float | None:
        """Returns None: the token counts of a foreign loader are unknown."""
        return None

    def _steps_from(self, step: int, state: Any) -> Iterator[tuple[list[Batch], Cursor]]:
        self.loader.load_state_dict(from_plain(state))
        batches: list[Batch] = []
        for item in self.loader:
            batches.append(self._batch(item))
            if len(batches) < self.batches_at(step):
                continue
            step += 1
            self._length = batches[0].tokens.shape[1]
            yield batches, self._cursor(step, as_plain(self.loader.state_dict(), self.label))
            batches = []

    def _batch(self, item: Any) -> Batch:
        batch = item if isinstance(item, Batch) else Batch(**item) if isinstance(item, Mapping) else None
        if batch is None:
            raise DataError(
                f"the loader {self.label!r} yields {type(item).__name__}; it must yield a Batch or a mapping of its fields"
            )
        if batch.tokens.ndim != 2 or batch.tokens.shape != batch.labels.shape or len(batch.tokens) != self.micro_batch:
            tokens, labels = tuple(batch.tokens.shape), tuple(batch.labels.shape)
            raise DataError(
                f"the loader {self.label!r} yields tokens {tokens} and labels {labels}; both must be ({self.micro_batch}, length)"
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
    """Shows the type checker that `ForeignStream` is a `Stream`."""
    return stream


def for_transformers(batch: Batch) -> dict[str, Any]:
    """Returns a batch as keyword arguments of a causal language model of transformers.

    The labels of a `Batch` are already shifted, but these models shift `labels` themselves. So `labels` here are unshifted:
    each label moves one position to the right, and the label of the last position of a row is lost. `shift_labels` are the
    shifted labels, which transformers uses unchanged if the model passes them to its loss. With both, the loss is the mean
    over all labels of the batch. Without `shift_labels` (remove it for a model that does not accept it), the loss leaves out
    the last position of each row.

    Positions restart in every document. From them transformers builds the mask that separates documents, if no attention
    mask is passed and no cache is used.

    Returns:
        `input_ids`, `labels`, `shift_labels` (B, T) int64; `position_ids` (B, T) int64 if the batch has positions; and
        `use_cache`, False.
    """
    labels = batch.labels.new_full(tuple(batch.labels.shape), IGNORE)
    labels[:, 1:] = batch.labels[:, :-1]
    inputs = {"input_ids": batch.tokens, "labels": labels, "shift_labels": batch.labels, "use_cache": False}
    return inputs if batch.positions is None else inputs | {"position_ids": batch.positions.long()}


def as_plain(value: Any, owner: str) -> Any:
    """Returns the state of a foreign loader as JSON without loss; types that JSON lacks become tagged objects.

    Raises:
        DataError: the state contains types other than numbers, text, bytes, lists, tuples, dictionaries, arrays and tensors.
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
    """Returns the value that `as_plain` converted."""
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
