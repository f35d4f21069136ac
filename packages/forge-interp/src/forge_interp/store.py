"""Stores of activations: a folder of shards, an index and a manifest.

`ActivationStore` memory-maps shards: opening is free, and a slice reads only its bytes. `ActivationWriter` writes shard by shard,
so memory is bounded. A shard is closed before it exceeds its maximum size, at the end of an input. `manifest.json` is replaced
after every shard, so that an interrupted recording can continue and writes the same files.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from forge_core.durable_files import publish, replace_file, sync_path
from forge_interp.tap_names import InterpError


class ActivationStore:
    """Store written by `ActivationWriter`, or by the ranks of `forge_interp.commands.ranks_store`.

    Attributes:
        manifest: contents of the manifest; `manifest["facts"]` describes the capture.
        names: names of the inner values.
        rows: number of rows of each inner value.
    """

    def __init__(self, folder: Path | str, *, partial: bool = False) -> None:
        """
        Args:
            folder: folder of the store.
            partial: whether to open a store whose capture has not ended; it has the rows stored so far.

        Raises:
            InterpError: the folder is not a store, the store is not complete, or a shard is missing.
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
        """Yields the rows of an inner value (or of `input`, `position`, `token`), one shard at a time."""
        path = self._path(name)
        for shard in self.manifest["shards"]:
            with safe_open(self.folder / shard["file"], framework="pt") as file:
                yield file.get_tensor(path)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Reads rows start to stop - 1 of an inner value, and no others.

        Raises:
            InterpError: the name was not captured, or the rows do not exist.
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
        """Reads all shards and checks their checksums.

        Raises:
            InterpError: the checksum of a shard differs.
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
    """Whether the folder contains a store of activations, complete or not."""
    try:
        return "taps" in read_manifest(folder / MANIFEST)
    except InterpError:
        return False


MANIFEST = "manifest.json"
FORMAT = 1


class ActivationManifest:
    """Manifest of a store that is being written. Files that it does not list are not part of the store.

    Attributes:
        entries: contents on disk: `facts`, `taps`, `shard_bytes`, `shards` in the order of their inputs, and `complete`.
    """

    def __init__(self, folder: Path, facts: Mapping[str, Any], taps: Mapping[str, Mapping[str, Any]], shard_bytes: int) -> None:
        """Opens a new or empty folder, or continues an unfinished store of the same capture. Removes files that its manifest does
        not list, which a killed process left behind. For the arguments see `ActivationWriter`.

        Raises:
            InterpError: the folder has another capture, a complete store, or other files.
        """
        self.folder = folder
        fresh = {"format": FORMAT, "facts": dict(facts), "taps": dict(taps), "shard_bytes": shard_bytes}
        self.entries: dict[str, Any] = json.loads(json.dumps(fresh)) | {"shards": [], "complete": False}
        try:
            self._open(folder)
        except OSError as cause:
            raise InterpError(f"{folder} cannot be written: {cause.strerror}; choose another folder") from cause

    def _open(self, folder: Path) -> None:
        path = folder / MANIFEST
        halves = list(folder.glob(f".{MANIFEST}.*"))  # temporary files of `replace_file` in a killed process
        if path.is_file():
            self.entries = self._same(read_manifest(path))
            kept = {shard["file"] for shard in self.entries["shards"]}
            for stray in (*folder.glob("*shard-*"), *halves):
                if stray.name not in kept:
                    stray.unlink()
            return
        if folder.exists() and (not folder.is_dir() or set(folder.iterdir()) - set(halves)):
            raise InterpError(f"{folder} is not empty and not a store of activations; choose another folder")
        folder.mkdir(parents=True, exist_ok=True)
        for stray in halves:
            stray.unlink()
        self.write()

    def _same(self, found: dict[str, Any]) -> dict[str, Any]:
        for key in ("facts", "taps", "shard_bytes"):
            if found[key] != self.entries[key]:
                raise InterpError(f"{self.folder} holds another capture: {_difference(found[key], self.entries[key], key)}")
        if found["complete"]:
            raise InterpError(f"{self.folder} is complete already; read it, or choose another folder")
        return found

    def add(self, shards: Iterable[Mapping[str, Any]]) -> None:
        """Adds shards that are on disk."""
        every = [*self.entries["shards"], *shards]
        self.entries["shards"] = sorted(every, key=lambda shard: shard["inputs"])

    def write(self, complete: bool = False) -> None:
        """Writes the manifest to disk.

        Raises:
            InterpError: the disk is full or cannot be written.
        """
        self.entries["complete"] = complete
        try:
            replace_file(self.folder / MANIFEST, json.dumps(self.entries, indent=1).encode())
        except OSError as cause:
            raise InterpError(
                f"{self.folder / MANIFEST} cannot be written: {cause.strerror}; free space, and start again"
            ) from cause


def read_manifest(path: Path) -> dict[str, Any]:
    """Reads the manifest of a store.

    Raises:
        InterpError: the file cannot be read or has another format.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as cause:
        raise InterpError(f"{path} cannot be read: {cause}") from cause
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise InterpError(f"{path} is not a manifest of activations, of format {FORMAT}")
    return found


def _difference(found: Any, wanted: Any, key: str) -> str:
    """Returns the first entry that differs, with both values."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        for name in [*found, *wanted]:
            if found.get(name) != wanted.get(name):
                return _difference(found.get(name), wanted.get(name), f"{key}.{name}")
    return f"{key} is {found}, here {wanted}"


INDEX = ("input", "position", "token")
"""Index columns of each row."""
SHARD_BYTES = 256 * 2**20


class ShardWriter:
    """Writes shards, each with the rows of consecutive inputs. Memory holds one shard.

    Attributes:
        next_input: number of the first input that is not captured yet.
        shards: file, rows, inputs and checksum of each shard that this writer wrote.
    """

    def __init__(
        self, folder: Path, prefix: str, names: Iterable[str], shard_bytes: int, begin: int, stored: Sequence[Mapping[str, Any]]
    ) -> None:
        """
        Args:
            folder: existing folder of the store.
            prefix: prefix of the file names, such as `shard-`, before a number.
            names: names of the inner values of a row.
            shard_bytes: maximum number of bytes of a shard.
            begin: number of the first input.
            stored: shards of this writer that exist already; writing continues after them.
        """
        self.folder, self.shards = folder, list[dict[str, Any]]()
        self.next_input: int = stored[-1]["inputs"][1] if stored else begin
        self._prefix, self._names, self._shard_bytes = prefix, set(names), shard_bytes
        self._begin, self._first, self._number = begin, self.next_input, len(stored)
        self._rows: list[dict[str, Tensor]] = []
        self._bytes = 0

    def add(self, values: Mapping[str, Tensor], index: Mapping[str, Tensor], inputs: int) -> None:
        """Adds all rows of the next `inputs` inputs: `values` (rows, ...) by name, `index` (rows,) for each of `INDEX`.

        Raises:
            InterpError: the rows do not match the store, or the disk is full.
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
        """Writes the remaining rows.

        Raises:
            InterpError: the disk is full; existing shards stay valid, and the capture can continue from them.
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
    """Returns the SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(2**22):
            digest.update(chunk)
    return digest.hexdigest()


class ActivationWriter:
    """Writes a store. If the folder has an interrupted capture with the same facts, writing continues after its last shard."""

    def __init__(
        self, folder: Path, facts: Mapping[str, Any], taps: Mapping[str, Mapping[str, Any]], *, shard_bytes: int = SHARD_BYTES
    ) -> None:
        """
        Args:
            folder: a new or empty folder, or that of an interrupted capture with the same facts.
            facts: facts that determine the values, as JSON: model, data, tokenizer, selection.
            taps: `alias`, `shape` of one row and `dtype` of each inner value.
            shard_bytes: maximum number of bytes of a shard.

        Raises:
            InterpError: the folder has another capture, a complete store, or other files.
        """
        self._manifest = ActivationManifest(folder, facts, taps, shard_bytes)
        self._shards = ShardWriter(folder, "shard-", taps, shard_bytes, 0, self._manifest.entries["shards"])
        self._named = 0

    @property
    def next_input(self) -> int:
        """Number of the first input that is not captured yet."""
        return self._shards.next_input

    def add(self, values: Mapping[str, Tensor], index: Mapping[str, Tensor], inputs: int) -> None:
        """Adds all rows of the next `inputs` inputs: `values` (rows, ...) by name, `index` (rows,) for each of `INDEX`.

        Raises:
            InterpError: the rows do not match the store, or the disk is full; existing shards stay valid, and the capture can
                continue from them.
        """
        self._shards.add(values, index, inputs)
        if len(self._shards.shards) > self._named:
            self._write()

    def close(self) -> None:
        """Writes the remaining rows and marks the store as complete."""
        self._shards.flush()
        self._write(complete=True)

    def _write(self, complete: bool = False) -> None:
        self._manifest.add(self._shards.shards[self._named :])
        self._named = len(self._shards.shards)
        self._manifest.write(complete)
