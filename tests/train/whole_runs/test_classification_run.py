"""Runs of a classifier: layouts, resumes, the accuracy on held-out texts, starts from a language model, adapters, exports."""

import json
from pathlib import Path

import pytest
import torch

from forge_core.batch import IGNORE
from forge_core.errors import ConfigError, ForgeError
from forge_core.registry import Registry
from forge_models.hf.converter import HfConverter
from forge_train.inference.evaluation import recipe_for, scores
from forge_train.inference.stored import load_model, open_weights
from forge_train.recipe.load import load_recipe
from forge_train.report.page import data_facts
from harness.pool import World
from train.runs import EXERCISES, prepared, train

LABELS = ("Reverse", "Capitalize", "Double")
RECIPE = (
    EXERCISES.replace("max_length = 64", f"max_length = 64\nlabels = {list(LABELS)}")
    .replace('name = "exercises"', 'name = "exercises"\nlabeled = true')
    .replace("[train]", '[objective]\nname = "classification"\n\n[train]')
)
LANGUAGE = ["--model.labels=[]", "--objective.name=cross_entropy", "--train.max_steps=2", "--data.sources.0.labeled=false"]
LANGUAGE += ["--data.evaluation.held_out.labeled=false"]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(RECIPE)
    return path


def logged(folder: Path, name: str) -> list[float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row[name] for row in rows if name in row]


@pytest.mark.slow
def test_layouts_micro_batches_and_resumes_are_one_process(world: World, recipe: Path, tmp_path: Path) -> None:
    whole = train(recipe, [f"--job.dir={tmp_path / 'whole'}"])
    cut = [f"--job.dir={tmp_path / 'cut'}"]
    first, second = train(recipe, [*cut, "--train.stop_at=2"]), train(recipe, cut)
    assert first["losses"] + second["losses"] == whole["losses"] and second["weights"] == whole["weights"]
    single = train(recipe, [f"--job.dir={tmp_path / 'single'}", "--train.micro_batch=1"])
    assert single["losses"] == pytest.approx(whole["losses"], rel=1e-9)
    for axis in ("dp_shard", "cp", "pp", "tp"):
        (found, _) = world.run(train, 2, recipe, [f"--job.dir={tmp_path / axis}", f"--parallel.{axis}=2"])
        assert found["losses"] == pytest.approx(whole["losses"], rel=1e-9), axis
        for name in ("loss", "accuracy"):
            expected = logged(tmp_path / "whole", f"evaluation/held_out/{name}")
            assert logged(tmp_path / axis, f"evaluation/held_out/{name}") == pytest.approx(expected, rel=1e-9), axis


def test_the_accuracy_is_that_of_each_text_alone(recipe: Path, tmp_path: Path) -> None:
    """Every held-out text alone in a row; `eval` of the checkpoint and the export say the same."""
    train(recipe, [f"--job.dir={tmp_path / 'run'}"])
    registry, weights = Registry(), open_weights(tmp_path / "run", Registry())
    model = load_model(weights, torch.device("cpu"))
    run, _ = prepared(recipe, [f"--job.dir={tmp_path / 'other'}"])
    HfConverter().write(tmp_path / "export", weights)
    from transformers import AutoModelForSequenceClassification

    twin = AutoModelForSequenceClassification.from_pretrained(tmp_path / "export", dtype=torch.float64)
    assert tuple(twin.config.id2label.values()) == LABELS
    right, total, count = 0, 0.0, 0
    for batch in run.evaluations["held_out"].batches(0, 1, 1):
        for number in range(int(batch.documents.max()) + 1):
            at = (batch.documents[0] == number).nonzero().flatten()
            ids, label = batch.tokens[0, at], int(batch.labels[0, at[-1]])
            assert label != IGNORE
            with torch.no_grad():
                logits, theirs = model(ids[None])[0, -1], twin(ids[None]).logits[0]
            torch.testing.assert_close(theirs, logits, rtol=0, atol=1e-6)  # its norms are in fp32
            right, total, count = (
                right + int(int(logits.argmax()) == label),
                total - float(logits.log_softmax(0)[label]),
                count + 1,
            )
    assert count > 10 and 0 < right < count
    found = {name: logged(tmp_path / "run", f"evaluation/held_out/{name}")[-1] for name in ("accuracy", "loss")}
    assert found == {"accuracy": pytest.approx(right / count), "loss": pytest.approx(total / count, rel=1e-9)}
    (score,) = scores(weights, recipe_for(weights, None, [], 1, registry), torch.device("cpu"), registry, lambda _: None)
    assert data_facts(run) == {"metrics": ["accuracy"]}, "so the report shows no perplexity"
    assert score.metrics == {"accuracy": pytest.approx(right / count)} and score.loss == pytest.approx(total / count, rel=1e-9)


def test_a_classifier_starts_from_a_language_model_with_a_new_head(recipe: Path, tmp_path: Path) -> None:
    train(recipe, [f"--job.dir={tmp_path / 'words'}", *LANGUAGE])
    words = open_weights(tmp_path / "words", Registry())
    HfConverter().write(tmp_path / "folder", words)
    fresh, _ = prepared(recipe, [f"--job.dir={tmp_path / 'fresh'}"])
    drawn = dict(fresh.model.parameters_held())["head.weight"]
    for number, start in enumerate((["--start.weights", tmp_path / "words"], ["--model.from_hf", tmp_path / "folder"])):
        run, _ = prepared(recipe, [f"--job.dir={tmp_path / f'run{number}'}", f"{start[0]}={start[1]}"])
        found = dict(run.model.parameters_held())
        assert torch.equal(found["head.weight"], drawn) and found["head.weight"].shape == (3, 16)
        for name, parameter in load_model(words, torch.device("cpu")).named_parameters():
            assert name == "head.weight" or torch.equal(found[name], parameter), name


def test_a_trained_head_is_taken_for_the_same_labels_and_refused_for_others(recipe: Path, tmp_path: Path) -> None:
    train(recipe, [f"--job.dir={tmp_path / 'first'}", "--train.max_steps=2"])
    HfConverter().write(tmp_path / "folder", open_weights(tmp_path / "first", Registry()))
    trained = load_model(open_weights(tmp_path / "first", Registry()), torch.device("cpu")).head.weight
    for number, start in enumerate((f"--start.weights={tmp_path / 'first'}", f"--model.from_hf={tmp_path / 'folder'}")):
        run, _ = prepared(recipe, [f"--job.dir={tmp_path / f'same{number}'}", start])
        assert torch.equal(dict(run.model.parameters_held())["head.weight"], trained)
    tasks = ["Capitalize", "Reverse", "Double"]
    other = [f"--model.labels={tasks}", f"--data.sources.0.tasks={tasks}", f"--data.evaluation.held_out.tasks={tasks}"]
    for number, start in enumerate((f"--start.weights={tmp_path / 'first'}", f"--model.from_hf={tmp_path / 'folder'}")):
        with pytest.raises(ForgeError, match=r"is a classifier of 3 labels, Reverse, Capitalize, Double, but model.labels has 3"):
            prepared(recipe, [f"--job.dir={tmp_path / f'other{number}'}", start, *other])
    anew = [*other, f"--start.weights={tmp_path / 'first'}", "--start.exclude=['head.weight']"]
    run, _ = prepared(recipe, [f"--job.dir={tmp_path / 'anew'}", *anew])
    assert not torch.equal(dict(run.model.parameters_held())["head.weight"], trained)


@pytest.mark.slow
def test_an_adapter_is_trained_stored_and_merged_with_its_head(recipe: Path, tmp_path: Path) -> None:
    train(recipe, [f"--job.dir={tmp_path / 'words'}", *LANGUAGE])
    words = open_weights(tmp_path / "words", Registry())
    adapter = [f"--start.weights={tmp_path / 'words'}", "--model.lora.rank=2", "--checkpoint.every=2"]
    whole = train(recipe, [f"--job.dir={tmp_path / 'run'}", *adapter])
    cut = [f"--job.dir={tmp_path / 'cut'}", *adapter]
    first, second = train(recipe, [*cut, "--train.stop_at=2"]), train(recipe, cut)
    assert first["losses"] + second["losses"] == whole["losses"] and second["weights"] == whole["weights"]
    fresh, _ = prepared(recipe, [f"--job.dir={tmp_path / 'fresh'}"])
    weights = open_weights(tmp_path / "run", Registry())
    model = load_model(weights, torch.device("cpu"))
    assert not torch.equal(model.head.weight, dict(fresh.model.parameters_held())["head.weight"])
    assert torch.equal(model.embed.weight, load_model(words, torch.device("cpu")).embed.weight)
    HfConverter().write(tmp_path / "export", weights)
    merged = HfConverter().read(tmp_path / "export")
    ids = torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(load_model(merged, torch.device("cpu"))(ids), model(ids), rtol=0, atol=1e-9)
    # An adapter of a trained classifier begins with its head.
    again = [f"--model.from_hf={tmp_path / 'export'}", "--model.lora.rank=2"]
    run, _ = prepared(recipe, [f"--job.dir={tmp_path / 'again'}", *again])
    assert torch.equal(dict(run.model.parameters_held())["head.weight"], model.head.weight)
    with pytest.raises(ForgeError, match=r"is a classifier, whose head is not part .*--merge --to hf"):
        Registry().load("forge.converters", "peft")().build().write(tmp_path / "peft", weights)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            ["--model.labels=['Reverse','Double']"],
            r"data.sources.0.name: has the labels Reverse, Capitalize, Double, but model.labels",
        ),
        (
            ["--model.labels=[]", "--objective.name=cross_entropy"],
            r"data.sources.0.name: has the labels .*, but the model has none",
        ),
        (["--data.sources.0.labeled=false"], r"data.sources.0.name: has no labels, but the model is a classifier"),
        (["--data.documents=ignore"], r"data.documents: 'ignore' lets the labeled texts of a row see each other"),
        (["--data.packing=concatenate"], r"data.packing: cuts documents"),
        (["--objective.name=cross_entropy"], r"objective.name: trains next tokens or answers, but model.labels"),
        (["--model.name=transformers"], r"labels"),
    ],
)
def test_recipes_that_do_not_fit_are_refused(recipe: Path, given: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_recipe(str(recipe), given, 1, Registry())
