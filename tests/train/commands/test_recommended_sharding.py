"""What `forge-train plan --device` recommends for `[transforms.shard]`, and recipes and checkpoints that left it to the run."""

import io
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from forge_core.errors import ConfigError
from forge_core.layout import Layout
from forge_core.registry import Registry
from forge_parallel.checks import compositions_are_proven
from forge_parallel.dryrun import sharding
from forge_parallel.dryrun.fake_world import ACCELERATORS
from forge_parallel.dryrun.sharding import Recommendation, recommend
from forge_parallel.model.plan import Plan
from forge_parallel.model.realize import Blueprint
from forge_parallel.transforms.shard import reduce_of
from forge_train.commands.plan import draw
from forge_train.plan import dry_run, plan_of
from forge_train.recipe.load import load_recipe
from forge_train.run.resume import compare_recipes
from harness.pool import World
from train.runs import TINY, train

GIB = 1 << 30


def recommended(recipe: Any, world: int, memory: int, *keys: str) -> Recommendation | None:
    resolved = load_recipe(recipe, keys, world, Registry())
    assert resolved.layout is not None
    return recommend(resolved.job, resolved.layout, lambda: Blueprint.of(resolved.job.model.build), memory)


def values(found: Recommendation | None) -> tuple[Any, Any]:
    assert found is not None
    return found.best.reduce, found.best.reshard


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "tiny.toml").write_text(TINY)
    return tmp_path / "tiny.toml"


@pytest.mark.parametrize(
    ("preset", "world", "gpu", "expected"),
    [
        ("7b", 8, "h100", ("last", False)),
        ("8b-h200", 8, "h200", ("last", False)),
        ("8b-h200-fp8", 8, "h200", ("last", False)),
        ("8b-h100", 8, "h100", ("each", False)),
        ("13b", 8, "h100", ("each", False)),
        ("30b", 16, "h100", ("each", None)),
        ("70b", 32, "h100", ("each", None)),
        ("70b", 32, "h200", ("each", None)),
    ],
)
def test_presets_state_what_is_recommended_for_their_gpus(preset: str, world: int, gpu: str, expected: tuple[Any, Any]) -> None:
    """70b: whole gradients are 4 x 70.6e9 = 282 GB and whole weights 141 GB, more than any of these GPUs. 8b: 32 GB and 14 GB on
    top of 64 GB / 8 of state and about 45 GB of activations, which an H200 has room for."""
    data = "--data.sources.0.path=."
    shard = load_recipe(preset, [data], world, Registry()).job.transforms["shard"]
    assert (shard.reduce, shard.reshard) == expected == values(recommended(preset, world, ACCELERATORS[gpu].memory, data))


@pytest.mark.parametrize(
    ("preset", "world", "gpu", "expected"), [("7b", 4, "h100", ("each", False)), ("8b-h200", 2, "h200", ("last", None))]
)
def test_presets_name_the_worlds_that_need_other_values(preset: str, world: int, gpu: str, expected: tuple[Any, Any]) -> None:
    data = "--data.sources.0.path=."
    assert values(recommended(preset, world, ACCELERATORS[gpu].memory, data)) == expected
    assert recommended("8b-h200", 1, ACCELERATORS["h200"].memory, data) is None, "one GPU is not sharded"


def test_where_there_is_nothing_to_recommend(recipe: Path) -> None:
    assert recommended(recipe, 1, 10**12) is None
    once = recommended(recipe, 2, 0, "--train.global_batch=4")
    assert once is not None and {option.reduce for option in once.proven} == {"last"}, "with one micro-batch both are the same"
    staged = recommended(recipe, 4, 10**12, "--parallel.pp=2")
    assert staged is not None
    assert {(option.reduce, option.reshard) for option in staged.proven} == {("last", None), ("last", True)}
    assert values(staged) == ("last", None)
    assert values(recommended(recipe, 4, 0, "--parallel.pp=2")) == ("last", True)


def test_what_no_test_proves_is_not_recommended(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(*names: str) -> Any:
        def check(job: Any, layout: Layout) -> Any:
            shard = job.transforms["shard"]
            return iter([f"{shard}"] if shard.reduce in names or shard.reshard in names else [])

        return check

    monkeypatch.setattr(sharding, "compositions_are_proven", refusing("last"))
    found = recommended(recipe, 2, 10**12)
    assert found is not None and values(found) == ("each", False) and len(found.unproven) == len(found.proven) == 2
    monkeypatch.setattr(sharding, "compositions_are_proven", refusing("last", "each"))
    assert recommended(recipe, 2, 10**12) is None


def test_every_recommendation_is_proven(recipe: Path) -> None:
    resolved = load_recipe(recipe, (), 4, Registry())
    found = recommended(recipe, 4, 0)
    assert resolved.layout is not None and found is not None
    for option in found.proven:
        keys = [
            f"--transforms.shard.reduce={option.reduce}",
            f"--transforms.shard.reshard={json.dumps(option.reshard or 'none')}",
        ]
        job = load_recipe(recipe, keys, 4, Registry()).job
        assert list(compositions_are_proven(job, resolved.layout)) == []


def test_a_person_copies_what_is_recommended_and_a_program_reads_it(recipe: Path, tmp_path: Path) -> None:
    resolved = load_recipe(recipe, (), 2, Registry())
    assert resolved.layout is not None
    pages = []
    for gpu in (None, ACCELERATORS["h200"]):
        plan = dry_run(resolved.job, resolved.layout, Registry(), 8, accelerator=gpu)
        page = io.StringIO()
        draw(plan, "tiny", Console(file=page, width=300))
        pages.append((page.getvalue(), json.loads(json.dumps(plan.as_json()))["shard"]))
    (cpu, nothing), (page, told) = pages
    assert "ecommended" not in cpu and nothing is None, "the memory of a CPU is not known"
    assert "the least traffic among options that fit into 126.90 GiB, 90 % of the memory of h200" in page
    assert page.count(" traffic in a step") == 3
    assert told["memory"] == 141 * GIB and told["usable"] == int(0.9 * 141 * GIB) and told["fits"]
    assert told["best"] in told["proven"] and len(told["proven"]) == 4 and told["unproven"] == []
    start = page.index("  [transforms.shard]")
    lines = page[start:].splitlines()[:3]
    (tmp_path / "copied.toml").write_text(TINY + "\n" + "\n".join(lines) + "\n")
    shard = load_recipe(tmp_path / "copied.toml", (), 2, Registry()).job.transforms["shard"]
    assert (shard.reduce, shard.reshard) == (told["best"]["reduce"], told["best"]["reshard"]) == ("last", False)
    tight = recommended(recipe, 2, 1000)
    assert tight is not None and not tight.fits and values(tight) == ("each", None)


@pytest.mark.parametrize(
    ("key", "reason"), [("reduce", "continue a run bit for bit"), ("reshard", "no bit of a run depends on it")]
)
def test_a_recipe_that_leaves_it_to_the_run_is_refused(recipe: Path, key: str, reason: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_recipe(recipe, [f"--transforms.shard.{key}=auto"], 2, Registry())
    (fault,) = refusal.value.faults
    assert fault.key == f"transforms.shard.{key}"
    assert "a run no longer chooses by itself: leave the key out" in fault.hint and reason in fault.hint


def test_a_plan_tells_a_checkpoint_how_gradients_are_summed(recipe: Path) -> None:
    resolved = load_recipe(recipe, ["--transforms.shard.reduce=each"], 2, Registry())
    assert resolved.layout is not None
    assert reduce_of(plan_of(resolved.job, resolved.layout, Registry())) == "each"
    assert reduce_of(Plan.of([], Layout())) is None


def test_checkpoints_of_runs_that_chose_are_resumed_with_the_value_that_they_record(recipe: Path) -> None:
    """Earlier versions stored `auto` in the recipe of a checkpoint, and under `reduce` the value that the run chose."""
    now = load_recipe(recipe, ["--transforms.shard.reduce=each"], 2, Registry())
    for chosen, expected in (("each", ()), ("last", ('transforms.shard.reduce was "last", is "each"',))):
        config = load_recipe(recipe, ["--transforms.shard.reduce=each"], 2, Registry()).as_json()
        config["transforms"]["shard"] |= {"reduce": "auto", "reshard": "auto"}
        meta = {"config": config, "reduce": chosen, "anchors": {"train.global_batch": now.job.train.global_batch}}
        meta["anchors"]["data.sequence_length"] = now.job.data.sequence_length
        found = compare_recipes(meta, now, Registry())
        assert (found.refused, found.noted) == ({}, expected)


def _trained(folder: str, name: str, keys: list[str]) -> dict[str, Any]:
    return train(Path(folder) / "tiny.toml", [f"--job.dir={folder}/{name}", *keys])


def test_the_order_of_sums_changes_bits_and_what_stays_gathered_does_not(world: World, recipe: Path) -> None:
    each = ["--transforms.shard.reduce=each"]
    keys = {"each": each, "kept": [*each, "--transforms.shard.reshard=false"], "last": []}
    found = {name: world.run(_trained, 2, str(recipe.parent), name, options) for name, options in keys.items()}
    assert found["each"] == found["kept"]
    assert found["each"][0]["weights"] != found["last"][0]["weights"], "else a resume need not keep the value"


def test_what_is_weighed_is_what_the_recipe_says(monkeypatch: pytest.MonkeyPatch) -> None:
    loads, needs = [], sharding.needs
    monkeypatch.setattr(sharding, "needs", lambda *given: loads.append(given[2]) or needs(*given))
    monkeypatch.setattr(sharding, "compositions_are_proven", lambda *_: iter(()))
    job = load_recipe("debug-moe", ["--transforms.shard.reduce=last"], 2, Registry()).job
    for layout, offload in (("dp2", False), ("1", True)):
        given = replace(job, transforms={"shard": replace(job.transforms["shard"], offload=offload)})
        assert recommend(given, Layout.parse(layout), lambda: Blueprint.of(job.model.build), 10**12) is not None
    first, second = loads
    assert (first.top_k, first.tokens) == (job.model.moe.top_k, job.train.micro_batch * job.data.sequence_length)
    assert job.model.moe.top_k > 1 and (first.offload, second.offload) == (False, True)


def test_experts_that_are_sharded_apart_get_a_recommendation() -> None:
    """tp alone shards nothing of a dense model; experts of its ranks see different tokens."""
    for preset, expected in (("debug", False), ("debug-moe", True)):
        job = load_recipe(preset, ["--transforms.shard.reduce=last"], 2, Registry()).job
        found = recommend(job, Layout(tp=2), partial(Blueprint.of, job.model.build), 10**12)
        assert (found is not None) is expected
