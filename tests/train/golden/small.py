"""Every preset with its strategies, schedule and objective, and a model, batches and data so small that a CPU trains twenty steps
of it in seconds."""

from pathlib import Path
from typing import Any

from forge_core.config.toml import to_toml
from forge_core.registry import Registry
from forge_train.recipe.load import load_recipe

STEPS = 20
WIDTHS = {"dim": 64, "layers": 2, "heads": 4, "head_dim": 16, "ffn_dim": 96, "vocab_size": 257, "max_length": 64}
SEEING = {"layers": 4, "vocab_size": 258}
"""Of models with images: a layer for each cross block, and an id for the placeholder."""
EYE = {"name": "vit", "size": 8, "patch": 4, "channels": 1, "dim": 32, "layers": 1, "heads": 2}
EXPERTS = {"experts": 8, "ffn_dim": 32}
SLOW = ("compile", "float8")
"""A compiler takes longer than the steps, and float8 rounds otherwise on each machine."""


WITH_DATA = frozenset({"sft-demo", "lora-demo", "dpo-demo", "classify-demo"})
"""Demos of fine-tuning, which need their own data or a base; `test_tuning_demos.py` runs them."""


def names() -> list[str]:
    """Of all presets that train on any text or images."""
    return [name for name in Registry().names("forge.presets") if name not in WITH_DATA]


def small(name: str, folder: Path) -> Path:
    """The recipe of a small preset, written to a folder with its text. Warm-up and decay keep their share of the run, and the
    rate is one that moves a model of this width."""
    (folder / "text.txt").write_text(" ".join(f"{number} and {number + 1} is {2 * number + 1}." for number in range(600)))
    values: dict[str, Any] = load_recipe(name).as_json()
    model, train, schedule = values["model"], values["train"], values["schedule"]
    grouped = model["kv_heads"] not in ("none", model["heads"])
    model |= WIDTHS | {"kv_heads": 2 if grouped else 4}
    if model["moe"] != "none":
        model["moe"] |= EXPERTS | {"top_k": min(2, model["moe"]["top_k"])}
    for key in {"warmup", "decay"} & schedule.keys():
        if isinstance(schedule[key], int):
            schedule[key] = max(1, schedule[key] * STEPS // train["max_steps"])
    values["train"] = train | {"max_steps": STEPS, "global_batch": 8, "micro_batch": 4, "threads": 1}
    values["data"] = {
        "sequence_length": 32,
        "tokenizer": {"name": "bytes"},
        "sources": [{"name": "text", "path": str(folder / "text.txt")}],
    }
    if "encoder" in model:
        model |= SEEING | {"encoder": EYE}
        values["data"] |= {"packing": "best_fit", "sources": [{"name": "digits", "split": "train", "held_out": 0.2}]}
    values["optimizer"]["lr"] = 3e-3
    values["precision"] = {"compute": "fp32", "state": "fp32"}
    values["transforms"] = {key: value for key, value in values["transforms"].items() if key not in SLOW}
    values["job"]["dir"] = str(folder / "run")
    for section in ("hooks", "trackers"):
        values[section] = []
    for section in ("parallel", "checkpoint"):
        del values[section]
    recipe = folder / f"{name}.toml"
    recipe.write_text(to_toml(values))
    return recipe
