"""Runs of preference optimization: the stored reference, exact resumes in any layout, evaluation, and what is refused."""

import json
from math import log
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_core.errors import ConfigError, ForgeError
from forge_core.registry import Registry
from forge_models.preference import PreferenceLoss
from forge_train.inference.evaluation import recipe_for, scores
from forge_train.inference.stored import open_weights
from forge_train.recipe.load import load_recipe
from harness.pool import World
from train.runs import prepared, train

RECIPE = """
[job]
name = "tiny"
seed = 3

[model]
name = "decoder"
dim = 16
layers = 2
heads = 4
kv_heads = 2
ffn_dim = 24
vocab_size = 257
max_length = 64

[data]
sequence_length = 64
packing = "best_fit"
tokenizer = { name = "bytes" }

[[data.sources]]
name = "exercises"
pairs = true
count = 60
letters = 3
held_out = 0.3

[data.evaluation.held_out]
name = "exercises"
pairs = true
count = 60
letters = 3
split = "held_out"
held_out = 0.3

[train]
max_steps = 6
threads = 1
global_batch = 4
micro_batch = 2

[objective]
name = "dpo"
beta = 0.5

[precision]
compute = "fp64"
state = "fp64"

[optimizer]
name = "adamw"
lr = 3e-3

[schedule]
name = "constant"

[checkpoint]
every = 3

[[hooks]]
name = "log"
every = 1

[[hooks]]
name = "evaluate"
every = 3
at_start = true

[[hooks]]
name = "answers"
at_start = true
count = 4
max_tokens = 8

[[hooks]]
name = "save"
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "dpo.toml"
    path.write_text(RECIPE)
    return path


def logged(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def references(folder: Path) -> list[Path]:
    return sorted((folder / "data").glob("reference-*"))


def test_a_run_starts_at_log_2_and_resumes_bitwise(recipe: Path, tmp_path: Path) -> None:
    whole = train(recipe, [f"--job.dir={tmp_path / 'whole'}"])
    assert whole["losses"][0] == pytest.approx(log(2), rel=1e-12), "the model is its own reference before the first step"
    assert len({*whole["losses"]}) == 6
    at = f"--job.dir={tmp_path / 'cut'}"
    first, second = train(recipe, [at, "--train.stop_at=3"]), train(recipe, [at])
    assert first["losses"] + second["losses"] == whole["losses"] and second["weights"] == whole["weights"]
    assert len(references(tmp_path / "cut")) == 1
    assert references(tmp_path / "cut")[0].name == references(tmp_path / "whole")[0].name, "named by its content"
    found = [row for row in logged(tmp_path / "whole") if "evaluation/held_out/loss" in row]
    assert found[0]["evaluation/held_out/loss"] == pytest.approx(log(2), rel=1e-12)
    assert found[0]["evaluation/held_out/margin"] == pytest.approx(0, abs=1e-12)
    assert found[-1]["evaluation/held_out/margin"] != 0 and 0 <= found[-1]["evaluation/held_out/accuracy"] <= 1
    assert not any("perplexity" in name for row in found for name in row)
    steps = [row for row in logged(tmp_path / "whole") if "accuracy" in row]
    assert len(steps) == 6 and all(row["margin"] == pytest.approx(row["chosen"] - row["rejected"]) for row in steps)
    answers = json.loads((tmp_path / "whole" / "answers.json").read_text())
    assert {answer["step"] for answer in answers} == {0, 6} and all(answer["prompt"].endswith(": ") for answer in answers)


def test_the_reference_is_the_whole_data_and_a_resume_in_another_layout_uses_it(
    world: World, recipe: Path, tmp_path: Path
) -> None:
    whole = train(recipe, [f"--job.dir={tmp_path / 'whole'}"])
    at = f"--job.dir={tmp_path / 'split'}"
    ranks = world.run(train, 2, recipe, [at, "--train.stop_at=2", "--parallel.dp_shard=2"])
    staged = world.run(train, 2, recipe, [at, "--train.stop_at=4", "--parallel.pp=2"])
    last = world.run(train, 2, recipe, [at, "--parallel.tp=2"])
    assert ranks[0]["losses"] + staged[0]["losses"] + last[0]["losses"] == pytest.approx(whole["losses"], rel=1e-9)
    (one,), (other,) = references(tmp_path / "whole"), references(tmp_path / "split")
    assert one.stat().st_size == other.stat().st_size == 60 * 32, "one entry of 32 bytes for each pair"


def test_a_stored_run_is_evaluated_against_its_own_reference(recipe: Path, tmp_path: Path) -> None:
    folder = tmp_path / "whole"
    train(recipe, [f"--job.dir={folder}"])
    registry, weights = Registry(), open_weights(folder, Registry())
    (score,) = scores(weights, recipe_for(weights, None, [], 1, registry), torch.device("cpu"), registry, lambda _: None)
    wanted = [row["evaluation/held_out/loss"] for row in logged(folder) if "evaluation/held_out/loss" in row][-1]
    assert score.loss == pytest.approx(wanted, rel=1e-9)


def test_a_missing_or_damaged_reference_is_refused(recipe: Path, tmp_path: Path) -> None:
    at = f"--job.dir={tmp_path / 'run'}"
    train(recipe, [at, "--train.stop_at=3"])
    (file,) = references(tmp_path / "run")
    content = file.read_bytes()
    file.write_bytes(content[:8] + bytes([content[8] ^ 1]) + content[9:])
    with pytest.raises(ForgeError, match="is damaged: its content differs"):
        prepared(recipe, [at])
    file.unlink()
    with pytest.raises(ForgeError, match="has the numbers of the frozen reference, but cannot be read"):
        prepared(recipe, [at])
    file.write_bytes(content)
    run, _ = prepared(recipe, [at])
    assert run.state.step == 3 and isinstance(run.step.step.objective, PreferenceLoss)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("overrides", "key", "why"),
    [
        (["--parallel.cp=2"], "parallel.cp", "needs whole rows"),
        (["--model.mtp.depth=1"], "model.mtp", "does not train next tokens"),
        (["--data.documents=ignore"], "data.documents", "see each other"),
        (["--objective.name=cross_entropy"], "data.sources.0.pairs", "would also train the rejected answers"),
        (["--data.evaluation.held_out.pairs=false"], "data.evaluation.held_out.pairs", "has no preference pairs"),
        (["--objective.loss=ipo", "--objective.label_smoothing=0.1"], "objective", "no effect with loss = 'ipo'"),
    ],
)
def test_what_does_not_go_together_is_refused_before_the_start(recipe: Path, overrides: list[str], key: str, why: str) -> None:
    world = 2 if "--parallel.cp=2" in overrides else 1
    with pytest.raises(ConfigError) as error:
        load_recipe(recipe, overrides, world)
    assert any(fault.key.startswith(key) and why in fault.message for fault in error.value.faults), error.value
