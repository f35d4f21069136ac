"""Bidirectional attention: every kernel against an independent loop, packing and padding, and what is refused by name."""

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, flex_attention, sdpa_kernel, varlen
from torch.utils.flop_counter import FlopCounterMode

from forge_core.batch import IGNORE, PADDING, Batch
from forge_core.errors import ConfigError, ForgeError
from forge_core.protocols.model import PositionedTokens
from forge_interp.attention_scores import capture_qk
from forge_models import generation
from forge_models.blocks import attention as module
from forge_models.blocks.attention import LocalAttention, mask
from forge_models.components.attentions import GQA
from forge_models.components.decoder import DecoderConfig, MTPConfig
from forge_models.components.recurrent import Hybrid
from forge_models.flops import count_flops
from forge_models.hf.families import FAMILIES
from forge_models.hf.family import misfits
from forge_models.objectives import CrossEntropy
from forge_parallel.timing.work import Scores
from forge_train.hooks.metrics import keys_met
from forge_train.recipe.load import load_recipe
from forge_vlm.components.model import VLM
from harness.closeness import assert_no_farther

CPU = torch.device("cpu")
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 3], [4, 4, 4, 4, 4, 4, 4, 4, 4]], dtype=torch.int32)
BOTH = {"attention": GQA(causal=False)}


def qkv(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 9, 16, generator=generator, dtype=dtype)
    k, v = torch.randn(2, 2, 2, 9, 16, generator=generator, dtype=dtype)
    return q, k, v


def by_hand(q, k, v, documents, scale: float, soft_cap: float | None = None) -> torch.Tensor:
    """Softmax over all keys of the query's document."""
    out = torch.zeros_like(q)
    for b in range(2):
        for h in range(4):
            for t in range(9):
                keys = [s for s in range(9) if documents is None or documents[b, s] == documents[b, t]]
                scores = k[b, h // 2, keys] @ q[b, h, t] * scale
                scores = scores if soft_cap is None else soft_cap * torch.tanh(scores / soft_cap)
                out[b, h, t] = scores.softmax(0) @ v[b, h // 2, keys]
    return out


@pytest.mark.parametrize("documents", [None, DOCUMENTS])
@pytest.mark.parametrize("soft_cap", [None, 1.5])
def test_sdpa_and_written_out(documents, soft_cap) -> None:
    q, k, v = qkv()
    core = LocalAttention("sdpa", capped=soft_cap is not None, causal=False)
    found = core(q, k, v, core.prepare(documents, 9, None, CPU), 0.7, soft_cap)
    torch.testing.assert_close(found, by_hand(q, k, v, documents, 0.7, soft_cap), rtol=1e-10, atol=1e-12)
    order = torch.tensor([4, 0, 8, 1, 7, 2, 6, 3, 5])  # keys in any order, as ranks that share a row hold them
    keys = PositionedTokens(order, None if documents is None else documents[:, order])
    shared = core.prepare_placed(PositionedTokens(torch.arange(9), documents), keys, None)
    torch.testing.assert_close(core(q, k[:, :, order], v[:, :, order], shared, 0.7, soft_cap), found, rtol=1e-10, atol=1e-12)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("documents", [None, DOCUMENTS])
def test_flex(monkeypatch, documents) -> None:
    monkeypatch.setattr(module, "_compiled", lambda name: getattr(flex_attention, name))
    q, k, v = qkv(torch.float32)
    places = torch.arange(9)
    with torch.compiler.set_stance("force_eager"), torch.no_grad():
        whole = module.block_mask(documents, 9, None, CPU, causal=False)
        placed = module.placed_block_mask(PositionedTokens(places, documents), PositionedTokens(places, documents), None, False)
        for blocks in (whole, placed):
            found = LocalAttention("flex", causal=False)(q, k, v, blocks, 0.7)
            wanted = by_hand(q.double(), k.double(), v.double(), documents, 0.7)
            assert_no_farther(found, by_hand(q, k, v, documents, 0.7), wanted)


@pytest.mark.parametrize("documents", [None, DOCUMENTS])
def test_variable_length_kernels_get_a_window_without_ends(monkeypatch, documents) -> None:
    given = {}

    def kernel(q, k, v, starts, *_, window_size, scale, **__):
        given.update(window=window_size)
        parts = [
            F.scaled_dot_product_attention(
                *(x[a:b].transpose(0, 1) for x in (q, k, v)), scale=scale, enable_gqa=q.shape[1] != k.shape[1]
            ).transpose(0, 1)
            for a, b in zip(starts.tolist(), starts.tolist()[1:], strict=False)
        ]
        return torch.cat(parts)

    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    q, k, v = qkv()
    shared = module.boundaries(documents, 9, None, CPU, causal=False)
    found = LocalAttention("varlen", causal=False)(q, k, v, shared, 0.7)
    torch.testing.assert_close(found, by_hand(q, k, v, documents, 0.7), rtol=1e-10, atol=1e-12)
    assert given["window"] == (-1, -1)


@pytest.mark.parametrize("causal", [False, True])
def test_every_kernel_of_a_gpu_is_told(monkeypatch, causal) -> None:
    for name in ("has_flex", "takes_lengths", "is_hopper"):
        monkeypatch.setattr(module.accelerator, name, lambda *_: True)
    for name in ("block_mask", "placed_block_mask"):
        monkeypatch.setattr(module, name, lambda *given: given[-1])
    row = PositionedTokens(torch.arange(9), DOCUMENTS)
    flex = LocalAttention("flex", causal=causal)
    assert flex.prepare(DOCUMENTS, 9, None, CPU) is flex.prepare_placed(row, row, None) is causal
    starts, x = torch.tensor([0, 3, 7, 8, 9, 18], dtype=torch.int32), torch.zeros(1, dtype=torch.bfloat16)
    for kind in ("varlen", "auto"):
        core = LocalAttention(kind, width=16, causal=causal)
        assert core.prepare_packed(DOCUMENTS, starts, 9, None, x).causal is causal
    assert LocalAttention("varlen", causal=causal).prepare(DOCUMENTS, 9, None, CPU).causal is causal
    assert LocalAttention("auto", causal=causal).prepare(None, 9, None, CPU).causal is causal


def test_the_order_of_kernels_of_a_gpu_hides_nothing(monkeypatch) -> None:
    monkeypatch.setattr(module.accelerator, "is_hopper", lambda _: True)
    assert module.whole_rows(CPU, causal=True).causal and not module.whole_rows(CPU, causal=False).causal
    q, k, v = qkv()
    order = module.KernelOrder((SDPBackend.MATH,), causal=False)
    found = LocalAttention("sdpa", causal=False)(q, k, v, order, 0.7)
    torch.testing.assert_close(found, by_hand(q, k, v, None, 0.7), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_packed_documents_have_the_gradients_of_documents_alone(make, tokens, soft_cap) -> None:
    model = make(dtype=torch.float64, spread=8.0, attention=GQA(causal=False, soft_cap=soft_cap))
    one, two = tokens(1, 6), tokens(1, 9, seed=2)
    labels = [tokens(1, length, seed=5).index_fill(1, torch.tensor([1, 3]), IGNORE) for length in (6, 9)]
    objective, wanted, total = CrossEntropy(), None, 0.0
    for row, label in zip((one, two), labels, strict=True):
        terms = model(row, labels=label, objective=objective)
        found = torch.autograd.grad(terms.sum, list(model.parameters()))
        wanted = found if wanted is None else [a + b for a, b in zip(wanted, found, strict=True)]
        total += terms.sum.item()
    padding = torch.zeros(1, 3, dtype=torch.int64)
    packed = torch.cat((one, two, padding), 1)
    documents = torch.tensor([[0] * 6 + [1] * 9 + [PADDING] * 3], dtype=torch.int32)
    positions = torch.tensor([[*range(6), *range(9), *range(3)]], dtype=torch.int32)
    terms = model(
        packed,
        positions=positions,
        documents=documents,
        labels=torch.cat((*labels, padding.fill_(IGNORE)), 1),
        objective=objective,
    )
    assert terms.sum.item() == pytest.approx(total, rel=1e-12)
    for name, ours, theirs in zip(
        dict(model.named_parameters()), torch.autograd.grad(terms.sum, list(model.parameters())), wanted, strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")


def test_padding_without_documents_is_not_seen(make, tokens) -> None:
    model = make(dtype=torch.float64, spread=8.0, **BOTH)
    row = tokens(1, 7)
    padded = torch.cat((row, tokens(1, 4, seed=3)), 1)
    token_mask = torch.arange(11)[None] < 7
    with torch.no_grad():
        found = model(padded, token_mask=token_mask)[:, :7]
        torch.testing.assert_close(found, model(row), rtol=1e-12, atol=1e-12)
        assert not torch.allclose(found, model(padded)[:, :7])
        with capture_qk(model) as kept:
            model(padded, token_mask=token_mask)
        pattern = kept.pattern(0)
    assert bool((pattern[0, :, :7, 7:] == 0).all()) and bool((pattern[0, :, :7, :7] > 0).all())
    torch.testing.assert_close(pattern.sum(-1), torch.ones_like(pattern.sum(-1)))


def test_every_token_sees_every_token(make, tokens) -> None:
    model, x = make(dtype=torch.float64, spread=8.0, **BOTH), tokens(1, 8)
    other = x.clone()
    other[0, 7] = (x[0, 7] + 1) % 97
    assert bool((model(x) != model(other)).any(-1).all())
    assert torch.equal(mask(None, 3, None, CPU, causal=False)[0, 0], torch.ones(3, 3, dtype=torch.bool))


def test_counts_equal_those_of_torch_and_a_causal_count_is_the_square(make, tokens) -> None:
    model, rows = make(**BOTH), tokens(2, 13)
    counts = count_flops(model.shape)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(rows[:, :-1], labels=rows[:, 1:], objective=CrossEntropy()).sum.backward()
    assert counter.get_total_flops() == counts.training(12) * 2 * 12 == counts.training(12, causal=True) * 2 * 12
    causal = count_flops(make().shape)
    assert causal.training(12, causal=True) < causal.training(12) == counts.training(12)
    assert Scores(8.0, causal=False).keys(12) == 12 and Scores(8.0).keys(12) == 6.5


def test_keys_are_those_of_whole_documents() -> None:
    documents = torch.tensor([[0, 0, 0, 1, 1, PADDING], [0, 0, 1, 1, 1, 1]], dtype=torch.int32)
    tokens = torch.zeros(2, 6, dtype=torch.int64)
    packed = Batch(tokens, tokens, torch.zeros(2, 6, dtype=torch.int32), documents)
    assert keys_met([packed], 6, None, causal=False) == (9 + 4 + 4 + 16) / 11
    padded = Batch(tokens, tokens, token_mask=torch.arange(6)[None] < torch.tensor([[4], [6]]))
    assert keys_met([padded], 6, None, causal=False) == (16 + 36) / 10
    assert keys_met([Batch(tokens, tokens)], 6, None, causal=False) == 6


def test_caches_and_generation_are_refused(make, tokens) -> None:
    model, causal = make(**BOTH), make()
    with pytest.raises(ForgeError, match=r"model\.attention\.causal = false.*use a causal model"):
        model.new_cache(1, 8)
    with pytest.raises(ValueError, match=r"model\.attention\.causal = false: a cache"):
        model(tokens(1, 4), cache=causal.new_cache(1, 8))
    with pytest.raises(generation.GenerationError, match=r"model\.attention\.causal = false"):
        list(generation.generate(model, [[1, 2]], max_tokens=1))


def test_keys_that_do_not_go_together_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="causal = false does not support a window"):
        GQA(causal=False, window=4)
    with pytest.raises(ValueError, match=r"full\.causal = false does not go with recurrent layers"):
        Hybrid(full=GQA(causal=False))
    with pytest.raises(ValueError, match=r"attention\.causal = false does not support \[model\.mtp\]"):
        DecoderConfig(dim=32, heads=4, mtp=MTPConfig(), **BOTH)
    with pytest.raises(ValueError, match=r"'vlm' does not support attention\.causal = false"):
        VLM(dim=32, heads=4, image_token=5, **BOTH)


def test_a_family_of_causal_models_does_not_hold_it() -> None:
    (said,) = misfits(FAMILIES["llama"], DecoderConfig(dim=32, heads=4, layers=2, **BOTH))
    assert "causal=False" in said


@pytest.mark.parametrize(
    ("given", "world", "key", "what"),
    [
        ([], 1, "model.attention.causal", "= false lets a token see the next one, which objective CrossEntropy predicts"),
        (["--objective.name=distillation", "--objective.teacher=runs/x"], 1, "model.attention.causal", "Distillation predicts"),
        (["--objective.name=dpo"], 1, "model.attention.causal", "DPO predicts"),
        (["--hooks=[{name='sample'}]"], 1, "hooks.0.name", "sample generates text"),
        (["--parallel.cp=2", "--transforms.context.kind=ring"], 2, "transforms.context.kind", "supports causal attention only"),
    ],
)
def test_recipes_are_refused_by_name(given: list[str], world: int, key: str, what: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_recipe("debug", ["--model.attention.name=gqa", "--model.attention.causal=false", *given], world)
    assert any(fault.key == key and what.lower() in fault.message.lower() for fault in error.value.faults), error.value.faults
