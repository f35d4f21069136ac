"""The keys of the store."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from forge_core import FREE, Component

if TYPE_CHECKING:
    from forge_core.protocols import Store


@dataclass(frozen=True, kw_only=True)
class Mirror(Component):
    """Checkpoints in the directory of the run and, at the same time, in a second directory, such as one on another disk.

    If one copy is lost, a run resumes from the other one.
    """

    key_class: ClassVar = FREE

    second: str
    """Directory of the second copies. Each run has a folder in it, with the name of its directory."""

    @classmethod
    def examples(cls, folder: Path) -> "Iterable[Mirror]":
        """Returns one store."""
        return (cls(second=str(folder / "second")),)

    def build(self, path: str | Path) -> "Store":
        from forge_ckpt import LocalStore
        from forge_mirror.store import MirrorStore

        first = Path(path).resolve()
        second = Path(self.second) / first.parent.name / first.name
        return MirrorStore(LocalStore(first), LocalStore(second))
