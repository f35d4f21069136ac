"""nanoGPT: values computed by hand from its `train.py` and `model.py`; files are never executed."""

import math
from typing import TYPE_CHECKING

import pytest

from forge_train.recipe.load import load_recipe

if TYPE_CHECKING:
    from pathlib import Path

    from train.migration.migrated import Migrate

GPT2 = """
# a comment
import time
out_dir = 'out-gpt2'
wandb_log = True
wandb_project = 'owt'
wandb_run_name = 'gpt2-124M'
batch_size = 12
block_size = 1024
gradient_accumulation_steps = 5 * 8
n_layer = 12
n_head = 12
n_embd = 768
bias = True
max_iters = 600000
lr_decay_iters = max_iters
learning_rate = 6e-4
min_lr = 6e-5
eval_interval = 1000
log_interval = 10
grad_clip = 0.0
"""


def test_gpt2_by_hand(migrated: "Migrate") -> None:
    """12 * 40 sequences of 1,024 tokens are 491,520 tokens a step, whatever the number of GPUs."""
    found = migrated("train_gpt2.py", GPT2, world=8)
    found.check()
    expected = {
        "job.name": "gpt2-124M",
        "job.seed": 1337,
        "model.dim": 768,
        "model.ffn_dim": 3072,
        "model.vocab_size": 50304,
        "model.tied_embeddings": True,
        "model.norm.name": "layernorm",
        "model.norm.bias": True,
        "model.mlp.name": "gelu",
        "model.mlp.exact": True,
        "model.mlp.bias": True,
        "model.attention.qkv_bias": True,
        "model.attention.output_bias": True,
        "model.attention.nope_every": 1,
        "model.learned_positions": True,
        "model.max_length": 1024,
        "train.global_batch": 480,
        "train.micro_batch": 12,
        "train.max_steps": 600000,
        "train.grad_clip": "none",
        "optimizer.betas": [0.9, 0.95],
        "optimizer.weight_decay": 0.1,
        "parameters.groups.0.match": "embed.weight",
        "parameters.groups.1.match": "positions.weight",  # the optimizer decays every tensor with two dimensions
        "parameters.groups.1.weight_decay": 0.1,
        "schedule.warmup": 2000,
        "schedule.min_ratio": 0.1,
        "data.documents": "ignore",
        "data.sources.0.path": "data/openwebtext/train.bin",
        "data.sources.0.dtype": "uint16",
        "data.sources.0.eos": 50256,
        "data.evaluation.validation.path": "data/openwebtext/val.bin",
        "checkpoint.every": 1000,
        "trackers.0.project": "owt",
    }
    assert {path: found.at(path) for path in expected} == expected
    assert found.at("train.global_batch") * found.at("data.sequence_length") == 491_520
    assert "one step" not in found.note("batch_size")


def test_the_decay_agrees_with_nanogpt(migrated: "Migrate") -> None:
    text = "learning_rate = 1e-3\nmin_lr = 1e-4\nwarmup_iters = 10\nmax_iters = 100\nlr_decay_iters = 100\n"
    factor = load_recipe(migrated("decay.py", text).path).job.schedule.build(100)
    for step in range(10, 100):
        coefficient = 0.5 * (1 + math.cos(math.pi * (step - 10) / 90))
        assert factor(step) * 1e-3 == pytest.approx(1e-4 + coefficient * 9e-4, rel=1e-12), step


def test_nothing_of_the_file_is_executed(migrated: "Migrate", tmp_path: "Path") -> None:
    trap = tmp_path / "executed"
    text = f"""
import os
open({str(trap)!r}, "w").close()
batch_size = 4
wandb_run_name = 'ft-' + str(time.time())
learning_rate = float(open({str(trap)!r}, "w").write("x"))
block_size = __import__("os").system("touch {trap}")
n_layer = 2 ** 99999999
if True:
    batch_size = 999
for n_head in range(3):
    pass
n_embd = 64
max_iters = (10 + 5) * 2
"""
    found = migrated("hostile.py", text, framework="nanogpt")
    assert not trap.exists()
    unread = [outcome.key for outcome in found.migration.of("unread")]
    for part in ("open(", "wandb_run_name = ", "learning_rate = ", "block_size = ", "n_layer = ", "if True", "for n_head"):
        assert any(part in text for text in unread), part
    assert "batch_size" in unread  # it may have been changed
    assert found.at("model.dim") == 64 and found.at("train.stop_at") == 30
    assert {outcome.line for outcome in found.migration.of("unread")} >= {3, 5, 6, 7, 8, 9}


def test_numbers_are_computed_within_bounds(migrated: "Migrate") -> None:
    """A file must not make the reader compute for long."""
    found = migrated("numbers.py", "n_embd = 2 ** 8\nbatch_size = (7 + 1) // 2\nn_head = 1 ** 101\nmax_iters = 1 // 0\n")
    assert (found.at("model.dim"), found.at("train.micro_batch")) == (256, 4)
    assert {outcome.key for outcome in found.migration.of("unread")} == {"n_head = 1 ** 101", "max_iters = 1 // 0"}


@pytest.mark.parametrize(
    ("text", "key", "kind"),
    [
        ("dropout = 0.2", "dropout", "cannot"),
        ("dropout = 0.0", "dropout", "translated"),
        ("init_from = 'gpt2-xl'", "init_from", "cannot"),
        ("init_from = 'resume'", "init_from", "translated"),
        ("dtype = 'float16'", "dtype", "cannot"),
        ("lr_decay_iters = 500", "lr_decay_iters", "cannot"),
        ("decay_lr = False\nmin_lr = 0.1", "min_lr", "without"),
        ("eval_iters = 3", "eval_iters", "without"),
        ("my_own = 3", "my_own", "unknown"),
        ("always_save_checkpoint = False", "always_save_checkpoint", "translated"),
    ],
)
def test_kinds(migrated: "Migrate", text: str, key: str, kind: str) -> None:
    found = migrated("kinds.py", f"n_head = 4\n{text}\n")
    assert kind in found.kinds(key)
    found.check()
