"""`auto` in `[transforms.shard]`: what presets get on GPUs, what a run says and keeps, and what no test has proven."""

import io
import json
import logging
import logging.handlers
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from forge_core.errors import PlanError
from forge_core.layout import Layout
from forge_core.registry import Registry
from forge_parallel import accelerator, settle
from forge_parallel.checks import compositions_are_proven, options_are_declared
from forge_parallel.dryrun.fake_world import ACCELERATORS
from forge_parallel.model.plan import Plan
from forge_parallel.model.realize import Blueprint
from forge_parallel.placement.topology import Topology
from forge_parallel.settle import Settled, reduced_by, reduced_so_far, settled, shared_memory
from forge_parallel.transforms.shard import FullyShard
from forge_train.commands.plan import draw
from forge_train.plan import dry_run, plan_of
from forge_train.recipe.load import load
from harness.pool import World
from train.runs import TINY, prepared, train

AUTO = ("--transforms.shard.reduce=auto", "--transforms.shard.reshard=auto")
GIB = 1 << 30


def settled_for(recipe: Any, world: int, memory: int | None, *keys: str, before: Any = None) -> Settled:
    said = [key.partition("=")[0] for key in keys]
    auto = [key for key in AUTO if key.partition("=")[0] not in said]
    resolved = load(recipe, [*auto, *keys], world, Registry())
    assert resolved.layout is not None
    return settled(resolved.job, resolved.layout, lambda: Blueprint.of(resolved.job.model.build), memory, before)


def values(found: Settled) -> tuple[Any, Any]:
    shard = found.job.transforms["shard"]
    return shard.reduce, shard.reshard


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "tiny.toml").write_text(TINY)
    return tmp_path / "tiny.toml"


@pytest.mark.parametrize(
    ("preset", "world", "gpu", "expected"),
    [
        ("8b-h200", 8, "h200", ("last", False)),
        ("8b-h200", 2, "h200", ("last", None)),
        ("8b-h200", 1, "h200", ("last", None)),
        ("8b-h200-fp8", 8, "h200", ("last", False)),
        ("8b-h100", 8, "h100", ("each", False)),
        ("70b", 32, "h100", ("each", None)),
        ("70b", 32, "h200", ("each", None)),
    ],
)
def test_what_presets_get(preset: str, world: int, gpu: str, expected: tuple[Any, Any]) -> None:
    """70b: whole gradients are 4 x 70.6e9 = 282 GB and whole weights 141 GB, more than any of these GPUs. 8b: 32 GB and 14 GB on
    top of 64 GB / 8 of state and about 45 GB of activations, which an H200 has room for."""
    resolved = load(preset, ["--data.sources.0.path=."], world, Registry())
    shard = resolved.job.transforms["shard"]
    assert (shard.reduce, shard.reshard) == ("auto", "auto"), "the preset leaves it to be chosen"
    assert values(settled_for(preset, world, ACCELERATORS[gpu].memory)) == expected


def test_explicit_values_are_left_alone_and_nothing_is_built(recipe: Path) -> None:
    def never() -> Any:
        raise AssertionError("the model is not needed")

    for shard in ((), ("--transforms.shard.reduce=each", "--transforms.shard.reshard=false")):
        resolved = load(recipe, shard, 2, Registry())
        assert resolved.layout is not None
        found = settled(resolved.job, resolved.layout, never, 10**15)
        assert found.job is resolved.job and found.chosen is None and found.lines() == [] and found.as_json() is None


@pytest.mark.parametrize(
    ("keys", "expected"),
    [(("--transforms.shard.reduce=each",), ("each", False)), (("--transforms.shard.reshard=true",), ("last", True))],
)
def test_one_key_can_be_said(recipe: Path, keys: tuple[str, ...], expected: tuple[Any, Any]) -> None:
    assert values(settled_for(recipe, 2, 10**12, *keys)) == expected


def test_where_there_is_nothing_to_choose(recipe: Path) -> None:
    alone = settled_for(recipe, 1, None)
    assert values(alone) == ("last", None) and alone.lines() == []
    once = settled_for(recipe, 2, None, "--train.global_batch=4")
    assert {option.reduce for option in once.among} == {"last"}, "with one micro-batch both are the same"
    staged = settled_for(recipe, 4, 10**12, "--parallel.pp=2")
    assert {(option.reduce, option.reshard) for option in staged.among} == {("last", None), ("last", True)}
    assert values(staged) == ("last", None)
    assert values(settled_for(recipe, 4, None, "--parallel.pp=2")) == ("last", True)


def test_what_no_test_proves_cannot_be_chosen(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks see what is chosen, not `auto`."""

    def refusing(*names: str) -> Any:
        def check(job: Any, layout: Layout) -> Any:
            shard = job.transforms["shard"]
            assert "auto" not in (shard.reduce, shard.reshard)
            return iter([f"{shard}"] if shard.reduce in names or shard.reshard in names else [])

        return check

    monkeypatch.setattr(settle, "compositions_are_proven", refusing("last"))
    found = settled_for(recipe, 2, 10**12)
    assert values(found) == ("each", False) and len(found.unproven) == len(found.among) == 2
    assert "reduce = 'last', reshard unset is left out: no test proves it" in "\n".join(found.lines())
    monkeypatch.setattr(settle, "compositions_are_proven", refusing("last", "each"))
    with pytest.raises(PlanError, match="'auto' finds nothing to choose: no test proves reduce = 'last'"):
        settled_for(recipe, 2, 10**12)


def test_every_choice_is_proven_and_auto_itself_is_no_feature(recipe: Path) -> None:
    resolved = load(recipe, AUTO, 4, Registry())
    assert resolved.layout is not None
    assert list(options_are_declared(resolved.job, resolved.layout)) == []
    found = settled_for(recipe, 4, None)
    for option in found.among:
        shard = replace(resolved.job.transforms["shard"], reduce=option.reduce, reshard=option.reshard)
        job = replace(resolved.job, transforms={"shard": shard})
        assert list(compositions_are_proven(job, resolved.layout)) == []


def test_a_plan_without_a_choice_is_refused_where_it_is_applied(recipe: Path) -> None:
    with pytest.raises(PlanError, match="reduce = 'auto': 'auto' stands for a value"):
        FullyShard(reduce="auto").apply(torch.nn.Linear(1, 1), SimpleNamespace())  # type: ignore[arg-type]
    resolved = load(recipe, AUTO, 2, Registry())
    assert resolved.layout is not None
    plan = plan_of(resolved.job, resolved.layout, Registry())
    assert reduced_by(plan) == "each", "of a device of which nothing is known, the least memory"
    assert reduced_by(Plan.of([], Layout())) is None


def test_a_person_and_a_program_read_what_was_chosen(recipe: Path) -> None:
    resolved = load(recipe, AUTO, 2, Registry())
    assert resolved.layout is not None
    pages = []
    for gpu in (None, ACCELERATORS["h200"]):
        plan = dry_run(resolved.job, resolved.layout, Registry(), 8, accelerator=gpu)
        page = io.StringIO()
        draw(plan, "tiny", Console(file=page, width=300))
        pages.append((page.getvalue(), json.loads(json.dumps(plan.as_json()))["shard"]))
    (cpu, unknown), (gpu_page, told) = pages
    assert "shard: chose reduce = 'each', reshard unset, about" in cpu and "no device is known" in cpu
    assert "shard: chose reduce = 'last', reshard = false, about" in gpu_page
    assert "of what fits into 126.90 GiB, 90 % of a device's 141.00 GiB, it exchanges least" in gpu_page
    assert gpu_page.count("would take about") == 3 and " more in a step" in gpu_page
    assert (unknown["memory"], unknown["usable"]) == (None, None)
    assert told["memory"] == 141 * GIB and told["usable"] == int(0.9 * 141 * GIB)
    assert told["chosen"] in told["among"] and len(told["among"]) == 4 and told["unproven"] == []
    nothing = settled_for(recipe, 2, 1000)
    assert "nothing fits into 900 B, 90 % of a device's 1,000 B, so what takes least" in nothing.lines()[0]


def _agreed(memories: list[int], folder: str) -> tuple[int | None, int | None, tuple[Any, Any]]:
    """What ranks whose devices report different bytes agree on, and choose."""
    topology = Topology.of(Layout(dp_shard=2), torch.device("cpu"))
    without, asked = shared_memory(topology), accelerator.memory
    accelerator.memory = lambda _: memories[topology.rank]
    try:
        memory = shared_memory(topology)
    finally:
        accelerator.memory = asked
    return without, memory, values(settled_for(Path(folder) / "tiny.toml", 2, memory))


def test_ranks_with_different_memory_choose_alike(world: World, recipe: Path) -> None:
    """Sizes between which the choice changes: the smaller one counts, by whole GiB or as its vendor names it."""
    folder = str(recipe.parent)
    for memories, expected in (([7 * GIB + 5, 3 * GIB + 9], 3 * GIB), ([int(139.7 * GIB), int(140.4 * GIB)], 141 * GIB)):
        assert world.run(_agreed, 2, memories, folder) == [(None, expected, ("last", False))] * 2
    assert world.run(_agreed, 2, [10**9, 7 * GIB], folder) == [(None, 0, ("each", None))] * 2


def _trained(folder: str, name: str, keys: list[str]) -> dict[str, Any]:
    return train(Path(folder) / "tiny.toml", [f"--job.dir={folder}/{name}", *keys])


def test_a_run_under_auto_is_the_run_with_the_values(world: World, recipe: Path) -> None:
    """Bit by bit: losses, weights and the optimizer's state. What is gathered when changes no bit; the order of sums does."""
    each = ["--transforms.shard.reduce=each"]
    keys = {"auto": list(AUTO), "each": each, "kept": [*each, "--transforms.shard.reshard=false"], "last": []}
    found = {name: world.run(_trained, 2, str(recipe.parent), name, options) for name, options in keys.items()}
    assert found["auto"] == found["each"] == found["kept"]
    assert found["auto"][0]["weights"] != found["last"][0]["weights"], "else the choice need not be kept over a resume"


def _resumed(folder: str, name: str, first: list[str], then: list[str]) -> list[Any]:
    recipe, where = Path(folder) / "tiny.toml", f"--job.dir={folder}/{name}"
    train(recipe, [where, "--train.max_steps=3", *first])
    said, log = logging.handlers.BufferingHandler(10**6), logging.getLogger("forge_train.run.start")
    log.addHandler(said)
    log.setLevel("INFO")
    run, _ = prepared(recipe, [where, "--train.max_steps=6", *then])
    log.removeHandler(said)
    lines = [record.getMessage() for record in said.buffer]
    return [reduced_by(run.model.plan), run.job.transforms["shard"].reduce, *(line[:29] for line in lines if "shard: " in line)]


def test_a_resume_sums_as_the_run_did(world: World, recipe: Path) -> None:
    """Without a device `each` is chosen, but a run that summed once a step goes on so; in another layout it is chosen anew."""
    folder = str(recipe.parent)
    for name, first in (("last", ["--transforms.shard.reduce=last"]), ("each", list(AUTO))):
        found = world.run(_resumed, 2, folder, name, first, list(AUTO))
        assert found == [[name, name, f"shard: chose reduce = '{name}',"]] * 2
    assert reduced_so_far({"layout": "dp2", "reduce": "last"}, Layout.parse("dp2")) == "last"
    assert reduced_so_far({"layout": "dp2", "reduce": "last"}, Layout.parse("dp4")) is None
    assert reduced_so_far({"layout": "dp2"}, Layout.parse("dp2")) is None
    changed = settled_for(recipe, 2, 1000, before="last")
    assert values(changed)[0] == "each"
    assert "gradients were summed with reduce = 'last' so far: last bits differ from here on" in changed.lines()[-1]
    assert "and sums as the run did so far" in settled_for(recipe, 2, 10**12, before="each").lines()[0]


def test_what_is_weighed_is_what_the_recipe_says(monkeypatch: pytest.MonkeyPatch) -> None:
    loads, needs = [], settle.needs
    monkeypatch.setattr(settle, "needs", lambda *given: loads.append(given[2]) or needs(*given))
    monkeypatch.setattr(settle, "compositions_are_proven", lambda *_: iter(()))
    job = load("debug-moe", AUTO, 2, Registry()).job
    for layout, offload in (("dp2", False), ("1", True)):
        given = replace(job, transforms={"shard": replace(job.transforms["shard"], offload=offload)})
        assert settled(given, Layout.parse(layout), lambda: Blueprint.of(job.model.build), 10**12).chosen is not None
    first, second = loads
    assert (first.top_k, first.tokens) == (job.model.moe.top_k, job.train.micro_batch * job.data.sequence_length)
    assert job.model.moe.top_k > 1 and (first.offload, second.offload) == (False, True)


def test_experts_that_are_sharded_apart_are_something_to_choose_for() -> None:
    """tp alone shards nothing of a dense model; experts of its ranks see different tokens."""
    for preset, chooses in (("debug", False), ("debug-moe", True)):
        job = load(preset, AUTO, 2, Registry()).job
        found = settled(job, Layout(tp=2), partial(Blueprint.of, job.model.build), 10**12)
        assert (found.chosen is not None) is chooses
