"""Formats of a quantized base against the papers' formulas and torchao; products, gradients and what a base cannot be."""

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch

from forge_core.errors import ForgeError
from forge_models import DecoderConfig, MoEConfig
from forge_models.base_format import Format
from forge_models.blocks import quantized as formats
from forge_models.blocks.moe.experts import Experts
from forge_models.blocks.quantized import dequantized, quantize, quantized, quantized_names
from forge_models.components.attentions import GQA, MLA
from forge_models.components.experts import SoftmaxTopKConfig
from forge_models.components.lora import LoRAConfig
from forge_models.components.transformers import SMALL as LLAMA
from forge_models.components.transformers import TransformersConfig
from models.nf4 import PUBLISHED, levels, rounded

SMALL = DecoderConfig(dim=64, layers=2, heads=4, kv_heads=2, ffn_dim=128, vocab_size=40, max_length=64)
EXPERTS = MoEConfig(experts=4, top_k=2, shared=1, ffn_dim=64, kernel="loop", router=SoftmaxTopKConfig())
KINDS: tuple[Format, ...] = ("int8", "nf4")


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_levels_are_the_quantiles_of_a_normal_distribution() -> None:
    assert pytest.approx(levels(), abs=1e-6) == list(formats.LEVELS)
    assert formats.LEVELS == PUBLISHED


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_the_formulas(kind: Format) -> None:
    matrix = drawn(48, 192)
    matrix[3] = 0  # a row without a scale
    matrix[4, :64] *= 1e-30
    matrix[5] = matrix[5].abs().max() * -1
    codes, scale = quantized(matrix, kind)
    found = dequantized(codes, scale, kind)
    assert torch.equal(found[[0, 1, 2, 5, 6, 47]], rounded(matrix[[0, 1, 2, 5, 6, 47]], kind))
    assert not found[3].any()
    assert torch.isfinite(found).all()
    assert torch.equal(found[5], matrix[5])
    bits = codes.nbytes + scale.nbytes
    assert bits == (48 * (192 + 4) if kind == "int8" else 48 * 192 * 9 // 16)
    for dtype in (torch.bfloat16, torch.float64):
        assert torch.equal(dequantized(codes, scale, kind, dtype), found.to(dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_of_a_quantized_matrix_is_the_quantized_part(kind: Format) -> None:
    """Rows, stacks and, of NF4, blocks are independent of each other; so layouts have the same bits."""
    stack = drawn(3, 8, 256)
    codes, scale = quantized(stack, kind)
    for index, matrix in enumerate(stack):
        for rows in (slice(0, 3), slice(3, 8)):
            own = quantized(matrix[rows], kind)
            assert torch.equal(own[0], codes[index, rows]) and torch.equal(own[1], scale[index, rows])
    if kind == "nf4":
        own = quantized(stack[..., 128:], kind)
        assert torch.equal(own[0], codes[..., 64:]) and torch.equal(own[1], scale[..., 2:])


def test_codes_are_those_of_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchao rounds the levels to four decimals; with its levels, all codes and the scales of blocks are equal."""
    logging.disable(logging.ERROR)  # of kernels that are not used here
    try:
        from torchao.prototype.quantized_training.int8 import quantize_int8_rowwise
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import get_block_absmax, to_nf4
    finally:
        logging.disable(logging.NOTSET)
    matrix = drawn(128, 256)
    theirs = to_nf4(matrix)
    assert [round(level, 4) for level in formats.LEVELS] == pytest.approx(theirs.nf4.tolist(), abs=1e-7)
    monkeypatch.setattr(formats, "LEVELS", tuple(theirs.nf4.tolist()))
    codes, scale = quantized(matrix, "nf4")
    assert torch.equal(codes.flatten(), theirs.quantized_data)
    assert torch.equal(scale.view(torch.float32).flatten(), get_block_absmax(matrix.flatten(), 64))
    # torchao rounds scales to 8 bits, in steps of 1 / 128 of the largest distance from their mean.
    scales = scale.view(torch.float32)
    step = float((scales - scales.mean()).abs().max()) / 128
    assert torch.allclose(dequantized(codes, scale, "nf4"), theirs.get_original_weight(), atol=1.01 * step, rtol=0)
    own, (codes, scale) = quantize_int8_rowwise(matrix), quantized(matrix, "int8")
    assert torch.equal(codes, own[0]) and torch.equal(scale.view(torch.float32).flatten(), own[1])


def filled(config: DecoderConfig, kind: Format, seed: int = 0) -> tuple[Any, Any]:
    """A model with a quantized base, and one with the base's values, with the same adapters, in fp64."""
    assert config.lora is not None
    held = replace(config, lora=replace(config.lora, base_format=kind)).build().double()
    plain = config.build().double()
    names = quantized_names(held)
    with torch.no_grad():
        own = dict(held.named_parameters())
        for index, (name, parameter) in enumerate(plain.named_parameters()):
            value = drawn(*parameter.shape, seed=seed + index) * 0.2
            if name in names:
                codes, scale = quantized(value, kind)
                own[name].copy_(codes)
                own[f"{name}_scale"].copy_(scale)
                stack = value.reshape(-1, *value.shape[-2:])
                value = torch.stack([rounded(matrix, kind) for matrix in stack]).reshape(value.shape)
            else:
                own[name].copy_(value)
            parameter.copy_(value)
        for name, buffer in held.named_buffers():
            buffer.zero_()
            plain.get_buffer(name).zero_()
    return held, plain


CONFIGS = {
    "dense": replace(SMALL, lora=LoRAConfig(rank=2)),
    "biases": replace(SMALL, lora=LoRAConfig(rank=2), attention=GQA(qkv_bias=True, output_bias=True)),
    "dora": replace(SMALL, lora=LoRAConfig(rank=2, dora=True, targets=("*.attention.*",))),
    "experts": replace(SMALL, lora=LoRAConfig(rank=2), moe=EXPERTS),
    "experts without adapters": replace(SMALL, lora=LoRAConfig(rank=2, targets=("*.q_proj",)), moe=EXPERTS),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_computes_with_the_values_of_its_codes(name: str, kind: Format) -> None:
    """Logits and gradients are those of a model in full precision with these values, to the bit."""
    held, plain = filled(CONFIGS[name], kind)
    matrices = {
        f"{path}.{slot}" for path, part in plain.named_modules() if isinstance(part, Experts) for slot in part._parameters
    }
    matrices |= {
        f"{path}.weight" for path, part in plain.named_modules() if path[:6] == "blocks" and hasattr(part, "in_features")
    }
    assert set(quantized_names(held)) == {name for name in matrices if "_lora_" not in name}
    tokens = torch.arange(24).view(2, 12)
    outputs = [model(tokens) for model in (held, plain)]
    assert torch.equal(*outputs)
    for out in outputs:
        out.square().sum().backward()
    theirs = dict(plain.named_parameters())
    trained = {name for name, parameter in held.named_parameters() if parameter.requires_grad}
    assert trained == {name for name in theirs if theirs[name].requires_grad}
    for name, parameter in held.named_parameters():
        if name in trained:
            assert torch.equal(parameter.grad, theirs[name].grad), name
            assert parameter.grad.any(), name
        else:
            assert parameter.grad is None


def test_grouped_products_and_their_gradients() -> None:
    """In bf16, with the kernel for all experts."""
    config = replace(SMALL, lora=LoRAConfig(rank=8), moe=replace(EXPERTS, kernel="grouped"))
    held, plain = (model.bfloat16() for model in filled(config, "nf4"))
    tokens = torch.arange(24).view(2, 12)
    outputs = [model(tokens) for model in (held, plain)]
    assert torch.equal(*outputs)
    for out in outputs:
        out.float().square().sum().backward()
    for name, parameter in plain.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(held.get_parameter(name).grad, parameter.grad), name


def test_a_backward_keeps_codes_and_no_matrix() -> None:
    held, _ = filled(CONFIGS["dense"], "nf4")
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        held.blocks["0"].mlp.up_proj(drawn(3, 64).double().requires_grad_())
    assert not any(tensor.shape == (128, 64) for tensor in kept)
    assert sorted(tuple(tensor.shape) for tensor in kept if not tensor.is_floating_point()) == [(128, 1), (128, 32)]


def test_bases_that_cannot_be_quantized_are_refused() -> None:
    lora = LoRAConfig(base_format="nf4")
    with pytest.raises(ValueError, match=r"rows of a multiple of 64 values, but those of blocks\.0\.mlp\.down_proj have 96"):
        replace(SMALL, ffn_dim=96, lora=lora)
    latent = MLA(kv_lora_rank=8, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16)
    with pytest.raises(ValueError, match=r"blocks\.0\.attention\.kv_b_proj have 8"):
        replace(SMALL, kv_heads=4, attention=latent, lora=lora)
    with pytest.raises(ValueError, match=r"experts\.down_proj have 32"):
        replace(SMALL, moe=replace(EXPERTS, ffn_dim=32, shared=0), lora=lora)
    assert replace(SMALL, ffn_dim=96, lora=LoRAConfig(base_format="int8")).build()
    with pytest.raises(ForgeError, match="class of transformers is none"):
        TransformersConfig(config=str(LLAMA).replace("'", '"').replace("False", "false"), weights_from="draw", lora=lora).build()

    class Own(torch.nn.Linear):
        """A layer with a forward that a product with its weight does not replace."""

    model = SMALL.build()
    model.blocks["0"].mlp.up_proj.__class__ = Own
    with pytest.raises(ValueError, match=r"blocks\.0\.mlp\.up_proj is a Own, which cannot be quantized"):
        quantize(model, ("blocks.0.mlp.up_proj",), "int8")
    model = replace(SMALL, ffn_dim=96).build()
    with pytest.raises(ValueError, match="down_proj have 96"):
        quantize(model, ("blocks.0.mlp.down_proj",), "nf4")
