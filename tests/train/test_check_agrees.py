"""`check` refuses what ranks would refuse later, and nothing else: both are asked about random recipes.

A dry run stands for the ranks: the real model, transforms, pipeline, step and optimizer of one rank of every stage.
"""

import random
import warnings
from pathlib import Path
from typing import Any

from forge_core.errors import ConfigError, Fault, ForgeError
from forge_core.registry import Registry
from forge_train.planning import planned
from forge_train.recipe import load

REGISTRY = Registry()

BASE = """
[job]
name = "drawn"

[model]
name = "decoder"
dim = 32
ffn_dim = 48
layers = 4
heads = 4
vocab_size = 64
max_length = 4096

[data]
sequence_length = 32

[[data.sources]]
name = "random"
vocab_size = 64

[train]
global_batch = 16
micro_batch = 2

[precision]
compute = "fp32"

[[hooks]]
name = "save"
"""


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
        "model.layers": maybe(0.4, 1, 2, 3, 5, 8),
        "model.vocab_size": maybe(0.3, 3, 61, 64, 65, 80),
        "model.tied_embeddings": maybe(0.3, True),
        "model.soft_cap": maybe(0.2, 30.0),
        "data.sequence_length": maybe(0.3, 16, 20, 24, 30, 64),
        "train.micro_batch": maybe(0.4, 1, 2, 3, 4),
        "train.global_batch": maybe(0.4, 8, 12, 24, 32),
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
        keys["model.prediction.depth"] = draw.choice((1, 2))
    if draw.random() < 0.2:
        keys["transforms.float8.recipe"] = draw.choice(("tensorwise", "rowwise"))
        keys["transforms.float8.emulate"] = True
        keys["transforms.float8.experts"] = maybe(0.3, True)
        keys["transforms.float8.exclude"] = maybe(0.2, ["*down_proj"], ["nothing"])
    return world, {key: value for key, value in keys.items() if value is not None}


def written(keys: dict[str, Any]) -> list[str]:
    return [f"--{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in keys.items()]


def verdicts(recipe: Path, seed: int) -> tuple[list[Fault], str, list[str]]:
    """The faults that `check` finds, and the refusal of a dry run that was told to go on in spite of them."""
    world, keys = drawn(seed)
    told = [f"--world={world}", *written(keys)]
    try:
        resolved = load(recipe, written(keys), world, REGISTRY)
        faults: list[Fault] = []
    except ConfigError as error:
        faults = list(error.faults)
        try:
            resolved = load(recipe, written(keys), None, REGISTRY)
        except ConfigError:
            return faults, "not a recipe", told
    from forge_core.layout import SIZES, Layout

    parallel = resolved.job.parallel
    try:
        layout = Layout.of({axis: getattr(parallel, axis) for axis in SIZES}, world)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            planned(resolved.job, layout, REGISTRY, 8)
    except (ForgeError, ValueError) as refusal:
        return faults, f"{type(refusal).__name__}: {refusal}", told
    except Exception as error:
        return faults, f"CRASH {type(error).__name__}: {error}", told
    return faults, "", told
