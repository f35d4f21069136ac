"""Counts against torch's counter, real parameters and figures worked out by hand."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from forge_core.component import Component
from forge_models.components.attentions import GQA, MLA
from forge_models.components.decoder import DecoderConfig, LayerInputsConfig
from forge_models.components.experts import MoEConfig
from forge_models.components.layers import GELU, GeGLU, LayerNormConfig, ReLU, ReLU2
from forge_models.components.lora import LoRAConfig
from forge_models.flops import count_flops, counts_of
from forge_models.objectives import CrossEntropy
from forge_models.shape import Streams, ValueEmbeddings

LATENT = {"kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 10}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tied_embeddings": True},
        {"kv_heads": 1, "head_dim": 6},
        {"mlp": ReLU2(bias=True), "norm_placement": "sandwich"},
        {"attention": GQA(qkv_bias=True, soft_cap=5.0)},  # written out, so counted without the plain kernel too
        {"attention": GQA(output_gate=True)},
        {"attention": GQA(window=20, global_every=2, global_head_dim=6, global_kv_heads=1, keys_as_values="global", v_norm=True)},
        {"streams": Streams(count=3), "attention_only": (0,)},
        {"attention": GQA(value_embeddings=ValueEmbeddings(layers=(1,)))},
        {"attention": GQA(shared_kv_layers=1, shared_kv_ffn_factor=3)},
        {"layer_inputs": LayerInputsConfig(dim=6)},
        {"attention": MLA(**LATENT), "kv_heads": None},
        {"attention": MLA(q_lora_rank=14, **LATENT), "kv_heads": None},
    ],
)
def test_equal_torchs_counter(make, tokens, fields):
    model = make(**fields)
    counts = count_flops(model.shape)
    rows = tokens(2, 13)
    # The fused kernel counts as 0 on a CPU; the plain one computes the full square and counts as matrix products.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        terms = model(rows[:, :-1], labels=rows[:, 1:], objective=CrossEntropy().build())
        terms.sum.backward()
    assert counter.get_total_flops() == counts.training(12) * 2 * 12
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(rows[:, :-1])
    assert counter.get_total_flops() == counts.forward(12) * 2 * 12


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tied_embeddings": True},
        {"attention": GQA(qk_norm="head"), "head_dim": 6},
        {"attention": GQA(qk_norm="full", qkv_bias=True, output_bias=True), "norm_placement": "post"},
        {"mlp": GeGLU(bias=True), "norm": LayerNormConfig(), "norm_placement": "sandwich"},
        {"mlp": GELU(bias=True), "norm": LayerNormConfig(bias=False), "attention": GQA(qk_norm="head")},
        {"mlp": ReLU()},
        {"attention": MLA(**LATENT), "kv_heads": None},
        {"attention": MLA(q_lora_rank=14, **LATENT), "kv_heads": None, "norm": LayerNormConfig()},
    ],
)
def test_parameters_equal_the_model(make, fields):
    model = make(**fields)
    counts = count_flops(model.shape)
    assert counts.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert counts.mlp == sum(p.numel() for name, p in model.named_parameters() if ".mlp." in name)


def test_llama_3_8b_by_hand():
    counts = count_flops(DecoderConfig(dim=4096, layers=32, heads=32, kv_heads=8, ffn_dim=14336, vocab_size=128256).shape)
    matrices = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 128256 * 4096
    assert counts.parameters == 8_030_261_248
    assert counts.training(4096) == 6 * matrices + 12 * 32 * 4096 * 4096
    # A causal query meets 1, 2, .. T keys.
    keys = sum(range(1, 4097)) / 4096
    assert counts.training(4096, causal=True) == 6 * matrices + 12 * 32 * 4096 * keys


def test_deepseek_v2_attention_by_hand():
    # DeepSeek-V2: 128 heads of 128 + 64, latents of 1536 and 512 (its paper, section 3.1.2).
    mla = MLA(q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    counts = count_flops(DecoderConfig(dim=5120, layers=1, heads=128, attention=mla, ffn_dim=12288, vocab_size=102400).shape)
    weights = 5120 * 1536 + 1536 * 128 * 192 + 5120 * 576 + 512 * 128 * 256 + 128 * 128 * 5120
    assert counts.attention == weights + 1536 + 512
    assert counts.forward(1000) - 2 * counts.matrix == 2 * 128 * (192 + 128) * 1000


def test_local_layers_meet_as_many_keys_as_their_window_holds():
    window, length = 5, 32
    local = GQA(window=window, global_every=3)
    sizes = {"dim": 32, "layers": 7, "heads": 4}
    counts, plain = count_flops(DecoderConfig(attention=local, **sizes).shape), count_flops(DecoderConfig(**sizes).shape)
    assert counts.parameters == plain.parameters
    # Layers 2 and 5 are global.
    for causal in (False, True):
        met = sum(min(t, window) for t in range(1, length + 1)) / length if causal else window
        everything = sum(range(1, length + 1)) / length if causal else length
        expected = 2 * 2 * 32 * (5 * met + 2 * everything)
        assert counts.forward(length, causal) - 2 * counts.matrix == pytest.approx(expected, rel=1e-12)
    assert counts.forward(4, True) == plain.forward(4, True)


def test_parts_that_do_not_declare_their_products_are_refused():
    class Other(Component):
        def build(self, context):
            return GQA().build(context)

    with pytest.raises(ValueError, match=r"Other does not declare its FLOPs; define matrices and score_width\(context\)"):
        count_flops(DecoderConfig(attention=Other()).shape)


def test_counting_needs_no_torch():
    code = "import sys, forge_models.flops; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_adapter_costs_four_flops_for_a_weight_of_its_base_and_six_for_its_own() -> None:
    """2 forward and 2 for the gradient of the input, for each weight in a product; 2 more for each weight that is trained."""
    plain = DecoderConfig(dim=16, layers=2, heads=4, kv_heads=2, ffn_dim=24, vocab_size=40, max_length=64)
    adapted = replace(plain, lora=LoRAConfig(rank=3, targets=("*.q_proj", "*.down_proj")))
    own = 2 * 3 * ((16 + 16) + (24 + 16))
    before, found = counts_of(plain), counts_of(adapted)
    assert before is not None and found is not None
    assert found.parameters == before.parameters + own == sum(p.numel() for p in adapted.build().parameters())
    scores = 6 * 2 * 4 * (4 + 4) * 8  # 6 L H (Dk + Dv) T
    assert before.training(8) == 6 * before.matrix + scores
    assert found.training(8) == pytest.approx(4 * before.matrix + 6 * own + scores, rel=1e-12)
    assert found.forward(8) == pytest.approx(before.forward(8) + 2 * own, rel=1e-12)
    experts = replace(adapted, moe=MoEConfig(experts=4, top_k=2, kernel="loop"), lora=LoRAConfig(rank=3, targets=("*.up_proj",)))
    counts = counts_of(experts)
    assert counts is not None
    assert (counts.lora, counts.lora_matrix) == (2 * 4 * 3 * (16 + 24), 2 * 2 * 3 * (16 + 24))
    assert counts.parameters == sum(p.numel() for p in experts.build().parameters())
