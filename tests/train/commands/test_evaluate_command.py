"""`forge-train evaluate`: the held-out loss of stored weights, against a plain loop over the whole model."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from forge_core.errors import ForgeError
from forge_core.registry import Registry
from forge_data.loading.evaluation import evaluation
from forge_train.cli import main
from forge_train.hooks.evaluation import bits_per_byte
from forge_train.inference.evaluation import Score, recipe_for, scores
from forge_train.inference.stored import load_model, open_weights
from forge_train.recipe.load import load_recipe
from forge_train.report.page import data_facts
from forge_train.run.loop import fit
from harness.pool import World
from train.runs import TINY, prepared, train

HELD_OUT = '\n[data.evaluation.held]\nname = "random"\nvocab_size = 61\ntokens = 333\ndocument = 23\nseed = 5\n'


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps with a held-out set."""
    folder = tmp_path_factory.mktemp("evaluated")
    recipe = folder / "tiny.toml"
    recipe.write_text(TINY + HELD_OUT)
    train(recipe, [f"--job.dir={folder / 'run'}", "--train.max_steps=3", "--hooks.0.name=save", "--optimizer.lr=0.1"])
    return folder


@torch.no_grad()
def reference(checkpoint: Path, recipe: Path) -> tuple[float, int]:
    """Loss and count of tokens by torch's own cross-entropy over logits of the whole model, in fp64."""
    weights = open_weights(checkpoint, Registry())
    model = load_model(weights, torch.device("cpu")).double()
    job = load_recipe(recipe).job
    total, count = 0.0, 0
    for batch in evaluation(job.data, workspace=checkpoint.parent / "elsewhere")["held"].batches(0, 1, 3):
        logits = model(batch.tokens, positions=batch.positions, documents=batch.documents)
        total += F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=-100, reduction="sum").item()
        count += int((batch.labels != -100).sum())
    return total / count, count


def evaluated(checkpoint: Path, overrides: list[str], size: int = 1) -> list[Score]:
    """On this rank."""
    registry = Registry()
    weights = open_weights(checkpoint, registry)
    resolved = recipe_for(weights, None, overrides, size, registry)
    return list(scores(weights, resolved, torch.device("cpu"), registry, lambda _: None))


def test_m3_the_loss_is_that_of_a_plain_loop(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected, tokens = reference(trained / "run", trained / "tiny.toml")
    assert abs(expected - math.log(61)) > 1e-3, "the weights are those of a run that has learned or unlearned something"
    with pytest.raises(SystemExit) as ended:
        main(["evaluate", str(trained / "run"), "--json"])
    assert not ended.value.code
    answer = json.loads(capsys.readouterr().out)
    (found,) = answer["sets"]
    assert answer["step"] == 3 and (found["name"], found["tokens"]) == ("held", tokens)
    assert found["loss"] == pytest.approx(expected, rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(expected), rel=1e-4)
    assert found["bits_per_byte"] is None  # random ids have no text


@pytest.mark.parametrize("layout", [[], ["--parallel.tp=2"], ["--parallel.pp=2"]], ids=["dp2", "tp2", "pp2"])
def test_the_layout_changes_nothing(world: World, trained: Path, layout: list[str]) -> None:
    exact = ["--precision.compute=fp64", "--precision.state=fp64"]
    (alone,) = evaluated(trained / "run", exact)
    for (found,) in world.run(evaluated, 2, trained / "run", [*exact, *layout], 2):
        assert found.loss == pytest.approx(alone.loss, rel=1e-12) and found.tokens == alone.tokens


def test_another_recipe_brings_its_own_sets_and_not_its_model(trained: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_text((TINY + HELD_OUT).replace("tokens = 333", "tokens = 99").replace("dim = 16", "dim = 32"))
    weights, registry = open_weights(trained / "run", Registry()), Registry()
    resolved = recipe_for(weights, str(other), [], 1, registry)
    (found,) = scores(weights, resolved, torch.device("cpu"), registry, lambda _: None)
    assert found.tokens < 99 and resolved.job.model.dim == 16


def test_the_layout_of_training_is_not_asked_for(trained: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "wide.toml"
    recipe.write_text(TINY + HELD_OUT + "\n[parallel]\ntp = 2\n")
    weights = open_weights(trained / "run", Registry())
    assert str(recipe_for(weights, str(recipe), [], 1, Registry()).layout) == "1"


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda values: values["data"].pop("evaluation"), "no held-out set"),
        (lambda values: values.pop("data"), "--recipe"),
    ],
)
def test_what_cannot_be_evaluated_says_what_to_give(trained: Path, spoil: Callable[[dict], object], said: str) -> None:
    weights = open_weights(trained / "run", Registry())
    spoil(weights.facts.recipe)  # type: ignore[arg-type]
    with pytest.raises(ForgeError, match=said):
        recipe_for(weights, None, [], 1, Registry())


TEXTS = ["a", "ab", "größe", "", "a longer document with several words in it", "🙂 two", "b"] * 9


@pytest.mark.parametrize("packing", ["concatenate", "pad"])
def test_trials_c3_bits_per_byte_are_of_the_text_that_is_predicted(packing: str, tmp_path: Path) -> None:
    """Of short documents, whose first tokens nothing predicts: against the bits of each byte that is, summed by torch."""
    (tmp_path / "held.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS), encoding="utf-8")
    held_out = f'\n[data.tokenizer]\nname = "bytes"\n\n[data.evaluation.held]\nname = "jsonl"\npath = "{tmp_path}/held.jsonl"\n'
    recipe = tmp_path / "tiny.toml"
    recipe.write_text(
        TINY.replace("vocab_size = 61", "vocab_size = 257").replace("[data]", f'[data]\npacking = "{packing}"') + held_out
    )
    run, _ = prepared(recipe, [f"--job.dir={tmp_path / 'run'}", "--train.max_steps=3", "--optimizer.lr=0.1"])
    fit(run)

    model: Any = load_model(open_weights(tmp_path / "run", Registry()), torch.device("cpu")).double()
    bits, count, size = 0.0, 0, 0
    with torch.no_grad():
        for batch in evaluation(load_recipe(recipe).job.data, workspace=tmp_path / "elsewhere")["held"].batches(0, 1, 3):
            logits = model(batch.tokens, positions=batch.positions, documents=batch.documents)
            loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=-100, reduction="none")
            bits += loss.sum().item() / math.log(2)
            count += int((batch.labels != -100).sum())
            size += int(((batch.labels >= 0) & (batch.labels < 256)).sum())  # a token below 256 is a byte
    assert size == sum(max(0, len(text.encode()) - 1) for text in TEXTS)
    (found,) = evaluated(tmp_path / "run", [])
    assert found.tokens == count and found.bits_per_byte == pytest.approx(bits / size, rel=1e-5)
    per_token = data_facts(run)["bytes_per_token"]["held"]  # what the report divides by
    assert bits_per_byte(found.loss, 1, per_token) == pytest.approx(bits / size, rel=1e-5)
