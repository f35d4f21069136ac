"""Proof that others bring: what `forge-train parity RECIPE --record DIR` measured, one JSON file for each layout.

A receipt proves pairs of features of which a plugin brings at least one; what is ours is proven by our tests alone. It counts as
long as the code is what was measured: the digests of Forge's packages and of the plugin's have to be the same. `check` finds
receipts in the folders of `parallel.proofs` and in those that plugins offer in the entry-point group `forge.proofs`.
"""

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any

from forge_core.durable_files import replace_file
from forge_core.errors import BrokenPlugin, ForgeError
from forge_core.features import Use
from forge_core.registry import Registry
from forge_parallel.verify.tolerance import within

GROUP = "forge.proofs"
FORGE = ("forge_core", "forge_models", "forge_parallel")
"""Packages in which numbers are made."""


@dataclass(frozen=True)
class Receipt:
    """One layout that gave the numbers of one process.

    Attributes:
        features: names of all that was used together.
        layout: as text, such as `dp2tp2`.
        mode: format of the numbers, such as `fp64`.
        tolerance: largest accepted relative error, for people to read: `within` knows it.
        errors: what was measured, by name.
        digests: package or plugin file -> digest of its code.
        versions: of torch and Forge, for people to read.
    """

    features: tuple[str, ...]
    layout: str
    mode: str
    tolerance: float
    errors: Mapping[str, float]
    digests: Mapping[str, str]
    versions: Mapping[str, str]

    def holds(self, now: Mapping[str, str]) -> bool:
        """Whether its numbers are within tolerance, and of code that is still the same: `now` is what `digests` says of a job."""
        return not self.changed(now) and within(self.errors, self.mode)

    def changed(self, now: Mapping[str, str]) -> list[str]:
        """Packages whose code is not what was measured, of which the receipt says no digest, or that the job does not use."""
        brought = {name.partition(":")[0] for name in self.features if ":" in name}
        needed = {*FORGE, *brought, *self.digests}
        return sorted(name for name in needed if name not in self.digests or now.get(name) != self.digests[name])


def write(receipt: Receipt, folder: Path) -> Path:
    """Writes a receipt; one of the same features, layout and mode is replaced."""
    what = sha256(json.dumps([sorted(receipt.features), receipt.mode]).encode()).hexdigest()[:8]
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{receipt.layout}-{receipt.mode}-{what}.json"
    replace_file(file, (json.dumps(asdict(receipt), indent=2, sort_keys=True) + "\n").encode())
    return file


def read(folder: Path) -> list[Receipt]:
    """The receipts in a folder.

    Raises:
        ForgeError: the folder does not exist, or a file in it is not a receipt.
    """
    if not folder.is_dir():
        raise ForgeError(f"folder {folder} of parallel.proofs does not exist; record receipts with forge-train parity --record")
    found = []
    for file in sorted(folder.glob("*.json")):
        try:
            said = json.loads(file.read_text())
            found.append(Receipt(**{**said, "features": tuple(said["features"])}))
        except (ValueError, TypeError, KeyError) as error:
            raise ForgeError(f"{file} is not a receipt of forge-train parity --record: {error}") from error
    return found


def offered(folders: Iterable[Path], registry: Registry) -> list[Receipt]:
    """Receipts in these folders, and those that installed plugins offer; a plugin that cannot be loaded proves nothing."""
    brought = []
    for entry in registry.of(GROUP):
        with suppress(BrokenPlugin):
            brought.append(Path(registry.load_entry(entry)))
    return [receipt for folder in (*folders, *brought) for receipt in read(folder)]


def digests(uses: Iterable[Use]) -> dict[str, str]:
    """Name of each package of Forge, and of each plugin that brings one of these features -> digest of its Python sources."""
    modules = {name: {name} for name in FORGE}
    for use in uses:
        if use.module:  # two files of one name are measured together
            modules.setdefault(use.name.partition(":")[0], set()).add(use.module)
    return {name: _digest(found) for name, found in modules.items()}


def _digest(modules: set[str]) -> str:
    files = [file for name in sorted(modules) for file in _sources(import_module(name))]
    return sha256(b"".join(file.name.encode() + b"\0" + file.read_bytes() for file in files)).hexdigest()[:16]


def _sources(module: Any) -> list[Path]:
    folders = [Path(folder) for folder in getattr(module, "__path__", ())]
    alone = getattr(module, "__file__", None)
    return sorted(file for folder in folders for file in folder.rglob("*.py")) or ([Path(alone)] if alone else [])
