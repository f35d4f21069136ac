"""Committed, verified checkpoints without pickle."""

from typing import TYPE_CHECKING

from forge_core.lazy import lazily

if TYPE_CHECKING:
    from forge_ckpt.resume import load as load
    from forge_ckpt.resume import newest as newest
    from forge_ckpt.saver import save as save
    from forge_ckpt.store import LocalStore as LocalStore
    from forge_ckpt.world import Alone as Alone

__getattr__, __dir__ = lazily(
    __name__,
    {
        "Alone": "world",
        "LocalStore": "store",
        "load": "resume",
        "newest": "resume",
        "save": "saver",
    },
)
