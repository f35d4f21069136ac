"""The trials on Forge, with its commands, model and checkpoints."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from common import Trap, bytes_of, flip_bit, moved, tiny
from trials import Result, outcome

from forge_ckpt import LocalStore, SingleProcessWorld, load, newest, pieces, save
from forge_core import Registry
from forge_core.errors import ForgeError
from forge_models import DecoderConfig

SHAPE = {"dim": 32, "layers": 2, "heads": 4, "ffn_dim": 64, "vocab_size": 64, "max_length": 32}


def _forge(folder: str, *words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "forge_train", *words]
    return subprocess.run(command, cwd=folder, env=dict(os.environ), capture_output=True, text=True, check=False)


def first_step() -> Result:
    with tempfile.TemporaryDirectory() as folder:
        words = ("run", "debug", "--train.max_steps=20", "--schedule.warmup=10", "--hooks.0.every=1")
        done = _forge(folder, *words)
        assert done.returncode == 0, done.stderr
        lines = Path(folder, "runs/debug/metrics.jsonl").read_text().splitlines()
        rate = next(line["lr"] for line in map(json.loads, lines) if "lr" in line)
    return outcome("right" if rate > 0 else "wrong", f"learning rate of the first step: {rate:g}")


def misspelled_key() -> Result:
    with tempfile.TemporaryDirectory() as folder:
        done = _forge(folder, "check", "debug", "--model.layrs=7")
    said = done.stderr.strip().splitlines()[-1][:120]
    return outcome("refused", said) if done.returncode == 2 else outcome("wrong", "accepted")


def small_updates() -> Result:
    from safetensors.torch import load_file
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 320}
    with tempfile.TemporaryDirectory() as folder:
        model = LlamaForCausalLM(LlamaConfig(**shape)).to(torch.bfloat16)
        model.save_pretrained(Path(folder, "before"))
        Path(folder, "r.toml").write_text(
            'base = "debug"\n[model]\nfrom_hf = "before"\ndim = 32\nlayers = 2\nheads = 4\nkv_heads = 4\nffn_dim = 64\n'
            '[precision]\ncompute = "bf16"\n[optimizer]\nlr = 1e-5\n[schedule]\nname = "constant"\n[train]\nmax_steps = 20\n'
            '[checkpoint]\nevery = 20\n[[hooks]]\nname = "save"\n'
        )
        done = _forge(folder, "run", "r.toml")
        assert done.returncode == 0, done.stderr
        done = _forge(folder, "convert", "--from", "forge", "--to", "hf", "runs/debug", "after")
        assert done.returncode == 0, done.stderr
        before = {name: value.clone() for name, value in model.state_dict().items()}
        after = load_file(Path(folder, "after/model.safetensors"))
        model.float().load_state_dict(after)
        dtype = next(iter(after.values())).dtype
    share = moved({name: value.float() for name, value in before.items()}, model)
    return outcome("right" if share > 0.5 else "wrong", f"{share:.0%} of the numbers changed in 20 steps; dtype {dtype}")


def _seen(config: DecoderConfig) -> float:
    """Returns how much the logits of the second document of a row change with the tokens of the first."""
    torch.manual_seed(0)
    model = config.build().double().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.1)
    ids, documents = torch.arange(16)[None] % 60, torch.tensor([[0] * 8 + [1] * 8], dtype=torch.int32)
    other = ids.clone()
    other[:, :8] += 3
    with torch.no_grad():
        first, second = (model(each, documents=documents)[:, 8:] for each in (ids, other))
    return (first - second).abs().max().item()


def packed_documents() -> Result:
    change = _seen(DecoderConfig(**SHAPE))
    return outcome("right" if change == 0 else "wrong", f"logits change by {change:.2g}")


def recurrent_state() -> Result:
    names = ("gated_delta_net", "mamba2", "kimi_delta")
    change = max(_seen(DecoderConfig(**SHAPE, attention=Registry().load("forge.attentions", name)())) for name in names)
    return outcome("right" if change == 0 else "wrong", f"{', '.join(names)}: logits change by {change:.2g}")


def _saved(folder: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = tiny()
    optimizer = torch.optim.AdamW(model.parameters())
    world = SingleProcessWorld()
    save(LocalStore(Path(folder)), pieces(model, optimizer, world=world), {"step": 1}, 1, world)
    return model, optimizer


def _loaded(folder: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Loads the newest checkpoint; returns the first line of a refusal, or nothing."""
    store, world = LocalStore(Path(folder)), SingleProcessWorld()
    try:
        found = newest(store, world)
        if found is None:
            return "no checkpoint can be loaded"
        load(store, found, pieces(model, optimizer, world=world, fresh=True), world)
    except ForgeError as error:
        return " ".join(str(error).replace(folder, "").split())[:160]
    return ""


def missing_tensor() -> Result:
    with tempfile.TemporaryDirectory() as folder:
        _saved(folder)
        larger = torch.nn.Sequential(*tiny(), torch.nn.Linear(16, 16, bias=False))  # type: ignore[arg-type]
        error = _loaded(folder, larger, torch.optim.AdamW(larger.parameters()))
    return outcome("refused", error) if error else outcome("wrong", "loaded")


def flipped_bit() -> Result:
    with tempfile.TemporaryDirectory() as folder:
        model, optimizer = _saved(folder)
        flip_bit(Path(folder), bytes_of(model[0].weight))  # type: ignore[index]
        error = _loaded(folder, model, optimizer)
    return outcome("refused", error) if error else outcome("wrong", "loaded")


def code_in_a_checkpoint() -> Result:
    """No file of a checkpoint is unpickled, so each of them is replaced by a pickle in turn."""
    import pickle

    seen = []
    with tempfile.TemporaryDirectory() as place:
        for index in range(100):
            folder, trap = Path(place, str(index)), Path(place, f"ran-{index}")
            folder.mkdir()
            model, optimizer = _saved(str(folder))
            files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
            if index >= len(files):
                break
            files[index].write_bytes(pickle.dumps(Trap(trap)))
            seen.append(bool(_loaded(str(folder), model, optimizer)))
            if trap.exists():
                return outcome("wrong", f"the code in {files[index].name} ran")
    return outcome("refused", f"a pickle in the place of each of {len(seen)} files: {sum(seen)} refused, none ran")
