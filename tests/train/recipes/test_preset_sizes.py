"""Presets of stated sizes: parameters by closed form, worlds that `check` takes, and the editors' schema over all presets."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import forge_train.presets
from core.judge import accepts
from forge_core.config.descriptions import json_schema
from forge_core.errors import ConfigError
from forge_core.registry import Registry
from forge_models.flops import count_flops
from forge_train.recipe.load import load_recipe
from forge_train.recipe.schema import Job

FOLDER = Path(forge_train.presets.__file__).parent
EVERY = sorted(path.stem for path in FOLDER.glob("*.toml"))
SIZED = sorted(set(EVERY) - {"debug", "debug-moe", "demo", "sft-demo", "lora-demo", "dpo-demo", "classify-demo"})

PUBLISHED = {"1b": 1_235_814_400, "7b": 8_030_261_248, "13b": 13_015_864_320, "30b": 32_528_943_616, "70b": 70_553_706_496}
PUBLISHED |= {"8x7b": 46_702_792_704, "30b-a3b-8xh100": 30_532_122_624}
PUBLISHED |= dict.fromkeys(("8b-h100", "8b-h200", "8b-h200-fp8"), PUBLISHED["7b"])
"""Of Llama-3.2-1B, Llama-3-8B, Llama-2-13B, LLaMA-30B, Llama-3-70B, Mixtral-8x7B and Qwen3-30B-A3B, as their model cards' tensors
add up."""

MEMORY = {name: 141e9 if "h200" in name else 80e9 for name in SIZED}
"""Bytes of the GPU that a preset is for."""


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry()


def stated(name: str, what: str) -> list[int]:
    """Numbers of the line `# Parameters: ...` or `# GPUs: ...` of a preset."""
    line = re.search(rf"^# {what}: (.*)$", (FOLDER / f"{name}.toml").read_text(), re.MULTILINE)
    assert line, f"{name} does not state its {what}"
    return [int(number.replace(",", "")) for number in line[1].split(", ")]


def closed_form(model: dict[str, Any], active: bool = False) -> int:
    """Weights of a decoder of the Llama family, term by term; with experts, of the Mixtral and Qwen3-MoE families."""
    dim, layers, heads = (model[key] for key in ("dim", "layers", "heads"))
    head_dim = model.get("head_dim", dim // heads)
    attention = dim * heads * head_dim * 2 + dim * model.get("kv_heads", heads) * head_dim * 2
    attention += 2 * head_dim if model.get("attention", {}).get("qk_norm") == "head" else 0
    tables = 1 if model.get("tied_embeddings") else 2
    each = 3 * dim * model.get("moe", {}).get("ffn_dim", model["ffn_dim"])
    chosen = each if "moe" not in model else model["moe"]["top_k" if active else "experts"] * each + model["moe"]["experts"] * dim
    return tables * model["vocab_size"] * dim + layers * (attention + chosen + 2 * dim) + dim


def test_the_sizes_that_are_promised_exist() -> None:
    sizes = {"20m", "125m", "350m", "1b", "7b", "8x7b", "13b", "30b", "70b"}
    assert set(SIZED) == sizes | {"8b-h100", "8b-h200", "8b-h200-fp8", "30b-a3b-8xh100"}


@pytest.mark.parametrize("name", SIZED)
def test_parameters_are_those_stated(name: str, registry: Registry) -> None:
    model = tomllib.loads((FOLDER / f"{name}.toml").read_text())["model"]
    assert stated(name, "Parameters") == [closed_form(model)]
    assert count_flops(load_recipe(name, registry=registry).job.model.shape).parameters == closed_form(model)
    assert closed_form(model) == PUBLISHED.get(name, closed_form(model))
    if "moe" in model:
        found = count_flops(load_recipe(name, registry=registry).job.model.shape).active
        assert stated(name, "Active") == [closed_form(model, active=True)] == [found]


@pytest.mark.parametrize("name", SIZED)
def test_check_takes_the_stated_worlds_and_refuses_others(name: str, registry: Registry) -> None:
    worlds = stated(name, "GPUs")
    for world in worlds:
        layout = load_recipe(name, world=world, registry=registry).layout
        assert layout is not None and layout.dp_shard == world
        assert layout.ep == load_recipe(name, registry=registry).job.parallel.ep
    assert load_recipe(name, ["--parallel.dp_replicate=2"], worlds[-1], registry).layout is not None
    for world, key in ((3 * worlds[0], "train.global_batch"), (2 * worlds[-1], None)):
        with pytest.raises(ConfigError) as refusal:
            load_recipe(name, world=world, registry=registry)
        job = load_recipe(name, registry=registry).job
        larger = "train.global_batch" if job.train.global_batch % world else "train.micro_batch"
        assert [fault.key for fault in refusal.value.faults] == [key or larger]


@pytest.mark.parametrize("name", SIZED)
def test_state_fits_from_the_smallest_stated_world_on(name: str, registry: Registry) -> None:
    """Weights, gradients and two moments, in fp32 16 bytes a parameter and in bf16 8, in half of a GPU's memory; half as many
    GPUs would not do, or are not a node."""
    (parameters,), worlds = stated(name, "Parameters"), stated(name, "GPUs")
    each = {"fp32": 16, "bf16": 8}[load_recipe(name, registry=registry).job.precision.state] * parameters / worlds[0]
    assert each <= MEMORY[name] / 2
    assert worlds[0] == 1 or 2 * each > MEMORY[name] / 2 or (name.startswith("8b-") and worlds[0] == 8)


@pytest.mark.parametrize("name", SIZED)
def test_a_run_is_about_twenty_tokens_a_parameter(name: str, registry: Registry) -> None:
    job = load_recipe(name, registry=registry).job
    tokens = job.train.max_steps * job.train.global_batch * job.data.sequence_length
    assert tokens == pytest.approx(20 * count_flops(job.model.shape).active, rel=0.05)
    if name in ("7b", "8x7b", "13b", "30b", "70b"):
        assert job.train.global_batch * job.data.sequence_length == 2**22


@pytest.mark.parametrize("name", SIZED)
def test_the_user_gives_the_data(name: str, registry: Registry) -> None:
    job = load_recipe(name, ["--data.sources.0.path=elsewhere"], registry=registry).job
    assert [source.path for source in job.data.sources] == ["elsewhere"]


def test_the_schema_accepts_every_preset_and_no_misspelt_one(registry: Registry) -> None:
    schema = json_schema(Job, registry)
    for name in EVERY:
        recipe = tomllib.loads((FOLDER / f"{name}.toml").read_text())
        assert accepts(schema, recipe), name
        for section, table in recipe.items():
            if isinstance(table, dict) and section != "transforms":
                assert not accepts(schema, recipe | {section: table | {"misspelt": 1}}), (name, section)
        assert not accepts(schema, recipe | {"train": recipe["train"] | {"max_steps": "many"}}), name
