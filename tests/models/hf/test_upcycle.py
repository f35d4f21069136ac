"""`forge-train upcycle` on a folder of transformers, which then computes with experts what it computed without."""

import json
from pathlib import Path

import pytest
import torch

from forge_models.hf.converter import HfConverter
from forge_train.cli import main
from harness.closeness import assert_no_farther
from models.hf.zoo import exact_logits, random_model, saved, tokens

RECIPE = """
base = "debug"
[model.moe]
experts = 4
top_k = 2
"""


def run(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return int(ended.value.code or 0)


def test_a_dense_folder_becomes_one_with_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dense = random_model("llama", {"rms_norm_eps": 1e-5})
    folder = saved(dense, tmp_path / "dense")
    recipe = tmp_path / "sparse.toml"
    recipe.write_text(RECIPE)
    assert run("upcycle", folder, recipe, tmp_path / "sparse") == 0
    assert "4 of 4 layers with 4 experts, 2 for each token" in capsys.readouterr().out
    with torch.no_grad():
        expected = dense(tokens()).logits
    found = HfConverter().build().reference(tmp_path / "sparse", tokens())
    assert isinstance(found, torch.Tensor)
    assert_no_farther(found, expected, exact_logits(dense, tokens()))


def test_a_program_gets_the_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = saved(random_model("llama", {"rms_norm_eps": 1e-5}), tmp_path / "dense")
    (tmp_path / "sparse.toml").write_text(RECIPE)
    assert run("upcycle", folder, tmp_path / "sparse.toml", tmp_path / "sparse", "--json") == 0
    counts = {"layers": 4, "layers_with_experts": 4, "experts": 4, "top_k": 2}
    assert json.loads(capsys.readouterr().out) == {"target": str(tmp_path / "sparse"), **counts}


def test_a_recipe_without_experts_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("upcycle", tmp_path, "debug", tmp_path / "new") == 2
    assert "has no [model.moe]" in capsys.readouterr().err
