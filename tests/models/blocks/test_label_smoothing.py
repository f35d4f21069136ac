"""Label smoothing through the chunked loss head, against torch's cross_entropy on whole logits."""

import pytest
import torch
from torch.nn import functional as F

from forge_core.batch import IGNORE
from forge_models.blocks import head as loss_head
from forge_models.blocks.head import ChunkedCrossEntropy, Head
from forge_models.objectives import CrossEntropy
from harness.closeness import assert_no_farther

ALL = [(0.1, 0.0, None), (0.3, 0.2, None), (0.1, 0.0, 2.0), (0.9, 0.2, 2.0)]
"""Smoothing, weight of the z term, soft cap."""
NAMES = ("total", "nll", "z", "hidden", "weight")


def problem(rows=11, dim=6, vocab=23, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, dim, generator=generator, dtype=torch.float64) for n in (rows, vocab))
    labels = torch.randint(0, vocab, (rows,), generator=generator)
    labels[[1, 5]] = IGNORE
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels


def of_torch(hidden, weight, labels, z_loss, soft_cap, smoothing):
    """The same by torch's own label smoothing."""
    logits = (hidden @ weight.T).to(torch.promote_types(hidden.dtype, torch.float32))
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    smoothed = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)
    nll = F.cross_entropy(logits, labels, reduction="none")
    z = torch.logsumexp(logits, -1).square() * (labels != IGNORE)
    return smoothed + (z_loss * z).sum(), nll, z


def gradients(head, hidden, weight, labels, smoothing, z_loss, soft_cap, scale=0.7):
    total, nll, z = head(hidden, weight, labels, z_loss, soft_cap, smoothing)
    return total.detach(), nll.detach(), z.detach(), *torch.autograd.grad(total * scale, (hidden, weight))


def of_ranks(head, bounds, hidden, weight, labels, smoothing, z_loss, soft_cap):
    """Losses of ranks that share the vocabulary unevenly, and their gradients, summed and put together."""
    told: list[list[torch.Tensor]] = []
    for first, end in bounds:  # what each rank tells
        mine: list[torch.Tensor] = []
        one = head.split(first, lambda numbers, mine=mine: mine.append(numbers) or numbers.unsqueeze(0))
        one(hidden.detach(), weight.detach()[first:end], labels, z_loss, soft_cap, smoothing)
        told.append(mine)
    found = []
    for first, end in bounds:
        turn = iter(range(len(told[0])))
        one = head.split(first, lambda _, turn=turn: (lambda at: torch.stack([rank[at] for rank in told]))(next(turn)))
        part = weight.detach()[first:end].requires_grad_()
        found.append(gradients(one, hidden, part, labels, smoothing, z_loss, soft_cap))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0][:3], other[:3], strict=True)), "all ranks have the same losses"
    return *found[0][:3], sum(one[3] for one in found), torch.cat([one[4] for one in found])


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("rows", [1, 4, 64])
@pytest.mark.parametrize("given", ALL)
def test_it_equals_torch_in_fp64(monkeypatch, given, rows, ranks, fused) -> None:
    """Whole and over ranks of 9, 9 and 5 words; by operators, and by what an accelerator has compiled, as it is written."""
    monkeypatch.setattr(loss_head, "_compiled", lambda function: function)
    arguments = (*problem(), *given)
    head = ChunkedCrossEntropy(rows, fused=fused)
    found = of_ranks(head, ((0, 9), (9, 18), (18, 23)), *arguments) if ranks > 1 else gradients(head, *arguments)
    expected = gradients(lambda h, w, y, z, cap, a: of_torch(h, w, y, z, cap, a), *arguments)
    for name, ours, theirs in zip(NAMES, found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_blocks_of_a_chunk_equal_torch(monkeypatch, soft_cap, ranks) -> None:
    """A chunk of 8 rows in blocks of 3, the last one shorter; over ranks they are worked out twice."""
    monkeypatch.setattr(loss_head, "CPU_BLOCK", 3 * 23)
    arguments = (*problem(), 0.1, 0.2, soft_cap)
    head = ChunkedCrossEntropy(8)
    found = of_ranks(head, ((0, 9), (9, 18), (18, 23)), *arguments) if ranks > 1 else gradients(head, *arguments)
    for ours, theirs in zip(found, gradients(of_torch, *arguments), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_gradcheck() -> None:
    hidden, weight, labels = problem(rows=6, dim=3, vocab=7)
    head = ChunkedCrossEntropy(4)
    assert torch.autograd.gradcheck(lambda h, w: head(h, w, labels, 0.2, 3.0, 0.3)[0], (hidden, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_low_precision_is_no_farther_from_fp64_than_torch(dtype) -> None:
    hidden, weight, labels = problem(rows=200, dim=32, vocab=500, dtype=dtype)
    exact = gradients(of_torch, hidden.double(), weight.double(), labels, 0.1, 0.1, None)
    plain = gradients(of_torch, hidden, weight, labels, 0.1, 0.1, None)
    found = gradients(ChunkedCrossEntropy(64), hidden, weight, labels, 0.1, 0.1, None)
    for ours, theirs, wide in zip(found, plain, exact, strict=True):
        assert ours.dtype == theirs.dtype
        assert_no_farther(ours, theirs, wide)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # inductor itself uses what torch has deprecated
def test_fused_passes_compile() -> None:
    arguments = (*problem(), 0.1, 0.3, 2.0)
    for ours, theirs in zip(
        gradients(ChunkedCrossEntropy(8, fused=True), *arguments), gradients(of_torch, *arguments), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_without_smoothing_nothing_is_computed_for_it(monkeypatch) -> None:
    """Two words more a row would be exchanged, and one more pass made, for nothing."""
    shapes = []
    head = ChunkedCrossEntropy(4).split(0, lambda numbers: shapes.append(numbers.shape[0]) or numbers.unsqueeze(0))
    hidden, weight, labels = problem()
    head(hidden, weight, labels, 0.1, None, 0.2)
    smoothed, shapes[:] = set(shapes), []
    monkeypatch.setattr(loss_head, "_of_all", None)
    head(hidden, weight, labels, 0.1, None)
    assert (smoothed, set(shapes)) == ({5}, {3})


def parts(batch=2, length=6):
    hidden, weight, labels = problem(rows=batch * length)
    head = Head(6, 23, 0.02)
    head.weight = torch.nn.Parameter(weight.detach())
    return head, hidden.detach().view(batch, length, 6).requires_grad_(), labels.view(batch, length)


def test_the_objective_reports_the_labels_loss_and_minimizes_the_smoothed_one() -> None:
    head, hidden, labels = parts()
    terms = CrossEntropy(label_smoothing=0.2, z_loss=0.1).build()(head, hidden, labels)
    plain = CrossEntropy(z_loss=0.1).build()(head, hidden, labels)
    expected = of_torch(hidden.flatten(0, 1), head.weight, labels.flatten(), 0.1, None, 0.2)[0]
    torch.testing.assert_close(terms.sum, plain.sum, rtol=1e-14, atol=0)
    assert torch.equal(terms.rows, plain.rows) and torch.equal(terms.metrics["nll"], plain.metrics["nll"])
    assert set(terms.metrics) == {"nll", "z", "smoothed"} and "smoothed" not in plain.metrics
    torch.testing.assert_close(terms.metrics["smoothed"], expected.detach(), rtol=1e-13, atol=0)
    found = torch.autograd.grad(terms.sum / 7, (hidden, head.weight))
    for ours, theirs in zip(found, torch.autograd.grad(expected / 7, (hidden, head.weight)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_a_batch_without_a_label_contributes_nothing() -> None:
    head, hidden, labels = parts()
    terms = CrossEntropy(label_smoothing=0.2).build()(head, hidden, torch.full_like(labels, IGNORE))
    terms.sum.backward()
    assert terms.sum == terms.metrics["smoothed"] == 0
    assert hidden.grad is not None and head.weight.grad is not None
    assert hidden.grad.count_nonzero() == head.weight.grad.count_nonzero() == 0


def test_evaluation_without_gradients_has_the_same_value() -> None:
    head, hidden, labels = parts()
    objective = CrossEntropy(label_smoothing=0.2).build()
    with torch.no_grad():
        terms = objective(head, hidden, labels)
    assert not terms.sum.requires_grad and float(terms.sum) == pytest.approx(float(terms.metrics["nll"]), rel=1e-14)


def test_a_loss_head_that_cannot_smooth_is_refused() -> None:
    head, hidden, labels = parts()
    core = ChunkedCrossEntropy()
    head.core = lambda hidden, weight, labels, z_loss, soft_cap: core(hidden, weight, labels, z_loss, soft_cap)
    CrossEntropy().build()(head, hidden, labels)
    with pytest.raises(TypeError, match="smoothing"):
        CrossEntropy(label_smoothing=0.1).build()(head, hidden, labels)
