"""Residual streams: against the modules of transformers, and against loops; what is counted, tapped and refused."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from forge_core.errors import ForgeError
from forge_core.registry import Registry
from forge_interp.captures import capture
from forge_interp.methods.lens import direct_logit_attribution, logit_lens, tuned_lens
from forge_interp.tap_names import taps
from forge_models.blocks.streams import StreamConnection, StreamWeights, doubly_stochastic, joined
from forge_models.components.attentions import GQA
from forge_models.components.decoder import DecoderConfig, MTPConfig
from forge_models.components.layers import RMSNormConfig
from forge_models.decoder import Decoder
from forge_models.flops import count_flops
from forge_models.hf.families import FAMILIES
from forge_models.hf.family import misfits
from forge_models.shape import Rope, Streams
from forge_train.recipe.load import load_recipe
from forge_vlm.components.encoders import ViT
from forge_vlm.components.model import VLM

SMALL = DecoderConfig(
    dim=6,
    layers=2,
    heads=2,
    head_dim=4,
    ffn_dim=8,
    vocab_size=11,
    max_length=32,
    norm=RMSNormConfig(eps=1e-3),
    streams=Streams(count=3, sinkhorn=4, eps=1e-2),
)
"""The small numbers are so large here that a missing one shows."""


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def filled(module: nn.Module, seed: int = 1) -> Any:
    generator = torch.Generator().manual_seed(seed)
    module = module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return module.eval()


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """theirs(ours) -> the module of transformers with the same parameters. It computes in fp32, so `float` makes fp64 here."""
    reference = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    config = SimpleNamespace(hc_mult=3, hc_sinkhorn_iters=4, hc_eps=1e-2, rms_norm_eps=1e-3, hidden_size=6)

    def theirs(ours: StreamWeights) -> Any:
        whole = isinstance(ours, StreamConnection)
        made = (reference.DeepseekV4HyperConnection if whole else reference.DeepseekV4HyperHead)(config)
        names = {"fn": "weight", "base": "bias", "scale": "scale"}
        with torch.no_grad():
            for name, own in names.items():
                slot = name if whole else f"hc_{name}"
                setattr(made, slot, nn.Parameter(getattr(ours, own).detach().clone()))
        made.pairs = {own: getattr(made, name if whole else f"hc_{name}") for name, own in names.items()}
        return made

    theirs.layer = reference.DeepseekV4DecoderLayer  # type: ignore[attr-defined]
    return theirs


def equal_gradients(ours: StreamWeights, other: Any) -> None:
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, other.pairs[name].grad, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize("kind", [StreamConnection, StreamWeights])
def test_values_and_gradients_equal_those_of_transformers(theirs: Any, kind: type[StreamWeights]) -> None:
    ours = filled(kind(SMALL.shape))
    other = theirs(ours)
    x, y = drawn(2, 5, 3, 6).requires_grad_(), drawn(2, 5, 3, 6).requires_grad_()
    found, expected = ours(x), other(y)
    if kind is StreamConnection:
        read, post, mix = found
        found, expected = (post, mix, read), expected
    else:
        found, expected = (found,), (expected,)
    for one, other_one in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other_one, rtol=0, atol=1e-12)
    sum(((one * drawn(*one.shape, seed=7)).sum() for one in found), x.sum()).backward()
    sum(((one * drawn(*one.shape, seed=7)).sum() for one in expected), y.sum()).backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-9, atol=1e-9)
    equal_gradients(ours, other)


def test_a_decoder_equals_layers_of_transformers(theirs: Any) -> None:
    """Their layer takes our attention and feed-forward layer, so that the streams between are what is compared."""
    model: Decoder = filled(SMALL.build())
    tokens = torch.arange(7)[None] % 11
    model(tokens).square().sum().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    block: Any = model.blocks["0"]
    rotation, mask = block.attention.rotary(torch.arange(7)[None]), block.attention.core.prepare(None, 7, None, "cpu")
    x = model.embed(tokens).unsqueeze(2).expand(-1, -1, 3, -1).contiguous()  # type: ignore[misc]
    mixers = {}
    for name, block in model.blocks.items():  # type: ignore[assignment]
        for slot in ("attention_streams", "mlp_streams"):
            mixers[f"blocks.{name}.{slot}"] = theirs(getattr(block, slot))
        layer = theirs.layer.__new__(theirs.layer)
        nn.Module.__init__(layer)
        layer.attn_hc = mixers[f"blocks.{name}.attention_streams"]
        layer.ffn_hc = mixers[f"blocks.{name}.mlp_streams"]
        layer.input_layernorm, layer.post_attention_layernorm = block.attention_norm, block.mlp_norm
        layer.self_attn = lambda x, own=block: (own.attention(x, rotation, mask), None)
        layer.mlp = lambda x, input_ids, own=block: own.mlp(x)
        x = layer(x)
    mixers["merge"] = theirs(model.merge)
    logits = model.head(model.norm(mixers["merge"](x)), None, None)  # type: ignore[misc]
    torch.testing.assert_close(model(tokens), logits, rtol=1e-12, atol=1e-12)
    model.zero_grad()
    logits.square().sum().backward()
    for name, gradient in gradients.items():
        path, _, slot = name.rpartition(".")
        expected = mixers[path].pairs[slot].grad if path in mixers else model.get_parameter(name).grad
        torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-9, msg=name)


def test_the_matrix_is_doubly_stochastic_and_mixes_from_rows_to_columns() -> None:
    made = doubly_stochastic(drawn(2, 3, 4, 4), 20, 1e-6)
    assert bool((made > 0).all())
    torch.testing.assert_close(made.sum(-2), torch.ones(2, 3, 4, dtype=torch.float64), rtol=0, atol=1e-5)
    torch.testing.assert_close(made.sum(-1), torch.ones(2, 3, 4, dtype=torch.float64), rtol=0, atol=1e-3)
    x, added, post = drawn(1, 2, 3, 5, seed=3), drawn(1, 2, 5, seed=4), drawn(1, 2, 3, seed=5)
    mix = drawn(1, 2, 3, 3, seed=6)
    found = joined(x, added, post, mix)
    for t in range(2):
        for k in range(3):
            expected = post[0, t, k] * added[0, t] + sum(mix[0, t, j, k] * x[0, t, j] for j in range(3))
            torch.testing.assert_close(found[0, t, k], expected)


@pytest.mark.parametrize("iterations", [1, 2, 5])
def test_the_backward_of_the_iterations_equals_finite_differences(iterations: int) -> None:
    logits = drawn(2, 3, 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: doubly_stochastic(x, iterations, 1e-2), logits)


def test_a_compiled_connection_equals_an_eager_one() -> None:
    ours, x = filled(StreamConnection(SMALL.shape)), drawn(2, 5, 3, 6)
    for found, expected in zip(torch.compile(ours, backend="eager", fullgraph=True)(x), ours(x), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)


def test_at_the_start_streams_are_equal_and_mixing_keeps_them() -> None:
    """With the weights of the start, zero biases and scales of one, the mean of the streams is the plain residual stream."""
    specs = SMALL.build().specs().tensors
    for path in ("blocks.0.attention_streams", "blocks.1.mlp_streams", "merge"):
        assert (specs[f"{path}.bias"].init.kind, specs[f"{path}.scale"].init.kind) == ("zeros", "ones")
        assert specs[f"{path}.weight"].init.std == SMALL.init_std
    ours = filled(StreamConnection(replace(SMALL, streams=Streams(count=4)).shape))
    with torch.no_grad():
        ours.weight.zero_()
        ours.bias.zero_()
        ours.scale.fill_(1)
    x, added = drawn(1, 2, 1, 6).expand(-1, -1, 4, -1), drawn(1, 2, 6, seed=2)
    read, post, mix = ours(x)
    torch.testing.assert_close(read, 2 * x[:, :, 0], rtol=1e-5, atol=1e-5)  # which the norm of the part divides away
    torch.testing.assert_close(joined(x, added, post, mix), x + added[:, :, None], rtol=1e-5, atol=1e-5)


def test_low_precision_computes_weights_in_fp32() -> None:
    reference = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    ours = filled(StreamConnection(SMALL.shape)).bfloat16()
    config = SimpleNamespace(hc_mult=3, hc_sinkhorn_iters=4, hc_eps=1e-2, rms_norm_eps=1e-3, hidden_size=6)
    other = reference.DeepseekV4HyperConnection(config).bfloat16()
    with torch.no_grad():
        for slot, own in (("fn", ours.weight), ("base", ours.bias), ("scale", ours.scale)):
            getattr(other, slot).copy_(own)
    x = drawn(2, 5, 3, 6).bfloat16()
    read, post, mix = ours(x)
    expected_post, expected_mix, expected_read = other(x)
    assert read.dtype == post.dtype == mix.dtype == torch.bfloat16
    for one, wide in ((post, expected_post), (mix, expected_mix), (read, expected_read)):
        torch.testing.assert_close(one.float(), wide.bfloat16().float(), rtol=2**-7, atol=1e-6)


def test_weights_are_counted_and_products_equal_those_of_loops() -> None:
    plain, found = count_flops(replace(SMALL, streams=None).shape), count_flops(SMALL.shape)
    own = 4 * 15 * 18 + 3 * 18  # two parts of two blocks, and the sum before the head
    assert found.matrix - plain.matrix == own
    assert found.norms - plain.norms == own + 4 * (15 + 3) + 3 + 1
    assert found.parameters == sum(parameter.numel() for parameter in SMALL.build().parameters())
    assert found.mixing == 4 * (3 * 6 + 3 * 3 * 6) + 3 * 6
    alone = replace(SMALL, attention_only=(0,))
    assert count_flops(alone.shape).mixing == found.mixing - (3 * 6 + 3 * 3 * 6)


def test_inner_values_have_all_streams() -> None:
    model = filled(SMALL.build())
    found = taps(model)
    for name in ("blocks.0.residual", "blocks.1.residual_mid", "blocks.1.residual_after", "residual"):
        assert (found[name].shape, found[name].dims[2:], found[name].alias) == ((3, 6), ("streams", "embed"), "")
    assert found["blocks.0.attention.added"].shape == (6,)
    tokens = torch.arange(5)[None]
    with capture(model, ["blocks.*.residual", "residual"]) as seen, torch.no_grad():
        logits = model(tokens)
    assert torch.equal(seen["blocks.0.residual"][0, :, 2], model.embed(tokens)[0])
    with torch.no_grad():
        assert torch.equal(model.head(model.norm(model.merge(seen["residual"])), None, None), logits)
    for lens in (
        lambda: logit_lens(model, tokens),
        lambda: tuned_lens(model, [tokens[0], tokens[0]]),
        lambda: direct_logit_attribution(model, tokens, torch.tensor([1])),
    ):
        with pytest.raises(ForgeError, match=r"reads one residual stream, but the model has several \(model.streams\)"):
            lens()


def test_a_pipeline_gets_the_shape_and_merges_on_its_last_stage() -> None:
    specs = SMALL.build().specs()
    assert (specs.streams, specs.exit) == (3, ("merge", "norm", "head"))
    assert specs.tensors["blocks.0.mlp_streams.weight"].fused == (3, 3, 9)
    assert replace(SMALL, streams=None).build().specs().streams is None


def test_what_is_not_proven_is_refused() -> None:
    with pytest.raises(ValueError, match="streams does not support parallel_residual"):
        replace(SMALL, parallel_residual=True)
    with pytest.raises(ValueError, match=r"streams does not support \[model.mtp\]"):
        replace(SMALL, mtp=MTPConfig())
    with pytest.raises(ValueError, match="streams does not support layer_scalar"):
        replace(SMALL, layer_scalar=True)

    with pytest.raises(ValueError, match=r"model.name = 'vlm' does not support \[model.streams\]"):
        VLM(dim=16, layers=2, heads=4, vocab_size=40, encoder=ViT(size=8, patch=4, dim=8, layers=1, heads=2), streams=Streams())
    assert [f"streams = {SMALL.streams!r}, it has None"] == misfits(FAMILIES["llama"], replace(SMALL, dim=8, head_dim=None))
    with pytest.raises(ValueError, match=r"set streams\.norm_eps"):
        Streams().resolved_norm_eps(SimpleNamespace())  # type: ignore[arg-type]
    assert Streams(norm_eps=0.5).resolved_norm_eps(RMSNormConfig()) == 0.5


def test_one_stream_is_refused_by_its_key() -> None:
    with pytest.raises(ForgeError, match=r"model\.streams\.count.*1"):
        load_recipe("debug", ["--model.streams.count=1"], None, Registry())
    assert load_recipe("debug", ["--model.streams.count=2"], None, Registry()).job.model.streams == Streams(count=2)


def test_positions_and_windows_are_those_of_the_mixer() -> None:
    """A token sees no later one through the streams, which mix numbers of one token only."""
    model = filled(replace(SMALL, attention=GQA(window=2), rope=Rope(theta=50.0)).build())
    tokens = torch.arange(6)[None]
    other = tokens.clone()
    other[0, 5] = 9
    with torch.no_grad():
        assert torch.equal(model(tokens)[:, :5], model(other)[:, :5])
