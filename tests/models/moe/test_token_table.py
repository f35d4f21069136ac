"""Layers whose experts a table of token ids names: against the modules of transformers, with losses, adapters and packing."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4SparseMoeBlock

from forge_core.errors import ForgeError
from forge_core.specs import BLOCK, Init, key_of, philox
from forge_models import initialize
from forge_models.blocks.moe.routers import SigmoidTopK
from forge_models.blocks.moe.token_table import TokenTable
from forge_models.components.attentions import MLA
from forge_models.components.decoder import DecoderConfig, MTPConfig
from forge_models.components.experts import MoEConfig, SigmoidTopKConfig
from forge_models.components.lora import LoRAConfig
from forge_models.hf.families import FAMILIES
from forge_models.hf.families.deepseek import DeepseekV3
from forge_models.hf.family import misfits
from forge_models.hf.names import places_in
from forge_models.objectives import CrossEntropy
from forge_models.shape import Losses, RouterContext
from forge_models.upcycle import _slices
from models.moe.test_moe_layer import SIZES, inputs, layer

ROUTER = SigmoidTopKConfig(scores="sqrt_softplus", scaling=1.5, hash_layers=(0,))
MOE = MoEConfig(experts=8, top_k=3, shared=1, ffn_dim=10, router=ROUTER)
CONTEXT = RouterContext(dim=16, experts=8, top_k=3, layer=0, init_std=1.0, vocab_size=53)


def reference() -> Any:
    sizes = {"num_experts_per_tok": 3, "num_local_experts": 8, "hidden_size": 16, "intermediate_size": 10, "vocab_size": 53}
    config = SimpleNamespace(
        **sizes,
        routed_scaling_factor=1.5,
        scoring_func="sqrtsoftplus",
        hidden_act="silu",
        swiglu_limit=1e9,
        mlp_bias=False,
        mlp_layer_types=["hash_moe"],
        _experts_implementation="eager",
    )
    return DeepseekV4SparseMoeBlock(config, 0).double()


def test_values_and_gradients_are_those_of_deepseek_v4() -> None:
    part, theirs = layer(MOE), reference()
    x, tokens = inputs()
    assert isinstance(part.router, TokenTable)
    named = {
        "gate.weight": part.router.weight,
        "experts.gate_up_proj": torch.cat([part.experts.gate_proj, part.experts.up_proj], 1),
        "experts.down_proj": part.experts.down_proj,
        **{f"shared_experts.{name}.weight": getattr(part.shared, name).weight for name in ("gate_proj", "up_proj", "down_proj")},
    }
    table = {"gate.tid2eid": part.router.table}
    ours, expected = part(x, None, tokens)[0], torch.func.functional_call(theirs, {**named, **table}, (x, tokens))
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
    slope, leaves = torch.randn(ours.shape, dtype=torch.float64), [x, *part.parameters()]
    mine, other = (torch.autograd.grad((y * slope).sum(), leaves) for y in (ours, expected))
    for one, two in zip(mine, other, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-12)
    assert all(bool(gradient.any()) for gradient in mine)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("scores", ["sigmoid", "sqrt_softplus"])
def test_weights_are_the_scores_of_the_named_experts(scores: Any, normalize: bool) -> None:
    settings = SigmoidTopKConfig(scores=scores, normalize=normalize, scaling=0.7, hash_layers=(0,))
    router = layer(replace(MOE, router=settings)).router
    x, tokens = inputs()
    flat, ids = x.flatten(0, 1), tokens.flatten()
    logits = flat @ router.weight.T
    values = logits.sigmoid() if scores == "sigmoid" else logits.exp().log1p().sqrt()
    found = router(flat, ids)
    chosen = torch.stack([value[router.table[token]] for value, token in zip(values, ids.tolist(), strict=True)])
    expected = 0.7 * (chosen / chosen.sum(1, keepdim=True) if normalize else chosen)
    torch.testing.assert_close(found.weights, expected, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(found.probabilities, values / values.sum(1, keepdim=True), rtol=1e-11, atol=1e-12)
    assert torch.equal(found.experts, router.table[ids]) and found.logits is not None


def test_the_table_is_drawn_from_seed_and_name_with_different_experts_of_a_token() -> None:
    """Against a loop that takes elements out of a list, with numpy's stream of the tensor's name."""
    import numpy as np

    config = DecoderConfig(
        **SIZES | {"layers": 2, "vocab_size": 30000}, moe=replace(MOE, router=replace(ROUTER, hash_layers=(0, 1)))
    )
    model = config.build()
    initialize(model, seed=3)
    tables = [model.blocks[name].mlp.router.table for name in "01"]
    assert tables[0].dtype == torch.int64 and BLOCK < 30000 * 3
    blocks = range(30000 * 3 // BLOCK + 1)
    streams = [np.random.Generator(np.random.Philox(**philox(key_of(3, "blocks.1.mlp.router.table"), at))) for at in blocks]
    samples = np.concatenate([stream.random(BLOCK, dtype=np.float32) for stream in streams])[: 30000 * 3].reshape(-1, 3)
    for token in (0, 1, 17, BLOCK // 3, 29999):
        left = list(range(8))
        assert tables[1][token].tolist() == [left.pop(int(sample * len(left))) for sample in samples[token].tolist()]
    for table in tables:
        assert bool((table.sort(1).values.diff(dim=1) > 0).all())
        for column in table.unbind(1):
            counts = torch.bincount(column, minlength=8)
            assert float((counts - 3750).abs().max()) < 5 * (30000 * 7 / 64) ** 0.5
    assert abs(float((tables[0][:, 0] == tables[1][:, 0]).double().mean()) - 1 / 8) < 0.02
    again = config.build()
    initialize(again, seed=4)
    assert not torch.equal(again.blocks["0"].mlp.router.table, tables[0])


def test_the_largest_sample_is_the_last_element() -> None:
    assert Init("choices", choices=3).of(torch.tensor([[1.0, 1.0, 1.0], [-1.0, -1.0, -1.0]])).tolist() == [[2, 1, 0], [0, 1, 2]]
    with pytest.raises(ValueError, match="only choices have a number of choices"):
        Init("zeros", choices=2)
    with pytest.raises(ValueError, match="only choices have a number of choices"):
        Init("choices")


def test_losses_balance_only_layers_that_choose() -> None:
    """A table cannot follow them; the z loss, which keeps logits small, stays."""
    moe = replace(MOE, losses=Losses(sequence=0.3, micro_batch=0.2, global_batch=0.1))
    part = layer(moe)
    x, tokens = inputs()
    part.before_step(torch.ones((), dtype=torch.float64))
    y, statistics = part(x, None, tokens)
    plain = layer(MOE)(x, None, tokens)[0]
    slope = torch.randn(y.shape, dtype=torch.float64)
    mine, other = (torch.autograd.grad((one * slope).sum(), x)[0] for one in (y, plain))
    assert torch.equal(y, plain) and torch.equal(mine, other)
    assert "load" not in part.state_dict() and float(statistics[-1]) == 0
    squeezed = layer(replace(MOE, losses=Losses(z=0.3, global_batch=0.1)))
    logits = x.flatten(0, 1) @ squeezed.router.weight.T
    expected = 0.3 * logits.logsumexp(-1).square().sum()
    assert squeezed(x, None, tokens)[1][-1].item() == pytest.approx(expected.item())
    with pytest.raises(ValueError, match=r"losses\.pooled joins the loads of all layers"):
        replace(MOE, losses=Losses(pooled=0.1))


def test_only_the_named_blocks_have_tables() -> None:
    config = DecoderConfig(**SIZES | {"layers": 5}, moe=replace(MOE, first_dense=1, router=replace(ROUTER, hash_layers=(1, 3))))
    found = {name: type(block.mlp.router) for name, block in config.build().blocks.items() if block.sparse}
    assert found == {"1": TokenTable, "2": SigmoidTopK, "3": TokenTable, "4": SigmoidTopK}
    for wrong in ((0,), (5,)):
        with pytest.raises(ValueError, match=r"moe\.router\.hash_layers \[\d\] are no blocks with experts, of 5 counted from 0"):
            replace(config, moe=replace(config.moe, router=replace(ROUTER, hash_layers=wrong)))
    with pytest.raises(ValueError, match="names a block twice"):
        replace(ROUTER, hash_layers=(1, 1))
    with pytest.raises(ValueError, match="hash_layers does not support n_group"):
        replace(MOE, router=replace(ROUTER, n_group=2))


def test_packed_documents_and_padding_route_by_their_own_tokens() -> None:
    """A row of two documents has the logits of each alone; padding is sent to no expert."""
    model = DecoderConfig(**SIZES | {"layers": 2}, moe=replace(MOE, router=replace(ROUTER, hash_layers=(0, 1)))).build().double()
    initialize(model, seed=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5)
        tokens = torch.randint(53, (1, 11), generator=torch.Generator().manual_seed(0))
        documents = torch.tensor([[0] * 4 + [1] * 5 + [-1] * 2])
        positions = torch.tensor([[*range(4), *range(5), 0, 0]])
        found = model(tokens, documents=documents, positions=positions)
        for start, end in ((0, 4), (4, 9)):
            torch.testing.assert_close(found[:, start:end], model(tokens[:, start:end]), rtol=1e-11, atol=1e-12)
        part = model.blocks["0"].mlp
        part.train()
        mask = documents >= 0
        load = part(torch.randn(1, 11, 16, dtype=torch.float64), mask, tokens)[1][:8]
        expected = torch.bincount(part.router.table[tokens[mask]].flatten(), minlength=8)
    assert load.tolist() == expected.tolist()


def test_a_cache_gives_the_logits_of_the_whole_row() -> None:
    model = DecoderConfig(**SIZES | {"layers": 2}, moe=MOE, mtp=MTPConfig(depth=1)).build().double().eval()
    initialize(model, seed=1)
    tokens = torch.randint(53, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole, cache = model(tokens), model.new_cache(2, 9)
        parts = [model(part, cache=cache) for part in tokens.split([4, 1, 3, 1], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-11, atol=1e-12)


def test_an_adapter_keeps_the_table_in_its_base() -> None:
    config = DecoderConfig(**SIZES, moe=MOE, lora=LoRAConfig(rank=2))
    model = config.build()
    assert {"blocks.0.mlp.router.table", "blocks.0.mlp.router.weight"} <= model.specs().base


def test_the_buffer_keeps_its_integers_in_every_precision_and_gets_no_gradient() -> None:
    model = DecoderConfig(**SIZES, moe=MOE).build()
    initialize(model, seed=1)
    before = model.blocks["0"].mlp.router.table.clone()
    model.to(torch.bfloat16)
    tokens = torch.randint(53, (2, 8))
    model(tokens[:, :-1], labels=tokens[:, 1:], objective=CrossEntropy().build()).sum.backward()
    assert torch.equal(model.blocks["0"].mlp.router.table, before)
    assert "blocks.0.mlp.router.table" in model.state_dict()
    assert bool(model.blocks["0"].mlp.router.weight.grad.any())


def test_tokens_are_needed_and_must_be_in_the_vocabulary() -> None:
    router = layer(MOE).router
    x = torch.randn(2, 16, dtype=torch.float64)
    with pytest.raises(ValueError, match="a table of experts needs token ids"):
        router(x, None)
    with pytest.raises(IndexError):
        router(x, torch.tensor([0, 53]))
    with pytest.raises(ValueError, match="this block processes none"):
        ROUTER.build(replace(CONTEXT, vocab_size=0))
    with pytest.raises(ForgeError, match=r"remove model\.moe\.router\.hash_layers"):
        _slices(MOE.shape(24), 24)


class Tabled(DeepseekV3):
    experts = replace(DeepseekV3.experts, table="gate.tid2eid")


def test_families_carry_the_table_or_refuse_it() -> None:
    router = SigmoidTopKConfig(bias_rate=0.0, hash_layers=(1,))
    sizes = {"dim": 16, "layers": 3, "heads": 4, "vocab_size": 40, "attention": MLA(kv_lora_rank=8)}
    model = DecoderConfig(**sizes, moe=MoEConfig(experts=4, shared=1, ffn_dim=8, first_dense=1, router=router))
    assert any("hash_layers" in told for told in misfits(FAMILIES["deepseek_v3"], model))
    places = places_in(Tabled(), model)
    place = places["blocks.1.mlp.router.table"]
    assert (place.names, place.shape, place.buffer) == (("model.layers.1.mlp.gate.tid2eid",), (40, 2), True)
    assert "blocks.2.mlp.router.bias" in places and "blocks.1.mlp.router.bias" not in places
