"""Finds the values that cause a difference between two runs: activation patching, its linear estimate, and head ablation."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from forge_interp.captures import capture
from forge_interp.edits import Edit, edit, patch, zero
from forge_interp.tap_names import InterpError, choose, taps

Metric = Callable[[Tensor], Tensor]
"""Logits (B, T, vocab) -> a scalar, such as a difference of two logits."""


@torch.no_grad()
def activation_patching(
    model: nn.Module, clean: Tensor, corrupted: Tensor, metric: Metric, names: str | Sequence[str]
) -> dict[str, Tensor]:
    """Returns (T,) by name: the metric of the corrupted run with the clean value at each position (Meng et al., 2022).

    Needs one forward per name and position.

    Raises:
        InterpError: the two runs have different lengths.
    """
    _refuse_unequal(clean, corrupted)
    chosen = choose(taps(model), names)
    with capture(model, list(chosen)) as seen:
        model(clean)
    source, found = {name: seen[name] for name in chosen}, {}
    for name in chosen:
        scores = []
        for place in range(clean.shape[1]):
            with edit(model, name, patch(source), positions=[place]):
                scores.append(metric(model(corrupted)).detach())
        found[name] = torch.stack(scores)
    return found


def attribution_patching(
    model: nn.Module, clean: Tensor, corrupted: Tensor, metric: Metric, names: str | Sequence[str]
) -> dict[str, Tensor]:
    """Returns (B, T) by name, or (B, T, heads) for values with heads: (clean - corrupted) . gradient of the metric in the
    corrupted run, the first-order change of the metric for each position (Nanda, 2023). Needs two forwards and one backward.

    Raises:
        InterpError: the two runs have different lengths, or all parameters are frozen, so that there is no gradient.
    """
    _refuse_unequal(clean, corrupted)
    with torch.no_grad(), capture(model, names) as kept:
        model(clean)
    with torch.enable_grad(), capture(model, names, keep="graph") as seen:
        score = metric(model(corrupted))
    values = list(seen.values())
    if not score.requires_grad or not all(value.requires_grad for value in values):
        raise InterpError("these values have no gradient; set requires_grad on a parameter before them")
    gradients = torch.autograd.grad(score, values)
    return {
        name: ((kept[name] - value.detach()) * gradient).sum(-1)
        for name, value, gradient in zip(seen, values, gradients, strict=True)
    }


@torch.no_grad()
def head_ablation(model: nn.Module, tokens: Tensor, metric: Metric, how: Edit | None = None) -> Tensor:
    """Returns (layers, heads): the metric without each head, whose output before the projection is zero, or the result of `how`.

    Needs one forward per head.
    """
    found = {name: one for name, one in taps(model).items() if name.startswith("blocks.") and name.endswith("attention.heads")}
    rows = []
    for name, one in found.items():
        row = []
        for head in range(one.heads or 0):
            with edit(model, name, how or zero(), heads=[head]):
                row.append(metric(model(tokens)))
        rows.append(torch.stack(row))
    return torch.stack(rows)


def _refuse_unequal(clean: Tensor, corrupted: Tensor) -> None:
    if clean.shape != corrupted.shape:
        raise InterpError(f"clean {tuple(clean.shape)} and corrupted {tuple(corrupted.shape)} tokens must have one shape")
