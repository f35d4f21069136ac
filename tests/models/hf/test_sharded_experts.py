"""Experts that are shared by ranks start from folders of transformers, and go back to them: logits, names and shapes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from forge_models.hf.reader import Folder
from forge_train.run.loop import fit
from harness.closeness import assert_no_farther
from harness.pool import World
from models.hf.command_line import run
from models.hf.zoo import CASES, exact_logits, random_model, saved, tokens
from train.runs import TINY, prepared

LAYOUTS = {
    "ep2": (2, ["--parallel.ep=2"]),
    "ep4": (4, ["--parallel.ep=4"]),
    "tp2": (2, ["--parallel.tp=2"]),
    "tp2ep2": (2, ["--parallel.tp=2", "--parallel.ep=2"]),
    "dp2tp2ep2etp2": (4, ["--parallel.tp=2", "--parallel.ep=2", "--parallel.etp=2"]),
}
FEWER: dict[str, Any] = {"num_hidden_layers": 2}
FAMILIES = {
    "mixtral": CASES["mixtral"][1] | FEWER,
    "qwen3_moe": CASES["qwen3_moe"][1] | FEWER | {"num_experts": 8},
    "deepseek_v3": CASES["deepseek_v3"][1] | FEWER,
}


def trained(recipe: Path, overrides: list[str], rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the sharded model as it starts and after two steps, when it was saved; on every rank."""
    training, _ = prepared(recipe, overrides)

    def logits() -> torch.Tensor:
        with training.model.inference(whole_sequences=True):
            return training.model.part(rows).clone()

    before = logits()
    fit(training)
    return before, logits()


def recipe_from(folder: Path, path: Path, extra: str = "") -> Path:
    """A recipe that starts from a folder."""
    head, _, rest = TINY.partition("[model]")
    path.write_text(f'{head}[model]\nfrom_hf = "{folder}"\n{extra}[data]{rest.partition("[data]")[2]}')
    return path


def there_and_back(world: World, tmp_path: Path, kind: str, layout: str) -> None:
    from transformers import AutoModelForCausalLM

    reference, rows = random_model(kind, FAMILIES[kind]), tokens(length=16)
    folder = saved(reference, tmp_path / "theirs")
    recipe, (ranks, keys) = recipe_from(folder, tmp_path / "recipe.toml"), LAYOUTS[layout]
    overrides = [f"--job.dir={tmp_path / 'run'}", "--train.max_steps=2", "--schedule.name=constant", *keys]
    found = world.run(trained, ranks, recipe, overrides, rows, timeout=200)
    with torch.no_grad():
        at_first = reference(rows).logits
    for before, _ in found:
        assert_no_farther(before, at_first, exact_logits(reference, rows))

    assert run("convert", "--from", "forge", "--to", "hf", tmp_path / "run", tmp_path / "ours") == 0
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    with torch.no_grad():
        expected = theirs(rows).logits
    assert (expected - found[0][0]).abs().max() > 1e-2, "it has trained"
    for _, after in found:
        assert_no_farther(after, expected, exact_logits(theirs, rows))
    assert names_and_shapes(tmp_path / "ours") == names_and_shapes(folder), "what save_pretrained writes"
    before, after = Folder(folder), Folder(tmp_path / "ours")
    assert before.tensors == after.tensors


def names_and_shapes(folder: Path) -> dict[str, list[int]]:
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(str(file), framework="pt") as handle:
            found |= {name: handle.get_slice(name).get_shape() for name in handle.keys()}  # noqa: SIM118 (no mapping)
    return found


@pytest.mark.parametrize(("kind", "layout"), [("mixtral", "ep2"), ("deepseek_v3", "tp2ep2")])
def test_there_and_back(world: World, tmp_path: Path, kind: str, layout: str) -> None:
    there_and_back(world, tmp_path, kind, layout)


REST = [
    ("mixtral", "ep4"),
    ("mixtral", "tp2"),
    ("mixtral", "dp2tp2ep2etp2"),
    ("qwen3_moe", "ep2"),
    ("qwen3_moe", "ep4"),
    ("qwen3_moe", "tp2"),
    ("deepseek_v3", "ep2"),
    ("deepseek_v3", "ep4"),
    ("deepseek_v3", "tp2"),
    ("deepseek_v3", "dp2tp2ep2etp2"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "layout"), REST)
def test_there_and_back_in_other_layouts(world: World, tmp_path: Path, kind: str, layout: str) -> None:
    there_and_back(world, tmp_path, kind, layout)


@pytest.mark.slow
def test_a_model_made_from_a_dense_one_trains_on_shared_experts(world: World, tmp_path: Path) -> None:
    """The same function at the start, in a layout that the dense model never had."""
    dense, rows = random_model("llama", FEWER | {"rms_norm_eps": 1e-5}), tokens(length=16)
    folder = saved(dense, tmp_path / "dense")
    (tmp_path / "sparse.toml").write_text('base = "debug"\n[model.moe]\nexperts = 4\ntop_k = 2\n')
    assert run("upcycle", folder, tmp_path / "sparse.toml", tmp_path / "sparse") == 0
    recipe = recipe_from(tmp_path / "sparse", tmp_path / "recipe.toml")
    overrides = ["--train.max_steps=2", "--schedule.name=constant"]
    alone, _ = trained(recipe, [*overrides, f"--job.dir={tmp_path / 'alone'}"], rows)
    shared = [*overrides, f"--job.dir={tmp_path / 'shared'}", "--parallel.ep=2"]
    found = world.run(trained, 2, recipe, shared, rows, timeout=200)
    with torch.no_grad():
        expected = dense(rows).logits
    for before, after in found:
        assert_no_farther(before, expected, exact_logits(dense, rows))
        assert (after - before).abs().max() > 1e-2, "it trains"
    assert_no_farther(alone, expected, exact_logits(dense, rows))
