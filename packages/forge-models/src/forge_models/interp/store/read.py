"""Reads stored activations as memory maps: opening costs nothing, and a slice reads its bytes only."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from forge_models.interp.listing import InterpError
from forge_models.interp.store.manifest import MANIFEST, read_manifest
from forge_models.interp.store.shards import INDEX, sha256_of


class ActivationStore:
    """A folder that `StoreWriter` wrote, or the ranks of `forge_train.inside.ranks_store`.

    Attributes:
        manifest: as it is on disk; `manifest["facts"]` says what was captured.
        names: of the inner values.
        rows: number of rows of each.
    """

    def __init__(self, folder: Path | str, *, partial: bool = False) -> None:
        """
        Args:
            folder: the store.
            partial: also opens one whose capture has not ended, as far as it has come.

        Raises:
            InterpError: not a store, not complete, or a shard is missing.
        """
        self.folder = Path(folder)
        self.manifest: dict[str, Any] = read_manifest(self.folder / MANIFEST)
        shards = self.manifest["shards"]
        if not self.manifest["complete"] and not partial:
            done = sum(last - first for first, last in (shard["inputs"] for shard in shards))
            raise InterpError(
                f"{self.folder}: the capture stopped with {done} inputs stored; start it again, or open it with partial=True"
            )
        if missing := [shard["file"] for shard in shards if not (self.folder / shard["file"]).is_file()]:
            raise InterpError(f"{self.folder} lacks {missing[0]}")
        self.names: tuple[str, ...] = tuple(self.manifest["taps"])
        self.rows: int = sum(shard["rows"] for shard in shards)
        self._aliases = {one["alias"]: name for name, one in self.manifest["taps"].items() if one["alias"]}

    def parts(self, name: str) -> Iterator[Tensor]:
        """The rows of an inner value (or of `input`, `position`, `token`), a shard at a time."""
        path = self._path(name)
        for shard in self.manifest["shards"]:
            with safe_open(self.folder / shard["file"], framework="pt") as file:
                yield file.get_tensor(path)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows start to stop - 1 of an inner value; the others are not read.

        Raises:
            InterpError: it was not captured, or these rows do not exist.
        """
        path, stop = self._path(name), self.rows if stop is None else stop
        if not 0 <= start <= stop <= self.rows:
            raise InterpError(f"rows {start} to {stop} of {name} do not exist: there are {self.rows}")
        found, first = [], 0
        for shard in self.manifest["shards"]:
            low, high = max(start - first, 0), min(stop - first, shard["rows"])
            if low < high:
                with safe_open(self.folder / shard["file"], framework="pt") as file:
                    found.append(file.get_slice(path)[low:high])
            first += shard["rows"]
        return torch.cat(found) if found else self._empty(path)

    def verify(self) -> None:
        """Reads every byte.

        Raises:
            InterpError: a shard is not what was written.
        """
        for shard in self.manifest["shards"]:
            if sha256_of(self.folder / shard["file"]) != shard["sha256"]:
                raise InterpError(f"{self.folder / shard['file']} is damaged: its checksum differs; capture again")

    def _path(self, name: str) -> str:
        path = self._aliases.get(name, name)
        if path not in self.names and path not in INDEX:
            raise InterpError(f"{name} was not captured; {self.folder} holds {', '.join((*self.names, *INDEX))}")
        return path

    def _empty(self, path: str) -> Tensor:
        if path in INDEX:
            return torch.empty(0, dtype=torch.int64)
        one = self.manifest["taps"][path]
        return torch.empty(0, *one["shape"], dtype=getattr(torch, one["dtype"]))


def is_store(folder: Path) -> bool:
    """Whether a folder says that it holds activations, finished or not."""
    try:
        return "taps" in read_manifest(folder / MANIFEST)
    except InterpError:
        return False
