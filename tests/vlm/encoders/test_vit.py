"""The native vision transformer against transformers' ViT and closed forms."""

import math

import pytest
import torch
from torch import nn

from forge_testing import modules
from forge_vlm.components.encoders import Features, ViT
from forge_vlm.encoders.shape import hidden_states
from forge_vlm.encoders.vit import VisionTransformer, cut_patches, sincos_positions

SMALL = {"size": 12, "patch": 4, "dim": 16, "layers": 2, "heads": 2, "ffn_dim": 24}
NAMES = {
    "attention_norm": "layernorm_before",
    "mlp_norm": "layernorm_after",
    "attention.q_proj": "attention.q_proj",
    "attention.k_proj": "attention.k_proj",
    "attention.v_proj": "attention.v_proj",
    "attention.o_proj": "attention.o_proj",
    "mlp.up_proj": "mlp.fc1",
    "mlp.down_proj": "mlp.fc2",
}


def built(component: ViT) -> VisionTransformer:
    module = modules.part(component.build)
    assert isinstance(module, VisionTransformer)
    return module


def images(component: ViT, count: int = 3) -> torch.Tensor:
    return modules.drawn(count, component.channels, component.size, component.size)


def test_it_is_the_vit_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    component = ViT(**SMALL, class_token=True)
    ours = built(component)
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        image_size=12,
        patch_size=4,
        layer_norm_eps=1e-6,
        hidden_act="gelu",
        qkv_bias=False,
    )
    theirs = transformers.ViTModel(config, add_pooling_layer=False).double().eval()
    mine = dict(ours.named_parameters())
    state = {
        "embeddings.cls_token": mine["embed.class_token"].view(1, 1, -1),
        "embeddings.position_embeddings": mine["embed.positions"][None],
        "embeddings.patch_embeddings.projection.weight": mine["embed.proj.weight"].view(16, 3, 4, 4),
        "embeddings.patch_embeddings.projection.bias": mine["embed.proj.bias"],
        **{f"layernorm.{slot}": mine[f"norm.{slot}"] for slot in ("weight", "bias")},
    }
    for layer in range(2):
        for name, other in NAMES.items():
            for slot in ("weight", "bias"):
                if (found := mine.get(f"layers.{layer}.{name}.{slot}")) is not None:
                    state[f"layers.{layer}.{other}.{slot}"] = found
    theirs.load_state_dict(state)
    x = images(component)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(pixel_values=x).last_hidden_state, atol=1e-10, rtol=1e-10)


def test_patches_are_those_of_a_convolution() -> None:
    x = modules.drawn(2, 3, 8, 12)
    conv = nn.Conv2d(3, 5, 4, stride=4, bias=False).double()
    wanted = conv(x).flatten(2).transpose(1, 2)
    torch.testing.assert_close(cut_patches(x, 4) @ conv.weight.flatten(1).T, wanted, atol=1e-12, rtol=1e-12)


def test_sines_and_cosines_by_hand() -> None:
    table = sincos_positions(3, 8, torch.device("cpu"))
    for row in range(3):
        for column in range(3):
            angles = [at * 10000 ** (-2 * i / 4) for at in (column, row) for i in range(2)]
            wanted = [
                *(f(a) for f in (math.sin, math.cos) for a in angles[:2]),
                *(f(a) for f in (math.sin, math.cos) for a in angles[2:]),
            ]
            assert table[row * 3 + column].tolist() == pytest.approx(wanted, abs=1e-6)


def test_sines_tell_patches_apart_and_take_no_parameters() -> None:
    component = ViT(**SMALL, positions="sincos")
    ours = built(component)
    assert ours.embed.positions is None
    x = images(component, 1)
    swapped = x.clone()
    swapped[..., :4, :4], swapped[..., 4:8, :4] = x[..., 4:8, :4], x[..., :4, :4]
    one, other = ours(x)[0], ours(swapped)[0]
    assert (one[[3, 0]] - other[[0, 3]]).abs().max() > 1e-3, "positions count"


def test_every_patch_sees_every_other() -> None:
    component = ViT(**SMALL)
    ours = built(component)
    x = images(component, 1).requires_grad_()
    for token in (0, 4, 8):
        (grad,) = torch.autograd.grad(ours(x)[0, token].square().sum(), x)
        assert (cut_patches(grad, 4)[0].abs().sum(-1) > 0).all()


def test_sizes_that_it_says() -> None:
    component = ViT(
        size=32, patch=8, channels=1, dim=24, layers=1, heads=3, class_token=True, pixel_mean=(0.1,), pixel_std=(0.3,)
    )
    assert (component.tokens, component.width, component.image_size) == (17, 24, 32)
    assert (component.mean, component.std) == ((0.1,), (0.3,))
    assert ViT().mean == (0.5, 0.5, 0.5)
    assert ViT(pixel_mean=(0.1, 0.2, 0.3)).mean == (0.1, 0.2, 0.3)
    assert component.shape.ffn_dim == 96
    assert built(ViT(**SMALL)).blocks == ("layers.0", "layers.1")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"size": 30, "patch": 16}, "patch 16 must divide size 30"),
        ({"dim": 10, "heads": 3}, "dim 10 must be a multiple of heads 3"),
        ({"dim": 6, "heads": 3, "positions": "sincos"}, "multiple of 4"),
        ({"pixel_mean": (0.1, 0.2)}, "pixel_mean has 2 numbers"),
        ({"pixel_std": ()}, "pixel_std has 0 numbers"),
    ],
)
def test_what_does_not_go_together_is_refused(keys: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ViT(**keys)


def test_images_of_another_size_are_refused() -> None:
    component = ViT(**SMALL)
    for shape in ((2, 3, 12, 8), (2, 1, 12, 12), (2, 3, 16, 16)):
        with pytest.raises(ValueError, match=r"the encoder takes \(3, 12, 12\)"):
            built(component)(modules.drawn(*shape))


def test_initial_weights() -> None:
    """Pixels of variance 1 become features of variance 1; projections to the stream are small in deep encoders."""
    specs = modules.specs_of(modules.on_meta(ViT(size=8, patch=4, dim=16, layers=8, heads=2).build))
    assert specs["embed.proj.weight"].init.std == pytest.approx(1 / math.sqrt(3 * 4 * 4))
    assert specs["layers.0.mlp.up_proj.weight"].init.std == 0.02
    for name in ("attention.o_proj", "mlp.down_proj"):
        assert specs[f"layers.3.{name}.weight"].init.std == pytest.approx(0.02 / 4)


def test_hidden_states_are_counted_from_both_ends() -> None:
    assert hidden_states((0, 3, -1, -2, -4), 3) == (0, 3, 3, 2, 0)
    for index in (4, -5):
        with pytest.raises(ValueError, match=f"feature_layers {index} does not exist; the encoder has 3 blocks"):
            hidden_states((index,), 3)


def test_features_are_taken_as_they_are() -> None:
    component = Features(count=4, dim=6)
    x = modules.drawn(2, 4, 6)
    assert torch.equal(component.build()(x), x)
    assert (component.tokens, component.width, component.mean) == (4, 6, ())
    with pytest.raises(ValueError, match=r"expected \(4, 6\)"):
        component.build()(x[:, :3])
