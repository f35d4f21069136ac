"""Blocks without a feed-forward layer: what they compute, what is counted, and what is refused."""

from typing import Any

import pytest
import torch

from forge_interp.methods.lens import direct_logit_attribution
from forge_models import DecoderConfig, initialize
from forge_models.components.experts import MoEConfig
from forge_models.flops import count_flops

SIZES: dict[str, Any] = {"dim": 32, "layers": 3, "heads": 4, "ffn_dim": 48, "vocab_size": 97, "max_length": 64}


def built(**changes: Any) -> Any:
    model = DecoderConfig(**SIZES | changes).build()
    initialize(model, 1)
    return model.double().eval()


def test_equals_a_block_whose_feed_forward_layer_adds_nothing() -> None:
    alone, whole = built(attention_only=(1,)), built()
    shared = whole.state_dict()
    alone.load_state_dict({name: shared[name] for name in alone.state_dict()})
    with torch.no_grad():
        whole.blocks["1"].mlp.down_proj.weight.zero_()
        tokens = torch.randint(97, (2, 9), generator=torch.Generator().manual_seed(0))
        assert torch.equal(alone(tokens), whole(tokens))
    assert {name for name in shared if name not in alone.state_dict()} == {
        *(f"blocks.1.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
        "blocks.1.mlp_norm.weight",
    }


@pytest.mark.parametrize("moe", [None, MoEConfig(experts=4, ffn_dim=16, shared=1)])
def test_counts_leave_out_what_is_not_there(moe: MoEConfig | None) -> None:
    fewer, all_blocks = (DecoderConfig(**SIZES, moe=moe, attention_only=alone) for alone in ((0, 2), ()))
    model = fewer.build()
    counts = count_flops(fewer.shape)
    assert counts.parameters == sum(p.numel() for p in model.parameters())
    each = (count_flops(all_blocks.shape).matrix - counts.matrix) / 2
    used = 48 if moe is None else 16 * (2 + 1)
    assert each == 3 * 32 * used + (0 if moe is None else 4 * 32)
    assert fewer.shape.has_dense == (moe is None)
    if moe is None:
        assert fewer.shape.elements == 2 * 97 * 32 + 3 * 4 * 32 * 32 + 3 * 32 * 48


def test_logits_are_split_into_the_parts_that_exist() -> None:
    model = built(attention_only=(1,))
    tokens = torch.randint(97, (2, 9), generator=torch.Generator().manual_seed(0))
    found = direct_logit_attribution(model, tokens, torch.tensor([3, 4]))
    assert "blocks.0.mlp.added" in found.names and "blocks.1.mlp.added" not in found.names
    with torch.no_grad():
        expected = model(tokens)[torch.arange(2), -1, torch.tensor([3, 4])]
    torch.testing.assert_close(found.parts.sum(0), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"attention_only": (1, 3)}, r"attention_only \[3\] do not exist; the model has 3 blocks, counted from 0"),
        ({"attention_only": (1,), "moe": MoEConfig(every=2)}, "every 2 and attention_only exclude all 3"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        DecoderConfig(**SIZES, **changes)


def test_blocks_with_weights_for_each_modality_are_refused() -> None:
    from forge_vlm.fusion.modalities import ModalityBlock

    with pytest.raises(ValueError, match=r"leave out model\.attention_only"):
        ModalityBlock(DecoderConfig(**SIZES, attention_only=(1,)).shape, 0, ("text", "image"), untied=True)
