"""What a store says about itself: `manifest.json`, which is replaced, whole, behind every shard."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from forge_core.durable_files import replace_file
from forge_models.interp.listing import InterpError

MANIFEST = "manifest.json"
FORMAT = 1


class Manifest:
    """The manifest of a store that is written. What it does not name is not there.

    Attributes:
        entries: as they are on disk: `facts`, `taps`, `shard_bytes`, `shards` in the order of their inputs, and `complete`.
    """

    def __init__(self, folder: Path, facts: Mapping[str, Any], taps: Mapping[str, Mapping[str, Any]], shard_bytes: int) -> None:
        """Opens a new or empty folder, or goes on with that of the same capture: files that its manifest does not name, which a
        process that was killed left, are removed. Arguments as `StoreWriter`.

        Raises:
            InterpError: the folder holds another capture, a complete one, or something else.
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
        halves = list(folder.glob(f".{MANIFEST}.*"))  # of `replace_file` in a process that was killed meanwhile
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
        """Names further shards, which are on disk."""
        every = [*self.entries["shards"], *shards]
        self.entries["shards"] = sorted(every, key=lambda shard: shard["inputs"])

    def write(self, complete: bool = False) -> None:
        """Puts it on disk.

        Raises:
            InterpError: a disk that takes no more.
        """
        self.entries["complete"] = complete
        try:
            replace_file(self.folder / MANIFEST, json.dumps(self.entries, indent=1).encode())
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


def _difference(found: Any, wanted: Any, key: str) -> str:
    """The first entry that differs, with both values."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        for name in [*found, *wanted]:
            if found.get(name) != wanted.get(name):
                return _difference(found.get(name), wanted.get(name), f"{key}.{name}")
    return f"{key} is {found}, here {wanted}"
