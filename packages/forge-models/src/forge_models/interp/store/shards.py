"""Rows of activations as files: a shard is closed before it grows beyond its size, and ends where an input ends."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from forge_core.durable_files import publish, sync_path
from forge_models.interp.listing import InterpError

INDEX = ("input", "position", "token")
"""What each row says about itself."""
SHARD_BYTES = 256 * 2**20


class ShardWriter:
    """Writes shards, each with the rows of neighboring inputs. Memory holds one.

    Attributes:
        next_input: number of the first input that is still to be captured.
        shards: what this one wrote: file, rows, inputs and checksum of each.
    """

    def __init__(
        self, folder: Path, prefix: str, names: Iterable[str], shard_bytes: int, begin: int, stored: Sequence[Mapping[str, Any]]
    ) -> None:
        """
        Args:
            folder: of the store; it is there.
            prefix: of the files, such as `shard-`; a number follows.
            names: of the inner values of a row.
            shard_bytes: a shard is closed before it grows beyond.
            begin: number of the first input.
            stored: shards of it that are there already; writing goes on behind them.
        """
        self.folder, self.shards = folder, list[dict[str, Any]]()
        self.next_input: int = stored[-1]["inputs"][1] if stored else begin
        self._prefix, self._names, self._shard_bytes = prefix, set(names), shard_bytes
        self._begin, self._first, self._number = begin, self.next_input, len(stored)
        self._rows: list[dict[str, Tensor]] = []
        self._bytes = 0

    def add(self, values: Mapping[str, Tensor], index: Mapping[str, Tensor], inputs: int) -> None:
        """Rows of the next `inputs` inputs, whole: `values` (rows, ...) by name, `index` (rows,) for each of `INDEX`.

        Raises:
            InterpError: rows that do not fit, or a disk that takes no more.
        """
        if set(values) != self._names or set(index) != set(INDEX):
            raise InterpError(f"a row has {', '.join(sorted(self._names))} and {', '.join(INDEX)}")
        row = {name: value.detach().cpu().contiguous() for name, value in (*values.items(), *index.items())}
        if len({len(value) for value in row.values()}) != 1:
            raise InterpError(f"rows differ in number: { {name: len(value) for name, value in row.items()} }")
        size = sum(value.numel() * value.itemsize for value in row.values())
        if self._rows and self._bytes + size > self._shard_bytes:
            self.flush()
        self._rows.append(row)
        self._bytes += size
        self.next_input += inputs

    def flush(self) -> None:
        """Writes what has not been written.

        Raises:
            InterpError: a disk that takes no more; shards that are there stay, and can be gone on from.
        """
        if not self._rows:
            return
        name = f"{self._prefix}{self._number + len(self.shards):05d}.safetensors"
        partial = self.folder / f".{name}.partial"
        whole = {key: torch.cat([row[key] for row in self._rows]) for key in self._rows[0]}
        try:
            save_file(whole, partial)
            sync_path(partial)
            publish(partial, self.folder / name)
        except (OSError, SafetensorError) as cause:
            partial.unlink(missing_ok=True)
            done = f"{self._first - self._begin} inputs" + (f" from number {self._begin} on" if self._begin else "")
            raise InterpError(
                f"{self.folder / name} of {self._bytes / 2**20:.1f} MiB cannot be written: {cause}; the first {done} "
                "are stored: make room, and start the same capture again to go on from there"
            ) from cause
        digest = sha256_of(self.folder / name)
        rows = len(whole["input"])
        self.shards.append({"file": name, "rows": rows, "inputs": [self._first, self.next_input], "sha256": digest})
        self._rows, self._bytes, self._first = [], 0, self.next_input


def sha256_of(path: Path) -> str:
    """Of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(2**22):
            digest.update(chunk)
    return digest.hexdigest()
