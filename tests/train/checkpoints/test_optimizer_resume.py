"""Every optimizer goes on bit for bit in a fresh process; what was frozen begins anew; averages are what is saved."""

from pathlib import Path
from typing import Any

import pytest
import torch

from forge_ckpt.checkpoint.locate import locate
from forge_core.component import fields_of
from forge_core.errors import ForgeError, PlanError
from forge_core.registry import Registry
from forge_parallel.optim.elementwise import ElementwiseOptimizer
from forge_parallel.placement.boxes import local_box
from forge_train.directory import CHECKPOINTS
from forge_train.formats.forge import ForgeWeights
from forge_train.run.loop import fit
from harness.pool import World
from harness.siblings import fast
from train.runs import TINY, digest, prepared, train

REGISTRY = Registry()
OPTIMIZERS = [entry.name for entry in REGISTRY.of("forge.optimizers") if entry.distribution == "forge-parallel"]
CONSTANT = ["--schedule.name=constant", "--schedule.warmup=2"]
LION = Path(__file__).parents[3] / "examples" / "plain_file" / "mine.py"
GROUP = """
[[parameters.groups]]
match = "blocks.1.*"
frozen = true

[[parameters.groups]]
match = "*norm*"
lr = 0.5
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


def chosen(name: str) -> list[str]:
    """The last optimizer of a name that conformance tries: what is for large tensors does its work in tiny ones there."""
    named = [f"--optimizer.name={name}"]
    if name not in OPTIMIZERS:
        return named
    example = tuple(REGISTRY.load("forge.optimizers", name).examples(Path()))[-1]
    values = {info.name: (info.default, getattr(example, info.name)) for info in fields_of(type(example))}
    return named + [f"--optimizer.{key}={value}" for key, (default, value) in values.items() if value != default]


def options(directory: Path, name: str, steps: int, *more: str) -> list[str]:
    named = [*chosen(name), "--optimizer.lr=1e-2", f"--train.max_steps={steps}"]
    return [f"--job.dir={directory}", *named, *CONSTANT, *more]


@pytest.mark.parametrize("name", fast("adamw8bit", of=OPTIMIZERS))
def test_fault_17_a_fresh_process_goes_on_bit_for_bit(world: World, recipe: Path, tmp_path: Path, name: str) -> None:
    """With groups, on two ranks that shard, then on one: there the losses agree."""
    recipe.write_text(TINY + GROUP)
    whole = world.run(train, 2, recipe, options(tmp_path / "whole", name, 6))
    first = world.run(train, 2, recipe, options(tmp_path / "cut", name, 4))
    again = world.run(train, 2, recipe, options(tmp_path / "cut", name, 6))
    for rank in range(2):
        assert first[rank]["losses"] + again[rank]["losses"] == whole[rank]["losses"]
        assert again[rank]["weights"] == whole[rank]["weights"]
    world.run(train, 2, recipe, options(tmp_path / "other", name, 4))
    alone = train(recipe, options(tmp_path / "other", name, 6))
    assert alone["losses"] == pytest.approx(whole[0]["losses"][4:], rel=1e-5)


@pytest.mark.parametrize("name", fast("muon", of=OPTIMIZERS))
def test_what_is_trained_from_a_resume_on_begins_without_state(
    recipe: Path, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """In four steps frozen: bit for bit as drawn. Then it moves, by what one new step of the optimizer moves it."""
    recipe.write_text(TINY + GROUP)
    run, _ = prepared(recipe, options(tmp_path / "run", name, 4))
    drawn = {key: tensor.detach().clone() for key, tensor in run.model.parameters_held() if key.startswith("blocks.1.")}
    fit(run)
    held = dict(run.model.parameters_held())
    assert all(torch.equal(held[key], tensor) for key, tensor in drawn.items())

    recipe.write_text(TINY)
    with caplog.at_level("INFO"):
        other, _ = prepared(recipe, options(tmp_path / "run", name, 5))
    assert "trained from now on, without optimizer state at first: blocks.1.attention.k_proj.weight" in caplog.text
    state = other.optimizer.state()
    assert all(any(key in tensors for tensors in state.values()) for key in drawn)
    for kind, tensors in state.items():
        for key in drawn.keys() & tensors.keys():
            expected = drawn[key] if kind == "z" else torch.zeros_like(tensors[key])
            assert torch.equal(tensors[key], expected), (kind, key)
    assert all(float(state["step"][key]) == 4 for key in state.get("step", {}) if key not in drawn)
    fit(other)
    assert all(not torch.equal(tensor, drawn[key]) for key, tensor in other.model.parameters_held() if key in drawn)

    recipe.write_text(TINY + GROUP)
    with caplog.at_level("INFO"):
        third = train(recipe, options(tmp_path / "run", name, 6))
    assert "frozen from now on, their optimizer state is dropped: blocks.1." in caplog.text and third["step"] == 6


@pytest.mark.parametrize("saving", fast(["--checkpoint.mode=async"], of=[[], ["--checkpoint.mode=async"]]), ids=["sync", "async"])
def test_what_is_frozen_is_on_the_disk_once_on_each_rank(world: World, recipe: Path, tmp_path: Path, saving: list[str]) -> None:
    """Of checkpoints of two ranks, over a resume; what one rank saves then, or a recipe that trains it, is written."""

    def files(step: int) -> dict[str, int]:
        folder = tmp_path / "run" / CHECKPOINTS / f"step-{step:08d}"
        return {file.name: file.stat().st_ino for file in folder.glob("*.bin")}

    recipe.write_text(TINY + GROUP)
    for steps in (2, 4):
        world.run(
            train, 2, recipe, options(tmp_path / "run", "adamw", steps, "--checkpoint.every=1", "--checkpoint.keep=0", *saving)
        )
    shared = {name: number for name, number in files(1).items() if len(name) > len("rank-00000.bin")}
    assert len(shared) == 2 and len(files(1)) == 4
    for step in (2, 3, 4):
        assert {name: number for name, number in files(step).items() if name in shared} == shared
        assert not {*files(step).values()} - {*shared.values()} & {*files(step - 1).values()}
    train(recipe, options(tmp_path / "run", "adamw", 5))
    assert len(files(5)) == 2 and not {*files(5).values()} & {*files(4).values()}
    recipe.write_text(TINY)
    train(recipe, options(tmp_path / "run", "adamw", 6))
    assert [*files(6)] == ["rank-00000.bin"]


@pytest.mark.parametrize("layout", ["dp_shard", "tp"])
def test_moments_of_eight_bits_have_the_same_bits_in_a_layout_of_another_kind(
    world: World, recipe: Path, tmp_path: Path, layout: str
) -> None:
    """Codes and scales that two ranks saved, each its part, are in one process bit for bit; and the other way round."""
    two = [f"--parallel.{layout}=2"]
    first = world.run(train, 2, recipe, options(tmp_path / "run", "adamw8bit", 3, *two))
    alone, _ = prepared(recipe, options(tmp_path / "run", "adamw8bit", 5))
    kinds = {key: {tensor.dtype for tensor in tensors.values()} for key, tensors in alone.optimizer.state().items()}
    assert torch.uint8 in kinds["exp_avg"] and kinds["exp_avg_sq_scale"] == {torch.float32}
    assert {rank["weights"] for rank in first} == {digest(alone)}
    fit(alone)
    assert set(world.run(digested, 2, recipe, options(tmp_path / "run", "adamw8bit", 6, *two))) == {digest(alone)}


def digested(recipe: Path, overrides: list[str]) -> str:
    """Of what this rank has restored."""
    return digest(prepared(recipe, overrides)[0])


def test_another_size_of_blocks_is_refused_at_a_resume(recipe: Path, tmp_path: Path) -> None:
    train(recipe, options(tmp_path / "run", "adamw8bit", 2))
    with pytest.raises(ForgeError, match=r"optimizer\.block"):
        prepared(recipe, options(tmp_path / "run", "adamw8bit", 4, "--optimizer.block=8"))


def test_an_older_checkpoint_of_bf16_state_has_one_count_for_all(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    low = ["--precision.compute=bf16", "--precision.state=bf16"]
    whole = train(recipe, options(tmp_path / "whole", "adamw", 6, *low))
    today = ElementwiseOptimizer.state

    def before(optimizer: ElementwiseOptimizer) -> Any:
        found = dict(today(optimizer))
        return {**found, "step": {"all": next(iter(found["step"].values()))}}

    with monkeypatch.context() as older:
        older.setattr(ElementwiseOptimizer, "state", before)
        train(recipe, options(tmp_path / "cut", "adamw", 4, *low))
    again = train(recipe, options(tmp_path / "cut", "adamw", 6, *low))
    assert again["losses"] == whole["losses"][4:] and again["weights"] == whole["weights"]


def test_checkpoints_and_evaluations_of_schedule_free_have_the_averaged_weights(recipe: Path, tmp_path: Path) -> None:
    """x of y and z, by the definition of the paper; what is trained comes back bit for bit."""
    run, _ = prepared(recipe, options(tmp_path / "run", "schedule_free_adamw", 6))
    fit(run)
    y = {key: tensor.detach().clone() for key, tensor in run.model.parameters_held()}
    z, beta = run.optimizer.state()["z"], run.job.optimizer.betas[0]
    x = {key: (tensor.double() - (1 - beta) * z[key].double()) / beta for key, tensor in y.items()}
    assert all(float((x[key] - y[key]).abs().max()) > 0 for key in y)
    weights = ForgeWeights(locate(tmp_path / "run" / CHECKPOINTS), Registry())
    for key, tensor in weights.read(list(x)).items():
        torch.testing.assert_close(tensor.double(), x[key], rtol=1e-5, atol=1e-7)
    with run.model.inference(whole_sequences=True):
        for key, tensor in run.model.parameters_held():
            torch.testing.assert_close(tensor.double(), x[key], rtol=1e-5, atol=1e-7)
    assert all(torch.equal(y[key], tensor) for key, tensor in run.model.parameters_held())
    again, _ = prepared(recipe, options(tmp_path / "run", "schedule_free_adamw", 7))
    assert all(torch.equal(y[key], local_box(tensor).local) for key, tensor in again.model.parameters_held())


def test_a_group_that_matches_nothing_is_refused_before_anything_starts(recipe: Path, tmp_path: Path) -> None:
    recipe.write_text(TINY + '[[parameters.groups]]\nmatch = "blocks.*.atention.*"\nlr = 0.1\n')
    with pytest.raises(PlanError, match=r"parameters\.groups\.0\.match: 'blocks.*did you mean 'blocks\.\*\.attention"):
        prepared(recipe, options(tmp_path / "run", "adamw", 4))
    assert not (tmp_path / "run").exists() or not any((tmp_path / "run").glob("*.toml"))


def test_a_plugin_from_a_file_has_groups_too(recipe: Path, tmp_path: Path) -> None:
    recipe.write_text(TINY + GROUP)
    found: Any = [train(recipe, options(tmp_path / "run", f"{LION}:Lion", steps)) for steps in (3, 5)]
    whole = train(recipe, options(tmp_path / "whole", f"{LION}:Lion", 5))
    assert found[1]["weights"] == whole["weights"]
