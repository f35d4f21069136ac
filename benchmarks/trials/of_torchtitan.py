"""The trials on torchtitan, with its schedule and its checkpoints. Its models and trainer import triton, which a CPU has not."""

import pickle
import tempfile
from pathlib import Path
from typing import Any

import torch
from common import Trap, bytes_of, flip_bit, tiny
from torchtitan.components.checkpointer.dcp import CheckpointManager
from torchtitan.components.optimizer.lr_scheduler import LRSchedulersContainer
from trials import Result, not_tried, outcome

NEEDS_TRITON = "its models and trainer import triton, which is not there for a CPU"


class _Optimizers(list[torch.optim.Optimizer]):
    """Stands for the container of optimizers, of which the schedule and the checkpoint need little."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def first_step() -> Result:
    optimizers = _Optimizers([torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=1e-3)])
    config = LRSchedulersContainer.Config(warmup_steps=10)
    rate = next(iter(config.build(optimizers=optimizers, training_steps=100))).get_last_lr()[0]
    return outcome("right" if rate > 0 else "wrong", f"learning rate of the first step: {rate:g}")


def misspelled_key() -> Result:
    return not_tried(NEEDS_TRITON)


def small_updates() -> Result:
    return not_tried(NEEDS_TRITON)


def packed_documents() -> Result:
    return not_tried(NEEDS_TRITON)


def recurrent_state() -> Result:
    return not_tried(NEEDS_TRITON)


def _manager(folder: str, model: torch.nn.Module) -> CheckpointManager:
    optimizers = _Optimizers([torch.optim.AdamW(model.parameters())])
    schedules = LRSchedulersContainer.Config(warmup_steps=1).build(optimizers=optimizers, training_steps=2)
    config = CheckpointManager.Config(enable=True, interval=1, keep_latest_k=0)
    return CheckpointManager(
        config, dataloader=None, model_parts=[model], optimizers=optimizers, lr_schedulers=schedules, states={},
        sd_adapter=None, base_folder=folder,
    )  # fmt: skip


def _loaded(folder: str, model: torch.nn.Module) -> str:
    """Loads the checkpoint of step 1; returns the last line of an error, or nothing."""
    try:
        assert _manager(folder, model).load(step=1)
    except BaseException as error:  # noqa: BLE001 (CheckpointException is no Exception)
        return str(error).strip().splitlines()[-1][:120] or type(error).__name__
    return ""


def _saved(folder: str) -> torch.nn.Module:
    model = tiny()
    _manager(folder, model).save(1)
    return model


def missing_tensor() -> Result:
    with tempfile.TemporaryDirectory() as folder:
        error = _loaded(folder, torch.nn.Sequential(*_saved(folder), torch.nn.Linear(16, 16, bias=False)))
    return outcome("refused", error) if error else outcome("wrong", "loaded")


def flipped_bit() -> Result:
    with tempfile.TemporaryDirectory() as folder:
        model = _saved(folder)
        before = model[0].weight.detach().clone()  # type: ignore[index]
        flip_bit(Path(folder), bytes_of(model[0].weight))  # type: ignore[index]
        if error := _loaded(folder, model):
            return outcome("refused", error)
        different = int((before != model[0].weight).sum())  # type: ignore[index]
    return outcome("wrong", f"loaded, {different} number differs")


def code_in_a_checkpoint() -> Result:
    with tempfile.TemporaryDirectory() as folder:
        model, trap = _saved(folder), Path(folder, "ran")
        file = next(Path(folder).rglob(".metadata"))
        metadata = pickle.loads(file.read_bytes())  # noqa: S301 (written above)
        metadata.storage_meta = Trap(trap)
        file.write_bytes(pickle.dumps(metadata))
        error = _loaded(folder, model)
        ran = trap.exists()
    return outcome("wrong" if ran else "refused" if error else "right", f".metadata: the code ran: {ran}")
