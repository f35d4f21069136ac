"""Stores that hold checkpoints."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from forge_core.component import FREE, Component

if TYPE_CHECKING:
    from pathlib import Path

    from forge_core.protocols.ckpt import Store


@dataclass(frozen=True, kw_only=True)
class Local(Component):
    """A directory that every rank sees under the same path: a local disk, or a shared file system."""

    key_class: ClassVar = FREE

    shared: bool = False
    """Files follow the umask, so that a group can read them; otherwise only their owner can."""

    allow_foreign_owner: bool = False
    """Accept a directory that belongs to another user, who could then change what is loaded."""

    def build(self, path: "str | Path") -> "Store":
        from forge_ckpt.store.store import LocalStore

        return LocalStore(path, shared=self.shared, allow_foreign_owner=self.allow_foreign_owner)
