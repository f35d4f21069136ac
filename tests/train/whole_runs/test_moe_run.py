"""A run with experts: resumes to the bit, generates from its checkpoint, and starts from another library's folder."""

import json
import tomllib
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from forge_core.errors import ForgeError
from forge_core.registry import Registry
from forge_models import initialize
from forge_models.generation import generate
from forge_parallel.model.parallel_model import full
from forge_train.cli import main
from forge_train.formats.forge import Cast
from forge_train.formats.plain import check_fit
from forge_train.inference.stored import load_model, open_weights
from harness.closeness import assert_no_farther
from models.hf.zoo import CASES, exact_logits, random_model, saved
from train.runs import TINY, prepared, train

SPARSE = (
    TINY
    + """
[[hooks]]
name = "routing"
every = 2

[model.moe]
experts = 4
shared = 1
ffn_dim = 16
first_dense = 1
router = { name = "sigmoid_topk", bias_rate = 0.05, bias_schedule = "cosine", bias_steps = 8 }
losses = { sequence = 0.01, global_batch = 0.01, z = 0.001 }
"""
)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "sparse.toml"
    path.write_text(SPARSE)
    return path


def test_fault_17_stop_and_resume_is_bitwise(recipe: Path, tmp_path: Path) -> None:
    def run(name: str, steps: int) -> dict:
        return train(recipe, [f"--job.dir={tmp_path / name}", f"--train.max_steps={steps}", "--schedule.name=constant"])

    whole, pieces = run("whole", 6), [run("cut", steps) for steps in (2, 6)]
    assert list(chain.from_iterable(piece["losses"] for piece in pieces)) == whole["losses"]
    assert pieces[-1]["weights"] == whole["weights"]  # of every parameter, bias and counter


def test_a_checkpoint_generates_with_the_biases_that_it_has(recipe: Path, tmp_path: Path) -> None:
    run, _ = prepared(recipe, [f"--job.dir={tmp_path / 'run'}"])
    bias = run.model.part.blocks["1"].mlp.router.bias
    bias.copy_(torch.tensor([0.5, -0.25, 0.125, 1e-3]))
    run.save()
    weights = open_weights(tmp_path / "run", Registry())
    model = load_model(weights)
    assert torch.equal(model.blocks["1"].mlp.router.bias, bias)
    assert model.blocks["1"].mlp.router.updates.dtype == torch.int64
    rounded = load_model(Cast(weights, "bfloat16"))
    assert rounded.blocks["1"].mlp.router.bias.dtype == torch.float32
    assert torch.equal(rounded.blocks["1"].mlp.router.bias, bias)
    run.model.part.eval()
    expected = generate(run.model.part, [[3, 1, 4]], max_tokens=6)
    assert generate(model, [[3, 1, 4]], max_tokens=6) == expected


def test_a_table_of_experts_is_part_of_the_weights(recipe: Path, tmp_path: Path) -> None:
    """A run goes on to the bit; a checkpoint has the table in integers, also in bf16; a format without it is refused."""
    table = 'hash_layers = [1], bias_rate = 0.05, bias_schedule = "constant"'
    recipe.write_text(recipe.read_text().replace('bias_rate = 0.05, bias_schedule = "cosine", bias_steps = 8', table))

    def run(name: str, steps: int) -> dict:
        return train(recipe, [f"--job.dir={tmp_path / name}", f"--train.max_steps={steps}", "--schedule.name=constant"])

    whole, pieces = run("whole", 4), [run("cut", steps) for steps in (2, 4)]
    assert list(chain.from_iterable(piece["losses"] for piece in pieces)) == whole["losses"]
    assert pieces[-1]["weights"] == whole["weights"]
    weights = open_weights(tmp_path / "whole", Registry())
    model, rounded = load_model(weights), load_model(Cast(weights, "bfloat16"))
    name, own = "blocks.1.mlp.router.table", model.blocks["1"].mlp.router.table
    drawn = weights.model.build()
    initialize(drawn, seed=tomllib.loads(recipe.read_text()).get("job", {}).get("seed", 0))
    assert own.dtype == torch.int64 and torch.equal(own, drawn.blocks["1"].mlp.router.table)
    assert torch.equal(rounded.blocks["1"].mlp.router.table, own)
    lacking = SimpleNamespace(
        model=weights.model,
        facts=weights.facts,
        read=weights.read,
        tensors={key: entry for key, entry in weights.tensors.items() if key != name},
    )
    with pytest.raises(ForgeError, match=f"has no {name}, whose values a model draws"):
        load_model(lacking)
    with pytest.raises(ForgeError, match=f"{name}: missing"):
        check_fit(weights.model, lacking.tensors, tmp_path)
    check_fit(weights.model, {key: entry for key, entry in weights.tensors.items() if not key.endswith("router.bias")}, tmp_path)


def test_a_run_starts_from_a_folder_with_experts(tmp_path: Path) -> None:
    kind, keys = CASES["deepseek_v3"]
    reference = random_model(kind, keys)
    folder = saved(reference, tmp_path / "theirs")
    text = SPARSE[SPARSE.index("[data]") : SPARSE.index("[model.moe]")].replace("vocab_size = 61", "vocab_size = 97")
    path = tmp_path / "from.toml"
    path.write_text(f'[job]\nname = "from"\n[model]\nfrom_hf = "{folder}"\n[model.moe.losses]\nglobal_batch = 0.1\n' + text)
    run, _ = prepared(path, [f"--job.dir={tmp_path / 'run'}"])
    tensors = {name: full(tensor) for name, tensor in run.model.tensors()}
    layer = reference.model.layers[1].mlp  # type: ignore[union-attr]
    assert torch.equal(tensors["blocks.1.mlp.router.bias"], layer.gate.e_score_correction_bias)
    assert torch.equal(tensors["blocks.1.mlp.experts.down_proj"], layer.experts.down_proj)
    assert tensors["blocks.1.mlp.load"].tolist() == [0] * 8  # a counter of ours, which begins
    with torch.no_grad():
        rows = torch.arange(20)[None]
        assert_no_farther(run.model.part.eval()(rows), reference(rows).logits, exact_logits(reference, rows))


@pytest.mark.slow
def test_the_parity_command_measures_experts(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--rows", "4", "--length", "16", "--steps", "1"]
    with pytest.raises(SystemExit) as ended:
        main(["parity", "debug-moe", "--layouts", "dp2ep2,tp2ep2,dp2pp2ep2", "--json", *sizes])
    assert not ended.value.code
    found = json.loads(capsys.readouterr().out)["layouts"]
    assert [entry["layout"] for entry in found] == ["dp2ep2", "tp2ep2", "dp2pp2ep2"]
    assert all(entry["passed"] and entry["initial"] and entry["gradients"] < 1e-12 for entry in found)
    by_row = "--model.moe.losses.sequence=0.1"
    with pytest.raises(SystemExit) as ended:
        main(["check", "debug-moe", "--world", "2", "--parallel.tp=2", by_row])
    assert ended.value.code == 2
    assert "model.moe.losses.sequence" in capsys.readouterr().err
