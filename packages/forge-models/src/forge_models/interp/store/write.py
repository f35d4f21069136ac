"""Writes activations shard by shard: memory is bounded, and a capture that was killed goes on and makes the same files.

A folder holds `manifest.json` and `shard-00000.safetensors`, ... A shard has a tensor (rows, ...) for each inner value, in the
dtype of the model, and for each row `input` (number of the input), `position` (its place in it, -1 for a mean) and `token` (its
id). A shard ends where an input ends. The manifest is replaced, whole, behind every shard; what it does not name is not there.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from forge_core.durable import publish, replace_file, sync_path
from forge_models.interp.listing import InterpError

MANIFEST = "manifest.json"
FORMAT = 1
INDEX = ("input", "position", "token")
"""What each row says about itself."""
SHARD_BYTES = 256 * 2**20


class StoreWriter:
    """A store that is written. The same facts find the store of a capture that stopped, and go on behind its last shard.

    Attributes:
        next_input: number of the first input that is still to be captured.
    """

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
        self.folder, self._shard_bytes = folder, shard_bytes
        fresh = {"format": FORMAT, "facts": dict(facts), "taps": dict(taps), "shard_bytes": shard_bytes}
        self._manifest: dict[str, Any] = json.loads(json.dumps(fresh)) | {"shards": [], "complete": False}
        self._rows: list[dict[str, Tensor]] = []
        self._bytes = 0
        self._open()
        shards = self._manifest["shards"]
        self.next_input: int = shards[-1]["inputs"][1] if shards else 0
        self._first = self.next_input

    def _open(self) -> None:
        path = self.folder / MANIFEST
        halves = list(self.folder.glob(f".{MANIFEST}.*"))  # of `replace_file` in a process that was killed meanwhile
        if path.is_file():
            found = read_manifest(path)
            for key in ("facts", "taps", "shard_bytes"):
                if found[key] != self._manifest[key]:
                    raise InterpError(f"{self.folder} holds another capture: {_difference(found[key], self._manifest[key], key)}")
            if found["complete"]:
                raise InterpError(f"{self.folder} is complete already; read it, or choose another folder")
            self._manifest = found
            kept = {shard["file"] for shard in found["shards"]}
            for stray in (*self.folder.glob("*shard-*"), *halves):  # a shard that the manifest does not name was not finished
                if stray.name not in kept:
                    stray.unlink()
            return
        if self.folder.exists() and (not self.folder.is_dir() or set(self.folder.iterdir()) - set(halves)):
            raise InterpError(f"{self.folder} is not empty and not a store of activations; choose another folder")
        self.folder.mkdir(parents=True, exist_ok=True)
        for stray in halves:
            stray.unlink()
        self._write_manifest()

    def add(self, values: Mapping[str, Tensor], index: Mapping[str, Tensor], inputs: int) -> None:
        """Rows of the next `inputs` inputs, whole: `values` (rows, ...) by name, `index` (rows,) for each of `INDEX`.

        Raises:
            InterpError: rows that do not fit, or a disk that takes no more; shards that are there stay, and can be gone on from.
        """
        if set(values) != set(self._manifest["taps"]) or set(index) != set(INDEX):
            raise InterpError(f"a row has {', '.join(self._manifest['taps'])} and {', '.join(INDEX)}")
        row = {name: value.detach().cpu().contiguous() for name, value in (*values.items(), *index.items())}
        if len({len(value) for value in row.values()}) != 1:
            raise InterpError(f"rows differ in number: { {name: len(value) for name, value in row.items()} }")
        size = sum(value.numel() * value.itemsize for value in row.values())
        if self._rows and self._bytes + size > self._shard_bytes:
            self._flush()
        self._rows.append(row)
        self._bytes += size
        self.next_input += inputs

    def close(self) -> None:
        """Writes what is left and marks the store as complete."""
        if self._rows:
            self._flush()
        self._manifest["complete"] = True
        self._write_manifest()

    def _flush(self) -> None:
        shards = self._manifest["shards"]
        name = f"shard-{len(shards):05d}.safetensors"
        partial = self.folder / f".{name}.partial"
        whole = {key: torch.cat([row[key] for row in self._rows]) for key in self._rows[0]}
        try:
            save_file(whole, partial)
            sync_path(partial)
            publish(partial, self.folder / name)
        except (OSError, SafetensorError) as cause:
            partial.unlink(missing_ok=True)
            raise InterpError(
                f"{self.folder / name} of {self._bytes / 2**20:.1f} MiB cannot be written: {cause}; the first {self._first} "
                "inputs are stored: make room, and start the same capture again to go on from there"
            ) from cause
        digest = sha256_of(self.folder / name)
        rows = len(whole["input"])
        shards.append({"file": name, "rows": rows, "inputs": [self._first, self.next_input], "sha256": digest})
        self._rows, self._bytes, self._first = [], 0, self.next_input
        self._write_manifest()

    def _write_manifest(self) -> None:
        try:
            replace_file(self.folder / MANIFEST, json.dumps(self._manifest, indent=1).encode())
        except OSError as cause:
            raise InterpError(
                f"{self.folder / MANIFEST} cannot be written: {cause.strerror}; make room, and start again"
            ) from cause


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a store.

    Raises:
        InterpError: it cannot be read, or is of another format.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as cause:
        raise InterpError(f"{path} cannot be read: {cause}") from cause
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise InterpError(f"{path} is not a manifest of activations, of format {FORMAT}")
    return found


def sha256_of(path: Path) -> str:
    """Of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(2**22):
            digest.update(chunk)
    return digest.hexdigest()


def _difference(found: Any, wanted: Any, key: str) -> str:
    """The first entry that differs, with both values."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        for name in [*found, *wanted]:
            if found.get(name) != wanted.get(name):
                return _difference(found.get(name), wanted.get(name), f"{key}.{name}")
    return f"{key} is {found}, here {wanted}"
