"""Runs of models with multi-token prediction: what is logged, resumed, checked, exported and generated."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from forge_ckpt.checkpoint.locate import locate
from forge_core.errors import ConfigError
from forge_core.protocols.run import Hook
from forge_core.registry import Registry
from forge_models.hf.reader import Folder
from forge_train.formats.forge import ForgeWeights
from forge_train.recipe.load import load_recipe
from forge_train.run.loop import fit
from models.hf.command_line import WORDS, run
from train.runs import prepared

MTP = """
[model.mtp]
depth = 2
weight = 0.4
schedule = { name = "multi_step", at = [0.5], factors = [0.25] }
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(WORDS + MTP)
    return path


class Watching(Hook):
    """The weight of the MTP losses in each step."""

    def __init__(self, weights: list[float]) -> None:
        self.weights = weights

    def before_update(self, run, result) -> None:
        self.weights.append(run.model.part.mtp.weight)


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_logs_each_depth_resumes_exactly_and_is_exported_without(recipe: Path, tmp_path: Path, capsys) -> None:
    overrides = ["--train.max_steps=4", "--checkpoint.every=2", "--hooks=[{name='log',every=1},{name='save'}]"]
    whole, _ = prepared(recipe, [*overrides, f"--job.dir={tmp_path / 'whole'}"])
    weights = []
    whole.hooks[:] = [*whole.hooks, Watching(weights)]
    fit(whole)
    assert weights == [0.4, 0.4, 0.1, 0.1]
    rows = [row for row in metrics(tmp_path / "whole") if "loss" in row]
    assert len(rows) == 4
    for row in rows:
        assert row["loss"] == pytest.approx(row["nll"], rel=1e-6), "what is logged as the loss is that of the next token"
        assert 4.0 < row["mtp_1"] < 6.5
        assert row["mtp_2"] < row["mtp_1"] * 1.05
    shutil.copytree(tmp_path / "whole", tmp_path / "part")
    shutil.rmtree(tmp_path / "part" / "checkpoints" / "step-00000004")
    again, _ = prepared(recipe, [*overrides, f"--job.dir={tmp_path / 'part'}"])
    assert again.state.step == 2
    fit(again)
    for (name, one), (_, other) in zip(whole.model.tensors(), again.model.tensors(), strict=True):
        assert torch.equal(one, other), name

    assert run("convert", "--from", "forge", "--to", "hf", tmp_path / "whole", tmp_path / "hf") == 0
    folder = Folder(tmp_path / "hf")
    assert folder.model.mtp is None
    kept = {name for name, _ in whole.model.tensors()}
    assert {name for name in kept if name.startswith("mtp.")}
    assert set(folder.tensors) == {name for name in kept if not name.startswith("mtp.")}
    assert "2 MTP modules" in (tmp_path / "hf" / "README.md").read_text()
    assert run("convert", "--from", "forge", "--to", "forge", tmp_path / "whole", tmp_path / "copy") == 0
    assert set(ForgeWeights(locate(tmp_path / "copy"), Registry()).tensors) == kept

    capsys.readouterr()
    arguments = ("generate", tmp_path / "whole", "--prompt", "ab", "--max-tokens", "12", "--json", "--temperature", "0")
    assert run(*arguments) == 0
    plain = json.loads(capsys.readouterr().out)
    assert run(*arguments, "--speculate") == 0
    shown = capsys.readouterr()
    answer = json.loads(shown.out)
    assert answer["text"] == plain["text"]
    assert answer["drafts"]["drafted"] == 2 * answer["drafts"]["rounds"]
    assert f"{answer['drafts']['accepted']} of {answer['drafts']['drafted']} drafts were right" in shown.err
    assert run("generate", tmp_path / "whole", "--prompt", "ab", "--speculate") == 2
    assert "--temperature 0" in capsys.readouterr().err


def test_evaluation_knows_of_the_next_token_only(recipe: Path, tmp_path: Path) -> None:
    run, _ = prepared(recipe, [f"--job.dir={tmp_path / 'run'}", "--train.max_steps=4"])
    batches, _ = next(iter(run.data.from_cursor(run.data.start())))
    found = run.step.evaluate(batches)
    run.model.part.mtp = None
    assert run.step.evaluate(batches) == found


FAULTS = {
    "model.mtp.schedule.warmup": ["--model.mtp.schedule={name='cosine',warmup=9}", "--train.max_steps=4"],
    "model.mtp.depth": ["--model.mtp.depth=64", "--data.sequence_length=32"],
}


@pytest.mark.parametrize("key", FAULTS)
def test_what_does_not_fit_is_named(recipe: Path, key: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_recipe(str(recipe), FAULTS[key], 1, Registry())
    assert key in {fault.key for fault in refusal.value.faults}
