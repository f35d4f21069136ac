"""Committed, verified checkpoints without pickle.

    from pathlib import Path
    import torch
    from torch import nn
    from forge_ckpt import LocalStore, SingleProcessWorld, load, newest, pieces, save

    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    store, world = LocalStore(Path("checkpoints")), SingleProcessWorld()
    save(store, pieces(model, optimizer, world=world), {"step": 100}, 100, world)
    found = newest(store, world)
    assert found is not None
    assert load(store, found, pieces(model, optimizer, world=world), world)["step"] == 100

With several processes, all of them make the same calls with a `ProcessGroupWorld`. A new optimizer has no state to load into:
pass `fresh=True` to `pieces`. `BackgroundSaves` writes during training.
"""

from typing import TYPE_CHECKING

from forge_core.exports import lazy_exports

if TYPE_CHECKING:
    from forge_ckpt.background import BackgroundSaves, SaveResult
    from forge_ckpt.checkpoint.locate import CheckpointLocation, locate
    from forge_ckpt.checkpoint.read import ResumePolicy, StoredTensors, load, newest
    from forge_ckpt.checkpoint.retention import RetentionPolicy
    from forge_ckpt.checkpoint.save import save
    from forge_ckpt.checkpoint.write import SaveRequest
    from forge_ckpt.module_pieces import pieces
    from forge_ckpt.store.local import LocalStore
    from forge_ckpt.store.remote import RemoteStore
    from forge_ckpt.world import ProcessGroupWorld, SingleProcessWorld

__all__ = [
    "BackgroundSaves",
    "CheckpointLocation",
    "LocalStore",
    "ProcessGroupWorld",
    "RemoteStore",
    "ResumePolicy",
    "RetentionPolicy",
    "SaveRequest",
    "SaveResult",
    "SingleProcessWorld",
    "StoredTensors",
    "load",
    "locate",
    "newest",
    "pieces",
    "save",
]
__getattr__, __dir__ = lazy_exports(__name__)
