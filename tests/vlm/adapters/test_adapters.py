"""Each adapter against a closed form, or against the connector of transformers that it is."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from forge_testing import modules
from forge_vlm.components.adapters import (
    AttentionPoolConfig,
    AveragePoolConfig,
    LinearConfig,
    MLPConfig,
    PerceiverConfig,
    PixelShuffleConfig,
)
from forge_vlm.context import AdapterContext

CLOSE = {"atol": 1e-12, "rtol": 1e-12}


def context(tokens: int, width: int = 8, dim: int = 12) -> AdapterContext:
    return AdapterContext(width=width, tokens=tokens, dim=dim)


def built(component, given: AdapterContext):
    """The module, its parameters by name, and features."""
    module = modules.part(lambda: component.build(given))
    return module, dict(module.named_parameters()), modules.drawn(3, given.tokens, given.width)


def test_linear_is_one_matrix() -> None:
    module, named, x = built(LinearConfig(), context(5))
    torch.testing.assert_close(module(x), x @ named["layers.0.weight"].T + named["layers.0.bias"], **CLOSE)
    assert "layers.0.bias" not in built(LinearConfig(bias=False), context(5))[1]


def test_mlp_is_the_projector_of_llava() -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.llava.modeling_llava import LlavaMultiModalProjector

    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1),
        text_config=transformers.LlamaConfig(hidden_size=12, num_hidden_layers=1, num_attention_heads=2),
    )
    theirs = LlavaMultiModalProjector(config).double()
    module, named, x = built(MLPConfig(), context(5))
    theirs.load_state_dict(
        {f"linear_{at + 1}.{slot}": named[f"layers.{at}.{slot}"] for at in (0, 1) for slot in ("weight", "bias")}
    )
    torch.testing.assert_close(module(x), theirs(x), **CLOSE)


def test_two_hidden_layers_of_another_width() -> None:
    module, named, x = built(MLPConfig(hidden=2, hidden_dim=10, bias=False), context(5))
    assert [tuple(p.shape) for p in named.values()] == [(10, 8), (10, 10), (12, 10)]
    first, second, third = named.values()
    torch.testing.assert_close(module(x), F.gelu(F.gelu(x @ first.T) @ second.T) @ third.T, **CLOSE)


@pytest.mark.parametrize(("grid", "window"), [(4, 2), (5, 2), (3, 3), (4, 3), (2, 5)])
def test_average_pool_by_hand(grid: int, window: int) -> None:
    """Windows at the edges are means of what is there."""
    component = AveragePoolConfig(window=window)
    module, named, x = built(component, context(grid * grid))
    image = x.view(3, grid, grid, 8)
    means = [
        image[:, row : row + window, column : column + window].mean((1, 2))
        for row in range(0, grid, window)
        for column in range(0, grid, window)
    ]
    wanted = torch.stack(means, 1) @ named["projection.layers.0.weight"].T + named["projection.layers.0.bias"]
    torch.testing.assert_close(module(x), wanted, **CLOSE)
    assert component.tokens(grid * grid) == len(means)


@pytest.mark.parametrize(("grid", "factor"), [(4, 2), (6, 3), (6, 2)])
def test_pixel_shuffle_is_the_connector_of_idefics3(grid: int, factor: int) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.idefics3.modeling_idefics3 import Idefics3Connector

    config = transformers.Idefics3Config(
        vision_config={"hidden_size": 8, "num_attention_heads": 2},
        text_config={"model_type": "llama", "hidden_size": 12, "num_attention_heads": 2},
        scale_factor=factor,
    )
    theirs = Idefics3Connector(config).double()
    component = PixelShuffleConfig(factor=factor)
    module, named, x = built(component, context(grid * grid))
    theirs.load_state_dict({"modality_projection.proj.weight": named["projection.layers.0.weight"]})
    torch.testing.assert_close(module(x), theirs(x), **CLOSE)
    assert component.tokens(grid * grid) == grid * grid // factor**2 == module(x).shape[1]


def test_attention_pool_is_multi_head_attention_of_each_window() -> None:
    """Against torch's module, one window at a time."""
    component = AttentionPoolConfig(window=2, heads=2, hidden=0, bias=False)
    module, named, x = built(component, context(16))
    theirs = nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)
    entries = [[named[f"{name}_proj.{slot}"] for name in "qkv"] for slot in ("weight", "bias")]
    theirs.load_state_dict(
        {
            "in_proj_weight": torch.cat(entries[0]),
            "in_proj_bias": torch.cat(entries[1]),
            "out_proj.weight": named["o_proj.weight"],
            "out_proj.bias": named["o_proj.bias"],
        }
    )
    image = x.view(3, 4, 4, 8)
    found = module(x)
    assert found.shape[1] == component.tokens(16) == 4
    for at, (row, column) in enumerate([(0, 0), (0, 2), (2, 0), (2, 2)]):
        window = image[:, row : row + 2, column : column + 2].reshape(3, 4, 8)
        pooled, _ = theirs(window.mean(1, keepdim=True), window, window)
        torch.testing.assert_close(found[:, at], pooled[:, 0] @ named["projection.layers.0.weight"].T, **CLOSE)


def test_perceiver_does_not_see_the_order_of_features() -> None:
    module, _, x = built(PerceiverConfig(latents=3, layers=2, heads=2), context(10))
    order = torch.randperm(10, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(module(x[:, order]), module(x), **CLOSE)
    assert (module(x)[:, 0] - module(x)[:, 1]).abs().max() > 1e-3, "latents differ"


def test_perceiver_layer_by_torchs_modules() -> None:
    module, named, x = built(PerceiverConfig(latents=3, layers=1, heads=2, ffn_dim=20), context(10))

    def norm(name: str, y: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(y, (12,), named[f"{name}.weight"], named[f"{name}.bias"], 1e-6)

    seen = norm("layers.0.feature_norm", x @ named["entry.layers.0.weight"].T + named["entry.layers.0.bias"])
    latents = named["latents"].expand(3, 3, 12)
    q, k, v = (
        y @ named[f"layers.0.{name}_proj.weight"].T
        for name, y in (("q", norm("layers.0.latent_norm", latents)), ("k", seen), ("v", seen))
    )
    heads = [torch.softmax(q[..., part] @ k[..., part].mT / 6**0.5, -1) @ v[..., part] for part in (slice(0, 6), slice(6, 12))]
    latents = latents + torch.cat(heads, -1) @ named["layers.0.o_proj.weight"].T
    inner = F.gelu(norm("layers.0.mlp_norm", latents) @ named["layers.0.up_proj.weight"].T)
    latents = latents + inner @ named["layers.0.down_proj.weight"].T
    torch.testing.assert_close(module(x), norm("norm", latents), **CLOSE)


def test_perceiver_makes_as_many_tokens_of_any_number() -> None:
    component = PerceiverConfig(latents=5, layers=1, heads=2)
    module, _, _ = built(component, context(10))
    for n in (1, 7, 30):
        assert module(modules.drawn(2, n, 8)).shape == (2, 5, 12)
        assert component.tokens(n) == 5


def test_counts() -> None:
    for component in (LinearConfig(), MLPConfig()):
        assert component.tokens(7) == 7
    assert AveragePoolConfig(window=3).tokens(49) == 9
    assert AttentionPoolConfig(window=3).tokens(81) == 9
    assert PixelShuffleConfig(factor=4).tokens(1024) == 64
    assert PerceiverConfig().tokens(729) == 64


@pytest.mark.parametrize("component", [AveragePoolConfig(), AttentionPoolConfig(), PixelShuffleConfig()])
def test_a_class_token_among_patches_is_refused(component) -> None:
    with pytest.raises(
        ValueError, match=r"needs a square grid of features, and 17 is not a square.*encoder\.class_feature = false"
    ):
        component.tokens(17)
    with pytest.raises(ValueError, match="17 is not a square number"):
        component.build(context(17))


@pytest.mark.parametrize("component", [AttentionPoolConfig(window=3), PixelShuffleConfig(factor=3)])
def test_windows_that_leave_something_over_are_refused(component) -> None:
    with pytest.raises(ValueError, match="3 must divide the 4 x 4 grid of 16 features"):
        component.tokens(16)
    with pytest.raises(ValueError, match="3 must divide"):
        component.build(context(16))


def test_heads_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="attention_pool: heads 3 must divide the feature width 8"):
        AttentionPoolConfig(heads=3).build(context(16))
    with pytest.raises(ValueError, match=r"perceiver: heads 5 must divide model\.dim 12"):
        PerceiverConfig(heads=5).build(context(16))


def test_initial_weights() -> None:
    given = AdapterContext(width=8, tokens=16, dim=12, init_std=0.03)
    for component in (LinearConfig(), MLPConfig(hidden=2), AveragePoolConfig(), PixelShuffleConfig(), AttentionPoolConfig()):
        specs = modules.specs_of(modules.on_meta(lambda component=component: component.build(given)))
        assert {spec.init.std for spec in specs.values() if spec.group == "matrix"} == {0.03}
    specs = modules.specs_of(modules.on_meta(lambda: PerceiverConfig(layers=2, heads=2).build(given)))
    assert specs["layers.1.q_proj.weight"].init.std == 0.03
    assert specs["layers.1.down_proj.weight"].init.std == specs["layers.0.o_proj.weight"].init.std == 0.015
