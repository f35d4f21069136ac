"""A run in stages goes on bit for bit in a fresh process: inside of a stage, at a border, and with what hooks keep."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_core.errors import ConfigError, PlanError
from forge_core.layout import Layout
from forge_core.registry import Registry
from forge_train.commands import parity
from forge_train.plan import dry_run
from forge_train.recipe.load import load_recipe
from forge_train.run.loop import fit
from harness.pool import World
from harness.siblings import fast
from train.checkpoints.test_optimizer_resume import CONSTANT, LION, OPTIMIZERS, chosen
from train.runs import TINY, digest, prepared, train

STAGES = """
[[train.stages]]
until = 2
train = ["blocks.1.*", "norm.weight"]
lr = { "*.attention.*" = 2.0 }

[[train.stages]]
until = 4
train = ["blocks.0.*", "blocks.1.attention.*"]
warmup = 2
weight_decay = { "blocks.*" = 0.2 }

[[train.stages]]
train = ["*"]
warmup = { "head.weight" = 2 }
"""
DECAYLESS = STAGES.replace('weight_decay = { "blocks.*" = 0.2 }\n', "")


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY.replace("[checkpoint]", STAGES + "\n[checkpoint]"))
    return path


def options(directory: Path, name: str, steps: int, *more: str) -> list[str]:
    named = [*chosen(name), "--optimizer.lr=1e-2", f"--train.max_steps={steps}", "--checkpoint.every=0"]
    return [f"--job.dir={directory}", *named, *CONSTANT, *more]


@pytest.mark.parametrize("name", fast("schedule_free_adamw", of=OPTIMIZERS))
def test_every_optimizer_goes_on_bit_for_bit_inside_of_stages_and_at_their_borders(
    recipe: Path, tmp_path: Path, name: str
) -> None:
    whole = train(recipe, options(tmp_path / "whole", name, 6))
    losses: list[float] = []
    for stop in (2, 3, 6):  # a border, and inside of a stage
        losses += train(recipe, options(tmp_path / "cut", name, 6, f"--train.stop_at={stop}"))["losses"]
    last = digest(prepared(recipe, options(tmp_path / "cut", name, 7))[0])
    assert losses == whole["losses"] and last == whole["weights"]


@pytest.mark.parametrize("layout", ["pp=2", pytest.param("dp_shard=2", marks=pytest.mark.slow)])
def test_on_two_ranks_too_and_then_on_one(world: World, recipe: Path, tmp_path: Path, layout: str) -> None:
    more = [f"--parallel.{layout}"]
    recipe.write_text(recipe.read_text() + '\n[[hooks]]\nname = "log"\nevery = 1\n')
    whole = world.run(train, 2, recipe, options(tmp_path / "whole", "adamw", 6, *more))
    for place in ("cut", "other"):
        world.run(train, 2, recipe, options(tmp_path / place, "adamw", 6, "--train.stop_at=2", *more))
    again = world.run(train, 2, recipe, options(tmp_path / "cut", "adamw", 6, *more))
    assert [rank["losses"] for rank in again] == [rank["losses"][2:] for rank in whole]
    assert [rank["weights"] for rank in again] == [rank["weights"] for rank in whole]
    lines = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    # The rate of the schedule, also where rank 0 has nothing that learns: the first half of a pipeline in stage 1.
    assert [line["lr"] for line in lines if "lr" in line] == pytest.approx([5e-3, *[1e-2] * 5])
    alone = train(recipe, options(tmp_path / "other", "adamw", 6))
    assert alone["losses"] == pytest.approx(whole[0]["losses"][2:], rel=1e-5)


def _states(run: Any) -> set[str]:
    return {name for tensors in run.optimizer.state().values() for name in tensors}


def test_a_frozen_parameter_has_no_gradient_no_state_and_no_update(recipe: Path, tmp_path: Path) -> None:
    """And the log says in which stage it was."""
    recipe.write_text(recipe.read_text() + '\n[[hooks]]\nname = "log"\nevery = 1\n')
    run, _ = prepared(recipe, options(tmp_path / "run", "adamw", 6))
    held = dict(run.model.parameters_held())
    seen: list[tuple[set[str], set[str], set[str]]] = []
    update, before = run.update, {name: tensor.detach().clone() for name, tensor in held.items()}

    def watched(result: Any) -> None:
        graded = {name for name, tensor in held.items() if tensor.grad is not None}
        update(result)
        moved = {name for name, tensor in held.items() if not torch.equal(tensor, before[name])}
        before.update({name: tensor.detach().clone() for name, tensor in held.items()})
        seen.append((graded, _states(run), moved))

    run.update = watched  # type: ignore[method-assign]
    fit(run)
    first = {name for name in held if name.startswith("blocks.1.") or name == "norm.weight"}
    second = {name for name in held if name.startswith(("blocks.0.", "blocks.1.attention."))}
    for step, names in enumerate([first, first, second, second, set(held), set(held)]):
        assert seen[step] == (names, names, names), step
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["stage"] for line in lines if "stage" in line] == [1, 1, 2, 2, 3, 3]
    sizes = [line["memory/optimizer"] for line in lines if "memory/optimizer" in line]
    assert sizes[0] < sizes[2] < sizes[4] or sizes[0] != sizes[2] != sizes[4]


@pytest.mark.slow
def test_an_average_of_the_weights_has_all_that_any_stage_trains(recipe: Path, tmp_path: Path) -> None:
    """By the definition, step by step, of parameters that are frozen for a while too; and across a border."""
    save = '[[hooks]]\nname = "save"'
    recipe.write_text(recipe.read_text().replace(save, f'[[hooks]]\nname = "ema"\ndecay = 0.5\n\n{save}'))
    run, _ = prepared(recipe, options(tmp_path / "whole", "adamw", 6))
    held = dict(run.model.parameters_held())
    mean = {name: tensor.detach().double() for name, tensor in held.items()}
    step = run.update

    def watched(result: Any) -> None:
        step(result)
        for name, tensor in held.items():
            mean[name] = mean[name] + 0.5 * (tensor.detach().double() - mean[name])

    run.update = watched  # type: ignore[method-assign]
    fit(run)
    for stop in (2, 6):
        again, _ = prepared(recipe, options(tmp_path / "cut", "adamw", 6, f"--train.stop_at={stop}"))
        fit(again)
    for one in (run, again):
        (kept,) = [found for hook in one.hooks if (found := hook.tensors(one.model).get("ema"))]
        assert kept.keys() == held.keys()
        for name, tensor in kept.items():
            torch.testing.assert_close(tensor.double(), mean[name], rtol=1e-5, atol=1e-7)


def test_another_end_of_a_stage_is_told_at_a_resume(recipe: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(recipe, options(tmp_path / "run", "adamw", 6, "--train.stop_at=3"))
    recipe.write_text(recipe.read_text().replace("until = 4", "until = 3").replace("warmup = 2\n", "warmup = 1\n"))
    with caplog.at_level("INFO"):
        run, _ = prepared(recipe, options(tmp_path / "run", "adamw", 6))
    assert "train.stages.1.until was 4, is 3" in caplog.text and "stage 3 of 3" in caplog.text
    (line,) = [record.getMessage() for record in caplog.records if "trained from now on" in record.getMessage()]
    assert "head.weight" in line and "blocks.1.mlp" in line and "blocks.0." not in line and "blocks.1.attention." not in line
    state = run.optimizer.state()
    counts = {name: float(step) for name, step in state["step"].items()}
    assert counts["blocks.1.attention.q_proj.weight"] == 3 and counts["blocks.0.mlp.up_proj.weight"] == 1
    assert counts["head.weight"] == 0 and not state["exp_avg"]["head.weight"].any()


@pytest.mark.slow
def test_a_plugin_from_a_file_has_stages_too(recipe: Path, tmp_path: Path) -> None:
    recipe.write_text(recipe.read_text().replace(STAGES, DECAYLESS))
    name = f"{LION}:Lion"
    whole = train(recipe, options(tmp_path / "whole", name, 6))
    found = [train(recipe, options(tmp_path / "cut", name, steps)) for steps in (2, 6)]
    assert found[1]["weights"] == whole["weights"] and found[1]["losses"] == whole["losses"][2:]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("until = 4", "until = 2", r"train\.stages\.1\.until: 2 is not after step 2, where the stage begins"),
        ("until = 4", "until = 1", r"train\.stages\.1\.until: 1 is not after step 2"),
        ("until = 4\n", "", r"train\.stages\.1\.until: is missing"),
        ('train = ["*"]', 'until = 5\ntrain = ["*"]', r"train\.stages\.2\.until: 5: the last stage lasts until the end"),
        ('train = ["*"]', "train = []", r"train\.stages\.2.*train = \[\] trains nothing"),
        ("warmup = 2\n", "warmup = 3\n", r"train\.stages\.1\.warmup: the warm-up has 3 steps, but its stage has only 2"),
        ('"head.weight" = 2', '"head.weight" = 9', r"stages\.2\.warmup: the warm-up of 'head.weight' has 9 steps, but"),
        ('"head.weight" = 2', '"head.weight" = -1', r"train\.stages\.2\.warmup"),
        ('"blocks.*" = 0.2', '"blocks.*" = -0.2', r"train\.stages\.1\.weight_decay"),
    ],
)
def test_stages_that_do_not_follow_each_other_are_refused_by_check(recipe: Path, old: str, new: str, message: str) -> None:
    assert old in recipe.read_text()
    recipe.write_text(recipe.read_text().replace(old, new))
    with pytest.raises(ConfigError, match=message):
        load_recipe(recipe, ["--train.max_steps=8"], 1, Registry())


def test_a_stage_behind_the_end_of_the_run_is_told_and_not_refused(recipe: Path) -> None:
    said = load_recipe(recipe, ["--train.max_steps=4"], 1, Registry()).warnings
    assert any("the next stage begins at step 4, but the run ends at train.max_steps = 4" in str(one) for one in said)
    assert not any("stages" in str(one) for one in load_recipe(recipe, ["--train.max_steps=8"], 1, Registry()).warnings)


def test_a_misspelled_name_is_refused_before_anything_starts(recipe: Path, tmp_path: Path) -> None:
    recipe.write_text(recipe.read_text().replace('"blocks.0.*"', '"block.0.*"'))
    with pytest.raises(PlanError, match=r"train\.stages\.1\.train: 'block\.0\.\*'.*did you mean 'blocks\.\*'"):
        prepared(recipe, options(tmp_path / "run", "adamw", 6))
    assert not (tmp_path / "run").exists() or not any((tmp_path / "run").glob("*.toml"))


@pytest.mark.slow
def test_a_plan_counts_what_any_stage_trains(recipe: Path, tmp_path: Path) -> None:
    """As without stages, where each parameter is trained in some; less where one never is."""
    layout, registry = Layout.parse("1"), Registry()

    def state(path: Path) -> int:
        (found,) = dry_run(load_recipe(path, ["--train.max_steps=8"], 1, registry).job, layout, registry, 1).ranks
        return found.optimizer

    plain, less = tmp_path / "plain.toml", tmp_path / "less.toml"
    plain.write_text(TINY)
    less.write_text(recipe.read_text().replace('train = ["*"]', 'train = ["head.weight"]'))
    embed = 61 * 16 * 8 + 4  # two moments of four bytes and a count
    assert state(recipe) == state(plain) and state(less) == state(plain) - embed


def test_parity_gives_each_stage_a_step(recipe: Path) -> None:
    """Of three steps the first has gradients of the first stage only, and all parameters move in the end."""
    found = parity.rank(str(recipe), [], "1", "fp64", 4, 2, 16, 2)
    assert len(found["loss"]) == 3
    assert {name.rpartition(".")[0].partition(".attention")[0] for name in found["gradients"]} >= {"norm", "blocks.1"}
    assert all(name.startswith(("blocks.1.", "norm.")) for name in found["gradients"])
    assert all(not torch.equal(tensor, found["initial"][name]) for name, tensor in found["weights"].items())
