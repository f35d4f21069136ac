"""Mamba-2 as a layer: against transformers, its documents, its cache, its initial weights, and what is refused."""

from dataclasses import replace
from inspect import signature
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from forge_models import DecoderConfig, initialize
from forge_models.blocks.mamba import GatedGroupNorm, StateSpaceMixer
from forge_models.components.recurrent import Hybrid
from forge_models.components.state_space import Mamba2
from forge_models.flops import count_flops
from forge_models.generation import generate
from harness.closeness import wide

SIZES: dict[str, Any] = {"dim": 32, "layers": 3, "heads": 4, "kv_heads": 2, "vocab_size": 97, "max_length": 512}
PART = Mamba2(heads=8, head_dim=6, groups=2, state_dim=5)


def spread(module: nn.Module, seed: int) -> None:
    """Gives every parameter other values, so that each part shows in the result."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
            parameter.copy_(0.3 * noise if parameter.dim() > 1 else 0.5 + 0.5 * noise)


def decoder(seed: int = 0, **changes: Any) -> Any:
    """A decoder in fp64 whose parameters are spread."""
    attention = Hybrid(recurrent=PART, kinds=("recurrent", "full", "recurrent"))
    model = DecoderConfig(**SIZES | {"attention": attention} | changes).build().double()
    spread(model, seed)
    return model.eval()


def tokens(rows: int, length: int) -> Tensor:
    return torch.randint(97, (rows, length), generator=torch.Generator().manual_seed(4))


def theirs_and_ours(kind: str, bias: bool) -> tuple[nn.Module, nn.Module, dict[str, tuple[str, slice]]]:
    """The layer of transformers in fp64, ours with its tensors, and ours -> tensor and rows of theirs."""
    from transformers import AutoConfig

    keys: dict[str, Any] = {"hidden_size": 32, "n_groups": 2, "use_bias": bias, "chunk_size": 16, "use_conv_bias": not bias}
    if kind == "nemotron_h":
        from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer as Layer

        keys |= {"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 5, "layers_block_type": ["linear_attention"] * 2}
        keys |= {"time_step_min": 0.05}
        limits: dict[str, Any] = {"step_min": 0.05}
    else:
        from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer as Layer
        from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated

        if "group_size" not in signature(MambaRMSNormGated).parameters:
            pytest.skip("Mamba2Mixer of this release normalizes all groups together; nemotron_h is compared")
        keys |= {"num_heads": 8, "head_dim": 8, "state_size": 5, "expand": 2, "num_hidden_layers": 2}
        keys |= {"time_step_limit": (0.02, 1.5)}
        limits = {"step_min": 0.02, "step_max": 1.5}
    config = AutoConfig.for_model(kind, **keys)
    theirs = Layer(config, 0).double()
    spread(theirs, 1)
    part = replace(PART, head_dim=8, bias=bias, conv_bias=not bias, norm_eps=config.layer_norm_epsilon, **limits)
    ours = part.build(DecoderConfig(**SIZES).shape.context(0)).double()
    whole, places = slice(None), {}
    ends_of = {"z_proj": (0, 64), "x_proj": (64, 128), "b_proj": (128, 138), "c_proj": (138, 148), "dt_proj": (148, 156)}
    for slot in ("weight", "bias") if bias else ("weight",):
        places |= {f"{name}.{slot}": (f"in_proj.{slot}", slice(*ends)) for name, ends in ends_of.items()}
        places[f"o_proj.{slot}"] = (f"out_proj.{slot}", whole)
    for slot in ("weight",) if bias else ("weight", "bias"):
        channels = {"x_conv": (0, 64), "b_conv": (64, 74), "c_conv": (74, 84)}
        places |= {f"{name}.{slot}": (f"conv1d.{slot}", slice(*ends)) for name, ends in channels.items()}
    places |= {f"steps.{name}": (name, whole) for name in ("A_log", "dt_bias", "D")} | {"norm.weight": ("norm.weight", whole)}
    values = dict(theirs.named_parameters())
    shapes = {name: parameter.shape for name, parameter in ours.named_parameters()}
    ours.load_state_dict({name: values[of][rows].reshape(shapes[name]) for name, (of, rows) in places.items()})
    return theirs, ours, places


@pytest.mark.parametrize("length", [1, 3, 16, 50])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ["mamba2", "nemotron_h"])
def test_equals_the_layer_of_transformers_with_all_gradients(kind: str, bias: bool, length: int) -> None:
    theirs, ours, places = theirs_and_ours(kind, bias)
    draw = torch.Generator().manual_seed(2)
    x = torch.randn(2, length, 32, dtype=torch.float64, generator=draw).requires_grad_()
    y = x.detach().clone().requires_grad_()
    weights = torch.randn(2, length, 32, dtype=torch.float64, generator=draw)
    with wide():
        expected = theirs(x)
        (expected * weights).sum().backward()
    found = ours(y, None, None)
    (found * weights).sum().backward()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(y.grad, x.grad, rtol=0, atol=1e-9)
    values = dict(theirs.named_parameters())
    assert set(places) == set(dict(ours.named_parameters()))
    for name, (name_of, part) in places.items():
        grad, other = ours.get_parameter(name).grad, values[name_of].grad
        assert grad is not None
        assert other is not None
        torch.testing.assert_close(grad, other[part].reshape(grad.shape), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("gate_first", [False, True])
def test_the_norm_equals_its_formula(gate_first: bool, compiled: bool) -> None:
    norm = GatedGroupNorm(3, 4, 1e-3, gate_first).double()
    spread(norm, 0)
    draw = torch.Generator().manual_seed(0)
    x, z, grad = (torch.randn(2, 5, 12, generator=draw, dtype=torch.float64).requires_grad_() for _ in range(3))
    gate = z / (1 + (-z).exp())
    before, after = (gate, 1) if gate_first else (1, gate)
    groups = (x * before).unflatten(-1, (4, 3))
    expected = (groups / (groups.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt()).flatten(-2) * norm.weight * after
    run = torch.compile(norm, backend="aot_eager", fullgraph=True) if compiled else norm
    found, given = run(x, z), [x, z, norm.weight]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    grads = [torch.autograd.grad((one * grad).sum(), given, retain_graph=True) for one in (found, expected)]
    torch.testing.assert_close(*grads, rtol=0, atol=1e-12)


@pytest.mark.parametrize("lengths", [(31, 39), (1, 1, 2, 66), (64, 6)])
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


def test_no_token_reaches_an_earlier_one_or_another_document() -> None:
    model, row = decoder(), tokens(1, 90)
    documents = (torch.arange(90) >= 40).int()[None]
    before = model(row, documents=documents)
    for place in (0, 39, 40, 64, 89):
        other = row.clone()
        other[0, place] = (other[0, place] + 1) % 97
        changed = (model(other, documents=documents) != before).any(-1)[0].nonzero().flatten()
        end = 40 if place < 40 else 90
        assert changed.min() == place and changed.max() < end, place


def test_a_cache_holds_states_of_constant_size_and_equals_whole_rows() -> None:
    model, rows = decoder(), tokens(3, 70)
    with torch.no_grad():
        whole = model(rows)
        for chunks in ((70,), (1,) * 70, (2, 1, 64, 3)):
            cache = model.new_cache(3, 70)
            found = torch.cat([model(part, cache=cache) for part in rows.split(chunks, dim=1)], 1)
            torch.testing.assert_close(found, whole, rtol=0, atol=1e-10)
    windows, state = cache.layers["0"].recurrent
    assert state.shape == (3, 8, 5, 6) and [tuple(x.shape) for x in windows] == [(3, 3, 10), (3, 3, 10), (3, 3, 48)]


@pytest.mark.parametrize("prefill", [None, 1, 3])
def test_prompts_of_different_lengths_are_continued_as_alone(prefill: int | None) -> None:
    """Padding behind a short prompt enters neither state nor convolution."""
    model, prompts = decoder(), [[5, 6, 7, 8, 9, 10, 11, 12], [1, 2], [3], [4, 9, 4, 9, 4]]
    found = generate(model, prompts, max_tokens=5, prefill=prefill, eos=57)
    for prompt, row in zip(prompts, found, strict=True):
        ids = list(prompt)
        for token in row:
            assert token == int(model(torch.tensor([ids]))[0, -1].argmax())
            ids.append(token)


def test_initial_weights_are_the_published_ones() -> None:
    part = Mamba2(heads=512, head_dim=2, groups=8, state_dim=4)
    model = DecoderConfig(**SIZES | {"attention": part}).build()
    initialize(model)
    layer: Any = model.blocks["0"].attention
    rates = layer.steps.A_log.detach().exp().sort().values
    steps = torch.nn.functional.softplus(layer.steps.dt_bias.detach().double()).log().sort().values
    share = (torch.arange(512) + 0.5) / 512
    assert rates.min() >= 1 - 1e-6 and rates.max() <= 16 + 1e-5 and (rates - (1 + 15 * share)).abs().max() < 15 * 0.07
    low, high = torch.tensor([1e-3, 0.1]).log()
    assert steps.min() >= low - 1e-5 and steps.max() <= high + 1e-5
    assert (steps - (low + (high - low) * share)).abs().max() < 0.07 * (high - low)
    for filters in (layer.x_conv.weight, layer.x_conv.bias):
        assert filters.abs().max() <= 0.5 and (filters.std() - 0.5 / 3**0.5).abs() < 0.02
    assert (layer.norm.weight == 1).all() and (layer.steps.D == 1).all()


def test_defaults_come_from_the_model() -> None:
    layer = DecoderConfig(**SIZES, attention=Mamba2()).build().blocks["0"].attention
    assert isinstance(layer, StateSpaceMixer)
    shapes = {name: tuple(p.shape) for name, p in layer.named_parameters() if name.endswith("proj.weight")}
    assert shapes == {
        "z_proj.weight": (64, 32),
        "x_proj.weight": (64, 32),
        "b_proj.weight": (256, 32),
        "c_proj.weight": (256, 32),
        "dt_proj.weight": (4, 32),
        "o_proj.weight": (32, 64),
    }
    assert layer.norm.width == 32 and layer.norm.eps == 1e-5


@pytest.mark.parametrize(
    ("part", "says"),
    [
        (Mamba2(groups=3), "groups 3 must divide heads 4 of mamba2"),
        (Mamba2(heads=5, groups=5), r"heads 5 of mamba2 must divide 2 \* dim = 64, or head_dim must be given"),
    ],
)
def test_settings_that_do_not_fit_are_refused(part: Mamba2, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        DecoderConfig(**SIZES, attention=Hybrid(recurrent=part))


def test_limits_in_the_wrong_order_are_refused() -> None:
    with pytest.raises(ValueError, match=r"step_max 0\.1 must be above step_min 0\.2"):
        Mamba2(step_min=0.2, step_max=0.1)


def test_flops_are_those_of_the_products() -> None:
    """Of a layer: projections, a write to and a read of each head's state, whatever the length."""
    config = DecoderConfig(**SIZES, attention=PART)
    counts, dense = count_flops(config.shape), count_flops(DecoderConfig(**SIZES).shape)
    projections, state = 32 * (48 + 48 + 10 + 10 + 8 + 48), 2 * 8 * 6 * 5
    full = 32 * (32 + 16 + 16 + 32)
    for length in (16, 256):
        scores = 2 * 32 * length
        assert counts.training(length) - dense.training(length) == 3 * 6 * (projections + state - full - scores)
    assert counts.attention == sum(p.numel() for block in config.build().blocks.values() for p in block.attention.parameters())
