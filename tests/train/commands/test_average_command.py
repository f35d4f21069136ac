"""An average of a run's checkpoints is opened by the commands on weights, and by no run."""

import json
from pathlib import Path

import pytest
import torch

from forge_core.errors import CheckpointError
from forge_core.registry import Registry
from forge_parallel.model.parallel_model import full
from forge_train.inference.stored import load_model, open_weights
from forge_train.run.loop import fit
from models.hf.command_line import WORDS, run
from train.commands.test_evaluate_command import HELD_OUT, reference
from train.runs import prepared


def test_an_average_is_evaluated_generated_from_and_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "tiny.toml"
    recipe.write_text(WORDS + HELD_OUT)
    settings = [f"--job.dir={tmp_path / 'run'}", "--schedule.name=constant", "--checkpoint.every=1", "--optimizer.name=adamw"]
    weights: list[dict[str, torch.Tensor]] = []
    training, _ = prepared(recipe, [*settings, "--train.max_steps=3"])
    save = training.save

    def keep() -> None:
        save()
        weights.append({name: full(tensor).detach().clone() for name, tensor in training.model.tensors()})

    training.save = keep
    fit(training)
    capsys.readouterr()
    assert (
        run("ckpt", "average", tmp_path / "run", 1, 2, 3, "--output", tmp_path / "averaged", "--weights", "1,1,2", "--json") == 0
    )
    document = json.loads(capsys.readouterr().out)
    assert document["of"] == [{"step": step, "share": share} for step, share in ((1, 0.25), (2, 0.25), (3, 0.5))]
    assert document["tensors"] > 0 and Path(document["checkpoint"]).parent == tmp_path / "averaged"
    assert Path(document["checkpoint"]).is_dir()
    model = load_model(open_weights(tmp_path / "averaged", Registry()))
    for name, tensor in model.state_dict().items():
        if name in weights[0]:
            given = sum(share * state[name].double() for share, state in zip((0.25, 0.25, 0.5), weights, strict=True))
            torch.testing.assert_close(tensor.double(), given, rtol=1e-7, atol=1e-9)
    capsys.readouterr()
    assert run("generate", tmp_path / "averaged", "--prompt", "ab", "--temperature", "0", "--max-tokens", "4", "--json") == 0
    assert json.loads(capsys.readouterr().out)["tokens"] <= 4
    assert run("evaluate", tmp_path / "averaged", "--json") == 0
    loss = json.loads(capsys.readouterr().out)["sets"][0]["loss"]
    assert loss == pytest.approx(reference(tmp_path / "averaged", recipe)[0], rel=1e-6)
    assert run("convert", "--from", "forge", "--to", "forge", tmp_path / "averaged", tmp_path / "exported") == 0
    back = load_model(open_weights(tmp_path / "exported", Registry())).state_dict()
    assert all(torch.equal(tensor, back[name]) for name, tensor in model.state_dict().items())
    again = tmp_path / "again"
    again.mkdir()
    (tmp_path / "averaged").rename(again / "checkpoints")
    with pytest.raises(CheckpointError, match="not in the checkpoint"):
        prepared(recipe, [f"--job.dir={again}", *settings[1:], "--train.max_steps=4"])
