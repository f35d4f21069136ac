"""Checkpoints of shared experts: every layout loads the same tensors, and a run goes on as if it had never stopped."""

from pathlib import Path
from typing import Any

import pytest
import torch

from forge_ckpt.checkpoint.locate import locate
from forge_core.registry import Registry
from forge_parallel.model.parallel_model import full
from forge_train.formats.forge import ForgeWeights
from forge_train.run.loop import fit
from harness.pool import World
from harness.siblings import fast
from train.runs import prepared

RECIPE = """
base = "debug-moe"

[job]
name = "sparse"
seed = 3

[model]
dim = 16
layers = 2
max_length = 16

[model.moe]
first_dense = 0
ffn_dim = 8

[model.moe.router]
bias_rate = 0.05
bias_schedule = "cosine"
bias_steps = 8

[model.moe.losses]
sequence = 0.0
global_batch = 0.01

[data]
sequence_length = 16
evaluation = {}

[[data.sources]]
name = "random"
vocab_size = 320
tokens = 4000
document = 23

[train]
max_steps = 8
threads = 1
micro_batch = 2

[precision]
compute = "fp64"
state = "fp64"

[optimizer]
lr = 1e-2

[schedule]
warmup = 2

[[hooks]]
name = "routing"
every = 2

[[hooks]]
name = "save"
"""

LAYOUTS = {
    "1": [],
    "ep2": ["--parallel.ep=2"],
    "ep4": ["--parallel.ep=4"],
    "dp4ep2": ["--parallel.ep=2"],
    "tp2": ["--parallel.tp=2"],
    "pp2": ["--parallel.pp=2"],
    "tp2ep2": ["--parallel.tp=2", "--parallel.ep=2"],
    "hsdp2x2ep2": ["--parallel.dp_replicate=2", "--parallel.ep=2"],
    "dp2tp2ep2etp2": ["--parallel.tp=2", "--parallel.ep=2", "--parallel.etp=2"],
}
RANKS = {"1": 1, "ep4": 4, "dp4ep2": 4, "hsdp2x2ep2": 4, "dp2tp2ep2etp2": 4}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "sparse.toml"
    path.write_text(RECIPE)
    return path


def on(world: World, layout: str, function: Any, recipe: Path, directory: Path, steps: int) -> list[dict[str, Any]]:
    """What `function` returns on every rank of a layout."""
    arguments = (recipe, [f"--job.dir={directory}", *LAYOUTS[layout]], steps)
    ranks = RANKS.get(layout, 2)
    return world.run(function, ranks, *arguments, timeout=200) if ranks > 1 else [function(*arguments)]


def trained(recipe: Path, overrides: list[str], steps: int) -> dict[str, Any]:
    """Goes on to step `steps` of eight, from the checkpoint that is there, and saves: what was there before and after."""
    run, recorder = prepared(recipe, overrides)
    before = whole(run)
    run.stop.max_steps = steps
    fit(run)
    return {"before": before, "after": whole(run), "losses": recorder.losses}


def whole(run: Any) -> dict[str, torch.Tensor]:
    """Every tensor of model and optimizer that this rank has a part of."""
    found = {name: full(tensor) for name, tensor in run.model.tensors()}
    for kind, tensors in run.optimizer.state().items():
        found |= {f"{kind}/{name}": full(tensor) for name, tensor in tensors.items()}
    return found


def together(ranks: list[dict[str, Any]], when: str) -> dict[str, torch.Tensor]:
    """Of all stages. Ranks that have the same tensor agree about it."""
    found: dict[str, torch.Tensor] = {}
    for rank in ranks:
        assert all(torch.equal(found[name], tensor) for name, tensor in rank[when].items() if name in found)
        found |= rank[when]
    return found


ELSEWHERE = {"ep4": ["1", "ep2", "tp2", "pp2"], "dp4ep2": ["1"]}
"""Layout that saves -> layouts that load."""

FURTHER = {"hsdp2x2ep2": ["1"], "dp2tp2ep2etp2": ["1", "ep4"], "pp2": ["ep4"], "1": ["dp2tp2ep2etp2", "tp2ep2", "dp4ep2"]}


@pytest.mark.parametrize("layout", fast("dp4ep2", of=ELSEWHERE))
def test_fault_19_every_tensor_is_what_was_saved_in_every_layout(world: World, recipe: Path, tmp_path: Path, layout: str) -> None:
    saved_and_loaded(world, recipe, tmp_path, layout, ELSEWHERE[layout])


@pytest.mark.slow
@pytest.mark.parametrize("layout", FURTHER)
def test_fault_19_every_tensor_is_what_was_saved_in_further_layouts(
    world: World, recipe: Path, tmp_path: Path, layout: str
) -> None:
    saved_and_loaded(world, recipe, tmp_path, layout, FURTHER[layout])


def saved_and_loaded(world: World, recipe: Path, tmp_path: Path, layout: str, others: list[str]) -> None:
    saved = together(on(world, layout, trained, recipe, tmp_path / "run", 2), "after")
    kinds = ("experts.up_proj", "router.weight", "router.bias", "router.updates", "mlp.load")
    assert all(any(name.endswith(kind) for name in saved) for kind in kinds)
    assert sum(name.endswith("/blocks.1.mlp.experts.down_proj") for name in saved) == 3, "AdamW's"
    stored = ForgeWeights(locate(tmp_path / "run"), Registry())
    for name, tensor in stored.read(list(stored.tensors)).items():
        assert torch.equal(tensor, saved[name]), name
    for other in others:
        loaded = together(on(world, other, trained, recipe, tmp_path / "run", 2), "before")
        assert loaded.keys() == saved.keys()
        assert [name for name in saved if not torch.equal(loaded[name], saved[name])] == []


@pytest.mark.slow
def test_fault_19_a_run_that_changes_its_layout_is_one_that_did_not(world: World, recipe: Path, tmp_path: Path) -> None:
    goes_on(world, recipe, tmp_path, [("ep2", 2), ("1", 3), ("tp2ep2", 4)])


@pytest.mark.slow
def test_fault_19_a_run_goes_through_many_layouts(world: World, recipe: Path, tmp_path: Path) -> None:
    legs = [("ep4", 2), ("ep2", 3), ("1", 4), ("tp2ep2", 5), ("pp2", 6), ("hsdp2x2ep2", 7), ("dp2tp2ep2etp2", 8)]
    goes_on(world, recipe, tmp_path, legs)


def goes_on(world: World, recipe: Path, tmp_path: Path, legs: list[tuple[str, int]]) -> None:
    (alone,) = on(world, "1", trained, recipe, tmp_path / "alone", legs[-1][1])
    losses = []
    for layout, steps in legs:
        ranks = on(world, layout, trained, recipe, tmp_path / "elastic", steps)
        assert all(rank["losses"] == ranks[0]["losses"] for rank in ranks)
        losses += ranks[0]["losses"]
    assert losses == pytest.approx(alone["losses"], rel=1e-9)
    after = together(ranks, "after")
    assert after.keys() == alone["after"].keys()
    for name, expected in alone["after"].items():
        torch.testing.assert_close(after[name], expected, rtol=1e-6, atol=1e-8, msg=name)
