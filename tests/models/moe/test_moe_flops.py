"""Counts of models with experts: against torch's counter, the real parameters, and published figures."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from forge_core.component import Component
from forge_models.components.attentions import GQA, MLA
from forge_models.components.decoder import DecoderConfig
from forge_models.components.experts import HashConfig, MoEConfig, NormedTopKConfig, SigmoidTopKConfig
from forge_models.components.layers import GELU, SwiGLU
from forge_models.flops import count_flops
from forge_models.objectives import CrossEntropy

CASES = [
    {"moe": MoEConfig(experts=4)},
    {"moe": MoEConfig(experts=5, top_k=3, shared=2, ffn_dim=20, first_dense=1, router=SigmoidTopKConfig())},
    {"moe": MoEConfig(experts=4, shared=1, shared_gate=True, first_dense=1)},
    {"moe": MoEConfig(experts=4, shared=1, branch_norms=True, router=NormedTopKConfig())},
    {"moe": MoEConfig(experts=6, top_k=1, ffn_dim=20, every=2, router=HashConfig()), "mlp": GELU()},
    {"moe": MoEConfig(experts=5, top_k=2, shared=1, ffn_dim=20, first_dense=1, latent_dim=12)},
    {"moe": MoEConfig(experts=5, top_k=2, ffn_dim=20, router=SigmoidTopKConfig(hash_layers=(0,)))},
]


@pytest.mark.parametrize("fields", CASES)
def test_equal_torchs_counter_and_the_model(make, tokens, fields):
    model = make(**fields)
    counts = count_flops(model.shape)
    assert counts.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert counts.mlp == sum(p.numel() for name, p in model.named_parameters() if ".mlp." in name)
    rows = tokens(2, 13)
    # torch counts the grouped product as nothing; the loop makes the same ones.
    model.requires_grad_()
    for module in model.modules():
        if hasattr(module, "kernel"):
            module.kernel = "loop"
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(rows[:, :-1], labels=rows[:, 1:], objective=CrossEntropy().build()).sum.backward()
    assert counter.get_total_flops() == counts.training(12) * 2 * 12


def test_capacity_makes_less_work(make, tokens):
    def flops(capacity):
        model = make(moe=MoEConfig(experts=4, capacity=capacity, kernel="loop"))
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            model(tokens(4, 16))
        return counter.get_total_flops(), count_flops(model.shape)

    (full, counts), (half, _) = flops(None), flops(0.5)
    assert full == counts.forward(16) * 64
    experts = 2 * 2 * 3 * 32 * 48 * 2 * 64  # layers, FLOPs of a multiply-add, matrices, widths, slots of a token, tokens
    assert full - half >= experts / 2


def test_mixtral_8x7b_by_hand():
    mixtral = DecoderConfig(
        dim=4096, layers=32, heads=32, kv_heads=8, ffn_dim=14336, vocab_size=32000, moe=MoEConfig(experts=8, top_k=2)
    )
    counts = count_flops(mixtral.shape)
    assert counts.parameters == 46_702_792_704  # its model card: 46.7 B, 12.9 B for a token
    expert = 3 * 4096 * 14336
    assert counts.active == 46_702_792_704 - 32 * 6 * expert == 12_879_925_248
    matrices = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 2 * expert + 8 * 4096) + 32000 * 4096
    assert counts.training(4096) == 6 * matrices + 12 * 32 * 4096 * 4096


def test_qwen3_30b_by_hand():
    moe = MoEConfig(experts=128, top_k=8, ffn_dim=768)
    qwen = DecoderConfig(
        dim=2048,
        layers=48,
        heads=32,
        kv_heads=4,
        head_dim=128,
        ffn_dim=6144,
        vocab_size=151936,
        attention=GQA(qk_norm="head"),
        moe=moe,
    )
    assert count_flops(qwen.shape).parameters == 30_532_122_624  # its model card: 30.5 B, 3.3 B for a token
    assert count_flops(qwen.shape).active == 30_532_122_624 - 48 * 120 * 3 * 2048 * 768 == 3_353_032_704


def test_deepseek_v3_by_hand():
    moe = MoEConfig(
        experts=256, top_k=8, shared=1, first_dense=3, ffn_dim=2048, router=SigmoidTopKConfig(n_group=8, topk_group=4)
    )
    mla = MLA(q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    counts = count_flops(
        DecoderConfig(
            dim=7168, layers=61, heads=128, ffn_dim=18432, vocab_size=129280, attention=mla, mlp=SwiGLU(), moe=moe
        ).shape
    )
    # Its paper: 671 B, of which 37 B for a token (section 2), without the layer that predicts a second token.
    assert counts.parameters == pytest.approx(671e9, rel=1e-3)
    assert counts.active == pytest.approx(37e9, rel=0.02)
    attention = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168 + 1536 + 512
    sparse = 257 * 3 * 7168 * 2048 + 256 * 7168
    by_hand = 61 * (attention + 2 * 7168) + 3 * 3 * 7168 * 18432 + 58 * sparse + 2 * 129280 * 7168 + 7168
    assert counts.parameters == by_hand


def test_routers_that_do_not_declare_their_products_are_refused():
    class Other(Component):
        def build(self, context):
            return HashConfig().build(context)

    with pytest.raises(ValueError, match=r"Other does not declare its FLOPs; define matrices\(context\)"):
        count_flops(DecoderConfig(moe=MoEConfig(router=Other())).shape)
