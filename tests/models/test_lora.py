"""Layers with adapters against their formulas; what an adapter cannot be."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from forge_models import DecoderConfig, MoEConfig, generate, initialize
from forge_models.blocks.lora import adapter_names, attach, matrices_of
from forge_models.components.attentions import MLA
from forge_models.components.experts import SigmoidTopKConfig
from forge_models.components.lora import LoRAConfig
from forge_vlm.components.model import VLM
from models.variants import SIZES, VARIANTS

SMALL = DecoderConfig(dim=16, layers=2, heads=4, kv_heads=2, ffn_dim=24, vocab_size=40, max_length=64)
EXPERTS = MoEConfig(experts=4, top_k=2, kernel="loop", router=SigmoidTopKConfig(bias_rate=0.1))


def spread(model: Any) -> Any:
    """Every parameter random, so that none is neutral."""
    draw = torch.Generator().manual_seed(0)
    initialize(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draw) * 0.3)
    return model.double()


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("stabilized", [False, True])
def test_a_layer_has_the_weight_of_its_formula(dora: bool, stabilized: bool) -> None:
    lora = LoRAConfig(rank=4, alpha=6, dora=dora, rank_stabilized=stabilized, targets=("*.o_proj",))
    layer = spread(replace(SMALL, lora=lora).build()).blocks["1"].attention.o_proj
    x = torch.randn(3, 16, dtype=torch.float64)
    weight = layer.weight + (3.0 if stabilized else 1.5) * layer.lora_b @ layer.lora_a
    if dora:
        weight = layer.lora_magnitude[:, None] * weight / weight.square().sum(1, keepdim=True).sqrt()
    assert torch.allclose(layer(x), x @ weight.T, rtol=1e-12, atol=1e-12)


def test_each_expert_has_an_adapter_of_its_own() -> None:
    model = spread(replace(SMALL, moe=EXPERTS, lora=LoRAConfig(rank=2, alpha=3, targets=("*.up_proj", "*.down_proj"))).build())
    experts = model.blocks["0"].mlp.experts
    tokens, counts = torch.randn(7, 16, dtype=torch.float64), torch.tensor([2, 0, 4, 1])
    expected = []
    for expert, rows in enumerate(tokens.split(counts.tolist())):
        gate = experts.gate_proj[expert]
        up = experts.up_proj[expert] + 1.5 * experts.up_proj_lora_b[expert] @ experts.up_proj_lora_a[expert]
        down = experts.down_proj[expert] + 1.5 * experts.down_proj_lora_b[expert] @ experts.down_proj_lora_a[expert]
        expected.append((torch.nn.functional.silu(rows @ gate.T) * (rows @ up.T)) @ down.T)
    assert torch.allclose(experts(tokens, counts), torch.cat(expected), rtol=1e-12, atol=1e-12)


def test_ranks_that_grouped_products_do_not_take_run_in_a_loop() -> None:
    """Rows of 2 bf16 values have 4 bytes, and grouped products take multiples of 16."""
    config = replace(SMALL, ffn_dim=32, moe=replace(EXPERTS, kernel="auto"), lora=LoRAConfig(rank=2))
    model = config.build()
    initialize(model)
    model.bfloat16()(torch.zeros(1, 4, dtype=torch.int64))
    grouped = replace(config, moe=replace(EXPERTS, kernel="grouped")).build()
    initialize(grouped)
    with pytest.raises(ValueError, match="rows of 2 values are not a multiple of 16 bytes"):
        grouped.bfloat16()(torch.zeros(1, 4, dtype=torch.int64))


def test_a_new_adapter_changes_nothing_and_generates_with_a_cache() -> None:
    plain, adapted = SMALL.build(), replace(SMALL, lora=LoRAConfig()).build()
    initialize(plain, seed=3)
    initialize(adapted, seed=3)
    x = torch.arange(12).view(2, 6)
    assert torch.equal(plain(x), adapted(x))
    assert generate(adapted.eval(), [[3, 1]], max_tokens=5) == generate(plain.eval(), [[3, 1]], max_tokens=5)


@pytest.mark.parametrize("moe", [None, EXPERTS])
def test_the_base_is_everything_but_the_adapter_and_is_frozen(moe: MoEConfig | None) -> None:
    model = replace(SMALL, moe=moe, lora=LoRAConfig(rank=2)).build()
    names = set(adapter_names(model))
    assert names == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert all("lora_" in name for name in names) and len(names) == 2 * 7 * 2
    before = {*dict(replace(SMALL, moe=moe).build().named_parameters()), *(n for n, _ in model.named_buffers())}
    assert model.specs().base == before
    if moe is not None:  # its biases would follow the loads of the run
        assert model.blocks["0"].mlp.router.bias_rate == 0
    assert SMALL.build().specs().base == frozenset()


@pytest.mark.parametrize("name", [name for name, fields in VARIANTS.items() if "mtp" not in fields])
def test_adapters_of_every_matrix_of_every_variant_equal_merged_weights(name: str) -> None:
    """W + scale * B A, for layers and for stacks of experts; no part of a model reads a weight without its adapter."""
    config, lora = DecoderConfig(**SIZES | VARIANTS[name]), LoRAConfig(rank=2, alpha=6, targets=("*",))
    adapted: Any = spread(replace(config, lora=lora).build()).eval()
    state, plain = adapted.state_dict(), config.build().double().eval()
    with torch.no_grad():
        for parameter, tensor in plain.state_dict().items():
            path, _, slot = parameter.rpartition(".")
            prefix = f"{path}.{slot}_" if f"{path}.{slot}_lora_a" in state else f"{path}."
            a, b = (state.get(f"{prefix}lora_{letter}") for letter in "ab")
            has = a is not None and b is not None and slot != "bias"
            tensor.copy_(state[parameter] + 3 * b @ a if has else state[parameter])  # type: ignore[operator]
        x = torch.arange(14).view(2, 7) * 5 % 101
        torch.testing.assert_close(adapted(x), plain(x), rtol=1e-9, atol=1e-9)
    hidden, experts = config.shape.matrices()
    assert sum("lora_a" in parameter for parameter in state) == len([*hidden, *experts])


def test_names_of_a_plan_are_those_of_the_modules() -> None:
    """Patterns are checked before torch is imported, against names that the components declare."""
    latent = MLA(q_lora_rank=6, kv_lora_rank=8, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5)
    for config in (
        SMALL,
        replace(SMALL, moe=replace(EXPERTS, shared=1, first_dense=1)),
        replace(SMALL, attention=latent, kv_heads=4),
    ):
        hidden, experts = config.shape.matrices()
        assert sorted(matrices_of(config.build())) == sorted([*hidden, *experts])


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ({"lora": LoRAConfig(targets=("*.w1",))}, r"'\*\.w1' matches no matrix .* are \*\.q_proj"),
        ({"lora": LoRAConfig(targets=("*.q_proj", "blocks.7.*"))}, r"'blocks\.7\.\*' matches no matrix"),
        ({"lora": LoRAConfig(dora=True), "moe": EXPERTS}, r"dora does not support experts, such as blocks\.0\.mlp\.experts"),
    ],
)
def test_adapters_that_cannot_be_are_refused(keys: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        replace(SMALL, **keys)


def test_a_vision_language_model_refuses_adapters() -> None:
    with pytest.raises(ValueError, match=r"'vlm' does not support \[model\.lora\]"):
        VLM(dim=16, layers=2, heads=4, vocab_size=40, lora=LoRAConfig())


def test_a_matrix_without_a_spec_is_refused() -> None:
    model = SMALL.build()
    model.blocks["0"].extra = torch.nn.Linear(16, 16)
    with pytest.raises(ValueError, match=r"blocks\.0\.extra\.weight has no TensorSpec"):
        attach(model, ("blocks.0.extra",), LoRAConfig())
