"""Runs that learn from a teacher: from its checkpoint, resumed exactly, in other layouts, and a teacher that does not fit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_core.errors import ConfigError, ForgeError
from forge_core.registry import Registry
from forge_train.inference.evaluation import recipe_for, scores
from forge_train.inference.stored import open_weights
from forge_train.recipe.load import load_recipe
from forge_train.run.teacher import store_logits
from harness import commands
from harness.pool import World
from train.runs import EXERCISES, prepared, train


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(EXERCISES)
    return path


@pytest.fixture
def teacher(recipe: Path, tmp_path: Path) -> str:
    """A wider model, trained by another run for two steps."""
    train(recipe, [f"--job.dir={tmp_path / 'teacher'}", "--model.dim=24", "--train.max_steps=2", "--job.seed=5"])
    return str(tmp_path / "teacher")


def from_teacher(teacher: str, *more: str) -> list[str]:
    return ["--objective.name=distillation", f"--objective.teacher={teacher}", "--objective.temperature=2", *more]


def test_a_run_resumes_bitwise_and_other_layouts_have_its_losses(
    world: World, recipe: Path, teacher: str, tmp_path: Path
) -> None:
    given = from_teacher(teacher)
    whole = train(recipe, [f"--job.dir={tmp_path / 'whole'}", *given])
    cut = [f"--job.dir={tmp_path / 'cut'}", *given]
    first, second = train(recipe, [*cut, "--train.stop_at=2"]), train(recipe, cut)
    assert first["losses"] + second["losses"] == whole["losses"] and second["weights"] == whole["weights"]
    for layout in ("dp_shard", "pp"):
        (found, _) = world.run(train, 2, recipe, [f"--job.dir={tmp_path / layout}", *given, f"--parallel.{layout}=2"])
        assert found["losses"] == pytest.approx(whole["losses"], rel=1e-9)
    rows = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "kl" in row]
    assert all(row["loss"] == pytest.approx(0.5 * row["nll"] + 0.5 * 4 * row["kl"]) for row in steps) and len(steps) == 4
    registry, weights = Registry(), open_weights(tmp_path / "whole", Registry())
    (score,) = scores(weights, recipe_for(weights, None, [], 1, registry), torch.device("cpu"), registry, lambda _: None)
    assert score.loss == pytest.approx([row["evaluation/held_out/loss"] for row in rows if "evaluation/held_out/loss" in row][-1])


def test_a_model_that_starts_as_its_teacher_diverges_by_nothing(recipe: Path, tmp_path: Path) -> None:
    train(recipe, [f"--job.dir={tmp_path / 'teacher'}", "--train.max_steps=2"])
    given = from_teacher(str(tmp_path / "teacher"), f"--start.weights={tmp_path / 'teacher'}", "--objective.weight=1")
    found = train(recipe, [f"--job.dir={tmp_path / 'student'}", "--train.max_steps=1", *given])
    assert found["losses"] == pytest.approx([0.0], abs=1e-12)


def test_a_teacher_that_does_not_fit_is_refused(recipe: Path, teacher: str, tmp_path: Path) -> None:
    given = [f"--job.dir={tmp_path / 'run'}", *from_teacher(teacher)]
    with pytest.raises(ForgeError, match="has 257 words, but the model has 300"):
        prepared(recipe, [*given, "--model.vocab_size=300"])
    with pytest.raises(ForgeError, match="are of another tokenizer than those of the data"):
        learned = ["--data.tokenizer.name=bpe", "--data.tokenizer.vocab_size=257", f"--data.tokenizer.files=['{recipe}']"]
        prepared(recipe, [*given, *learned])
    with pytest.raises(ForgeError, match=r"reads 64 tokens, but data\.sequence_length is 80"):
        prepared(recipe, [*given, "--data.sequence_length=80", "--model.max_length=80"])
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize(("axis", "why"), [("tp", "compares whole distributions"), ("cp", "would each have a part of a row")])
def test_layouts_that_split_what_is_compared_are_refused(recipe: Path, axis: str, why: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_recipe(recipe, [*from_teacher("runs/x"), f"--parallel.{axis}=2"], 2)
    assert any(fault.key == f"parallel.{axis}" and why in fault.message for fault in error.value.faults)


def changed(given: list[str], *more: str) -> list[str]:
    """The options with others in place of those with the same keys."""
    keys = {option.partition("=")[0] for option in more}
    return [*(option for option in given if option.partition("=")[0] not in keys), *more]


def taught(recipe: Path, folder: Path, *given: str) -> dict[str, Any]:
    """The document of `forge-train teach`."""
    return json.loads(commands.run("-m", "forge_train", "teach", str(recipe), str(folder), *given, "--json").stdout)


def test_stored_logits_have_the_losses_of_the_teacher(world: World, recipe: Path, teacher: str, tmp_path: Path) -> None:
    given = from_teacher(teacher, "--objective.top_k=5")
    wanted = train(recipe, [f"--job.dir={tmp_path / 'whole'}", *given])
    found = taught(recipe, tmp_path / "logits", f"--job.dir={tmp_path / 'teach'}", *given)
    assert found["top_k"] == 5 and found["rows"] > 0 < found["labels"] and found["teacher"].startswith("sha256:")
    stored = [*given, f"--objective.stored={tmp_path / 'logits'}"]
    whole = train(recipe, [f"--job.dir={tmp_path / 'stored'}", *stored])
    assert whole["losses"] == pytest.approx(wanted["losses"], rel=1e-12) and whole["step"] == 4
    cut = [f"--job.dir={tmp_path / 'cut'}", *stored]
    first, second = train(recipe, [*cut, "--train.stop_at=2"]), train(recipe, cut)
    assert first["losses"] + second["losses"] == whole["losses"] and second["weights"] == whole["weights"]
    elsewhere = changed(stored, f"--objective.teacher={found['teacher']}")  # the weights are not on this machine
    assert train(recipe, [f"--job.dir={tmp_path / 'hash'}", *elsewhere])["losses"] == whole["losses"]
    for layout in ("dp_shard", "pp"):
        (other, _) = world.run(train, 2, recipe, [f"--job.dir={tmp_path / layout}", *stored, f"--parallel.{layout}=2"])
        assert other["losses"] == pytest.approx(wanted["losses"], rel=1e-9)
    rows = [json.loads(line) for line in (tmp_path / "stored" / "metrics.jsonl").read_text().splitlines()]
    live = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    name = "evaluation/held_out/loss"
    losses = [[row[name] for row in each if name in row] for each in (rows, live)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12) and len(losses[0]) == 2
    registry, weights = Registry(), open_weights(tmp_path / "stored", Registry())
    (score,) = scores(weights, recipe_for(weights, None, [], 1, registry), torch.device("cpu"), registry, lambda _: None)
    assert score.loss == pytest.approx(losses[0][-1], rel=1e-12)


def test_stored_logits_that_do_not_fit_are_refused(recipe: Path, teacher: str, tmp_path: Path) -> None:
    given = from_teacher(teacher, "--objective.top_k=5")
    taught(recipe, tmp_path / "logits", f"--job.dir={tmp_path / 'teach'}", *given)
    stored = [f"--job.dir={tmp_path / 'run'}", *given, f"--objective.stored={tmp_path / 'logits'}"]
    train(recipe, [f"--job.dir={tmp_path / 'other'}", "--train.max_steps=1", "--model.dim=24", "--job.seed=6"])
    learned = ["--data.tokenizer.name=bpe", "--data.tokenizer.vocab_size=257", f"--data.tokenizer.files=['{recipe}']"]
    for more, why in (
        (["--data.sequence_length=40"], r"is of data\.sequence_length = 48, but the run has 40; run forge-train teach"),
        (["--data.packing=pad"], r"is of data\.packing = 'best_fit', but the run has 'pad'"),
        (["--data.sources.0.seed=9"], "has no rows of the sources with the fingerprints"),
        (["--data.evaluation.held_out.seed=9"], "has no rows of the sources with the fingerprints"),
        (learned, "is of data with the tokenizer"),
        (["--model.vocab_size=300"], "is of a teacher with 257 words, but the model has 300"),
        (["--objective.top_k=6"], "has the 5 most likely words, not 6"),
        ([f"--objective.teacher={tmp_path / 'other'}"], r"is of the teacher sha256:\w+, but objective\.teacher is sha256:"),
        (["--objective.teacher=sha256:00"], r"but objective\.teacher is sha256:00; run forge-train teach with this teacher"),
        (["--objective.stored=none", "--objective.teacher=sha256:00"], r"set objective\.stored, or give the path"),
    ):
        with pytest.raises(ForgeError, match=why):
            prepared(recipe, changed(stored, *more))
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_what_cannot_be_stored_is_refused(recipe: Path, teacher: str, tmp_path: Path) -> None:
    device, where = torch.device("cpu"), [f"--job.dir={tmp_path / 'teach'}"]
    for given, why in (
        ([], r"objective CrossEntropy has no teacher; set objective\.name = 'distillation'"),
        (from_teacher(teacher), r"objective\.top_k must be fewer words than the vocabulary"),
        (from_teacher(teacher, "--objective.top_k=257"), r"objective\.top_k must be fewer words"),
        (from_teacher(teacher, "--objective.top_k=5", "--model.vocab_size=300"), "has 257 words, but the model has 300"),
    ):
        job = load_recipe(recipe, [*where, *given], 1).job
        with pytest.raises(ForgeError, match=why):
            store_logits(job, tmp_path / "logits", device, Registry(), lambda _: None)
    assert not (tmp_path / "logits").exists()
