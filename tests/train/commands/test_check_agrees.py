"""`check` refuses what ranks would refuse later, and nothing else: both are asked about random recipes.

A dry run stands for the ranks: the real model, transforms, pipeline, step and optimizer of one rank of every stage.
"""

import random
import re
import warnings
from pathlib import Path
from typing import Any

import pytest

from forge_core.errors import ConfigError, Fault, ForgeError
from forge_core.layout import SIZES, Layout
from forge_core.registry import Registry
from forge_train.plan import dry_run
from forge_train.recipe.load import load_recipe
from forge_train.recipe.schema import Job

REGISTRY = Registry()

BASE = """
[job]
name = "drawn"

[model]
name = "decoder"
dim = 32
ffn_dim = 48
layers = 2
heads = 4
vocab_size = 64
max_length = 4096

[data]
sequence_length = 16

[[data.sources]]
name = "random"
vocab_size = 2

[train]
global_batch = 8
micro_batch = 2

[precision]
compute = "fp32"

[[hooks]]
name = "save"
"""


BLIND = re.compile(r"^train\.|needs a model with experts")
"""Faults that a dry run does not see: it reads no data, and experts that are not there are nobody's."""


POLICY = re.compile(r"no test proves")
"""Faults that say nothing about whether ranks could run it."""


def drawn(seed: int) -> tuple[int, dict[str, Any]]:
    """A world size and overrides; most keys keep their values, so that about half of all recipes are right."""
    draw = random.Random(seed)

    def maybe(chance: float, *values: Any) -> Any:
        return draw.choice(values) if draw.random() < chance else None

    axes = ("tp", "cp", "pp", "dp_replicate", "dp_shard")
    sizes = {axis: draw.choice((2, 2, 2, 3, 4)) for axis in draw.sample(axes, draw.choice((1, 1, 2, 2, 3)))}
    sizes.setdefault("dp_shard", 1)
    keys: dict[str, Any] = {f"parallel.{axis}": size for axis, size in sizes.items()}
    world = 1
    for size in sizes.values():
        world *= size
    tp, cp, pp = (sizes.get(axis, 1) for axis in ("tp", "cp", "pp"))
    keys |= {
        "model.heads": maybe(0.4, 2, 4, 6, 8, 16),
        "model.head_dim": maybe(0.3, 4, 8, 16),
        "model.ffn_dim": maybe(0.4, 2, 17, 24, 50, 64),
        "model.layers": maybe(0.5, 1, 3, 4, 4, 5),
        "model.vocab_size": maybe(0.3, 3, 61, 64, 65, 80),
        "model.tied_embeddings": maybe(0.3, True),
        "model.soft_cap": maybe(0.2, 30.0),
        "data.sequence_length": maybe(0.3, 12, 20, 24, 30, 32),
        "train.micro_batch": maybe(0.4, 1, 2, 3, 4),
        "train.global_batch": maybe(0.4, 4, 12, 16),
        "precision.compute": maybe(0.3, "bf16", "fp64"),
        "transforms.recompute.policy": maybe(0.2, "full", "selective"),
        "model.rope.scaling": maybe(0.1, "dynamic"),
    }
    if keys["model.rope.scaling"]:
        keys |= {"model.rope.factor": 2.0, "model.rope.original_max_length": 16}
    if keys["model.heads"] is not None and keys["model.head_dim"] is None:
        keys["model.head_dim"] = 8
    keys["model.kv_heads"] = maybe(0.6, *(n for n in (1, 2, 3, 4, 6, 8) if (keys["model.heads"] or 4) % n == 0))
    if keys["precision.compute"] == "fp64":
        keys["precision.state"] = "fp64"
    if draw.random() < 0.2:
        keys |= {"model.attention.name": "mla", "model.kv_heads": None, "model.head_dim": keys["model.head_dim"] or 8}
        keys |= {"model.attention.kv_lora_rank": draw.choice((12, 16)), "model.attention.qk_nope_head_dim": 8}
        keys |= {"model.attention.qk_rope_head_dim": 8, "model.attention.v_head_dim": draw.choice((8, 16))}
        keys["model.attention.q_lora_rank"] = maybe(0.5, 16)
    else:
        keys["model.attention.soft_cap"] = maybe(0.3, 20.0)
        keys["model.attention.window"] = maybe(0.2, 8)
        keys["model.attention.qk_norm"] = maybe(0.3, "head", "full")
    if draw.random() < 0.3:
        keys |= {"model.moe.experts": draw.choice((3, 4, 6, 8)), "model.moe.top_k": 2, "model.moe.shared": draw.choice((0, 1))}
        keys["model.moe.ffn_dim"] = maybe(0.5, 8, 16, 24, 30)
        keys["model.moe.losses.sequence"] = maybe(0.2, 0.1)
        keys["model.moe.first_dense"] = maybe(0.3, 1)
    if draw.random() < 0.35:
        lenders = sizes["dp_shard"] * cp * tp
        keys["parallel.ep"] = draw.choice([n for n in (2, 3, 4, 6, 8) if lenders % n == 0] or [1])
        if tp > 1 and lenders % (keys["parallel.ep"] * tp) == 0:
            keys["parallel.etp"] = maybe(0.4, tp)
        if draw.random() < 0.4:
            keys["transforms.expert.dispatcher"] = draw.choice(("all_gather", "hierarchical"))
            if keys["transforms.expert.dispatcher"] == "hierarchical":
                keys["transforms.expert.ranks_per_node"] = draw.choice((2, 3))
    if cp > 1:
        keys["transforms.context.kind"] = draw.choice(("all_gather", "ring", "ulysses"))
    if tp > 1:
        keys["transforms.tensor.sequence_parallel"] = maybe(0.25, False)
    if pp > 1:
        schedules = ("gpipe", "1f1b", "interleaved", "interleaved_zero_bubble", "zbv", "dualpipev")
        keys["parallel.pipeline.schedule.name"] = draw.choice(schedules)
        keys["parallel.pipeline.split"] = maybe(0.2, "2,2", "1,1,1,1", "3,1")
    if draw.random() < 0.15:
        keys["model.mtp.depth"] = draw.choice((1, 2))
    if draw.random() < 0.2:
        keys["transforms.float8.recipe"] = draw.choice(("tensorwise", "rowwise"))
        keys["transforms.float8.emulate"] = True
        keys["transforms.float8.experts"] = maybe(0.3, True)
        keys["transforms.float8.exclude"] = maybe(0.2, ["*down_proj"], ["nothing"])
    return world, {key: value for key, value in keys.items() if value is not None}


def written(keys: dict[str, Any]) -> list[str]:
    return [f"--{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in keys.items()]


def asked(recipe: Path, seed: int) -> tuple[list[Fault], Job | None, Layout | None, str]:
    """The faults that `check` finds, the recipe where it can be read in spite of them, and what was asked."""
    world, keys = drawn(seed)
    told = f"--world {world} {' '.join(written(keys))}"
    faults: list[Fault] = []
    try:
        resolved = load_recipe(recipe, written(keys), world, REGISTRY)
    except ConfigError as error:
        faults = list(error.faults)
        try:
            resolved = load_recipe(recipe, written(keys), None, REGISTRY)
        except ConfigError:
            return faults, None, None, told
    parallel = resolved.job.parallel
    return faults, resolved.job, Layout.of({axis: getattr(parallel, axis) for axis in SIZES}, world), told


def refusal(job: Job, layout: Layout) -> str:
    """What a dry run says against a recipe; empty when it takes it. Only words of ours count: a crash is no refusal."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            dry_run(job, layout, REGISTRY, 8)
        except (ForgeError, ValueError) as refused:
            return f"{type(refused).__name__}: {refused}"
    return ""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("drawn") / "drawn.toml"
    path.write_text(BASE)
    return path


@pytest.mark.slow
def test_e7_check_and_ranks_agree_on_random_recipes(recipe: Path) -> None:
    """Refusals of both are quick; of what `check` takes a few are run."""
    refused = taken = 0
    for seed in range(1000, 1060):
        faults, job, layout, told = asked(recipe, seed)
        if job is None or layout is None or any(BLIND.search(str(fault)) for fault in faults):
            continue
        if any(not POLICY.search(str(fault)) for fault in faults):
            refused += 1
            assert refusal(job, layout), f"check refuses what ranks take: {told}: {faults}"
        elif not faults and taken < 2:
            taken += 1
            assert refusal(job, layout) == "", f"check takes what ranks refuse: {told}"
    assert refused > 15
    assert taken == 2


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 400, 50))
def test_e7_check_names_every_refusal_of_ranks(recipe: Path, first: int) -> None:
    """Also where it refuses for want of a proof only."""
    for seed in range(first, first + 50):
        faults, job, layout, told = asked(recipe, seed)
        if job is None or layout is None or any(BLIND.search(str(fault)) for fault in faults):
            continue
        named = any(not POLICY.search(str(fault)) for fault in faults)
        assert bool(refusal(job, layout)) == named, f"{told}: {faults}"
