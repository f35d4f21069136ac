"""Distillation against the divergence on whole logits by torch, with its gradients; the teacher sees what the student sees."""

import pytest
import torch
from torch.nn import functional as F

from forge_core.batch import IGNORE, PADDING, Batch
from forge_core.errors import ForgeError
from forge_models import distillation
from forge_models.distillation import DistillationLoss
from forge_models.objectives import Distillation

CASES = {
    "divergence": {"weight": 1.0},
    "mixed": {"weight": 0.3},
    "warm": {"weight": 0.6, "temperature": 2.5},
    "top_k": {"weight": 1.0, "top_k": 5},
    "warm_top_k": {"weight": 0.6, "temperature": 0.7, "top_k": 3},
    "more_than_all": {"weight": 1.0, "top_k": 1000},
}


def batch_of(tokens) -> Batch:
    ids = tokens(3, 18)
    labels = tokens(3, 18, seed=2)
    labels[0, 4:9], labels[1, 15:] = IGNORE, IGNORE
    documents = (torch.arange(18) >= torch.tensor([[7], [18], [3]])).int()
    documents[2, 16:] = PADDING
    labels[2, 15:] = IGNORE
    positions = torch.arange(18).expand(3, 18) - torch.where(documents == 0, 0, torch.tensor([[7], [18], [3]]))
    return Batch(ids, labels, positions.int(), documents)


def logits_of(model, batch: Batch) -> torch.Tensor:
    return model(batch.tokens, positions=batch.positions, documents=batch.documents)


def by_torch(model, teacher, batch: Batch, weight: float, temperature: float = 1.0, top_k: int | None = None) -> torch.Tensor:
    """The sum over labels, from whole logits."""
    keep = batch.labels != IGNORE
    student, labels = logits_of(model, batch)[keep], batch.labels[keep]
    with torch.no_grad():
        taught = logits_of(teacher, batch)[keep] / temperature
        if top_k is not None and top_k < taught.shape[1]:
            least = taught.sort(1, descending=True).values[:, top_k - 1 : top_k]
            taught = taught.where(taught >= least, -torch.inf)
        share = taught.softmax(1)
    divergence = F.kl_div((student / temperature).log_softmax(1), share, reduction="sum")
    return (1 - weight) * F.cross_entropy(student, labels, reduction="sum") + weight * temperature**2 * divergence


@pytest.mark.parametrize("soft_cap", [None, 3.0])
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_equal_torch(make, tokens, monkeypatch, case, soft_cap) -> None:
    monkeypatch.setattr(distillation, "chunk_rows", lambda *_: 7)  # several chunks, the last one shorter
    student = make(dtype=torch.float64, spread=8.0, soft_cap=soft_cap)
    teacher = make(seed=1, dtype=torch.float64, spread=6.0, dim=24, layers=1, ffn_dim=20)
    batch, settings = batch_of(tokens), CASES[case]
    expected = by_torch(student, teacher, batch, **settings)
    wanted = torch.autograd.grad(expected, list(student.parameters()))
    objective = Distillation(teacher="x", **settings).build().with_teacher(teacher)
    terms = student(
        batch.tokens, positions=batch.positions, documents=batch.documents, labels=batch.labels, objective=objective.bound(batch)
    )
    found = torch.autograd.grad(terms.sum * 0.7, list(student.parameters()))
    torch.testing.assert_close(terms.sum, expected, rtol=1e-12, atol=1e-11)
    for name, ours, theirs in zip(dict(student.named_parameters()), found, wanted, strict=True):
        torch.testing.assert_close(ours / 0.7, theirs, rtol=1e-9, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")
    torch.testing.assert_close(terms.rows.sum(), terms.sum.detach(), rtol=1e-12, atol=1e-12)
    assert int(terms.tokens) == int((batch.labels != IGNORE).sum())
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in teacher.parameters())


def test_a_student_that_is_its_teacher_has_nothing_to_learn(make, tokens) -> None:
    student, batch = make(dtype=torch.float64, spread=8.0), batch_of(tokens)
    objective = DistillationLoss(weight=1.0, temperature=2.0).with_teacher(make(dtype=torch.float64, spread=8.0))
    terms = student(
        batch.tokens, positions=batch.positions, documents=batch.documents, labels=batch.labels, objective=objective.bound(batch)
    )
    assert float(terms.metrics["kl"]) == pytest.approx(0, abs=1e-12)
    for gradient in torch.autograd.grad(terms.sum, list(student.parameters())):
        torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-12)


def test_without_a_teacher_or_a_batch_it_is_refused(tokens) -> None:
    with pytest.raises(ForgeError, match=r"give one with objective\.with_teacher"):
        DistillationLoss().bound(batch_of(tokens))
    with pytest.raises(ForgeError, match=r"call objective\.bound"):
        DistillationLoss()(None, None, None)  # type: ignore[arg-type]
