"""Objectives that do not do what they have to."""

from conformance.part import Part
from forge_core.batch import IGNORE
from forge_models.objectives import CrossEntropy


def spoiled(spoil, z_loss: float = 0.0) -> Part:
    def make():
        def objective(head, hidden, labels):
            return spoil(CrossEntropy(z_loss=z_loss)(head, hidden, labels), labels, hidden)

        return objective

    return Part(make=make)


def mean(terms, labels, hidden):
    return terms._replace(sum=terms.sum / terms.tokens.clamp(min=1))


BAD = {
    "check_sums": [
        (spoiled(mean), "`sum` of two micro-batches"),
        (spoiled(lambda t, labels, hidden: t._replace(metrics={"nll": t.metrics["nll"] / t.tokens})), "metric 'nll'"),
        (spoiled(lambda t, labels, hidden: t._replace(tokens=t.tokens // 3)), "micro-batches have"),
    ],
    "check_tokens": [
        (spoiled(lambda t, labels, hidden: t._replace(tokens=(labels == labels).sum())), "labels are not IGNORE"),
        (spoiled(lambda t, labels, hidden: t._replace(sum=t.sum + hidden.square().sum())), "tokens without a label"),
    ],
    "check_rows": [
        (spoiled(lambda t, labels, hidden: t._replace(rows=t.rows / (labels != IGNORE).sum(1))), r"rows\[0\]"),
        (spoiled(lambda t, labels, hidden: t._replace(rows=t.rows + hidden.sum((1, 2)))), "have a graph"),
    ],
    "check_nothing": [
        (spoiled(lambda t, labels, hidden: t._replace(sum=t.sum / t.tokens)), "without labels, not 0"),
        (spoiled(lambda t, labels, hidden: t._replace(sum=t.sum + 0 * hidden.sum() + 1)), "is 1.0 without labels"),
        (spoiled(lambda t, labels, hidden: t._replace(sum=t.sum + hidden.sum() - hidden.sum().detach())), "gradients are not 0"),
        (spoiled(lambda t, labels, hidden: t._replace(sum=t.sum.detach())), "has no graph"),
    ],
}
