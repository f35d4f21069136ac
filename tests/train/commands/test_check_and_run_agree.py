"""`check` and `run` refuse alike: what `check` passes runs, what it refuses is refused by `run` before anything is written.

Recipes are generated from what is registered and from every key of a small recipe: wrong types, values out of range, misspelled
keys, other components, features that do not go together.
"""

import random
import re
import shutil
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from forge_core.config.tree import leaves
from forge_core.errors import ConfigError, ForgeError, MissingFile
from forge_core.registry import Registry
from forge_train.recipe.load import load_recipe
from train.runs import TINY, prepared

REGISTRY = Registry()
SMALL = ("--train.max_steps=4",)

NAMED = {
    "forge.attentions": "model.attention",
    "forge.mlps": "model.mlp",
    "forge.norms": "model.norm",
    "forge.objectives": "objective",
    "forge.optimizers": "optimizer",
    "forge.schedules": "schedule",
    "forge.tokenizers": "data.tokenizer",
}
WRONG: dict[type, tuple[str, ...]] = {
    bool: ("maybe", "1", "[]"),
    int: ("-1", "0", "7", "1000", "1.5", "x", "", "99999999999999999999999", "[1]", "none"),
    float: ("-1.0", "0.0", "nan", "inf", "1e400", "2.0", "x", "none"),
    list: ("[]", "x", "[1, 2, 3]", "['a']", "none"),
    str: ("", "no such", "5", "none", "../x", "a/b", "x" * 300),
}
POSSIBLE: dict[type, tuple[str, ...]] = {
    bool: ("true", "false"),
    int: ("1", "2", "3", "5", "8", "16"),
    float: ("0.0", "0.5", "1.0", "3.0", "1e-3"),
    list: ("[]",),
    str: ("none",),
}
FEATURES = (
    *("model.moe.experts=4", "model.moe.top_k=2", "model.moe.losses.sequence=0.1", "model.moe.capacity=1.0", "model.mtp.depth=1"),
    *("model.attention.window=4", "model.attention.core=flex", "model.attention.core=varlen", "model.attention.core=sdpa"),
    *(
        "model.tied_embeddings=true",
        "model.soft_cap=5.0",
        "model.rope.scaling=yarn",
        "model.mlp.bias=true",
        "model.vocab_size=300",
    ),
    *("data.packing=pad", "data.packing=best_fit", "data.documents=ignore", "data.sequence_length=32", "data.workers=1"),
    *("data.phases=[{start = 2}]", "data.evaluation.a={name = 'random', vocab_size = 61, tokens = 200}"),
    *("train.stages=[{steps = 2}]", "train.micro_batch=8", "train.micro_batch=4", "train.global_batch=4"),
    *("precision.compute=bf16", "precision.compute=fp64", "precision.state=fp64", "checkpoint.mode=async", "checkpoint.keep=1"),
    *("transforms.float8.recipe=tensorwise", "transforms.recompute.policy=full", "transforms.recompute.policy=selective"),
    *("trackers=[{name = 'tensorboard'}]", "checkpoint.resume=never"),
)

ONLY_A_START_KNOWS = re.compile(r"is not a key of this recipe, nor of the checkpoint|needs a tokenizer: add \[data\.tokenizer\]")
"""What a check cannot know: keys of the checkpoint that a run will find, and whether its sources bring a tokenizer."""


@cache
def keys(recipe: Path) -> tuple[tuple[str, Any], ...]:
    """Every key of the recipe with its value, defaults included."""
    return tuple((key, value) for key, value, _ in leaves(load_recipe(recipe, SMALL, 1, REGISTRY).tree))


def kind_of(value: Any) -> type:
    return next((kind for kind in (bool, int, float, str) if isinstance(value, kind)), list)


def wrong(draw: random.Random, known: tuple[tuple[str, Any], ...]) -> str:
    key, value = draw.choice(known)
    if draw.random() < 0.15:
        at = draw.randrange(len(key))
        return f"--{key[:at]}{key[at + 1 :]}=1"
    return f"--{key}={draw.choice(WRONG[kind_of(value)])}"


def possible(draw: random.Random, known: tuple[tuple[str, Any], ...]) -> str:
    kind = draw.random()
    if kind < 0.35:
        key, value = draw.choice(known)
        return f"--{key}={draw.choice(POSSIBLE[kind_of(value)])}"
    if kind < 0.55:
        group = draw.choice(sorted(NAMED))
        return f"--{NAMED[group]}.name={draw.choice(sorted(REGISTRY.names(group)))}"
    if kind < 0.75:
        return f"--hooks=[{{name = 'save'}}, {{name = '{draw.choice(sorted(REGISTRY.names('forge.hooks')))}'}}]"
    return f"--{draw.choice(FEATURES)}"


def drawn(seed: int, known: tuple[tuple[str, Any], ...]) -> list[str]:
    """Overrides: every third recipe has something that is wrong by itself."""
    draw = random.Random(seed)
    make = wrong if seed % 3 == 0 else possible
    return [*SMALL, *(make(draw, known) for _ in range(draw.choice((1, 2, 2, 3))))]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("agree") / "tiny.toml"
    file.write_text(TINY)
    return file


def disagreement(recipe: Path, seed: int, folder: Path) -> str:
    """What check and run say of a recipe where one refuses it and the other does not; "" where they agree."""
    overrides = [f"--job.dir={folder / 'run'}", *drawn(seed, keys(recipe))]
    told = f"seed {seed}: {' '.join(overrides[1:])}"
    try:
        load_recipe(recipe, overrides, 1, REGISTRY)
    except ConfigError as refusal:
        assert refusal.faults, told
        return f"{told}: check refuses, and the directory exists" if (folder / "run").exists() else ""
    try:
        load_recipe(recipe, overrides, 1, REGISTRY, here=True)
    except ConfigError as refusal:
        others = [fault for fault in refusal.faults if not isinstance(fault, MissingFile)]
        return f"{told}: a run that starts here refuses {others[0]}" if others else ""
    try:
        run, _ = prepared(recipe, overrides)
        from forge_train.run.loop import fit

        fit(run)
    except ForgeError as refusal:
        return "" if ONLY_A_START_KNOWS.search(str(refusal)) else f"{told}: check passes, and run refuses: {refusal}"
    except Exception as error:
        return f"{told}: check passes, and run ends with {type(error).__name__}: {error}"
    finally:
        shutil.rmtree(folder / "run", ignore_errors=True)
    return ""


def disagreements(recipe: Path, seeds: range, folder: Path) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of libraries, such as TensorBoard's
        return [text for seed in seeds if (text := disagreement(recipe, seed, folder))]


def test_check_and_run_refuse_alike_20_generated_recipes(recipe: Path, tmp_path: Path) -> None:
    assert disagreements(recipe, range(20), tmp_path) == []


@pytest.mark.slow
def test_check_and_run_refuse_alike_200_generated_recipes(recipe: Path, tmp_path: Path) -> None:
    assert disagreements(recipe, range(20, 220), tmp_path) == []


def test_generated_recipes_are_of_both_kinds(recipe: Path) -> None:
    """A test of recipes that are all refused, or all right, would say little."""
    refused = 0
    for seed in range(40):
        try:
            load_recipe(recipe, drawn(seed, keys(recipe)), 1, REGISTRY)
        except ConfigError:
            refused += 1
    assert 10 <= refused <= 30
