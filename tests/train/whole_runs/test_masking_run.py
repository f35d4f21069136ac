"""Runs that fill in masked tokens: other layouts and micro-batches, a resume, held-out sets, and a start from a causal model."""

import json
from pathlib import Path

import pytest
import torch

from forge_core.batch import IGNORE
from forge_core.registry import Registry
from forge_models.masking import MaskedDiffusionLoss, MaskedLMLoss
from forge_train.inference.evaluation import recipe_for, scores
from forge_train.inference.stored import load_model, open_weights
from harness.pool import World
from harness.siblings import fast
from train.runs import EXERCISES, prepared, train

RECIPE = EXERCISES.replace("vocab_size = 257", "vocab_size = 258").replace(
    "max_length = 64",
    """max_length = 64
attention = { name = "gqa", causal = false }

[objective]
name = "masked_diffusion"
mask_id = 257""",
)
OBJECTIVES = {
    "masked_lm": [
        "--objective.name=masked_lm",
        "--objective.mask_id=257",
        "--objective.vocab_size=257",
        "--objective.ratio=0.4",
    ],
    "masked_diffusion": [],
}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(RECIPE)
    return path


@pytest.mark.parametrize("name", fast("masked_lm", of=OBJECTIVES))
def test_layouts_micro_batches_and_resumes_have_the_same_masks(world: World, recipe: Path, tmp_path: Path, name: str) -> None:
    given = OBJECTIVES[name]
    whole = train(recipe, [f"--job.dir={tmp_path / 'whole'}", *given])
    cut = [f"--job.dir={tmp_path / 'cut'}", *given]
    first, second = train(recipe, [*cut, "--train.stop_at=2"]), train(recipe, cut)
    assert first["losses"] + second["losses"] == whole["losses"] and second["weights"] == whole["weights"]
    single = train(recipe, [f"--job.dir={tmp_path / 'single'}", *given, "--train.micro_batch=1"])
    assert single["losses"] == pytest.approx(whole["losses"], rel=1e-9)
    shared = ["cp", "dp_shard"] if name == "masked_lm" else ["dp_shard"]
    for axis in (*shared, "pp", "tp"):
        (found, _) = world.run(train, 2, recipe, [f"--job.dir={tmp_path / axis}", *given, f"--parallel.{axis}=2"])
        assert found["losses"] == pytest.approx(whole["losses"], rel=1e-9), axis
    rows = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    registry, weights = Registry(), open_weights(tmp_path / "whole", Registry())
    for _ in range(2):
        (score,) = scores(weights, recipe_for(weights, None, [], 1, registry), torch.device("cpu"), registry, lambda _: None)
        logged = [row["evaluation/held_out/loss"] for row in rows if "evaluation/held_out/loss" in row][-1]
        assert score.loss == pytest.approx(logged, rel=1e-12)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_held_out_loss_is_that_of_a_loop_over_rows(recipe: Path, tmp_path: Path, name: str) -> None:
    train(recipe, [f"--job.dir={tmp_path / 'run'}", *OBJECTIVES[name], "--train.max_steps=2"])
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    (logged,) = [row["evaluation/held_out/loss"] for row in rows if "evaluation/held_out/loss" in row]
    model = load_model(open_weights(tmp_path / "run", Registry()), torch.device("cpu"))
    run, _ = prepared(recipe, [f"--job.dir={tmp_path / 'other'}", *OBJECTIVES[name]])
    objective = MaskedDiffusionLoss(257) if name == "masked_diffusion" else MaskedLMLoss(257, 257, ratio=0.4)
    total, count = 0.0, 0
    for batch in run.evaluations["held_out"].batches(0, 1, 1):  # each row alone
        ready = objective.prepared(batch)
        documents = None if ready.documents is None else ready.documents
        with torch.no_grad():
            logits = model(ready.tokens, positions=ready.positions, documents=documents).double()
        for at in (ready.labels[0] != IGNORE).nonzero().flatten().tolist():
            weight = float(ready.targets["masked_weights"][0, at]) if name == "masked_diffusion" else 1.0
            total -= weight * float(logits[0, at].log_softmax(0)[batch.tokens[0, at]])
        count += int((batch.labels != IGNORE).sum()) if name == "masked_diffusion" else int((ready.labels != IGNORE).sum())
    assert logged == pytest.approx(total / count, rel=1e-9) and count > 20


def test_a_bidirectional_model_starts_from_a_causal_one(recipe: Path, tmp_path: Path) -> None:
    causal = ["--model.attention.causal=true", "--objective.name=cross_entropy", "--train.max_steps=2"]
    train(recipe, [f"--job.dir={tmp_path / 'causal'}", *causal])
    run, _ = prepared(recipe, [f"--job.dir={tmp_path / 'both'}", f"--start.weights={tmp_path / 'causal'}"])
    taken = load_model(open_weights(tmp_path / "causal", Registry()), torch.device("cpu"))
    found = dict(run.model.parameters_held())
    for name, parameter in taken.named_parameters():
        assert torch.equal(found[name], parameter), name
