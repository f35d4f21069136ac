"""The keys of the model and of its folders."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from annotated_types import Gt

from forge_core import FREE, IDENTITY, Component


@dataclass(frozen=True, kw_only=True)
class MinGRUConfig(Component):
    """Minimal gated recurrent units (Feng et al., 2024). The state has a fixed size, however long a row is."""

    key_class: ClassVar = IDENTITY
    implementation: ClassVar[str] = "forge_mingru.model:MinGRU"

    dim: Annotated[int, Gt(0)] = 256
    """Width of the stream."""
    layers: Annotated[int, Gt(0)] = 4
    """Number of recurrent layers."""
    expand: Annotated[int, Gt(0)] = 2
    """Width of a layer's state, as a multiple of `dim`."""
    vocab_size: Annotated[int, Gt(0)] = 32768
    """Number of tokens."""
    init_std: Annotated[float, Gt(0), FREE] = 0.02
    """Standard deviation of the initial matrices."""

    @classmethod
    def examples(cls, folder: Path) -> "Iterable[MinGRUConfig]":
        """Returns a small model."""
        return (cls(dim=16, layers=2, vocab_size=40),)


@dataclass(frozen=True, kw_only=True)
class MinGRUFolderConfig(Component):
    """Folders with `"model_type": "mingru"` in `config.json`, and the tensors under the names of the model."""

    implementation: ClassVar[str] = "forge_mingru.folder:MinGRUFolder"
