"""transformers' Trainer: JSON, YAML and literal calls, with values computed by hand from its documentation."""

import json
import math
from typing import TYPE_CHECKING, Any

import pytest

from forge_core.errors import ForgeError
from forge_train.recipe.load import load_recipe

if TYPE_CHECKING:
    from train.migration.migrated import Migrate

ARGUMENTS: dict[str, Any] = {
    "output_dir": "out/first-run",
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 8,
    "max_steps": 2000,
    "learning_rate": 2e-4,
    "lr_scheduler_type": "cosine_with_min_lr",
    "lr_scheduler_kwargs": {"min_lr": 2e-5},
    "warmup_ratio": 0.03,
    "weight_decay": 0.1,
    "adam_beta2": 0.95,
    "max_grad_norm": 0.0,
    "bf16": True,
    "gradient_checkpointing": True,
    "seed": 5,
    "logging_steps": 25,
    "save_steps": 200,
    "save_total_limit": 2,
    "eval_strategy": "steps",
    "eval_steps": 100,
    "report_to": ["wandb", "tensorboard"],
    "train_file": "train.jsonl",
    "validation_file": "valid.txt",
    "tokenizer_name": "tok",
    "block_size": 512,
    "deepspeed": "zero3.json",
    "my_own": 1,
}


def test_arguments_by_hand(migrated: "Migrate") -> None:
    """4 * 8 sequences on each of 4 processes are 128; 3 % of 2,000 steps are 60; 2e-5 is a tenth of 2e-4."""
    found = migrated("arguments.json", json.dumps(ARGUMENTS), world=4)
    expected = {
        "job.name": "first-run",
        "job.seed": 5,
        "train.global_batch": 128,
        "train.micro_batch": 4,
        "train.max_steps": 2000,
        "train.grad_clip": "none",
        "optimizer.lr": 2e-4,
        "optimizer.betas": [0.9, 0.95],
        "optimizer.weight_decay": 0.1,
        "parameters.groups.0.match": "embed.weight",
        "schedule.name": "cosine",
        "schedule.warmup": 60,
        "schedule.min_ratio": 0.1,
        "precision.compute": "bf16",
        "transforms.recompute.policy": "full",
        "data.sequence_length": 512,
        "data.sources.0.name": "jsonl",
        "data.sources.0.path": "train.jsonl",
        "data.evaluation.validation.name": "text",
        "data.tokenizer.path": "tok/tokenizer.json",
        "checkpoint.every": 200,
        "checkpoint.keep": 2,
        "hooks.0.every": 25,
        "hooks.2.every": 100,
        "trackers.0.name": "wandb",
        "trackers.1.name": "tensorboard",
    }
    assert {path: found.at(path) for path in expected} == expected
    assert found.kinds("deepspeed") == {"without"} and found.kinds("my_own") == {"unknown"}
    with pytest.raises(ForgeError, match=r"model\.dim"):  # the file has no model
        found.check()


def test_a_share_of_the_run_is_rounded_up_as_transformers_does(migrated: "Migrate") -> None:
    """3.01 % of 2,000 steps are 60.2."""
    found = migrated("arguments.json", json.dumps(ARGUMENTS | {"warmup_ratio": 0.0301}))
    assert found.at("schedule.warmup") == 61


def test_a_model_folder_and_yaml(migrated: "Migrate") -> None:
    found = migrated(
        "arguments.yaml", "model_name_or_path: ./model\nmax_steps: 10\nlearning_rate: 1e-4\nper_device_train_batch_size: 2\n"
    )
    assert found.at("model.from_hf") == "./model" and found.at("optimizer.lr") == 1e-4
    nested = migrated("nested.yaml", "training_args:\n  max_steps: 10\n  learning_rate: 1e-4\n  bf16: true\n")
    assert (nested.at("train.max_steps"), nested.at("precision.compute")) == (10, "bf16")


def test_epochs_must_be_filled_in(migrated: "Migrate") -> None:
    found = migrated("arguments.json", json.dumps({"num_train_epochs": 2, "per_device_train_batch_size": 2, "warmup_ratio": 0.1}))
    assert {"train.max_steps", "schedule.warmup"} <= {blank.path for blank in found.migration.blanks}
    assert found.kinds("num_train_epochs") == {"cannot"}


def test_python_is_read_without_running_it(migrated: "Migrate") -> None:
    text = """
from transformers import Trainer, TrainingArguments
raise SystemExit("never executed")
STEPS = 5 * 100
arguments = TrainingArguments(
    output_dir="out", max_steps=STEPS, learning_rate=1e-3, bf16=torch.cuda.is_bf16_supported(), **more
)
Trainer(model, arguments).train()
"""
    found = migrated("train.py", text)
    assert (found.at("train.max_steps"), found.at("optimizer.lr"), found.at("precision.compute")) == (500, 1e-3, "fp32")
    unread = " ".join(outcome.key for outcome in found.migration.of("unread"))
    assert "bf16 = torch.cuda.is_bf16_supported()" in unread and "more" in unread


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_schedules_agree_after_the_warmup(migrated: "Migrate", kind: str) -> None:
    arguments = {"max_steps": 100, "warmup_steps": 10, "lr_scheduler_type": kind, "per_device_train_batch_size": 2}
    found = migrated("arguments.json", json.dumps(arguments))
    base = found.path.with_name("base.toml")
    schedule = "".join(f"{name} = {value!r}\n" for name, value in found.at("schedule").items())
    base.write_text(f'base = "debug"\n[train]\nmax_steps = 100\n[schedule]\n{schedule}')
    factor = load_recipe(base).job.schedule.build(100)
    for step in range(10, 100):
        p = (step - 10) / 90
        assert factor(step) == pytest.approx(1 - p if kind == "linear" else 0.5 * (1 + math.cos(math.pi * p)), abs=1e-12), step


@pytest.mark.parametrize(
    ("arguments", "key", "kind"),
    [
        ({"optim": "adafactor"}, "optim", "cannot"),
        ({"optim": "lion_32bit"}, "optim", "translated"),
        ({"lr_scheduler_type": "greedy"}, "lr_scheduler_type", "cannot"),
        ({"lr_scheduler_kwargs": {"num_cycles": 3}}, "lr_scheduler_kwargs", "cannot"),
        ({"fp16": True}, "fp16", "cannot"),
        ({"eval_strategy": "steps"}, "eval_strategy", "cannot"),
        ({"save_strategy": "epoch"}, "save_strategy", "cannot"),
        ({"report_to": "comet_ml"}, "report_to", "cannot"),
        ({"neftune_noise_alpha": 5}, "neftune_noise_alpha", "without"),
        ({"warmup_steps": 7}, "warmup_steps", "converted"),
    ],
)
def test_kinds(migrated: "Migrate", arguments: dict[str, Any], key: str, kind: str) -> None:
    found = migrated("arguments.json", json.dumps({"max_steps": 100, "per_device_train_batch_size": 1, **arguments}))
    assert kind in found.kinds(key)
