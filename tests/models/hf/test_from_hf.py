"""`[model] from_hf`: a run starts from a folder's weights at step 0, on any number of processes, and is a run like any other."""

from pathlib import Path
from typing import Any

import torch

from forge_models.hf.reader import Folder
from forge_train.run.loop import fit
from harness.pool import World
from models.hf.test_commands import full, run
from models.hf.zoo import random_model, saved
from train.runs import TINY, prepared


def trained(recipe: Path, overrides: list[str]) -> tuple[int, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Step at the start, and whole tensors before and after training."""
    training, _ = prepared(recipe, overrides)
    step = training.state.step
    before = {name: full(tensor).clone() for name, tensor in training.model.tensors()}
    fit(training)
    return step, before, {name: full(tensor).clone() for name, tensor in training.model.tensors()}


def test_a_run_starts_from_a_folder_resumes_and_is_exported(world: World, tmp_path: Path) -> None:
    folder = saved(random_model("qwen2", {}), tmp_path / "source")
    head, _, rest = TINY.partition("[model]")
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f'{head}[model]\nfrom_hf = "{folder}"\n[data]{rest.partition("[data]")[2]}')
    given: dict[str, Any] = Folder(folder).read(list(Folder(folder).tensors))
    constant = [f"--job.dir={tmp_path / 'run'}", "--schedule.name=constant"]

    step, before, after = world.run(trained, 2, recipe, [*constant, "--train.max_steps=5"])[0]
    assert step == 0
    assert before.keys() == given.keys()
    assert all(torch.equal(before[name], given[name]) for name in given)
    assert any(not torch.equal(after[name], given[name]) for name in given), "it trains"

    step, again, _ = trained(recipe, [*constant, "--train.max_steps=6"])
    assert step == 5
    assert all(torch.equal(again[name], after[name]) for name in given), "a resume takes the checkpoint, not the folder"

    (folder / "model.safetensors").unlink()
    assert run("convert", "--from", "forge", "--to", "hf", tmp_path / "run", tmp_path / "out") == 0
    assert Folder(tmp_path / "out").family.model_type == "qwen2"
    assert run("check", recipe, "--world", "1") == 0, "a recipe needs the folder's configuration only"
