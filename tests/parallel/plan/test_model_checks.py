"""`check` refuses what ranks would refuse when they lay out the model, all of it in one round."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from forge_core.layout import Layout
from forge_models.components.attentions import GQA
from forge_models.components.decoder import DecoderConfig
from forge_models.components.experts import MoEConfig
from forge_models.shape import Losses, Rope
from forge_parallel.checks import float8_can_multiply, left_to_the_start, rows_can_be_shared, tensors_can_be_cut
from forge_parallel.transforms.context.transform import ContextParallel
from forge_parallel.transforms.float8.transform import Float8
from forge_parallel.transforms.tensor.transform import TensorParallel
from forge_vlm.components.model import VLM

DECODER = DecoderConfig(dim=32, heads=4, kv_heads=2, layers=2, ffn_dim=32, vocab_size=64)
DYNAMIC = Rope(scaling="dynamic", factor=2.0, original_max_length=16)


def keys(model: Any, layout: str, **transforms: Any) -> list[str]:
    job = SimpleNamespace(model=model, transforms=transforms)
    checks = (tensors_can_be_cut, rows_can_be_shared, float8_can_multiply)
    return [fault.key for check in checks for fault in check(job, Layout.parse(layout))]


@pytest.mark.parametrize(
    ("changes", "layout", "transforms", "found"),
    [
        ({}, "tp4", {}, []),
        ({}, "tp8", {}, ["model.heads"]),
        ({"heads": 6, "kv_heads": 3, "head_dim": 8}, "tp2", {}, ["model.kv_heads"]),
        ({"heads": 6, "kv_heads": 2, "head_dim": 8}, "tp3", {}, ["model.kv_heads"]),
        ({"ffn_dim": 3, "vocab_size": 5}, "tp4", {}, ["model.vocab_size", "model.ffn_dim"]),
        ({"heads": 2, "ffn_dim": 3}, "tp4", {}, ["model.heads", "model.ffn_dim"]),
        ({"moe": MoEConfig(experts=4, losses=Losses(sequence=0.1))}, "tp2", {}, ["model.moe.losses.sequence"]),
        (
            {"moe": MoEConfig(experts=4, losses=Losses(sequence=0.1))},
            "tp2",
            {"tensor": TensorParallel(sequence_parallel=False)},
            [],
        ),
        ({"rope": DYNAMIC}, "cp2", {}, ["model.rope.scaling"]),
        ({}, "cp4", {"context": ContextParallel(kind="ulysses")}, []),
        ({}, "cp4tp2", {"context": ContextParallel(kind="ulysses")}, ["transforms.context.kind"]),
        ({}, "cp8", {"context": ContextParallel(kind="ulysses")}, ["transforms.context.kind"]),
        ({"attention": GQA(soft_cap=5.0)}, "cp2", {"context": ContextParallel(kind="ring")}, ["transforms.context.kind"]),
        ({"attention": GQA(soft_cap=5.0)}, "cp2", {}, []),
        ({}, "1", {"float8": Float8()}, []),
        ({}, "tp4", {"float8": Float8()}, ["transforms.float8"]),
        ({"kv_heads": 4}, "tp2", {"float8": Float8()}, []),
        ({"ffn_dim": 40}, "1", {"float8": Float8()}, ["transforms.float8"]),
        ({"ffn_dim": 40}, "1", {"float8": Float8(exclude=["*.mlp.*"])}, []),
        ({}, "1", {"float8": Float8(include=["*.nothing"])}, ["transforms.float8"]),
        ({}, "1", {"float8": Float8(exclude=["*"])}, ["transforms.float8"]),
        ({}, "1", {"float8": Float8(experts=True)}, ["transforms.float8.experts"]),
        ({"moe": MoEConfig(experts=4), "head_dim": 16}, "dp2tp2etp2", {"float8": Float8(experts=True)}, []),
        (
            {"moe": MoEConfig(experts=4, ffn_dim=16), "head_dim": 16},
            "dp2tp2etp2",
            {"float8": Float8(experts=True)},
            ["transforms.float8.experts"],
        ),
    ],
)
def test_e7_what_ranks_would_refuse(changes: dict[str, Any], layout: str, transforms: dict[str, Any], found: list[str]) -> None:
    assert keys(replace(DECODER, **changes), layout, **transforms) == found


def test_e7_a_model_without_a_shape_is_judged_when_it_is_built() -> None:
    assert keys(SimpleNamespace(), "dp2tp2cp2", float8=Float8(include=["nothing"])) == []
    assert keys(SimpleNamespace(shape=(3, 4)), "dp2tp2cp2") == [], "a shape of another kind"


def test_what_is_left_to_the_start_is_named() -> None:
    def left(model: Any, layout: str, **transforms: Any) -> tuple[str, ...]:
        return left_to_the_start(SimpleNamespace(model=model, transforms=transforms), Layout.parse(layout))

    unknown = SimpleNamespace()
    assert left(unknown, "dp2") == ()
    assert left(unknown, "dp2tp2cp2", float8=Float8()) == ("parallel.tp", "parallel.cp", "transforms.float8")
    assert left(DECODER, "dp2tp2cp2", float8=Float8()) == ()
    images = VLM(dim=32, heads=4, layers=2, vocab_size=64)
    assert left(images, "tp2", float8=Float8()) == ("transforms.float8",), "a fusion may add layers"
