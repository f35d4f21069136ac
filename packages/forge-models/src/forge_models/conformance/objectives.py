"""Checks of objectives: they sum over valid tokens, so that micro-batches and ranks add up to the whole batch."""

from typing import Any

SIZES = (4, 6, 8, 10)
"""Number of rows, tokens per row, width, vocabulary size."""


def check_sums(component: Any) -> None:
    """Checks that `sum`, `tokens`, metrics and gradients of micro-batches add up to those of the whole batch."""
    from forge_models.conformance import trial

    head, hidden, labels = _given()
    whole, gradients = _terms(component, head, hidden, labels)
    for cut in (1, 2):
        one, grad_one = _terms(component, head, hidden[:cut], labels[:cut])
        two, grad_two = _terms(component, head, hidden[cut:], labels[cut:])
        trial.same(one.sum + two.sum, whole.sum, "`sum` of two micro-batches and of their batch")
        for name, value in whole.metrics.items():
            trial.same(one.metrics[name] + two.metrics[name], value, f"metric {name!r} of micro-batches and batch")
        trial.same(grad_one + grad_two, gradients, "gradients of two micro-batches and of their batch")
        count = int(one.tokens) + int(two.tokens)
        assert count == int(whole.tokens), f"micro-batches have {count} tokens, their batch {int(whole.tokens)}"


def check_tokens(component: Any) -> None:
    """Checks that `tokens` counts the labels that are not IGNORE, and that tokens without a label add nothing to `sum`."""
    import torch

    from forge_core.batch import IGNORE
    from forge_models.conformance import trial

    head, hidden, labels = _given()
    terms, _ = _terms(component, head, hidden, labels)
    valid = int((labels != IGNORE).sum())
    assert int(terms.tokens) == valid, f"tokens is {int(terms.tokens)}, but {valid} labels are not IGNORE"
    other = torch.where((labels == IGNORE).unsqueeze(-1), trial.drawn(*hidden.shape, seed=9), hidden)
    trial.same(_terms(component, head, other, labels)[0].sum, terms.sum, "`sum` depends on tokens without a label")


def check_rows(component: Any) -> None:
    """Checks that `rows`, if returned, are the contributions of each row to `sum`."""
    from forge_models.conformance import trial

    head, hidden, labels = _given()
    terms, _ = _terms(component, head, hidden, labels)
    if terms.rows is None:
        return
    assert not terms.rows.requires_grad, "rows have a graph; detach them"
    for row in range(len(labels)):
        alone, _ = _terms(component, head, hidden[row : row + 1], labels[row : row + 1])
        trial.same(terms.rows[row].double(), alone.sum.double(), f"rows[{row}] and `sum` of that row alone")


def check_nothing(component: Any) -> None:
    """Checks that a batch without labels gives 0 with a graph and gradients of 0, so that ranks without labels join the step."""
    import torch

    from forge_core.batch import IGNORE

    head, hidden, labels = _given()
    terms, gradients = _terms(component, head, hidden, torch.full_like(labels, IGNORE))
    assert int(terms.tokens) == 0, f"tokens is {int(terms.tokens)} without labels"
    assert float(terms.sum) == 0, f"`sum` is {float(terms.sum)} without labels, not 0"
    assert not bool(gradients.any()), "gradients are not 0 without labels"


def _given() -> Any:
    import torch

    from forge_core.batch import IGNORE
    from forge_models.blocks.head import Head
    from forge_models.conformance import trial

    rows, length, width, vocab = SIZES
    head = trial.part(lambda: Head(width, vocab, 0.02))
    labels = torch.randint(vocab, (rows, length), generator=torch.Generator().manual_seed(3))
    labels[0, 2:] = IGNORE  # rows with different numbers of labels, to detect a mean over rows
    labels[2, 0] = IGNORE
    return head, trial.drawn(rows, length, width), labels


def _terms(component: Any, head: Any, hidden: Any, labels: Any) -> Any:
    """Returns the terms, and the gradients of the head's weight and of a constant added to all hidden states."""
    import torch

    head.zero_grad(set_to_none=True)
    shift = torch.zeros(hidden.shape[-1], dtype=hidden.dtype, requires_grad=True)
    terms = component.build()(head, hidden + shift, labels)
    assert terms.sum.requires_grad, "`sum` has no graph"
    terms.sum.backward()
    missing = torch.zeros_like(head.weight)
    assert shift.grad is not None, "`sum` does not depend on the hidden states"
    gradients = torch.cat((missing if head.weight.grad is None else head.weight.grad, shift.grad.unsqueeze(0)))
    return terms._replace(sum=terms.sum.detach()), gradients
