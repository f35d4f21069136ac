"""One norm before both parts of a parallel block: a block equals the formula, and wrong combinations are refused."""

import pytest
import torch

from forge_models.components.attentions import GQA
from forge_models.components.decoder import DecoderConfig
from forge_models.components.recurrent import Hybrid


def test_both_parts_read_what_one_norm_makes() -> None:
    torch.manual_seed(0)
    sizes = {"dim": 16, "layers": 2, "heads": 2, "ffn_dim": 24, "vocab_size": 40, "max_length": 12}
    model = DecoderConfig(**sizes, parallel_residual=True, shared_norm=True).build().double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0, 0.3)
    assert not any("mlp_norm" in name for name in model.state_dict())
    x, block = torch.randn(2, 7, 16, dtype=torch.float64), model.blocks["1"]
    rotation = block.attention.rotary(torch.arange(7))
    normed = block.attention_norm(x)
    expected = x + block.attention(normed, rotation, None) + block.mlp(normed)
    torch.testing.assert_close(block(x, rotation, None), expected, rtol=0, atol=1e-12)


def test_a_shared_norm_needs_parallel_parts_and_norms_before_them() -> None:
    with pytest.raises(ValueError, match="shared_norm needs parallel_residual = true"):
        DecoderConfig(shared_norm=True)
    with pytest.raises(ValueError, match="shared_norm needs norms before the parts of a block"):
        DecoderConfig(shared_norm=True, parallel_residual=True, norm_placement="post")
    mixed = Hybrid(full=GQA(), recurrent_norm_placement="post")
    with pytest.raises(ValueError, match="shared_norm needs norms before the parts of a block"):
        DecoderConfig(shared_norm=True, parallel_residual=True, attention=mixed)
