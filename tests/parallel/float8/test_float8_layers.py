"""What float8 converts, by name and shape, and what it refuses before the run."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from forge_core.errors import ForgeError, PlanError
from forge_core.layout import Layout
from forge_core.specs import Specs
from forge_models.components.decoder import DecoderConfig
from forge_models.components.experts import MoEConfig
from forge_parallel import torchao_library
from forge_parallel.model.parallel_model import Context
from forge_parallel.model.plan import Plan
from forge_parallel.model.realize import Blueprint, realize
from forge_parallel.placement import shares
from forge_parallel.placement.topology import Topology
from forge_parallel.transforms.float8 import conversion, layers
from forge_parallel.transforms.float8.transform import Float8
from forge_parallel.transforms.tensor.transform import TensorParallel as TensorParallel
from models.variants import VARIANTS

CPU = torch.device("cpu")
DECODER = DecoderConfig(dim=64, layers=2, heads=4, kv_heads=2, ffn_dim=64, vocab_size=61, max_length=32, tied_embeddings=True)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_linear_layer_of_the_zoo_is_converted_and_no_head_expert_or_router(variant: str) -> None:
    sizes = {"dim": 48, "heads": 6, "head_dim": 10, "ffn_dim": 56, "vocab_size": 101, "max_length": 64} | VARIANTS[variant]
    blueprint = Blueprint.of(DecoderConfig(**{"layers": 2, **sizes}).build)
    paths = layers.candidates(blueprint.specs)
    modules = dict(blueprint.module.named_modules())
    assert {path for path in paths if isinstance(modules[path], nn.Linear)} == {
        path for path, module in modules.items() if isinstance(module, nn.Linear)
    }
    assert not any(word in path for path in paths for word in ("head", "experts", "embed"))


def test_routers_are_no_linear_layers() -> None:
    decoder = replace(DECODER, moe=MoEConfig(experts=4, ffn_dim=32, shared=1))
    blueprint, at = Blueprint.of(decoder.build), Layout()
    context = Context(blueprint.specs, Topology(at, CPU), torch.float32, torch.float32)
    part = Float8().build().apply(blueprint.module, context)
    converted = {path.rpartition(".")[2] for path, module in part.named_modules() if hasattr(module, "casting")}
    assert converted == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    with pytest.raises(PlanError, match=r"include: '\*\.router' matches no linear layer"):
        Float8(include=["*.router"]).build().apply(Blueprint.of(decoder.build).module, context)


def _apply(float8: Float8, decoder: DecoderConfig = DECODER, layout: str = "1", compute: str = "bf16") -> None:
    at = Layout.parse(layout)
    realize(Blueprint.of(decoder.build), Plan.of([float8.build(), TensorParallel()], at), Topology(at, CPU), 0, compute, "fp64")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"include": ["*.up"]},
            r"include: '\*.up' matches no linear layer with a hidden matrix; these layers are blocks\.\*\.attention",
        ),
        ({"exclude": ["head"]}, "exclude: 'head' matches no linear layer with a hidden matrix"),
        ({"exclude": ["*"]}, "converts no layer: include and exclude select none"),
        ({"emulate": False}, "emulate = false, but the device 'cpu' has no float8 products"),
    ],
)
def test_what_cannot_be_converted_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        _apply(Float8(**fields))


def test_shapes_are_checked_before_the_run_and_named() -> None:
    with pytest.raises(PlanError, match=r"\*\.mlp\.gate_proj, blocks\.\*\.mlp\.up_proj: 40 x 64; blocks\.\*\.mlp\.down_proj"):
        _apply(Float8(), replace(DECODER, ffn_dim=40))
    _apply(Float8(exclude=["*.mlp.*"]), replace(DECODER, ffn_dim=40))
    with pytest.raises(PlanError, match=r'float8\.exclude = \["blocks\.\*\.mlp\.gate_proj", "blocks\.\*\.mlp\.up_proj"'):
        _apply(Float8(include=["*.mlp.*"]), replace(DECODER, ffn_dim=40))


def test_shapes_are_those_that_tensor_parallel_ranks_hold() -> None:
    specs: Specs = Blueprint.of(DECODER.build).specs
    shapes = {"blocks.0.mlp.up_proj": (48, 64), "blocks.0.attention.k_proj": (32, 64), "blocks.0.attention.o_proj": (64, 64)}
    layers.check_shapes(shapes, specs, 1)
    with pytest.raises(PlanError, match=r"blocks\.\*\.mlp\.up_proj: 24 x 64 \(split by parallel\.tp = 2\)\. Choose"):
        layers.check_shapes(shapes, specs, 2)
    with pytest.raises(PlanError, match=r"gate_proj, blocks\.\*\.mlp\.up_proj: 24 x 64 \(split by parallel\.tp = 2\)"):
        _apply(Float8(), replace(DECODER, ffn_dim=48), "tp2")

    def held(path: str, shape: tuple[int, int]) -> tuple[tuple[int, int], ...]:
        return shares.held(layers.matrix_of(path, shape, specs), specs.units, 4)

    assert held("blocks.0.attention.k_proj", (32, 64)) == ((16, 64),), "one head of two, on two ranks each"
    assert held("blocks.0.mlp.up_proj", (40, 64)) == ((10, 64),)
    assert held("blocks.0.attention.o_proj", (64, 64)) == ((64, 16),)


def test_fp64_is_refused() -> None:
    with pytest.raises(PlanError, match=r"does not support precision\.compute = 'fp64'"):
        _apply(Float8(), compute="fp64")


def test_rows_with_scales_of_their_own_cannot_be_gathered_in_float8() -> None:
    with pytest.raises(ValueError, match="all_gather = true needs recipe = 'tensorwise'"):
        Float8(recipe="rowwise", all_gather=True)


def test_a_linear_layer_with_a_forward_of_its_own_is_refused() -> None:
    class Doubled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (the base class's name)
            return 2 * super().forward(input)

    def build() -> nn.Module:
        model = DECODER.build()
        model.blocks["1"].mlp.up_proj.__class__ = Doubled  # type: ignore[union-attr, index]
        return model

    at = Layout()
    with pytest.raises(PlanError, match=r'blocks\.1\.mlp\.up_proj is a Doubled.*add "blocks\.1\.mlp\.up_proj" to'):
        realize(Blueprint.of(build), Plan.of([Float8().build()], at), Topology(at, CPU), 0)


def test_tokens_that_kernels_cannot_sum_over_are_refused() -> None:
    conversion.require_torchao()
    from forge_parallel.transforms.float8.linear import Casting, float8_class

    layer: Any = nn.Linear(32, 32)
    layer.__class__, layer.casting = float8_class(nn.Linear), Casting.of("tensorwise", emulate=False)
    with pytest.raises(ForgeError, match="24 tokens on this rank, but float8 needs a multiple of 16"):
        layer(torch.randn(2, 12, 32))


def test_without_torchao_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchao_library, "find_spec", lambda _: None)
    with pytest.raises(ForgeError, match=r'pip install "forge-parallel\[float8\]"'):
        Float8().build()
