"""Committed, verified checkpoints without pickle."""

from typing import TYPE_CHECKING

from forge_core.exports import lazy_exports

if TYPE_CHECKING:
    from forge_ckpt.background.background import BackgroundSaves as BackgroundSaves
    from forge_ckpt.ranks.pieces import pieces as pieces
    from forge_ckpt.ranks.world import ProcessGroupWorld as ProcessGroupWorld
    from forge_ckpt.ranks.world import SingleProcessWorld as SingleProcessWorld
    from forge_ckpt.remote.store import RemoteStore as RemoteStore
    from forge_ckpt.saving.resume import load as load
    from forge_ckpt.saving.resume import newest as newest
    from forge_ckpt.saving.saver import save as save
    from forge_ckpt.saving.write import SaveRequest as SaveRequest
    from forge_ckpt.store.store import LocalStore as LocalStore

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "BackgroundSaves": "background.background",
        "ProcessGroupWorld": "ranks.world",
        "SingleProcessWorld": "ranks.world",
        "LocalStore": "store.store",
        "RemoteStore": "remote.store",
        "load": "saving.resume",
        "newest": "saving.resume",
        "pieces": "ranks.pieces",
        "save": "saving.saver",
        "SaveRequest": "saving.write",
    },
)
