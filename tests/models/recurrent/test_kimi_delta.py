"""Kimi Delta Attention as a layer: against transformers, its documents, its cache, its initial weights, its counts."""

from typing import Any

import pytest
import torch

from forge_models import DecoderConfig, initialize
from forge_models.components.attentions import MLA, IndexedMLA
from forge_models.components.kimi_delta import KDA
from forge_models.components.recurrent import Hybrid
from forge_models.flops import count_flops
from forge_models.generation import generate
from forge_models.shape import Rope
from harness.closeness import wide
from models.recurrent.test_mamba2 import SIZES, spread, tokens

PART = KDA(heads=4, head_dim=6)


def decoder() -> Any:
    """A decoder in fp64 whose parameters are spread."""
    attention = Hybrid(recurrent=PART, kinds=("recurrent", "full", "recurrent"))
    model = DecoderConfig(**SIZES, attention=attention).build().double()
    spread(model, 0)
    return model.eval()


@pytest.mark.parametrize("length", [1, 3, 70])
def test_equals_the_layer_of_transformers_with_all_gradients(length: int) -> None:
    from transformers import AutoConfig
    from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention

    keys: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    keys |= {"linear_num_heads": 4, "linear_head_dim": 6, "linear_conv_kernel_dim": 4, "rms_norm_eps": 1e-5}
    theirs: Any = KimiLinearDeltaAttention(AutoConfig.for_model("kimi_linear", **keys), 0).double()
    spread(theirs, 1)
    ours = KDA(heads=4, head_dim=6, norm_eps=1e-5).build(DecoderConfig(**SIZES).shape.context(0)).double()
    whole = slice(None)
    places: dict[str, tuple[str, slice]] = {}
    for at, name in enumerate("qkv"):
        places[f"{name}_conv.weight"] = ("conv1d.weight", slice(24 * at, 24 * at + 24))
    for name in ("q", "k", "v", "b", "g_a", "g_b", "o"):
        places[f"{name}_proj.weight"] = (f"{name}_proj.weight", whole)
    places |= {f"f_{end}_proj.weight": (f"forget_gate.f_{end}_proj.weight", whole) for end in "ab"}
    places |= {f"decay.{name}": (f"forget_gate.{name}", whole) for name in ("A_log", "dt_bias")}
    places["norm.weight"] = ("o_norm.weight", whole)
    values = dict(theirs.named_parameters())
    shapes = {name: parameter.shape for name, parameter in ours.named_parameters()}
    ours.load_state_dict({name: values[of][rows].reshape(shapes[name]) for name, (of, rows) in places.items()})
    draw = torch.Generator().manual_seed(2)
    x = torch.randn(2, length, 32, dtype=torch.float64, generator=draw).requires_grad_()
    y = x.detach().clone().requires_grad_()
    weights = torch.randn(2, length, 32, dtype=torch.float64, generator=draw)
    with wide():
        expected = theirs(x)
        (expected * weights).sum().backward()
    found = ours(y, None, None)
    (found * weights).sum().backward()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)
    torch.testing.assert_close(y.grad, x.grad, rtol=0, atol=1e-10)
    for name, (of, rows) in places.items():
        grad, other = ours.get_parameter(name).grad, values[of].grad
        assert grad is not None
        assert other is not None
        torch.testing.assert_close(grad, other[rows].reshape(grad.shape), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("lengths", [(31, 39), (1, 1, 2, 66)])
def test_documents_of_a_row_equal_rows_of_their_own(lengths: tuple[int, ...]) -> None:
    """Logits and gradients of every parameter, within 1e-12 of their size."""
    model, row = decoder(), tokens(1, sum(lengths))
    documents = torch.tensor([[number for number, length in enumerate(lengths) for _ in range(length)]])
    positions = torch.tensor([[place for length in lengths for place in range(length)]])
    together = model(row, documents=documents, positions=positions)
    alone = torch.cat([model(part) for part in row.split(lengths, dim=1)], 1)
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-12 * max(1.0, float(alone.detach().abs().max())))
    weights = torch.randn(alone.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    parameters = list(model.parameters())
    found, expected = (torch.autograd.grad((x * weights).sum(), parameters) for x in (together, alone))
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() <= 1e-12 * max(1.0, float(other.abs().max()))


def test_a_cache_equals_whole_rows() -> None:
    model, rows = decoder(), tokens(2, 70)
    with torch.no_grad():
        whole = model(rows)
        for chunks in ((70,), (2, 1, 64, 3)):
            cache = model.new_cache(2, 70)
            found = torch.cat([model(part, cache=cache) for part in rows.split(chunks, dim=1)], 1)
            torch.testing.assert_close(found, whole, rtol=0, atol=1e-10)
    assert cache.layers["0"].recurrent[1].shape == (2, 4, 6, 6)


def test_prompts_of_different_lengths_are_continued_as_alone() -> None:
    model, prompts = decoder(), [[5, 6, 7, 8, 9, 10], [1, 2], [3]]
    found = generate(model, prompts, max_tokens=4, prefill=3, eos=57)
    for prompt, row in zip(prompts, found, strict=True):
        ids = list(prompt)
        for token in row:
            assert token == int(model(torch.tensor([ids]))[0, -1].argmax())
            ids.append(token)


def test_initial_weights_are_the_published_ones() -> None:
    model = DecoderConfig(**SIZES | {"attention": KDA(heads=256, head_dim=2)}).build()
    initialize(model)
    layer: Any = model.blocks["0"].attention
    rates = layer.decay.A_log.detach().exp()
    steps = torch.nn.functional.softplus(layer.decay.dt_bias.detach().double()).log().sort().values
    low, high = torch.tensor([1e-3, 0.1]).log()
    share = (torch.arange(512) + 0.5) / 512
    assert rates.min() >= 1 - 1e-6 and rates.max() <= 16 + 1e-5 and (rates.mean() - 8.5).abs() < 1
    assert (steps - (low + (high - low) * share)).abs().max() < 0.07 * (high - low)


def test_flops_are_those_of_the_products() -> None:
    config = DecoderConfig(**SIZES, attention=PART)
    counts, dense = count_flops(config.shape), count_flops(DecoderConfig(**SIZES).shape)
    projections, state = 32 * (3 * 24 + 4 + 2 * 6 + 24) + 2 * 6 * 24, 3 * 4 * 6 * 6
    full = 32 * (32 + 16 + 16 + 32)
    for length in (16, 256):
        assert counts.training(length) - dense.training(length) == 3 * 6 * (projections + state - full - 2 * 32 * length)


LATENT: dict[str, Any] = {"kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}


def latent(rotates: bool, rope: Rope) -> Any:
    """A block of latent attention in fp64, whose parameters are spread."""
    model = DecoderConfig(**SIZES | {"layers": 1, "kv_heads": None}, attention=MLA(**LATENT, rotates=rotates), rope=rope).build()
    spread(model.double(), 3)
    return model.eval()


@torch.no_grad()
def test_latent_attention_without_rotation_has_no_positions() -> None:
    """The order of earlier tokens, the base of angles and their scaling change nothing; with rotation all do."""
    rows, scaled = tokens(2, 9), Rope(theta=50.0, scaling="yarn", factor=4.0, original_max_length=8, mscale_all_dim=0.7)
    order = torch.tensor([4, 2, 7, 0, 1, 6, 3, 5, 8])
    for rotates in (False, True):
        plain = latent(rotates, Rope())(rows)[:, -1]
        for other in (latent(rotates, Rope())(rows[:, order])[:, -1], latent(rotates, scaled)(rows)[:, -1]):
            assert torch.allclose(other, plain, rtol=0, atol=1e-11) is not rotates


def test_an_indexer_needs_rotation() -> None:
    with pytest.raises(ValueError, match="rotates = false does not go with an indexer"):
        IndexedMLA(**LATENT, q_lora_rank=7, index_heads=3, index_dim=6, top_k=2, rotates=False)
