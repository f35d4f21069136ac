"""The keys of the format: none."""

from dataclasses import dataclass
from typing import ClassVar

from forge_core import Component


@dataclass(frozen=True, kw_only=True)
class NpzConverter(Component):
    """A folder with one `.npy` file per tensor and `model.json`, for programs that have NumPy but not torch."""

    implementation: ClassVar[str] = "forge_npz.files:NpzFiles"
