"""Proof that others bring: what `forge-train parity RECIPE --record DIR` measured, one JSON file for each layout.

A receipt proves pairs of features of which a plugin brings at least one; what is ours is proven by our tests alone. It counts as
long as the code is what was measured: the digests of Forge's packages and of the plugin's have to be the same. `check` finds
receipts in the folders of `parallel.proofs` and in those that plugins offer in the entry-point group `forge.proofs`.
"""

import json
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any

from forge_core.durable import replace_file
from forge_core.errors import ForgeError
from forge_core.features import Use
from forge_core.registry import Registry

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
        tolerance: largest accepted relative error.
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

    @property
    def holds(self) -> bool:
        """Whether its numbers are within tolerance, and of code that is still the same."""
        compared = ("loss", "norm", "gradients", *(["weights"] if self.mode == "fp64" else []))
        return not self.changed and all(self.errors.get(name, math.inf) <= self.tolerance for name in compared)

    @property
    def changed(self) -> list[str]:
        """Packages whose code is not what was measured."""
        return sorted(name for name, digest in self.digests.items() if _digest(name) != digest)


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
    """Receipts in these folders, and those that installed plugins offer."""
    brought = [Path(registry.load_entry(entry)) for entry in registry.of(GROUP)]
    return [receipt for folder in (*folders, *brought) for receipt in read(folder)]


def digests(uses: Iterable[Use]) -> dict[str, str]:
    """Digests of Forge's packages, and of those that bring one of these features."""
    brought = {use.name.partition(":")[0] for use in uses if ":" in use.name}
    return {name: _digest(name) for name in sorted({*FORGE, *brought})}


def _digest(name: str) -> str:
    """Of the Python sources of a package, or of one plugin file; empty when it is not loaded here."""
    files = [Path(file) for file in _sources(name)]
    content = b"".join(file.name.encode() + b"\0" + file.read_bytes() for file in files)
    return sha256(content).hexdigest()[:16] if files else ""


def _sources(name: str) -> list[Path]:
    if name.endswith(".py"):
        loaded = [module for key, module in sys.modules.items() if key.startswith("forge_file_")]
        return sorted(file for module in loaded if (file := Path(str(module.__file__))).name == name)
    try:
        module: Any = import_module(name)
    except ImportError:
        return []
    folders = [Path(folder) for folder in getattr(module, "__path__", ())]
    return sorted(file for folder in folders for file in folder.rglob("*.py")) or [Path(module.__file__)]
