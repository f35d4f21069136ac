"""The trials on KempnerForge, with its configuration loader, model, schedule and checkpoint manager."""

import tempfile
from pathlib import Path

import torch
from common import Trap, bytes_of, flip_bit, moved, tiny
from kempnerforge.checkpoint.manager import CheckpointManager
from kempnerforge.config.loader import load_config
from kempnerforge.config.schema import CheckpointConfig, ModelConfig, SchedulerConfig, TrainConfig
from kempnerforge.model.transformer import Transformer
from kempnerforge.training.scheduler import build_scheduler
from trials import Result, not_tried, outcome


def _model() -> Transformer:
    torch.manual_seed(0)
    return Transformer(ModelConfig(dim=32, n_layers=2, n_heads=4, n_kv_heads=4, vocab_size=64, max_seq_len=32))


def first_step() -> Result:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=1e-3)
    schedule = build_scheduler(optimizer, SchedulerConfig(warmup_steps=10), 100)
    rate = schedule.get_last_lr()[0]
    return outcome("right" if rate > 0 else "wrong", f"learning rate of the first step: {rate:g}")


def misspelled_key() -> Result:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "config.toml")
        file.write_text("[model]\nn_layrs = 7\n")
        try:
            config = load_config(str(file), [])
        except Exception as error:  # noqa: BLE001 (any refusal counts)
            return outcome("refused", str(error).splitlines()[0][:120])
    return outcome("wrong", f"n_layrs = 7 has {config.model.n_layers} layers")


def small_updates() -> Result:
    model = _model().to(TrainConfig().param_dtype)  # what its build does on one device
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        ids = torch.randint(64, (4, 17), generator=generator)
        logits = model(ids[:, :-1]).float()
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    share = moved(before, model)
    dtype = TrainConfig().param_dtype
    return outcome("right" if share > 0.5 else "wrong", f"{share:.0%} of the numbers changed in 20 steps; dtype {dtype}")


def packed_documents() -> Result:
    model = _model().double().eval()
    ids, documents = torch.arange(16)[None] % 60, torch.tensor([[0] * 8 + [1] * 8])
    other = ids.clone()
    other[:, :8] += 3
    with torch.no_grad():
        first, second = (model(each, doc_ids=documents)[:, 8:] for each in (ids, other))
    change = (first - second).abs().max().item()
    return outcome("right" if change == 0 else "wrong", f"logits change by {change:.2g}")


def recurrent_state() -> Result:
    return not_tried("no recurrent layers")


def missing_tensor() -> Result:
    with tempfile.TemporaryDirectory() as folder:
        model, _ = _saved(folder)
        larger = torch.nn.Sequential(*model, torch.nn.Linear(16, 16, bias=False))
        try:
            CheckpointManager(CheckpointConfig(dir=folder), larger, torch.optim.AdamW(larger.parameters())).load()
        except BaseException as error:  # noqa: BLE001 (CheckpointException is no Exception)
            return outcome("refused", str(error).strip().splitlines()[-1][:120])
    return outcome("wrong", "loaded")


def _saved(folder: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = tiny()
    optimizer = torch.optim.AdamW(model.parameters())
    manager = CheckpointManager(CheckpointConfig(dir=folder), model, optimizer)
    manager.save(1)
    return model, optimizer


def flipped_bit() -> Result:
    with tempfile.TemporaryDirectory() as folder:
        model, optimizer = _saved(folder)
        before = model[0].weight.detach().clone()
        flip_bit(Path(folder), bytes_of(model[0].weight))
        try:
            CheckpointManager(CheckpointConfig(dir=folder), model, optimizer).load()
        except BaseException as error:  # noqa: BLE001
            return outcome("refused", str(error).strip().splitlines()[-1][:120])
        different = int((before != model[0].weight).sum())
    return outcome("wrong", f"loaded, {different} number differs")


def code_in_a_checkpoint() -> Result:
    with tempfile.TemporaryDirectory() as folder:
        model, optimizer = _saved(folder)
        trap, state = Path(folder, "ran"), next(Path(folder).glob("step_*/train_state.pt"))
        torch.save(torch.load(state, weights_only=False) | {"trap": Trap(trap)}, state)
        try:
            CheckpointManager(CheckpointConfig(dir=folder), model, optimizer).load()
        except BaseException as error:  # noqa: BLE001
            return outcome("wrong" if trap.exists() else "refused", f"train_state.pt: {type(error).__name__}")
        return outcome("wrong" if trap.exists() else "right", f"train_state.pt: the code ran: {trap.exists()}")
