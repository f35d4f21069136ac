"""A run of a class of transformers, from a folder on two processes to a folder that transformers loads."""

from pathlib import Path
from typing import Any

import pytest
import torch

from forge_core.errors import ConfigError
from forge_core.registry import Registry
from forge_train.recipe.load import load_recipe
from harness.pool import World
from models.hf.test_commands import run
from models.hf.test_from_hf import trained
from train.runs import TINY


def folder_with_experts(path: Path) -> tuple[Path, Any]:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    model = MixtralForCausalLM(MixtralConfig(vocab_size=512, initializer_range=0.2, **sizes, **heads))
    model.save_pretrained(path)
    return path, model


def recipe_of(path: Path, keys: str) -> Path:
    head, _, rest = TINY.partition("[model]")
    path.write_text(f'{head}[model]\nname = "transformers"\n{keys}\n[data]{rest.partition("[data]")[2]}')
    return path


def test_a_run_with_experts_starts_resumes_and_is_loaded_by_transformers(world: World, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder, theirs = folder_with_experts(tmp_path / "source")
    given = dict(theirs.named_parameters())
    recipe = recipe_of(tmp_path / "recipe.toml", f'folder = "{folder}"')
    constant = [f"--job.dir={tmp_path / 'run'}", "--schedule.name=constant"]
    layout = ["--parallel.ep=2"]

    step, before, after = world.run(trained, 2, recipe, [*constant, *layout, "--train.max_steps=5"])[0]
    assert step == 0
    assert before.keys() == given.keys()
    assert all(torch.equal(before[name], given[name]) for name in given), "two matrices of a folder are one of the module"
    assert all(not torch.equal(after[name], given[name]) for name in given), "all of it trains"

    step, again, last = trained(recipe, [*constant, "--train.max_steps=6"])
    assert step == 5
    assert all(torch.equal(again[name], after[name]) for name in given), "in another layout"

    assert run("convert", "--from", "forge", "--to", "hf", tmp_path / "run", tmp_path / "out") == 0
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", local_files_only=True)
    assert all(torch.equal(parameter, last[name]) for name, parameter in loaded.named_parameters())
    assert loaded.config.initializer_range == 0.2


def test_a_resume_takes_up_where_a_run_of_one_piece_is(tmp_path: Path) -> None:
    folder, _ = folder_with_experts(tmp_path / "source")
    recipe = recipe_of(tmp_path / "recipe.toml", f'folder = "{folder}"')
    options = ["--schedule.name=constant", "--train.max_steps=6"]
    _, _, whole = trained(recipe, [*options, f"--job.dir={tmp_path / 'whole'}"])
    trained(recipe, [options[0], "--train.max_steps=3", f"--job.dir={tmp_path / 'parts'}"])
    step, _, parts = trained(recipe, [*options, f"--job.dir={tmp_path / 'parts'}"])
    assert step == 3
    assert all(torch.equal(parts[name], whole[name]) for name in whole)


REFUSED = {
    "tp of experts": (["--parallel.tp=2", "--transforms.tensor.sequence_parallel=false"], "not offered with tp = 2"),
    "ep that does not divide": (["--parallel.ep=8"], "4 experts do not divide over 8 ranks"),
    "cp": (["--parallel.cp=2"], "no test proves"),
    "float8 of experts": (["--transforms.float8.experts=true", "--transforms.float8.emulate=true"], "no test proves"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_check_refuses_what_no_comparison_has_shown(case: str, tmp_path: Path) -> None:
    folder, _ = folder_with_experts(tmp_path / "source")
    overrides, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        load_recipe(recipe_of(tmp_path / "recipe.toml", f'folder = "{folder}"'), overrides, 8, Registry())


WRONG = {
    "no folder": ("", "model.folder: is missing"),
    "no such folder": ('folder = "nowhere"', "config.json cannot be read"),
    "not json": ('config = "{"\nweights_from = "draw"', "config is not JSON"),
    "no kind": ('config = "{}"\nweights_from = "draw"', "has no model_type"),
    "unknown kind": ('config = \'{"model_type": "mine"}\'\nweights_from = "draw"', "has not been compared"),
    "weights without a folder": ('config = \'{"model_type": "llama"}\'', "needs folder"),
    "a folder that is loaded otherwise": (
        'config = \'{"model_type": "youtu", "vocab_size": 512}\'\nfolder = "."',
        "YoutuForCausalLM does not give the same logits in transformers.*set model.weights_from = 'draw'",
    ),
    "a class that is refused": ('config = \'{"model_type": "xlnet"}\'\nweights_from = "draw"', "XLNetLMHeadModel is refused"),
}


@pytest.mark.parametrize("case", WRONG)
def test_check_refuses_wrong_keys(case: str, tmp_path: Path) -> None:
    keys, message = WRONG[case]
    with pytest.raises(ConfigError, match=message):
        load_recipe(recipe_of(tmp_path / "recipe.toml", keys), [], 1, Registry())


def test_packing_is_refused_for_a_class_that_mixes_documents(tmp_path: Path) -> None:
    keys = 'config = \'{"model_type": "mamba", "vocab_size": 512}\'\nweights_from = "draw"'
    recipe = recipe_of(tmp_path / "recipe.toml", keys)
    with pytest.raises(ConfigError, match="MambaForCausalLM cannot have several documents in a row"):
        load_recipe(recipe, ["--data.packing=best_fit"], 1, Registry())
    assert load_recipe(recipe, ["--data.packing=pad"], 1, Registry()).layout
