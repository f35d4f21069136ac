"""Logits of a teacher's most likely words, stored once for all rows of a data set, and read by distillation instead of a teacher.

A store is a folder. `keys.bin` has 32 bytes for each row, sorted: the row's key as two uint64, and the number of its first label
and of its labels as two int64. `words.bin` (labels, top_k) int32 has the most likely words of each label, the most likely one
first, and `logits.bin` their logits in fp32 or fp64. `manifest.json` says where they come from, and has a hash of each file. All
numbers are little-endian.
"""

import json
from collections.abc import Mapping
from hashlib import blake2b, sha256
from pathlib import Path
from shutil import rmtree
from types import TracebackType
from typing import IO, Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from forge_core.batch import IGNORE, Batch
from forge_core.errors import ForgeError
from forge_core.files import publish, sync, sync_path, write_file

MANIFEST = "manifest.json"
FORMAT = 1
KEYS, WORDS, LOGITS = "keys.bin", "words.bin", "logits.bin"
_READ = 1 << 24
"""Bytes that are hashed at a time."""


def row_keys(batch: Batch) -> list[bytes]:
    """Returns the key of each row of a batch of whole rows on the host: 16 bytes, a digest of tokens, labels and documents."""
    parts = [part.numpy() for part in (batch.tokens, batch.labels, batch.documents) if part is not None]
    keys = []
    for row in range(len(batch.tokens)):
        digest = blake2b(digest_size=16)
        for part in parts:
            digest.update(np.ascontiguousarray(part[row]).tobytes())
        keys.append(digest.digest())
    return keys


class TeacherFacts(NamedTuple):
    """Where stored logits come from.

    Attributes:
        teacher: hash of the teacher's weights.
        tokenizer: fingerprint of the tokenizer; None if the data have none.
        vocab_size: number of words of the teacher.
        top_k: number of words of each label.
        data: what determines the rows: `sequence_length`, `packing`, `documents`, and the fingerprints of `sources`.
    """

    teacher: str
    tokenizer: str | None
    vocab_size: int
    top_k: int
    data: Mapping[str, Any]


class TeacherLogitsWriter:
    """Context in which a store is written; it is there only after the context ends without an error.

    Attributes:
        rows, labels: number of rows and labels so far.
    """

    def __init__(self, folder: Path, facts: TeacherFacts, dtype: torch.dtype) -> None:
        """
        Args:
            folder: folder to create.
            facts: see `TeacherFacts`.
            dtype: dtype of the logits, fp32 or fp64.

        Raises:
            ForgeError: the folder exists, or cannot be created.
        """
        self.folder, self._facts, self.rows, self.labels = folder, facts, 0, 0
        self._type = "<f8" if dtype == torch.float64 else "<f4"
        self._partial = folder.with_name(f".{folder.name}.partial")
        self._keys: dict[bytes, tuple[int, int]] = {}
        self._hashes = {WORDS: sha256(), LOGITS: sha256()}
        self._files: dict[str, IO[bytes]] = {}
        if folder.exists():
            raise ForgeError(f"{folder} exists; choose another folder, or remove it")

    def __enter__(self) -> Self:
        try:
            rmtree(self._partial, ignore_errors=True)
            self._partial.mkdir(parents=True)
            self._files = {name: (self._partial / name).open("wb") for name in self._hashes}
        except OSError as error:
            raise ForgeError(f"{self._partial} cannot be created: {error.strerror or error}; choose another folder") from error
        return self

    def add(self, batch: Batch, words: Tensor, logits: Tensor) -> None:
        """Adds the rows of a batch on the host; rows without labels and repeated rows are left out.

        Args:
            batch: the batch.
            words: (labels of the batch, top_k) int64, row by row.
            logits: (labels of the batch, top_k).

        Raises:
            ForgeError: a file cannot be written.
        """
        counts, first = (batch.labels != IGNORE).sum(1).tolist(), 0
        for key, count in zip(row_keys(batch), counts, strict=True):
            if count and key not in self._keys:
                part = slice(first, first + count)
                self._write(WORDS, words[part].numpy().astype("<i4"))
                self._write(LOGITS, logits[part].numpy().astype(self._type))
                self._keys[key] = (self.labels, count)
                self.labels, self.rows = self.labels + count, self.rows + 1
            first += count

    def _write(self, name: str, values: np.ndarray) -> None:
        content = values.tobytes()
        self._hashes[name].update(content)
        try:
            self._files[name].write(content)
        except OSError as error:
            raise ForgeError(f"{self._partial / name} cannot be written: {error.strerror or error}; make room") from error

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            for file in self._files.values():
                if kind is None:
                    sync(file)
                file.close()
            if kind is None:
                self._finish()
        except OSError as cause:
            raise ForgeError(f"{self.folder} cannot be written: {cause.strerror or cause}; make room") from cause
        finally:
            rmtree(self._partial, ignore_errors=True)

    def _finish(self) -> None:
        entries = [(*np.frombuffer(key, dtype="<u8").tolist(), *place) for key, place in self._keys.items()]
        content = np.array(sorted(entries), dtype="<u8").reshape(-1, 4).tobytes()
        write_file(self._partial / KEYS, content)
        hashes = {KEYS: sha256(content).hexdigest()} | {name: each.hexdigest() for name, each in self._hashes.items()}
        document = {"format": FORMAT, **self._facts._asdict(), "rows": self.rows, "labels": self.labels}
        document |= {"dtype": self._type, "sha256": hashes}
        write_file(self._partial / MANIFEST, (json.dumps(document, indent=1) + "\n").encode())
        sync_path(self._partial)
        publish(self._partial, self.folder)


class StoredTeacherLogits:
    """A store, whose files are memory-mapped.

    Attributes:
        folder: the folder.
        facts: see `TeacherFacts`.
    """

    def __init__(self, folder: Path) -> None:
        """Opens a store and verifies its hashes.

        Raises:
            ForgeError: a file is missing or damaged, or the folder is no store.
        """
        self.folder = folder
        try:
            document = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
            if document["format"] != FORMAT:
                raise ForgeError(f"{folder} has format {document['format']}, but this version reads {FORMAT}; write it again")
            self.facts = TeacherFacts(**{name: document[name] for name in TeacherFacts._fields})
            for name in (KEYS, WORDS, LOGITS):
                if _hash_of(folder / name) != document["sha256"][name]:
                    raise ForgeError(f"{folder / name} is damaged: its content differs from when it was written; restore it")
            shape = (document["labels"], self.facts.top_k)
            self._keys = np.fromfile(folder / KEYS, dtype="<u8").reshape(-1, 4)
            self._words = np.memmap(folder / WORDS, dtype="<i4", mode="r", shape=shape) if shape[0] else None
            self._logits = np.memmap(folder / LOGITS, dtype=document["dtype"], mode="r", shape=shape) if shape[0] else None
        except OSError as error:
            why = f"{error.filename or folder} cannot be read: {error.strerror or error}"
            raise ForgeError(f"{why}; give a folder that forge-train teach has written") from error
        except (ValueError, LookupError, TypeError) as error:
            raise ForgeError(
                f"{folder} has no valid {MANIFEST} ({error}); give a folder that forge-train teach has written"
            ) from error

    def of_row(self, key: bytes) -> tuple[np.ndarray, np.ndarray] | None:
        """Returns the words and logits (labels of the row, top_k) of a row; None for an unknown row."""
        one, two = np.frombuffer(key, dtype="<u8")
        first = self._keys[:, 0]
        for place in range(int(np.searchsorted(first, one)), int(np.searchsorted(first, one, side="right"))):
            if self._keys[place, 1] == two and self._words is not None and self._logits is not None:
                start, count = (int(number) for number in self._keys[place, 2:])
                return self._words[start : start + count], self._logits[start : start + count]
        return None

    def of_batch(self, batch: Batch, top_k: int) -> tuple[Tensor, Tensor]:
        """Returns the `top_k` most likely words (B, T, top_k) int32 of each position of a batch of whole rows on the host, and
        their logits; those of positions without a label are arbitrary.

        Raises:
            ForgeError: a row with labels is not in the store.
        """
        rows, length = batch.labels.shape
        labeled = (batch.labels != IGNORE).numpy()
        words = np.broadcast_to(np.arange(top_k, dtype=np.int32), (rows, length, top_k)).copy()
        kind = np.float32 if self._logits is None else self._logits.dtype.newbyteorder("=")
        logits = np.zeros((rows, length, top_k), dtype=kind)
        for row, key in enumerate(row_keys(batch)):
            if not labeled[row].any():
                continue
            if (found := self.of_row(key)) is None:
                sample = batch.samples[row] if batch.samples else row
                raise ForgeError(
                    f"objective.stored: {self.folder} does not have the row of sample {sample}; the data or "
                    "their packing have changed since forge-train teach; run it again"
                )
            words[row, labeled[row]], logits[row, labeled[row]] = (each[:, :top_k] for each in found)
        return torch.from_numpy(words), torch.from_numpy(logits)


def _hash_of(path: Path) -> str:
    digest = sha256()
    with path.open("rb") as file:
        while content := file.read(_READ):
            digest.update(content)
    return digest.hexdigest()
