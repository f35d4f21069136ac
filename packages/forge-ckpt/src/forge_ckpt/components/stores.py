"""Stores that hold checkpoints."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from forge_core.component import FREE, Component

if TYPE_CHECKING:
    from collections.abc import Iterable

    from forge_core.protocols.checkpoint import Store


@dataclass(frozen=True, kw_only=True)
class Local(Component):
    """A directory that every rank sees under the same path: a local disk, or a shared file system."""

    key_class: ClassVar = FREE

    shared: bool = False
    """Files follow the umask, so that a group can read them; otherwise only their owner can."""

    allow_foreign_owner: bool = False
    """Accept a directory that belongs to another user, who could then change what is loaded."""

    def build(self, path: str | Path) -> "Store":
        from forge_ckpt.store.store import LocalStore

        return LocalStore(path, shared=self.shared, allow_foreign_owner=self.allow_foreign_owner)


@dataclass(frozen=True, kw_only=True)
class Remote(Component):
    """Object storage that every rank reaches, through fsspec: `pip install 'forge-ckpt[remote]'`.

    Credentials and addresses of servers are given to fsspec and its packages in the environment or in their files, such as
    `AWS_ENDPOINT_URL`.
    """

    key_class: ClassVar = FREE

    url: str
    """Where checkpoints of runs live. Those of a run are in its folder there, which has the name of the run's directory; with
    `s3://bucket/runs` those of `runs/demo` are in `s3://bucket/runs/demo/checkpoints`."""

    def __post_init__(self) -> None:
        from forge_ckpt.remote.urls import check_url

        check_url(self.url)

    @classmethod
    def examples(cls, folder: Path) -> "Iterable[Remote]":
        return (cls(url=f"memory://{folder.name}"),)

    def build(self, path: str | Path) -> "Store":
        from forge_ckpt.remote.store import RemoteStore

        *_, run, name = Path(path).resolve().parts
        return RemoteStore(f"{self.url.rstrip('/')}/{run}/{name}")
