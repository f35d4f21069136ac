"""Heads that differ between layers, values from keys, frequencies of a share of pairs: formulas and refusals."""

from typing import Any

import pytest
import torch

from forge_models.blocks.rope import Rotary, frequencies_of, rotate
from forge_models.components.attentions import GQA
from forge_models.components.decoder import DecoderConfig
from forge_models.components.recurrent import GDN, Hybrid
from forge_models.shape import Rope

SIZES: dict[str, Any] = {"dim": 16, "layers": 4, "heads": 4, "kv_heads": 2, "ffn_dim": 24, "vocab_size": 40, "max_length": 32}


def test_values_are_keys_before_their_norm_and_rotation() -> None:
    torch.manual_seed(0)
    heads: dict[str, Any] = {"window": 3, "global_every": 4, "global_head_dim": 6, "global_kv_heads": 1}
    attention = GQA(**heads, v_norm=True, keys_as_values="global", scale=1.0)
    model = DecoderConfig(**SIZES, attention=attention).build().double()
    for tensor in (*model.parameters(), *model.buffers()):
        torch.nn.init.normal_(tensor, 0, 0.3)
    names = {name.removeprefix("blocks.3.attention.") for name in model.state_dict() if name.startswith("blocks.3.attention.")}
    assert names == {"q_proj.weight", "k_proj.weight", "o_proj.weight"}
    layer, x = model.blocks["3"].attention, torch.randn(1, 5, 16, dtype=torch.float64)
    rotation = layer.rotary(torch.arange(5))
    q = rotate((x @ layer.q_proj.weight.T).view(1, 5, 4, 6).transpose(1, 2), rotation)
    made = (x @ layer.k_proj.weight.T).view(1, 5, 1, 6).transpose(1, 2)
    v = made / (made.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    scores = (q @ rotate(made, rotation).transpose(-1, -2)).masked_fill(torch.ones(5, 5).triu(1).bool(), float("-inf"))
    expected = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2) @ layer.o_proj.weight.T
    torch.testing.assert_close(layer(x, rotation, None), expected, rtol=0, atol=1e-12)
    local = model.blocks["0"].attention
    assert local.v_proj.weight.shape == (2 * 4, 16) and local.q_proj.weight.shape == (4 * 4, 16)


def test_a_scalar_multiplies_the_stream_that_leaves_a_block() -> None:
    torch.manual_seed(0)
    model = DecoderConfig(**SIZES, layer_scalar=True).build().double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0, 0.3)
    block, x = model.blocks["1"], torch.randn(1, 5, 16, dtype=torch.float64)
    rotation = block.attention.rotary(torch.arange(5))
    block.scalar.fill_(1)
    plain = block(x, rotation, None)
    block.scalar.fill_(-2.5)
    torch.testing.assert_close(block(x, rotation, None), -2.5 * plain)
    assert not any(name.endswith("scalar") for name, _ in model.named_parameters())
    assert "blocks.1.scalar" in model.state_dict() and "blocks.1.scalar" in model.specs().tensors


def test_a_share_of_pairs_turns_with_the_frequencies_of_the_whole_width() -> None:
    rope, cpu = Rope(theta=900.0, proportion=0.4, scaling="linear", factor=3.0), torch.device("cpu")
    expected = [900 ** (-2 * pair / 10) / 3 if pair < 2 else 0.0 for pair in range(5)]
    torch.testing.assert_close(frequencies_of(rope, 10, cpu), torch.tensor(expected))
    x = torch.randn(1, 1, 6, 10)
    turned = rotate(x, Rotary(10, rope)(torch.arange(6)))
    still = [2, 3, 4, 7, 8, 9]
    assert torch.equal(turned[..., still], x[..., still])
    assert not torch.allclose(turned[:, :, 1:, [0, 1, 5, 6]], x[:, :, 1:, [0, 1, 5, 6]])
    assert Rope(local_theta=50.0, proportion=0.4).of_layer(local=True) == Rope(theta=50.0)
    assert Rope(proportion=0.4).of_layer(local=True).proportion == 0.4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"global_head_dim": 8}, "global_head_dim and global_kv_heads need a window"),
        ({"global_kv_heads": 2}, "global_head_dim and global_kv_heads need a window"),
        ({"keys_as_values": "global"}, "keys_as_values = 'global' needs a window"),
        ({"window": 3, "global_head_dim": 8}, "global_head_dim needs global layers"),
        ({"window": 3, "global_every": 5, "global_kv_heads": 1}, "global_kv_heads needs global layers"),
        ({"window": 3, "global_every": 2, "global_kv_heads": 3}, "global_kv_heads 3 must divide heads 4"),
        ({"window": 3, "global_every": 2, "global_head_dim": 7}, "7 of global_head_dim 7 dimensions rotate"),
    ],
)
def test_heads_of_global_layers_that_do_not_fit_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DecoderConfig(**SIZES, attention=GQA(**fields))


def test_a_share_that_leaves_no_pair_or_has_another_scaling_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rope\.proportion 0\.2 of 2 pairs of head_dim is none"):
        DecoderConfig(**SIZES, rope=Rope(proportion=0.2))
    with pytest.raises(ValueError, match=r"proportion 0\.5 does not support scaling 'yarn'"):
        Rope(proportion=0.5, scaling="yarn", factor=2.0, original_max_length=8)


def test_heads_of_all_layers_are_shared_by_ranks_that_divide_each_number() -> None:
    layered = GQA(window=3, global_every=2, global_kv_heads=4)
    assert DecoderConfig(**SIZES, attention=layered).shape.units["common_kv_heads"] == 2
    assert "common_kv_heads" not in DecoderConfig(**SIZES, attention=GQA(window=3, global_every=2)).shape.units
    mixed = DecoderConfig(**SIZES, attention=Hybrid(full=layered, recurrent=GDN(key_heads=2), full_every=2))
    assert {"common_kv_heads": 2, "kv_heads": 2, "state_heads": 2}.items() <= mixed.shape.units.items()
