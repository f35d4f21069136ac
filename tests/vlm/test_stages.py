"""Stages of training of vision-language models: their roles, and every fusion in layouts against one process."""

from dataclasses import replace
from fnmatch import fnmatchcase

import pytest
import torch

from forge_parallel.optim.groups import TrainingStage
from forge_parallel.verify.parity import Measurement, compare
from forge_testing.modules import on_meta
from harness.pool import World
from parallel.compositions.rows import case_of, layout_of, measured
from vlm.tiny import MODELS, TEXT

STAGES = (
    TrainingStage(until=1, train=("adapter", "fusion")),
    TrainingStage(until=2, train=("adapter", "decoder"), lr={"adapter": 3.0}),
    TrainingStage(train=("*",), lr={"encoder": 0.1}, warmup={"encoder": 2}),
)

FUSION = {
    "joint": (),
    "cross": ("blocks.1.cross.*",),
    "mot": ("blocks.*.image.*",),
    "mot-experts": ("blocks.*.image.*",),
    "moma-token": ("blocks.*.layers.image.*",),
}


@pytest.mark.parametrize("name", FUSION)
def test_each_parameter_has_one_role_and_the_decoder_is_the_text_model(name: str) -> None:
    """Of `decoder` are as many as the text model has, with its names but for the word of the modality."""
    model = on_meta(MODELS[name].build)
    roles, names = model.specs().roles, {key for key, _ in model.named_parameters()}
    assert set().union(*roles.values()) == names and sum(map(len, roles.values())) == len(names)
    assert roles["encoder"] and all(key.startswith("encoder.") for key in roles["encoder"])
    assert roles["adapter"] and all(key.startswith("adapter.") for key in roles["adapter"])
    expected = {key for key in names if any(fnmatchcase(key, pattern) for pattern in FUSION[name])}
    assert roles.get("fusion", frozenset()) == expected and bool(expected) == bool(FUSION[name])
    text = on_meta(replace(TEXT, moe=MODELS[name].moe).build)
    plain = {key.replace(".layers.text.", ".").replace(".text.", ".") for key in roles["decoder"]}
    assert plain == {key for key, _ in text.named_parameters()}


ROWS = ("fusion_cross dp_shard accumulate",)
SLOW = (
    "fusion_moma experts ep_all_gather dp_shard accumulate",
    "fusion_joint dp_shard tp tp_whole accumulate recompute",
    "fusion_mot dp_shard pp_1f1b accumulate",
    "fusion_cross dp_shard dp_replicate",
    "fusion_moma_choice dp_shard experts ep_all_to_all",
    "fusion_moma_threshold experts pp_interleaved accumulate",
)


def _measured(row: str, layout: str) -> Measurement:
    words = frozenset(row.split())
    first = () if "fusion_joint" not in words else (TrainingStage(until=1, train=("adapter",)),)
    return measured(replace(case_of(words), stages=(*first, *STAGES[len(first) :]), steps=4), layout, words)


@pytest.mark.parametrize("row", [*ROWS, *(pytest.param(row, marks=pytest.mark.slow) for row in SLOW)])
def test_stages_of_a_fusion_are_those_of_one_process(world: World, row: str) -> None:
    alone, layout = _measured(row, "1"), layout_of(frozenset(row.split()))
    assert alone.gradients and not any(key.startswith(("encoder.", "embed.", "head.")) for key in alone.gradients)
    assert any(key.startswith("adapter.") for key in alone.gradients)
    moved = {key for key, tensor in alone.weights.items() if not torch.equal(tensor, alone.initial[key])}
    assert any(key.startswith("encoder.") for key in moved)
    for found in world.run(_measured, layout.world, row, str(layout)):
        assert (difference := compare(alone, found)).accepted("fp64"), difference
