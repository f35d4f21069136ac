"""Writes activations shard by shard: memory is bounded, and a capture that was killed goes on and makes the same files.

A folder holds `manifest.json` and `shard-00000.safetensors`, ... A shard has a tensor (rows, ...) for each inner value, in the
dtype of the model, and for each row `input` (number of the input), `position` (its place in it, -1 for a mean) and `token` (its
id). A shard ends where an input ends. The manifest is replaced, whole, behind every shard; what it does not name is not there.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from forge_models.interp.store.manifest import Manifest
from forge_models.interp.store.shards import SHARD_BYTES, ShardWriter


class StoreWriter:
    """A store that is written. The same facts find the store of a capture that stopped, and go on behind its last shard."""

    def __init__(
        self, folder: Path, facts: Mapping[str, Any], taps: Mapping[str, Mapping[str, Any]], *, shard_bytes: int = SHARD_BYTES
    ) -> None:
        """
        Args:
            folder: a new or empty one, or that of the same capture.
            facts: what determines the numbers: model, data, tokenizer, selection. JSON.
            taps: per inner value `alias`, `shape` of one row and `dtype`.
            shard_bytes: a shard is closed before it grows beyond.

        Raises:
            InterpError: the folder holds another capture, a complete one, or something else.
        """
        self._manifest = Manifest(folder, facts, taps, shard_bytes)
        self._shards = ShardWriter(folder, "shard-", taps, shard_bytes, 0, self._manifest.entries["shards"])
        self._named = 0

    @property
    def next_input(self) -> int:
        """Number of the first input that is still to be captured."""
        return self._shards.next_input

    def add(self, values: Mapping[str, Tensor], index: Mapping[str, Tensor], inputs: int) -> None:
        """Rows of the next `inputs` inputs, whole: `values` (rows, ...) by name, `index` (rows,) for each of `INDEX`.

        Raises:
            InterpError: rows that do not fit, or a disk that takes no more; shards that are there stay, and can be gone on from.
        """
        self._shards.add(values, index, inputs)
        if len(self._shards.shards) > self._named:
            self._write()

    def close(self) -> None:
        """Writes what is left and marks the store as complete."""
        self._shards.flush()
        self._write(complete=True)

    def _write(self, complete: bool = False) -> None:
        self._manifest.add(self._shards.shards[self._named :])
        self._named = len(self._shards.shards)
        self._manifest.write(complete)
