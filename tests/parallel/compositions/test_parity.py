"""Layouts against one process, and one process against a loop in plain torch."""

from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F

from forge_core.batch import Batch
from forge_core.layout import Layout
from forge_models.components.decoder import DecoderConfig
from forge_parallel.model.plan import Plan
from forge_parallel.optim.optimizers import AdamWConfig
from forge_parallel.transforms.shard import FullyShard
from forge_parallel.verify.parity import Case, Measurement, compare, measure, synthetic, within_rounding
from harness.pool import World
from harness.siblings import fast
from parallel.compositions.rows import case_of, measured
from parallel.one_process import alone
from parallel.tiny import VOCAB, TiedTiny, Tiny, cross_entropy

CPU = torch.device("cpu")
DECODER = DecoderConfig(dim=16, layers=2, heads=4, kv_heads=2, ffn_dim=24, vocab_size=VOCAB, max_length=32, tied_embeddings=True)
CASE = Case(Tiny, cross_entropy, AdamWConfig(lr=1e-2).build, VOCAB, rows=8, micro_batch=1, steps=3)


def _measure(case: Case, layout: str, reduce: Literal["last", "each"] = "last") -> Measurement:
    return measure(case, Plan.of([FullyShard(reduce=reduce)], Layout.parse(layout)), CPU)


def _plain_torch(case: Case) -> Measurement:
    """The same training written with nothing of ours: whole batch at once, torch's loss, clipping and AdamW."""
    start = _measure(replace(case, steps=0), "1").initial
    module: Any = case.build().to(torch.float64)
    with torch.no_grad():
        module.scale.fill_(1.0)
        for name, parameter in module.named_parameters():
            parameter.copy_(start[name])
    decayed = [p for n, p in module.named_parameters() if p.dim() == 2 and not n.startswith("embed")]
    others = [p for n, p in module.named_parameters() if p.dim() != 2 or n.startswith("embed")]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, foreach=False, fused=False)
    losses, norms, tokens, by_source, gradients = [], [], [], [], {}
    for step in range(case.steps):
        batch = synthetic(case, step)
        logits = module(batch.tokens, positions=batch.positions, documents=batch.documents)
        loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=-100)
        loss.backward()
        if step == 0:
            gradients = {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
        norms.append(float(torch.nn.utils.clip_grad_norm_(module.parameters(), case.grad_clip)))
        losses.append(loss.item())
        tokens.append(float((batch.labels != -100).sum()))
        by_source.append(_by_source(batch, logits))
        optimizer.step()
        optimizer.zero_grad()
    weights = {n: p.detach().clone() for n, p in module.named_parameters()}
    return Measurement(losses, norms, tokens, start, gradients, weights, by_source)


def _by_source(batch: Batch, logits: torch.Tensor) -> dict[str, float]:
    """torch's mean loss over the rows of each source that have a label; the first rows, of source "silent", have none."""
    assert batch.sources is not None
    found: dict[str, float] = {}
    for number, name in enumerate(batch.sources.names):
        own = [row for row, source in enumerate(batch.sources.rows.tolist()) if source == number]
        labels = batch.labels[own].flatten()
        if tokens := int((labels != -100).sum()):
            found[f"source/{name}/loss"] = F.cross_entropy(logits[own].flatten(0, 1), labels, ignore_index=-100).item()
            found[f"source/{name}/tokens"] = tokens
    assert list(found) == [f"source/{name}/{what}" for name in ("even", "odd") for what in ("loss", "tokens")]
    return found


@pytest.mark.parametrize("build", [Tiny, TiedTiny])
@pytest.mark.parametrize("micro_batch", [1, 2, 8])
def test_one_process_equals_plain_torch(build: type[Tiny], micro_batch: int) -> None:
    case = replace(CASE, build=build, micro_batch=micro_batch)
    expected = _plain_torch(case)
    difference = compare(expected, _measure(case, "1"))
    assert difference.accepted("fp64"), difference
    assert min(expected.norm) > case.grad_clip, "clipping must have something to do"


LAYOUTS = ["dp2", "dp4", "hsdp2x1", "hsdp2x2", "hsdp4x1"]


@pytest.mark.parametrize("layout", fast("dp2", "hsdp2x2", "hsdp4x1", of=LAYOUTS))
@pytest.mark.parametrize(("build", "micro_batch"), [(Tiny, 1), (TiedTiny, 2)])
def test_a_layout_equals_one_process(world: World, layout: str, build: type[Tiny], micro_batch: int) -> None:
    case = replace(CASE, build=build, micro_batch=micro_batch)
    reference = alone(_measure, case, "1")
    for found in world.run(_measure, Layout.parse(layout).world, case, layout):
        difference = compare(reference, found)
        assert difference.accepted("fp64"), difference
    assert reference.tokens[0] > 0


@pytest.mark.parametrize("layout", ["dp4", "hsdp2x2"])
def test_fp32_is_held_to_its_own_tolerance(world: World, layout: str) -> None:
    case = replace(CASE, compute="fp32", state="fp32", steps=1)
    reference = _measure(case, "1")
    for found in world.run(_measure, 4, case, layout):
        difference = compare(reference, found)
        assert difference.accepted("fp32"), difference


def test_the_gate_sees_a_wrong_divisor(world: World) -> None:
    """The gate must not be blind: FSDP's own division, which is off in `shard`, is an error of a factor of two."""
    difference = compare(_measure(CASE, "1"), world.run(_averaging, 2, CASE)[0])
    assert not difference.accepted("fp64")
    assert difference.gradients == pytest.approx(0.5, rel=1e-6)


def _slightly_off(*arguments: Any) -> Any:
    """The objective with a value that is too large by 1e-8 of itself; its gradients are right."""
    terms = cross_entropy(*arguments)
    return terms._replace(sum=terms.sum + 1e-8 * terms.sum.detach())


@pytest.mark.parametrize("layout", ["1", "dp2"])
def test_e11_a_loss_that_is_off_by_one_in_a_hundred_million_is_caught(world: World, layout: str) -> None:
    reference, case = alone(_measure, CASE, "1"), replace(CASE, objective=_slightly_off)
    for found in world.run(_measure, Layout.parse(layout).world, case, layout):
        difference = compare(reference, found)
        assert difference.loss == pytest.approx(1e-8, rel=1e-4)
        assert max(difference.norm, difference.gradients, difference.weights) <= 1e-10
        assert not difference.accepted("fp64")


@pytest.mark.parametrize("field", ["loss", "norm", "by_source"])
def test_e11_every_number_of_a_step_is_compared_in_fp64(field: str) -> None:
    def off(value: Any) -> Any:
        return {key: off(inner) for key, inner in value.items()} if isinstance(value, dict) else value * (1 + 1e-9)

    reference = alone(_measure, CASE, "1")
    found = replace(reference, **{field: [off(value) for value in getattr(reference, field)]})
    assert not compare(reference, found).accepted("fp64")
    assert compare(reference, found).accepted("fp32")


def _averaging(case: Case) -> Measurement:
    def mean(self: FSDPModule, factor: float) -> None:
        original(self, 2 * factor)

    original = FSDPModule.set_gradient_divide_factor
    FSDPModule.set_gradient_divide_factor = mean  # type: ignore[method-assign]
    try:
        return _measure(case, "dp2")
    finally:
        FSDPModule.set_gradient_divide_factor = original  # type: ignore[method-assign]


def test_trials_c8_the_rounding_of_float8_is_the_bound_and_hides_no_wrong_sum() -> None:
    """What rounding moved sets how far a layout may be; a gradient that is made twice, left out or of other tokens is farther."""
    row = frozenset({"float8", "float8_experts", "experts"})
    case = replace(case_of(row), compute="fp32", state="fp32", steps=2)
    exact, rounded = measured(case, "1", frozenset({"experts"})), measured(case, "1", row)
    assert not compare(exact, rounded).accepted("fp32")
    assert within_rounding(exact, rounded, rounded)
    noise = {name: gradient * (1 + 1e-6) for name, gradient in rounded.gradients.items()}
    assert within_rounding(exact, rounded, replace(rounded, gradients=noise))
    assert not within_rounding(exact, rounded, replace(rounded, tokens=[tokens + 1 for tokens in rounded.tokens]))
    for wrong in (0.0, 0.5, 2.0, float("nan")):
        for name, gradient in rounded.gradients.items():
            changed = replace(rounded, gradients={**rounded.gradients, name: gradient * wrong})
            assert not within_rounding(exact, rounded, changed), (name, wrong)
        for field in ("loss", "norm"):
            for step in range(2):
                numbers = [value * (wrong if at == step else 1) for at, value in enumerate(getattr(rounded, field))]
                assert not within_rounding(exact, rounded, replace(rounded, **{field: numbers})), (field, step, wrong)
