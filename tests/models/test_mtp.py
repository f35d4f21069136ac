"""Multi-token prediction against formulas written in plain torch, document by document, and against the model without it."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from forge_core.batch import IGNORE, PADDING, Batch, MTPTargets
from forge_models.blocks.block import MTPModules
from forge_models.components.attentions import GQA
from forge_models.components.decoder import DecoderConfig, MTPConfig
from forge_models.components.experts import HashConfig, MoEConfig, SigmoidTopKConfig
from forge_models.flops import count_flops
from forge_models.inner_values import listening
from forge_models.objectives import CrossEntropy

LENGTHS = ((5, 1, 2, 8), (16,), (3, 4, 9))
"""Tokens of the documents in each row of 16; the last one of a row goes on behind it, but for the second row."""


def packed(seed=3, vocab=97):
    """A batch of `LENGTHS`, made token by token, and per row its documents as lists of ids, the one behind the row included."""
    generator = torch.Generator().manual_seed(seed)
    rows, batch = [], {"tokens": [], "labels": [], "positions": [], "documents": []}
    for number, lengths in enumerate(LENGTHS):
        made = {name: [] for name in batch}
        documents = []
        for index, length in enumerate(lengths):
            goes_on = index == len(lengths) - 1 and number != 1
            ids = torch.randint(vocab, (length + goes_on,), generator=generator).tolist()
            documents.append((ids, length))
            made["tokens"] += ids[:length]
            made["labels"] += (ids[1:] + [IGNORE])[:length]
            made["positions"] += range(length)
            made["documents"] += [index] * length
        rows.append(documents)
        for name, values in made.items():
            batch[name].append(values)
    tensors = {name: torch.tensor(values) for name, values in batch.items()}
    return Batch(**tensors), rows


def norm(x, weight):
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight


def turned(x):
    """Rotary positions of (T, heads, width), half-split; angles in fp32."""
    width = x.shape[-1]
    frequency = 1.0 / 10000 ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    angle = torch.outer(torch.arange(len(x), dtype=torch.float32), frequency)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def block(x, w):
    """One layer on a single document (T, dim); 4 query heads of width 8 share 2 key-value heads."""
    y = norm(x, w["attention_norm.weight"])
    q, k, v = (
        (y @ w[f"attention.{name}_proj.weight"].T).unflatten(-1, (heads, 8)) for name, heads in (("q", 4), ("k", 2), ("v", 2))
    )
    k, v = (part.repeat_interleave(2, 1) for part in (turned(k), v))
    scores = torch.einsum("thd,shd->hts", turned(q), k) / 8**0.5
    scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf)
    x = x + torch.einsum("hts,shd->thd", scores.softmax(-1), v).flatten(1) @ w["attention.o_proj.weight"].T
    y = norm(x, w["mlp_norm.weight"])
    gate, up = y @ w["mlp.gate_proj.weight"].T, y @ w["mlp.up_proj.weight"].T
    return x + (F.silu(gate) * up) @ w["mlp.down_proj.weight"].T


def under(w, path):
    return {name.removeprefix(f"{path}."): value for name, value in w.items() if name.startswith(f"{path}.")}


def by_hand(w, rows, depth):
    """Sums over all documents of the negative log-likelihood of the next token and of each MTP module, from weights by name."""
    table, head = w["embed.weight"], w.get("head.weight", w["embed.weight"])
    sums, counts = [0.0] * (depth + 1), [0] * (depth + 1)
    for ids, length in (document for row in rows for document in row):
        x = table[ids[:length]]
        for layer in range(2):
            x = block(x, under(w, f"blocks.{layer}"))
        for k in range(depth + 1):
            if k:  # places of the row that have a token k further on in their document
                own = under(w, f"mtp.depths.{k}")
                x, tokens = x[: length - k], ids[k:length]
                if not tokens:
                    break
                pair = torch.cat((norm(x, own["stream_norm.weight"]), norm(table[tokens], own["token_norm.weight"])), -1)
                x = block(pair @ own["projection.weight"].T, under(own, "block"))
            labels = torch.tensor(ids[k + 1 :], dtype=torch.int64)
            hidden = norm(x[: len(labels)], w["norm.weight"] if k == 0 else own["norm.weight"])
            sums[k] = sums[k] + F.cross_entropy(hidden @ head.T, labels, reduction="sum") if len(labels) else sums[k]
            counts[k] += len(labels)
    return sums, counts


def scored(model, batch, mtp_targets=True):
    batch = batch.with_mtp_targets(model.specs().mtp_depth if mtp_targets else 0)
    extra = {} if batch.mtp_targets is None else {"mtp_targets": batch.mtp_targets}
    fields = {"positions": batch.positions, "documents": batch.documents, "labels": batch.labels}
    return model(batch.tokens, **fields, objective=CrossEntropy().build(), **extra)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_loss_and_gradients_equal_the_formulas(make, depth, tied):
    model = make(spread=5.0, dtype=torch.float64, tied_embeddings=tied, mtp=MTPConfig(depth=depth, weight=0.7))
    with torch.no_grad():  # no norm is like another
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(parameter))) * 0.3)
    batch, rows = packed()
    terms = scored(model, batch)
    terms.sum.backward()
    weights = {name: value.detach().clone().requires_grad_() for name, value in model.named_parameters()}
    sums, counts = by_hand(weights, rows, depth)
    (sums[0] + 0.7 / depth * sum(sums[1:])).backward()
    assert int(terms.tokens) == counts[0] == 42
    torch.testing.assert_close(terms.sum, sums[0], rtol=1e-12, atol=0)  # the value is that of the next token alone
    torch.testing.assert_close(terms.rows.sum(), sums[0], rtol=1e-12, atol=0)
    for k in range(1, depth + 1):
        torch.testing.assert_close(terms.metrics[f"mtp_{k}"], sums[k].detach(), rtol=1e-12, atol=0)
    assert (batch.with_mtp_targets(depth).mtp_targets.labels != IGNORE).sum((0, 1)).tolist() == counts[1:]
    for name, parameter in model.named_parameters():
        scale = float(weights[name].grad.abs().max())
        assert scale > 0, name
        torch.testing.assert_close(parameter.grad, weights[name].grad, rtol=0, atol=1e-10 * scale, msg=name)


def test_rows_that_do_not_tell_their_documents_have_the_same_labels():
    batch, _ = packed()
    told = batch.with_mtp_targets(3).mtp_targets
    untold = Batch(batch.tokens, batch.labels).with_mtp_targets(3).mtp_targets
    assert torch.equal(told.labels, untold.labels)
    assert not torch.equal(told.tokens, untold.tokens)  # without a border tokens of the next document are read, and score nothing


def test_what_lies_beyond_a_document_or_its_end_changes_nothing(make):
    model = make(spread=5.0, dtype=torch.float64, mtp=MTPConfig(depth=2))
    batch, _ = packed()
    losses = []
    for offset in (0, 13):
        tokens = batch.tokens.clone()
        tokens[2, 3:7] = (tokens[2, 3:7] + offset) % 97  # the second document of the third row
        labels = batch.labels.clone()
        labels[2, 3:7] = IGNORE
        changed = Batch(tokens, labels, batch.positions, batch.documents)
        losses.append(scored(model, changed).metrics["mtp_2"])
    assert torch.equal(*losses)


def test_a_masked_label_ends_the_chain_that_reaches_it():
    labels = torch.tensor([[IGNORE, 2, 3, IGNORE, 5, 6]])
    mtp_targets = Batch(torch.tensor([[0, 1, 2, 3, 4, 5]]), labels).with_mtp_targets(2).mtp_targets
    assert mtp_targets.labels[0, :, 0].tolist() == [IGNORE, 3, IGNORE, IGNORE, 6, IGNORE]
    assert mtp_targets.labels[0, :, 1].tolist() == [IGNORE] * 6
    assert mtp_targets.tokens[0, :, 1].tolist() == [2, 3, 4, 5, IGNORE, IGNORE]


def test_rows_shorter_than_the_depth_have_no_label():
    mtp_targets = Batch(torch.tensor([[7, 8]]), torch.tensor([[8, 9]])).with_mtp_targets(3).mtp_targets
    assert mtp_targets.labels.tolist() == [[[9, IGNORE, IGNORE], [IGNORE] * 3]]
    assert mtp_targets.tokens.tolist() == [[[8, IGNORE, IGNORE], [IGNORE] * 3]]


def test_the_value_is_that_of_the_model_without_the_modules(make):
    """In training, in evaluation, and as logits: bit by bit."""
    batch, _ = packed()
    plain, more = make(spread=5.0), make(spread=5.0, mtp=MTPConfig(depth=2))
    more.load_state_dict(plain.state_dict() | {"mtp.embed.weight": plain.embed.weight}, strict=False)
    assert torch.equal(plain(batch.tokens), more(batch.tokens))
    for mtp_targets in (False, True):
        assert torch.equal(scored(plain, batch).sum, scored(more, batch, mtp_targets).sum)
    scored(more, batch, mtp_targets=False).sum.backward()
    assert more.mtp.depths["1"].projection.weight.grad is None


def test_the_weight_follows_its_schedule(make):
    class Halved:
        def build(self, steps):
            assert steps == 10
            return lambda step: 1.0 if step < 5 else 0.5

    model = make(dtype=torch.float64, mtp=MTPConfig(weight=0.6, schedule=Halved()))
    batch, _ = packed()

    def gradient(step):
        model.zero_grad()
        model.at_step(step, 10)
        scored(model, batch).sum.backward()
        return model.mtp.depths["1"].projection.weight.grad.clone()

    torch.testing.assert_close(gradient(4), 2 * gradient(5), rtol=1e-12, atol=0)
    assert model.mtp.weight == 0.3


EXPERTS = {
    "softmax": MoEConfig(experts=4, ffn_dim=24),
    "shared_sigmoid": MoEConfig(experts=5, top_k=2, shared=1, ffn_dim=24, first_dense=1, router=SigmoidTopKConfig()),
    "hash": MoEConfig(experts=4, top_k=1, ffn_dim=24, every=2, router=HashConfig()),
}


@torch.no_grad()
@pytest.mark.parametrize("name", EXPERTS)
def test_modules_have_experts_as_the_layers_would_go_on(make, name):
    """Every document alone, module by module, with blocks as black boxes."""
    model = make(spread=5.0, dtype=torch.float64, moe=EXPERTS[name], mtp=MTPConfig(depth=2))
    blocks = [depth.block for depth in model.mtp.depths.values()]
    assert [one.sparse for one in blocks] == [model.shape.moe.has(layer) for layer in (2, 3)]
    batch, rows = packed()
    terms = scored(model, batch)
    expected, seen = [0.0, 0.0], [0, 0]
    streams = {}
    for ids, length in (document for row in rows for document in row):
        tokens = torch.tensor([ids[:length]])
        with listening(lambda where, value: streams.update({where: value})):
            model(tokens)
        x = streams["residual"]
        for k, depth in enumerate(model.mtp.depths.values(), 1):
            here = torch.tensor([ids[k:length]], dtype=torch.int64)
            seen[k - 1] += here.shape[1]
            x = x[:, : length - k]
            if not here.shape[1]:
                break
            attention = depth.block.attention
            turn = attention.rotary(torch.arange(here.shape[1]))
            routed = {"token_mask": torch.ones_like(here, dtype=torch.bool), "tokens": here} if depth.block.sparse else {}
            x, hidden, *_ = depth(x, model.embed(here), turn, None, **routed)
            labels = torch.tensor(ids[k + 1 :], dtype=torch.int64)
            logits = hidden[0, : len(labels)] @ model.head.weight.T
            expected[k - 1] += float(F.cross_entropy(logits, labels, reduction="sum")) if len(labels) else 0.0
    for k, total in enumerate(expected, 1):
        assert float(terms.metrics[f"mtp_{k}"]) == pytest.approx(total, rel=1e-12)
    counted = [one.mlp._router_stats[2 * one.mlp.shape.experts] for one in blocks if one.sparse]
    # The listening forwards above ran the layers again, not the modules' own sums: a place without a token counts nowhere.
    assert [int(count) for count in counted] == [seen[k] for k in range(2) if blocks[k].sparse]


def test_padding_reaches_no_expert_and_no_label(make):
    model = make(moe=EXPERTS["softmax"], mtp=MTPConfig(depth=1))
    batch, _ = packed()
    documents = batch.documents.clone()
    documents[1, 8:] = PADDING
    labels = batch.labels.clone()
    labels[1, 7:] = IGNORE
    scored(model, Batch(batch.tokens, labels, batch.positions, documents))
    layer = model.mtp.depths["1"].block.mlp
    assert int(layer._router_stats[2 * 4]) == (4 + 0 + 1 + 7) + 7 + (2 + 3 + 8)


def test_blocks_go_on_with_the_pattern_of_windows():
    config = DecoderConfig(
        dim=32, layers=3, heads=4, vocab_size=97, attention=GQA(window=4, global_every=2), mtp=MTPConfig(depth=2)
    )
    found = [depth.block.attention.window for depth in config.build().mtp.depths.values()]
    assert found == [None, 4]


def test_specs_name_everything_once(make):
    for tied in (False, True):
        model = make(tied_embeddings=tied, mtp=MTPConfig(depth=2))
        specs = model.specs()
        assert specs.tensors.keys() == dict(model.named_parameters()).keys()
        assert specs.ties == {"mtp.embed.weight": "embed.weight"} | ({"head.weight": "embed.weight"} if tied else {})
        assert specs.mtp_depth == 2
        assert specs.blocks[-2:] == ("mtp.depths.1", "mtp.depths.2")
        assert specs.exit == ("norm", "head", "mtp")
    assert make().specs().mtp_depth == 0
    assert isinstance(model.mtp, MTPModules)


def test_labels_that_nobody_asked_for_are_refused(make):
    batch, _ = packed()
    mtp_targets = batch.with_mtp_targets(1).mtp_targets
    with pytest.raises(ValueError, match=r"\[model.mtp\]"):
        make()(batch.tokens, labels=batch.labels, objective=CrossEntropy().build(), mtp_targets=mtp_targets)
    with pytest.raises(ValueError, match="objective"):
        make(mtp=MTPConfig())(batch.tokens, mtp_targets=mtp_targets)


COUNTED = [
    {"mtp": MTPConfig(depth=2)},
    {"mtp": MTPConfig(), "tied_embeddings": True, "norm_placement": "sandwich"},
    {"mtp": MTPConfig(depth=2), "moe": MoEConfig(experts=4, shared=1, ffn_dim=24, every=2, kernel="loop")},
]


@pytest.mark.parametrize("fields", COUNTED)
def test_counts_equal_torchs_counter_and_the_model(make, tokens, fields):
    model = make(**fields)
    counts = count_flops(model.shape)
    assert counts.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert counts.mtp == sum(parameter.numel() for parameter in model.mtp.depths.parameters())
    model.requires_grad_()
    rows = tokens(2, 13)
    batch = Batch(rows[:, :-1], rows[:, 1:])
    mtp_targets = batch.with_mtp_targets(model.shape.mtp_depth).mtp_targets
    # As if every place had a token at each depth: what a module skips for want of one is the only thing that is not counted.
    filled = MTPTargets(mtp_targets.tokens.clamp(min=0), mtp_targets.labels)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        terms = model(batch.tokens, labels=batch.labels, objective=CrossEntropy().build(), mtp_targets=filled)
        terms.sum.backward()
    assert counter.get_total_flops() == counts.training(12) * 2 * 12
    plain = count_flops(replace(model.shape, mtp_depth=0))
    assert counts.forward(12) == plain.forward(12)
    assert counts.parameters - plain.parameters == counts.mtp
