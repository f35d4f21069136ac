"""Reads and tokenizes records in order during a run, without preparing a store first.

A file is a shard. Empty documents and those of another split are not counted, so a position in a shard is one number. To
return to it, the documents before it are read, but not tokenized.
"""

from collections.abc import Callable, Iterator
from functools import partial
from hashlib import sha256
from itertools import islice

import numpy as np

from forge_core.errors import DataError
from forge_core.protocols.data import Tokenizer
from forge_data.preparation.job import encode
from forge_data.sources import huggingface
from forge_data.sources.records import (
    SHOWN,
    CorpusPart,
    Document,
    Records,
    Skips,
    Wanted,
    checked_value,
    in_split,
    read_part,
)
from forge_data.tokenizers.control import identity_of


def _silent(message: str) -> None:
    """Ignores a message."""


class _StreamSkips(Skips):
    """Counts the broken records of a whole stream, each only once, although later epochs read it again.

    The first `SHOWN` records are reported by name; after that, the number is reported whenever its first digit changes.
    """

    def __init__(self, budget: int, what: str, report: Callable[[str], None]) -> None:
        """
        Args:
            budget: see `Skips`.
            what: name of the stream for messages.
            report: called with messages.
        """
        super().__init__(budget)
        self._what, self._report = what, report
        self._seen: set[str] = set()

    def broken(self, message: str) -> None:
        if message in self._seen:
            return
        super().broken(message)
        self._seen.add(message)
        so_far = f"{self.count} broken record{'s' if self.count > 1 else ''} of {self._what} left out so far"
        if self.count <= SHOWN:
            self._report(f"{so_far}: {message}")
        elif self.count % 10 ** (len(str(self.count)) - 1) == 0:
            self._report(f"{so_far}; the newest: {message}")


class StreamedRecords:
    """The `StreamedSource` of files of records."""

    max_id: int | None = None

    def __init__(
        self, records: Records, tokenizer: Tokenizer | None, eos: int | None, report: Callable[[str], None] = _silent
    ) -> None:
        """
        Args:
            records: the documents.
            tokenizer: required for text.
            eos: for records of ids: the id appended to every document that does not end with it.
            report: called with messages about skipped records.

        Raises:
            DataError: the records are text, and `tokenizer` is None.
        """
        self._documents = _Tokens(records.wanted, tokenizer, eos, records.what)
        self.name = records.what
        self.vocab_size = tokenizer.vocab_size if tokenizer else None
        self.tokenizer = tokenizer.fingerprint if tokenizer else None
        self.fingerprint = self._documents.fingerprint(records.fingerprint)
        self._files = [file for file in records.files if file.size]
        self._skips = _StreamSkips(records.skip, self.name, report)
        self.shards = len(self._files)

    def stream(self, shard: int, start: int = 0) -> Iterator[np.ndarray]:
        """Yields the token ids of documents `start`, `start` + 1, ... of a file."""
        file = self._files[shard]
        part = CorpusPart((file,), 0, -1, file.size)
        for name, content in islice(read_part(part, self._documents.wanted, self._skips), start, None):
            yield self._documents.of(name, content)


class DatasetTexts:
    """Documents of a Hugging Face dataset as `Texts`, without downloading the whole dataset.

    Attributes:
        fingerprint: fingerprint of the dataset's files and of `wanted`.
        shards: number of shards of the dataset.
        skip: maximum number of broken records that are skipped.
    """

    def __init__(
        self,
        path: str,
        *,
        subset: str | None = None,
        dataset_split: str = "train",
        text: str = "text",
        ids: str | None = None,
        split: str = "all",
        held_out: float = 0.05,
        skip: int = 0,
    ) -> None:
        """Opens the dataset; the arguments are those of `huggingface.open_dataset`.

        Raises:
            DataError: see `huggingface.open_stream_of`.
        """
        column = ids or text
        self._dataset, identity = huggingface.open_stream_of(path, subset, dataset_split, column)
        self.wanted = Wanted("huggingface", column, ids is not None, split, held_out)
        self.name = f"{path} ({dataset_split}, streamed)"
        self.fingerprint = sha256(f"{identity} {self.wanted}".encode()).hexdigest()
        self.shards: int = self._dataset.num_shards
        self.skip = skip

    def shard(self, number: int, skips: Skips) -> Iterator[Document]:
        """Yields the documents of one shard that are in the split and not empty."""
        for row, record in enumerate(self._dataset.shard(self.shards, number)):
            name = f"{self.name}, shard {number}, row {row}"
            content = checked_value(record.get(self.wanted.column), partial(str, name), self.wanted, skips)
            if content is not None and len(content) and in_split(f"{number}:{row}", self.wanted.split, self.wanted.held_out):
                yield name, content

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """Yields (name, text) of every document."""
        skips = Skips(self.skip)
        for number in range(self.shards):
            for name, text in self.shard(number, skips):
                assert isinstance(text, str), "expected text, got token ids"
                yield name, text


class StreamedDataset:
    """The `StreamedSource` of a Hugging Face dataset."""

    max_id: int | None = None

    def __init__(
        self, texts: DatasetTexts, tokenizer: Tokenizer | None, eos: int | None, report: Callable[[str], None] = _silent
    ) -> None:
        """Arguments: see `StreamedRecords`.

        Raises:
            DataError: the records are text, and `tokenizer` is None.
        """
        self._texts = texts
        self.name = self._texts.name
        self._documents = _Tokens(self._texts.wanted, tokenizer, eos, self.name)
        self.vocab_size = tokenizer.vocab_size if tokenizer else None
        self.tokenizer = tokenizer.fingerprint if tokenizer else None
        self.fingerprint = self._documents.fingerprint(self._texts.fingerprint)
        self.shards = self._texts.shards
        self._skips = _StreamSkips(texts.skip, self.name, report)

    def stream(self, shard: int, start: int = 0) -> Iterator[np.ndarray]:
        """Yields the token ids of documents `start`, `start` + 1, ... of one of the dataset's shards."""
        for name, content in islice(self._texts.shard(shard, self._skips), start, None):
            yield self._documents.of(name, content)


class _Tokens:
    """Converts documents to token ids, including the end-of-document token."""

    def __init__(self, wanted: Wanted, tokenizer: Tokenizer | None, eos: int | None, what: str) -> None:
        if tokenizer is None and not wanted.ids:
            raise DataError(f"{what} is text and needs a tokenizer; add [data.tokenizer] with name = 'bpe' or 'bytes'")
        self.wanted = wanted
        self._tokenizer = tokenizer
        self._eos = eos

    def fingerprint(self, texts: str) -> str:
        """Returns the fingerprint of the stream whose documents have the fingerprint `texts`."""
        tokenizer = self._tokenizer
        made_with = None if tokenizer is None else tokenizer.fingerprint if self.wanted.ids else identity_of(tokenizer)
        return sha256(f"stream {texts} {made_with} {self._eos}".encode()).hexdigest()

    def of(self, name: str, content: "str | np.ndarray") -> np.ndarray:
        """Returns the ids (tokens,) int64 of one document.

        Raises:
            DataError: an id exceeds the vocabulary.
        """
        if isinstance(content, str):
            assert self._tokenizer is not None
            return encode([content], self._tokenizer).ids
        if self._tokenizer is not None and int(content.max()) >= self._tokenizer.vocab_size:
            limit = self._tokenizer.vocab_size
            raise DataError(f"document {name} holds token id {int(content.max())}, but the vocabulary has only {limit} ids")
        return content if self._eos is None or content[-1] == self._eos else np.append(content, self._eos)
