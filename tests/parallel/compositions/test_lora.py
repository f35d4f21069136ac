"""Adapters in layouts: each equals one process, and the base never changes."""

from dataclasses import replace

import pytest
import torch

from forge_models.components.decoder import DecoderConfig
from forge_parallel.verify.parity import Measurement, compare
from harness.pool import World
from parallel.compositions.rows import DECODER, LORA, case_of, decoder_of, layout_of, measured

ROWS = (
    "dp_shard lora",
    "tp lora",
    "pp_1f1b accumulate lora",
    "dp_shard experts ep_all_to_all lora",
    pytest.param("tp tp_whole lora", marks=pytest.mark.slow),
    pytest.param("tp experts lora", marks=pytest.mark.slow),
)


def _changed(row: str, **keys: object) -> DecoderConfig:
    return replace(decoder_of(frozenset(row.split())), **keys)  # type: ignore[arg-type]


MODELS = {
    "one key-value head for two ranks": ("tp lora", {"kv_heads": 1}),
    "biases": ("tp lora", {"attention": replace(DECODER.attention, qkv_bias=True, output_bias=True)}),  # type: ignore[type-var]
    "a stage without adapters": ("pp_1f1b accumulate lora", {"lora": replace(LORA, targets=("blocks.3.*",))}),
    "rows of trained length": ("dp_shard lora", {"lora": replace(LORA, dora=True, rank_stabilized=True)}),
    "rows of trained length in a pipeline": ("pp_1f1b accumulate lora", {"lora": replace(LORA, dora=True)}),
}


def _measured(name: str, layout: str) -> Measurement:
    row, keys = MODELS.get(name, (name, {}))
    words = frozenset(row.split())
    case = case_of(words)
    if keys:
        case = replace(case, build=_changed(row, **keys).build)
    return measured(case, layout, words)


@pytest.mark.parametrize("name", [*ROWS, *(pytest.param(name, marks=pytest.mark.slow) for name in MODELS)])
def test_an_adapter_in_a_layout_equals_one_process(world: World, name: str) -> None:
    """After three steps, with loss, norm, gradients and weights; all that has changed and has a gradient is the adapter."""
    alone = _measured(name, "1")
    adapter = {name for name in alone.weights if "lora_" in name}
    assert adapter == set(alone.gradients)
    assert adapter == {name for name, tensor in alone.weights.items() if not torch.equal(tensor, alone.initial[name])}
    layout = layout_of(frozenset(MODELS.get(name, (name,))[0].split()))
    for found in world.run(_measured, layout.world, name, str(layout)):
        difference = compare(alone, found)
        assert difference.accepted("fp64"), difference
