"""The layer: against transformers, its documents, its cache, its initial weights, and what is refused."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from forge_core.errors import ForgeError
from forge_models import DecoderConfig, initialize
from forge_models.blocks.chunks import document_runs
from forge_models.blocks.delta_net import GatedDeltaNet
from forge_models.blocks.short_conv import causal_filter
from forge_models.components.attentions import GQA
from forge_models.components.recurrent import GDN, Hybrid
from forge_models.flops import count_flops
from forge_models.generation import GenerationError, generate
from forge_models.speculation import speculate
from harness.closeness import wide

SIZES: dict[str, Any] = {"dim": 32, "layers": 4, "heads": 4, "kv_heads": 2, "vocab_size": 97, "max_length": 512}
SHARED_KEYS = GDN(key_heads=2, value_heads=4, key_dim=6, value_dim=5)


def decoder(seed: int = 0, **changes: Any) -> Any:
    """A decoder in fp64 whose parameters are spread, so that every part shows in the logits."""
    model = DecoderConfig(**SIZES | {"attention": Hybrid(recurrent=SHARED_KEYS)} | changes).build()
    initialize(model, seed)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.double().parameters():
            noise = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
            parameter.copy_(0.2 * noise if parameter.dim() > 1 else parameter + 0.3 * noise)
    return model.eval()


def tokens(rows: int, length: int) -> Tensor:
    return torch.randint(97, (rows, length), generator=torch.Generator().manual_seed(4))


def reference(kind: str) -> nn.Module:
    """The layer of transformers in fp64, and the names of its tensors in ours."""
    from transformers import AutoConfig

    keys = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}
    keys |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 5}
    config = AutoConfig.for_model(kind, **keys, layer_types=["linear_attention", "full_attention"])
    if kind == "qwen3_next":
        from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet as Layer
    else:
        from transformers.models.olmo_hybrid.modeling_olmo_hybrid import OlmoHybridGatedDeltaNet as Layer
    layer = Layer(config, 0).double()
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in layer.parameters():
            noise = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
            parameter.copy_(0.3 * noise if parameter.dim() > 1 else 1 + 0.3 * noise)
    return layer


def with_weights_of(theirs: Any, kind: str) -> GatedDeltaNet:
    """Our layer with the tensors of the other one, taken apart as its forward does."""
    context = DecoderConfig(**SIZES).shape.context(0)
    component = GDN(**{**vars(SHARED_KEYS), "negative_eigenvalues": kind == "olmo_hybrid", "norm_eps": 1e-5})
    ours = component.build(context).double()
    assert isinstance(ours, GatedDeltaNet)
    q, k, v = theirs.conv1d.weight.squeeze(1).split([12, 12, 20])
    found = {"q_conv.weight": q, "k_conv.weight": k, "v_conv.weight": v}
    found |= {"decay.A_log": theirs.A_log, "decay.dt_bias": theirs.dt_bias}
    if kind == "qwen3_next":
        rows = torch.arange(64, dtype=torch.float64)[None, None]  # the order is that of the reference's own function
        order = theirs.fix_query_key_value_ordering(rows, torch.arange(8, dtype=torch.float64)[None, None])
        fused = (theirs.in_proj_qkvz.weight,) * 4 + (theirs.in_proj_ba.weight,) * 2
        for name, index, weight in zip("qkvzba", order, fused, strict=True):
            found[f"{name}_proj.weight"] = weight[index.flatten().long()]
        found |= {"norm.weight": theirs.norm.weight, "o_proj.weight": theirs.out_proj.weight}
    else:
        found |= {f"{name}_proj.weight": getattr(theirs, f"{name}_proj").weight for name in "qkvbao"}
        found |= {"z_proj.weight": theirs.g_proj.weight, "norm.weight": theirs.o_norm.weight}
    ours.load_state_dict(found)
    return ours


@pytest.mark.parametrize("length", [1, 3, 64, 150])
@pytest.mark.parametrize("kind", ["qwen3_next", "olmo_hybrid"])
def test_equals_the_layer_of_transformers(kind: str, length: int) -> None:
    theirs = reference(kind)
    ours = with_weights_of(theirs, kind)
    x = torch.randn(2, length, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    with wide(), torch.no_grad():
        expected = theirs(x)
        found = ours(x, None, None)  # type: ignore[arg-type]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_convolution_equals_torchs(compiled: bool, biased: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*shape, generator=draw, dtype=torch.float64).requires_grad_() for shape in ((2, 9, 6), (6, 4)))
    bias = torch.randn(6, generator=draw, dtype=torch.float64).requires_grad_() if biased else None
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 2, 3, 3], [0] * 9])

    def theirs(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows = []
        for row, numbers in zip(x, documents, strict=True):
            parts = [row[numbers == number] for number in numbers.unique()]
            full = [torch.conv1d(part.T[None], weight[:, None], bias, padding=3, groups=6)[0, :, : len(part)].T for part in parts]
            rows.append(torch.nn.functional.silu(torch.cat(full)))
        return torch.stack(rows)

    run = torch.compile(causal_filter, backend="aot_eager", fullgraph=True) if compiled else causal_filter
    found, expected = run(x, weight, document_runs(documents), bias), theirs(x, weight, bias)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
    given = [x, weight] if bias is None else [x, weight, bias]
    grads = torch.autograd.grad(found.square().sum(), given)
    torch.testing.assert_close(grads, torch.autograd.grad(expected.square().sum(), given), rtol=0, atol=1e-12)


@pytest.mark.parametrize("short", [1, 2, 3])
def test_rows_shorter_than_the_filter(short: int) -> None:
    model = decoder()
    rows = tokens(2, 5)
    torch.testing.assert_close(model(rows)[:, :short], model(rows[:, :short]), rtol=0, atol=1e-12)


@pytest.mark.parametrize("lengths", [(31, 39), (1, 1, 2, 66), (64, 6), (63, 3, 4)])
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
    for place in (0, 39, 40, 63, 64, 89):
        other = row.clone()
        other[0, place] = (other[0, place] + 1) % 97
        changed = (model(other, documents=documents) != before).any(-1)[0].nonzero().flatten()
        end = 40 if place < 40 else 90
        assert changed.min() == place and changed.max() < end, place


def test_a_cache_holds_states_of_constant_size_and_equals_whole_rows() -> None:
    model, rows = decoder(), tokens(3, 80)
    with torch.no_grad():
        whole = model(rows)
        for chunks in ((80,), (1,) * 80, (2, 1, 64, 13)):
            cache = model.new_cache(3, 80)
            found = torch.cat([model(part, cache=cache) for part in rows.split(chunks, dim=1)], 1)
            torch.testing.assert_close(found, whole, rtol=0, atol=1e-11)
    windows, state = cache.layers["0"].recurrent
    assert state.shape == (3, 4, 6, 5) and [tuple(x.shape) for x in windows] == [(3, 3, 12), (3, 3, 12), (3, 3, 20)]
    assert cache.layers["0"].k is None and cache.layers["3"].k.shape == (3, 2, 80, 8)


@pytest.mark.parametrize("prefill", [None, 1, 3, 5])
def test_prompts_of_different_lengths_are_continued_as_alone(prefill: int | None) -> None:
    """Padding behind a short prompt enters neither state nor convolution."""
    model, prompts = decoder(), [[5, 6, 7, 8, 9, 10, 11, 12], [1, 2], [3], [4, 9, 4, 9, 4]]
    found = generate(model, prompts, max_tokens=7, prefill=prefill, eos=57)
    for prompt, row in zip(prompts, found, strict=True):
        ids = list(prompt)
        for token in row:
            assert token == int(model(torch.tensor([ids]))[0, -1].argmax())
            ids.append(token)


def test_a_cache_that_is_read_out_of_order_is_refused() -> None:
    model = decoder()
    cache = model.new_cache(1, 20)
    model(tokens(1, 8), cache=cache)
    cache.rewind(5)
    with pytest.raises(ValueError, match=r"has read \[8\] tokens of the rows, but the next ones are at \[5\]; it cannot go back"):
        model(tokens(1, 2), cache=cache)
    from forge_models.components.decoder import MTPConfig

    drafting = DecoderConfig(**SIZES, attention=Hybrid(), mtp=MTPConfig()).build()
    with pytest.raises(GenerationError, match="recurrent layers cannot drop rejected drafts"):
        speculate(drafting, [[1, 2]], max_tokens=3)


def test_initial_weights_are_the_published_ones() -> None:
    model = DecoderConfig(**SIZES | {"attention": GDN(key_heads=8, value_heads=512, key_dim=4, value_dim=2)}).build()
    initialize(model)
    layer: Any = model.blocks["0"].attention
    rates = layer.decay.A_log.detach().exp().sort().values
    steps = torch.nn.functional.softplus(layer.decay.dt_bias.detach().double()).log().sort().values
    share = (torch.arange(512) + 0.5) / 512
    assert rates.min() >= 0.01 and rates.max() <= 16 and (rates - 16 * share).abs().max() < 16 * 0.07
    low, high = torch.tensor([1e-3, 0.1]).log()
    assert steps.min() >= low - 1e-5 and steps.max() <= high + 1e-5
    assert (steps - (low + (high - low) * share)).abs().max() < 0.07 * (high - low)
    assert layer.v_conv.weight.abs().max() <= 0.5 and (layer.v_conv.weight.std() - 0.5 / 3**0.5).abs() < 0.02
    assert (layer.norm.weight == 1).all()


@pytest.mark.parametrize(
    ("attention", "says"),
    [
        (Hybrid(kinds=("recurrent",) * 3), "kinds has 3 entries, but the model has 4 layers; give one for each"),
        (Hybrid(kinds=("full",) * 4), "kinds gives every layer full attention; choose attention GQA itself"),
        (Hybrid(full_every=1), "full_every 1 gives every layer full attention"),
        (Hybrid(recurrent=GDN(key_heads=3, value_heads=4)), "key_heads 3 must divide value_heads 4"),
        (GDN(value_heads=6), "key_heads 4 must divide value_heads 6"),
        (Hybrid(full=GQA(nope_layers=(4,))), r"nope_layers \[4\] do not exist"),
    ],
)
def test_settings_that_do_not_fit_are_refused(attention: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        DecoderConfig(**SIZES, attention=attention)


def test_two_ways_to_choose_layers_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="full_every and kinds exclude each other"):
        Hybrid(full_every=2, kinds=("full", "recurrent"))


def test_wrong_keys_of_a_recipe_are_named() -> None:
    from forge_train.recipe.load import load_recipe

    for override, key in (
        ('--model.attention={name = "hybrid", kinds = ["recurrent", "linear"]}', "model.attention.kinds"),
        ('--model.attention={name = "hybrid", recurrent = {name = "gated_delta_net", conv_width = 0}}', "conv_width"),
        ('--model.attention={name = "hybrid", kinds = ["recurrent"]}', "kinds has 1 entries"),
    ):
        with pytest.raises(ForgeError, match=key):
            load_recipe("debug", [override], 1)


def test_layers_are_chosen() -> None:
    kinds = ("recurrent", "full", "full", "recurrent")
    for attention, full in ((Hybrid(), {3}), (Hybrid(full_every=2), {1, 3}), (Hybrid(kinds=kinds), {1, 2})):
        model = DecoderConfig(**SIZES, attention=attention).build()
        found = {int(name) for name, block in model.blocks.items() if not isinstance(block.attention, GatedDeltaNet)}
        assert found == full
    mixed = DecoderConfig(**SIZES, attention=Hybrid(recurrent_norm_placement="pre"), norm_placement="post").build()
    assert [block.attention_norm is not None for block in mixed.blocks.values()] == [True, True, True, False]
    assert [block.attention_post_norm is not None for block in mixed.blocks.values()] == [False, False, False, True]


def test_flops_are_those_of_the_products() -> None:
    """Of a layer: projections, and three products of each head's state with a vector, whatever the length."""
    config = DecoderConfig(**SIZES, attention=Hybrid(recurrent=SHARED_KEYS))
    counts, dense = count_flops(config.shape), count_flops(DecoderConfig(**SIZES).shape)
    projections, state = 32 * (12 + 12 + 20 + 20 + 4 + 4 + 20), 3 * 4 * 6 * 5
    full = 32 * (32 + 16 + 16 + 32)
    for length in (16, 256):
        difference = counts.training(length) - dense.training(length)
        scores = 2 * 32 * length
        assert difference == 3 * 6 * (projections + state - full - scores)
    assert counts.attention == sum(p.numel() for block in config.build().blocks.values() for p in block.attention.parameters())
