"""Committed, verified checkpoints without pickle."""

from typing import TYPE_CHECKING

from forge_core.exports import lazy_exports

if TYPE_CHECKING:
    from forge_ckpt.background import BackgroundSaves as BackgroundSaves
    from forge_ckpt.checkpoint.read import load as load
    from forge_ckpt.checkpoint.read import newest as newest
    from forge_ckpt.checkpoint.save import save as save
    from forge_ckpt.checkpoint.write import SaveRequest as SaveRequest
    from forge_ckpt.module_pieces import pieces as pieces
    from forge_ckpt.store.local import LocalStore as LocalStore
    from forge_ckpt.store.remote import RemoteStore as RemoteStore
    from forge_ckpt.world import ProcessGroupWorld as ProcessGroupWorld
    from forge_ckpt.world import SingleProcessWorld as SingleProcessWorld

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "BackgroundSaves": "background",
        "ProcessGroupWorld": "world",
        "SingleProcessWorld": "world",
        "LocalStore": "store.local",
        "RemoteStore": "store.remote",
        "load": "checkpoint.read",
        "newest": "checkpoint.read",
        "pieces": "module_pieces",
        "save": "checkpoint.save",
        "SaveRequest": "checkpoint.write",
    },
)
