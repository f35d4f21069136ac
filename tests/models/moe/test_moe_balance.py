"""Losses, statistics and the bias: by hand, outside of recomputation, once per step, over whatever split of the batch."""

import math
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from forge_core.batch import IGNORE, PADDING
from forge_core.protocols.model import Observer
from forge_models.blocks.moe.layer import ExpertLayer, Totals
from forge_models.blocks.moe.routers import RowIndex
from forge_models.components.experts import MoEConfig, SigmoidTopKConfig, SoftmaxTopKConfig
from forge_models.objectives import CrossEntropy
from forge_models.shape import LAYOUT_DEPENDENT, Losses
from models.moe.test_moe_layer import inputs, layer

NO = torch.zeros(())
SMALL = {"layers": 3, "kv_heads": 2}


def observers(model):
    return [module for module in model.modules() if isinstance(module, Observer)]


def advance(model, skip=NO):
    """What a step does after its last backward, on one process."""
    for module in observers(model):
        module.after_step(module.statistics(), skip)


def train(model, rows, scale=None, **extras):
    """Gradients of the mean loss of one micro-batch; None for `scale` divides by the tokens of the batch."""
    for module in observers(model):
        module.before_step(torch.tensor(1 / rows.numel(), dtype=torch.float64) if scale is None else scale)
    terms = model(rows, labels=rows.roll(-1, 1), objective=CrossEntropy().build(), **extras)
    (terms.sum / terms.tokens).backward()
    return terms


def published(part, x, losses, before=None):
    """Every loss from the formulas of the papers, one scope after the other, as means."""
    probabilities, chosen = [], []
    for row in x:
        routing = part.router(row, None)
        probabilities.append(routing.probabilities)
        chosen.append(torch.nn.functional.one_hot(routing.experts, part.shape.experts).double().sum(1))
    experts, k = part.shape.experts, part.shape.top_k

    def switch(p, c):
        return experts * sum((c[:, i].mean() / k) * p[:, i].mean() for i in range(experts))

    logits = x.flatten(0, 1) @ part.router.weight.T
    found = {
        "sequence": sum(switch(p, c) for p, c in zip(probabilities, chosen, strict=True)) / len(x),
        "micro_batch": switch(torch.cat(probabilities), torch.cat(chosen)),
        "z": (logits.exp().sum(1).log() ** 2).mean(),
    }
    if before is not None:
        found["global_batch"] = experts * sum(
            before[i] / before.sum() * torch.cat(probabilities)[:, i].mean() for i in range(experts)
        )
    return sum(getattr(losses, name) * value for name, value in found.items())


@pytest.mark.parametrize("name", ["sequence", "micro_batch", "global_batch", "z"])
@pytest.mark.parametrize("router", [SoftmaxTopKConfig(), SigmoidTopKConfig()], ids=lambda r: type(r).__name__)
def test_a_loss_and_its_gradient_are_those_of_its_paper(name, router):
    losses = Losses(**{name: 0.37})
    part = layer(MoEConfig(experts=6, top_k=2, router=router, losses=losses))
    x, _ = inputs(3, 7)
    before = None
    if name == "global_batch":
        before = torch.tensor([5, 0, 1, 30, 2, 2])
        part.load.copy_(before)
    part.before_step(torch.tensor(1 / 21, dtype=torch.float64))
    y, counted = part(x)
    # The output's own gradient is zero, so all that arrives is the loss's.
    found = torch.autograd.grad(y, [x, part.router.weight], torch.zeros_like(y))
    expected = published(part, x, losses, before)
    torch.testing.assert_close(Totals.of(counted).loss / 21, expected.detach(), rtol=1e-12, atol=0)
    for one, two in zip(found, torch.autograd.grad(expected, [x, part.router.weight]), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-14)
        assert float(one.abs().max()) > 0


def test_rows_of_other_lengths_are_balanced_one_by_one():
    """Tokens taken out of a batch, as those of a modality are: each row's loss is that of the row alone, padding is in none."""
    part = layer(MoEConfig(experts=6, top_k=2, losses=Losses(sequence=0.37)))
    lengths, (x, _) = [4, 0, 7, 1], inputs(1, 12)
    mask = (torch.arange(12) % 5 > 0).unsqueeze(0)
    rows = RowIndex(torch.repeat_interleave(torch.arange(4), torch.tensor(lengths)), 4)
    y, counted = part(x, mask, None, False, rows)
    (found,) = torch.autograd.grad(y, x, torch.zeros_like(y))
    expected, losses = torch.zeros_like(x), 0.0
    for begin, length in zip((0, 4, 4, 11), lengths, strict=True):
        if length:
            row = x[:, begin : begin + length].detach().requires_grad_()
            y, alone = part(row, mask[:, begin : begin + length])
            expected[:, begin : begin + length] = torch.autograd.grad(y, row, torch.zeros_like(y))[0]
            losses += float(Totals.of(alone).loss)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)
    assert float(Totals.of(counted).loss) == pytest.approx(losses, rel=1e-12)


def test_an_even_load_has_loss_one_a_token_and_all_on_one_as_many_as_experts():
    """The two ends that papers state, for every scope of balance."""
    losses = Losses(micro_batch=1.0)
    part = layer(MoEConfig(experts=4, top_k=1, router=SoftmaxTopKConfig(), losses=losses))
    x = 50 * torch.eye(16, dtype=torch.float64)[:4].repeat(3, 1).unsqueeze(0).requires_grad_()
    with torch.no_grad():
        part.router.weight.zero_()
        part.router.weight[:, :4] = torch.eye(4)
    assert float(Totals.of(part(x)[1]).loss) == pytest.approx(12 * 1, rel=1e-9)
    with torch.no_grad():
        part.router.weight[:, :4] = 0
        part.router.weight[0, :4] = 1
    assert float(Totals.of(part(x)[1]).loss) == pytest.approx(12 * 4, rel=1e-9)


def test_the_layout_changes_the_loss_that_says_so_and_no_other(make):
    """One micro-batch of four rows against four of one row: the same gradients, unless a loss is known to depend on it."""
    rows = torch.randint(97, (4, 12), generator=torch.Generator().manual_seed(2))
    depends = []
    for name in ("sequence", "micro_batch", "global_batch", "pooled", "z"):
        gradients = []
        for size in (4, 1):
            model = make(dtype=torch.float64, moe=MoEConfig(experts=4, losses=Losses(**{name: 0.5})), **SMALL)
            for module in observers(model):
                module.before_step(torch.tensor(1 / rows.numel()))
                if name == "global_batch":
                    module.load.copy_(torch.tensor([1, 9, 2, 4]))
            for part in rows.split(size):
                terms = model(part, labels=part.roll(-1, 1), objective=CrossEntropy().build())
                (terms.sum / rows.numel()).backward()
            gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        if not torch.allclose(*gradients, rtol=1e-9, atol=1e-14):
            depends.append(name)
    assert tuple(depends) == LAYOUT_DEPENDENT


def test_a_loss_stays_in_its_layer_and_out_of_the_terms(make, tokens):
    """What the objective returns is the same with and without; only gradients differ, and those of the router do."""
    rows, found = tokens(2, 9), {}
    for weight in (0.0, 5.0):
        model = make(moe=MoEConfig(experts=4, losses=Losses(micro_batch=weight)), **SMALL)
        found[weight] = train(model, rows).sum.detach(), model.blocks["0"].mlp.router.weight.grad
    assert torch.equal(found[0.0][0], found[5.0][0])
    assert not torch.allclose(found[0.0][1], found[5.0][1])


def test_without_a_step_the_losses_are_sums_like_the_terms(make, tokens):
    """A foreign loop that calls terms.sum.backward() gets the gradient of sum + losses, one weight for both."""
    rows = tokens(2, 9)
    alone = make(dtype=torch.float64, moe=MoEConfig(experts=4, losses=Losses(z=0.1)), **SMALL)
    alone(rows, labels=rows, objective=CrossEntropy().build()).sum.backward()
    stepped = make(dtype=torch.float64, moe=MoEConfig(experts=4, losses=Losses(z=0.1)), **SMALL)
    for module in observers(stepped):
        module.before_step(torch.tensor(1 / 18, dtype=torch.float64))
    (stepped(rows, labels=rows, objective=CrossEntropy().build()).sum / 18).backward()
    for one, two in zip(alone.parameters(), stepped.parameters(), strict=True):
        torch.testing.assert_close(one.grad / 18, two.grad, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_changes_no_statistic_and_no_gradient(make, tokens, reentrant):
    rows, found = tokens(2, 9), []
    moe = MoEConfig(
        experts=4, shared=1, capacity=0.9, router=SigmoidTopKConfig(), losses=Losses(sequence=0.1, micro_batch=0.1, z=0.1)
    )
    for again in (False, True):
        model = make(dtype=torch.float64, moe=moe, **SMALL)
        if again:
            for block in model.blocks.values():
                block.forward = partial(_recomputed, block.forward, reentrant)
        train(model, rows)
        statistics = [module.statistics() for module in observers(model)]
        assert [float(Totals.of(each).tokens) for each in statistics] == [18] * 3
        advance(model)
        found.append([*statistics, *(p.grad for p in model.parameters()), *model.buffers()])
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


def _recomputed(forward, reentrant, *args, **kwargs):
    if reentrant:  # this form takes no keywords
        return checkpoint(lambda *given: forward(*given, **kwargs), *args, use_reentrant=True)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def test_statistics_count_each_token_once_without_padding_but_with_prompts(make, tokens):
    model = make(moe=MoEConfig(experts=4, top_k=2), **SMALL)
    rows = tokens(2, 9)
    documents = torch.zeros(2, 9, dtype=torch.int32)
    documents[0, 5:] = PADDING
    labels = rows.roll(-1, 1)
    labels[1, :4] = IGNORE  # a prompt is read like anything else
    for _ in range(3):
        model(rows, labels=labels, documents=documents, objective=CrossEntropy().build()).sum.backward()
    model.eval()
    model(rows)  # an evaluation between two micro-batches is not counted
    for module in observers(model):
        totals = Totals.of(module.statistics())
        assert float(totals.tokens) == 3 * (9 + 5)
        assert float(totals.load.sum()) == 3 * 2 * 14
        assert float(totals.dropped.sum()) == 0
        assert 0 < float(totals.entropy) / 42 <= math.log(4)
    advance(model)
    assert all(float(module.statistics().abs().sum()) == 0 for module in observers(model))


def test_dropped_slots_are_counted():
    part = layer(MoEConfig(experts=4, top_k=2, capacity=0.5))
    totals = Totals.of(part(inputs(4, 8)[0])[1])
    most = 8  # 0.5 * 64 / 4
    assert torch.equal(totals.dropped, (totals.load - most).clamp(min=0))
    assert float(totals.dropped.sum()) >= 32


def test_entropy_is_ln_of_the_experts_when_nothing_is_preferred():
    part = layer(MoEConfig(experts=8, router=SoftmaxTopKConfig()))
    torch.nn.init.zeros_(part.router.weight)
    assert float(Totals.of(part(inputs()[0])[1]).entropy) == pytest.approx(21 * math.log(8), rel=1e-12)


def test_a_layer_that_saw_nothing_has_statistics_too():
    part = layer(MoEConfig(experts=4, router=SigmoidTopKConfig()))
    before = part.router.bias.clone()
    part.after_step(part.statistics(), NO)
    assert torch.equal(part.router.bias, before)  # no load is an even load


def test_the_bias_moves_by_its_rate_against_the_load():
    part = layer(MoEConfig(experts=4, router=SigmoidTopKConfig(bias_rate=0.25)))
    part.router.bias.zero_()
    totals = torch.zeros(11, dtype=torch.float64)
    totals[:4] = torch.tensor([9, 1, 5, 5])
    part.after_step(totals, NO)
    assert part.router.bias.tolist() == [-0.25, 0.25, 0, 0]
    part.after_step(totals, torch.ones(()))  # a skipped step is no step
    assert part.router.bias.tolist() == [-0.25, 0.25, 0, 0]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("cosine", [0.5 * (1 + math.cos(math.pi * step / 4)) for step in range(4)] + [0, 0]),
        ("warmup", [0.25, 0.5, 0.75, 1, 1, 1]),
    ],
)
def test_the_rate_follows_its_schedule_and_a_resume_goes_on_in_it(schedule, expected):
    def fresh():
        part = layer(MoEConfig(experts=2, top_k=1, router=SigmoidTopKConfig(bias_rate=0.1, bias_schedule=schedule, bias_steps=4)))
        part.router.bias.zero_()
        return part

    part, totals, moved = fresh(), torch.tensor([1.0, 3, 0, 0, 4, 0, 0]).double(), []
    for step in range(6):
        before = part.router.bias.clone()
        part.after_step(totals, torch.tensor(1.0))  # skipped steps do not count in the schedule
        part.after_step(totals, NO)
        moved.append(float((part.router.bias - before)[0]) / 0.1)
        if step == 2:
            other = fresh()
            other.load_state_dict(part.state_dict())
            part = other
    assert moved == pytest.approx(expected, abs=1e-12)


def test_a_skipped_step_leaves_the_loads_for_the_global_loss_alone():
    part = layer(MoEConfig(experts=2, top_k=1, losses=Losses(global_batch=1.0)))
    totals = torch.tensor([1.0, 3, 0, 0, 4, 0, 0]).double()
    part.load.zero_()
    part.after_step(totals, NO)
    part.after_step(2 * totals, torch.ones(()))
    assert part.load.tolist() == [1, 3]
    assert "load" in part.state_dict()


def skewed(part, generator):
    """Tokens that all prefer the same two experts, at first."""
    x = torch.randn(8, 32, 16, generator=generator, dtype=torch.float64)
    x[..., 0] += 3
    return x


def spread(part, generator):
    load = sum(Totals.of(part(skewed(part, generator))[1]).load for _ in range(10))
    return float(load.max() / load.mean())


@pytest.mark.parametrize("by", ["bias", "sequence", "micro_batch", "global_batch"])
def test_the_load_evens_out_on_a_skewed_problem(by):
    router = SigmoidTopKConfig(bias_rate=0.005 if by == "bias" else 0.0)
    losses = Losses() if by == "bias" else Losses(**{by: 1.0})
    part = layer(MoEConfig(experts=8, top_k=2, router=router, losses=losses))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        part.router.bias.zero_()
        part.router.weight.mul_(0.3)
        part.router.weight[:2, 0] = 0.8
    first = spread(part, generator)
    assert first > 2.5  # of at most 4: nearly everyone goes to two of eight experts
    optimizer = torch.optim.SGD([part.router.weight], lr=0.5)
    for _ in range(150):
        x = skewed(part, generator)
        part.before_step(torch.tensor(1 / 256))
        y, counted = part(x)
        part.observe(counted)
        optimizer.zero_grad()
        if by != "bias":
            y.backward(torch.zeros_like(y))
            optimizer.step()
        part.after_step(part.statistics(), NO)
    assert spread(part, generator) < 1.4
    assert isinstance(part, ExpertLayer)
