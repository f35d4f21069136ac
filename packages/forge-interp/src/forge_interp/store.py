"""Stores of activations: a folder of shards, an index and a manifest.

`ActivationStore` memory-maps shards: opening is free, and a slice reads only its bytes. `ActivationWriter` writes shard by shard,
so memory is bounded. A shard is closed before it exceeds its maximum size, at the end of an input. `manifest.json` is replaced
after every shard, so that an interrupted recording can continue and writes the same files.

`record` runs a model over inputs and stores the selected values; it continues an interrupted run of the same capture.
"""

import ctypes
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from forge_core.batch import PADDING
from forge_core.files import publish, replace_file, sync_path
from forge_interp.captures import Captured, capture, select_taps
from forge_interp.selection import Positions, Selection
from forge_interp.tap_names import InterpError, TapInfo
from forge_models.generation import evaluating


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


def record(
    model: nn.Module,
    inputs: Sequence[Tensor],
    folder: Path,
    names: str | Sequence[str],
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    positions: Positions = "all",
    batch: int = 8,
    facts: Mapping[str, Any] | None = None,
    shard_bytes: int = SHARD_BYTES,
    report: Callable[[int], None] | None = None,
) -> ActivationWriter:
    """Stores inner values of `inputs`, each (length,) token ids, in a folder; an interrupted capture continues.

    Memory holds one batch and one shard. Selection works as in `capture`.

    Args:
        batch: number of inputs per forward; shorter inputs are padded, and padding is not read.
        facts: further facts about the origin of model and data, for the manifest.
        report: called with the number of inputs that are done.

    Raises:
        InterpError: the selection is invalid (raised before any forward), the folder has another capture, or the disk is full.
    """
    infos = select_taps(model, names, layers, heads)
    check_inputs(model, inputs, positions)
    chosen = {name: stored(one, heads) for name, one in infos.items()}
    said = facts_of(fingerprint(model), inputs, batch, layers, heads, positions)
    writer = ActivationWriter(folder, {**said, **(facts or {})}, chosen, shard_bytes=shard_bytes)
    device = next(model.parameters()).device
    with torch.no_grad(), evaluating(model), capture(model, list(infos), heads=heads, positions=positions, device="cpu") as seen:
        while writer.next_input < len(inputs):
            first = writer.next_input
            rows = inputs[first : first + batch]
            tokens, documents = _padded(rows)
            model(tokens.to(device), documents=None if documents is None else documents.to(device))
            writer.add(*_stored_rows(seen, tokens, first, positions == "mean"), len(rows))
            seen.clear()
            if report is not None:
                report(writer.next_input)
    writer.close()
    return writer


def check_inputs(model: Any, inputs: Sequence[Tensor], positions: Positions) -> None:
    """Checks all inputs before the first one runs.

    Raises:
        InterpError: there are no inputs, an input is empty or too long, an id is outside of the vocabulary, or a position is
            beyond an input.
    """
    if not inputs:
        raise InterpError("inputs is empty; give at least one row of tokens")
    shape = model.shape
    listed = [positions] if isinstance(positions, int) else positions if isinstance(positions, Sequence) else []
    if not isinstance(positions, str):
        Selection(positions)
    for number, row in enumerate(inputs):
        if not 0 < len(row) <= shape.max_length:
            raise InterpError(f"input {number} has {len(row)} tokens; 1 to {shape.max_length} are possible")
        if not 0 <= int(row.min()) <= int(row.max()) < shape.vocab_size:
            raise InterpError(f"input {number} holds token {int(row.max())}; the vocabulary has {shape.vocab_size}")
        for place in listed if not isinstance(positions, str) else ():
            if isinstance(place, int) and not 0 <= place < len(row):
                raise InterpError(f"position {place} is beyond input {number}, of {len(row)} tokens; count from 0, or use 'last'")
    if positions == "last_of_word":
        raise InterpError("positions 'last_of_word' need words of each batch; capture them with `capture`")


def stored(info: TapInfo, heads: Sequence[int] | None) -> dict[str, Any]:
    """Returns the manifest entry of an inner value: alias, shape of a row, dtype."""
    shape = info.shape if heads is None else (len(heads), *info.shape[1:])
    return {"alias": info.alias, "shape": list(shape), "dtype": str(info.dtype).removeprefix("torch.")}


def row_bytes(infos: Mapping[str, TapInfo], heads: Sequence[int] | None) -> int:
    """Returns the number of bytes of one stored row of all inner values."""
    return sum(torch.Size(stored(one, heads)["shape"]).numel() * one.dtype.itemsize for one in infos.values())


def facts_of(
    weights: str,
    inputs: Sequence[Tensor],
    batch: int,
    layers: Sequence[int] | None,
    heads: Sequence[int] | None,
    positions: Positions,
) -> dict[str, Any]:
    """Returns the facts that determine the stored values, for a manifest; `weights` is a `fingerprint`."""
    return {
        "weights": weights,
        "tokens": _digest((f"{len(row)}", row.long()) for row in inputs),
        "inputs": len(inputs),
        "batch": batch,
        "layers": None if layers is None else list(layers),
        "heads": None if heads is None else list(heads),
        "positions": positions if isinstance(positions, str | int) else repr(positions),
    }


def fingerprint(model: nn.Module) -> str:
    """Returns the SHA-256 of all parameters: names, dtypes, shapes and bytes."""
    return fingerprint_of(sorted(model.named_parameters(), key=lambda one: one[0]))


def fingerprint_of(parameters: Iterable[tuple[str, Tensor]]) -> str:
    """Returns the `fingerprint` of parameters in order of their names; only one of them must be in memory at a time."""
    return _digest((f"{name} {value.dtype} {tuple(value.shape)}", value) for name, value in parameters)


def _digest(parts: Iterable[tuple[str, Tensor]]) -> str:
    digest = hashlib.sha256()
    for text, value in parts:
        held = value.detach().cpu().contiguous()
        digest.update(text.encode())
        digest.update((ctypes.c_char * (held.numel() * held.itemsize)).from_address(held.data_ptr()))
    return digest.hexdigest()


def _padded(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    longest = max(len(row) for row in rows)
    tokens = torch.stack([torch.nn.functional.pad(row.long(), (0, longest - len(row))) for row in rows])
    lengths = torch.tensor([len(row) for row in rows])
    if bool((lengths == longest).all()):
        return tokens, None
    behind = torch.arange(longest) >= lengths[:, None]
    return tokens, torch.zeros(tokens.shape, dtype=torch.int32).masked_fill(behind, PADDING)


def _stored_rows(seen: Captured, tokens: Tensor, first: int, mean: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns the values (rows, ...) and the index columns (input, position, token) of the rows, input by input."""
    places = seen.tokens[-1].cpu()
    if mean:
        count = len(tokens)
        index = {"input": torch.arange(count) + first, "position": torch.full((count,), -1), "token": torch.full((count,), -1)}
        return {name: value.flatten(0, 1) for name, value in seen.items()}, index
    rows, columns = places.unbind(1)
    # Where inputs have different numbers of tokens, values come as (rows, ...) already.
    values = {
        name: value.flatten(0, 1) if value.dim() - len(seen.infos[name].shape) == 2 else value for name, value in seen.items()
    }
    return values, {"input": rows + first, "position": columns, "token": tokens[rows, columns]}
