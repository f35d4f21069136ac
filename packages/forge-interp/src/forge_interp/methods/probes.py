"""Linear probes, steering vectors, and how many dimensions activations use."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from forge_interp.neuro.encoding import standardized
from forge_interp.tap_names import InterpError, require_finite


class LinearProbe(NamedTuple):
    """logits = x @ weight.T + bias.

    Attributes:
        weight: (classes, width) fp64; `bias` (classes,).
        train_accuracy: on the rows that it was fitted to.
        accuracy: on the rows that were held out.
        chance: share of the most frequent class among the held-out rows: what a constant answer reaches.
    """

    weight: Tensor
    bias: Tensor
    train_accuracy: float
    accuracy: float
    chance: float


def linear_probe(
    x: Tensor, labels: Tensor, *, held_out: float = 0.2, decay: float = 1e-2, groups: Tensor | None = None, seed: int = 0
) -> LinearProbe:
    """Multinomial logistic regression (Alain and Bengio, 2017): minimizes mean nll + decay / 2 |weight|^2 on standardized rows.

    Args:
        x: (n, width) activations.
        labels: (n,) classes 0, 1, ...
        held_out: share of the groups that are not fitted.
        groups: (n,) rows of one group, such as a document, are held out together; None = each row by itself.
        seed: of the choice.

    Raises:
        InterpError: rows and labels do not fit, values that are not finite, labels that are not classes, or one side of the split
            has no rows or one class only.
    """
    if x.dim() != 2 or len(x) != len(labels) or (groups is not None and len(groups) != len(x)):
        raise InterpError(
            f"activations {tuple(x.shape)} must be (rows, width), with one label ({len(labels)} given) and one group for each row"
        )
    require_finite("activations", x)
    if labels.is_floating_point() or labels.dim() != 1:
        raise InterpError(f"labels are {labels.dtype} {tuple(labels.shape)}; give one integer for each row")
    if len(labels) and int(labels.min()) < 0:
        row = int((labels < 0).nonzero()[0])
        raise InterpError(
            f"label {int(labels[row])} of row {row} is not a class; classes are 0, 1, ...; leave out rows without one"
        )
    members, group = torch.unique(torch.arange(len(x)) if groups is None else groups.cpu(), return_inverse=True)
    order = torch.randperm(len(members), generator=torch.Generator().manual_seed(seed))
    outside = torch.isin(group, order[: round(held_out * len(members))])
    rows, labels = x.detach().cpu().double(), labels.cpu().long()
    if not bool(outside.any()) or len(labels[~outside].unique()) < 2:
        raise InterpError("a probe needs training rows of two classes and held-out rows; change held_out")
    varies = standardized(rows[~outside], 0).any(0)  # a feature that does not vary tells nothing, whatever its units
    mean, spread = rows[~outside].mean(0), torch.where(varies, rows[~outside].std(0), float("inf"))
    standard, classes = (rows - mean) / spread, int(labels.max()) + 1
    fitted, answers = standard[~outside], labels[~outside]
    weight = torch.zeros(classes, rows.shape[1], dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(classes, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=200, tolerance_grad=1e-9, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        found = F.cross_entropy(fitted @ weight.T + bias, answers) + decay / 2 * weight.square().sum()
        found.backward()
        return found

    with torch.enable_grad():
        optimizer.step(loss)  # type: ignore[arg-type]
    with torch.no_grad():
        right = (standard @ weight.T + bias).argmax(1) == labels
        plain = weight / spread
        chance = labels[outside].bincount().max() / outside.sum()
        inside, beyond = (float(right[side].double().mean()) for side in (~outside, outside))
        return LinearProbe(plain, bias - plain @ mean, inside, beyond, float(chance))


def steering_vector(positive: Tensor, negative: Tensor) -> Tensor:
    """(width,) fp64: mean activation of one kind of text minus that of another (Rimsky et al., 2024), for `edit` with `add`."""
    return positive.detach().flatten(0, -2).double().mean(0) - negative.detach().flatten(0, -2).double().mean(0)


def effective_rank(x: Tensor, center: bool = True) -> Tensor:
    """exp of the entropy of the singular values, as shares of their sum (Roy and Vetterli, 2007); from 1 to the width.

    Args:
        x: (..., width) activations.
        center: without their mean.

    Raises:
        InterpError: nothing varies, or values that are not finite.
    """
    rows = x.detach().reshape(-1, x.shape[-1]).double()
    require_finite("activations", rows)
    sizes = torch.linalg.svdvals(rows - rows.mean(0) if center else rows)
    if not bool((standardized(rows, 0) if center else rows).any()):
        raise InterpError("all rows are equal; their rank says nothing")
    shares = sizes / sizes.sum()
    return torch.special.entr(shares).sum().exp()


def dead_neurons(hidden: Tensor, threshold: float = 0.0) -> Tensor:
    """(width,) bool: neurons whose absolute value exceeds the threshold for no token of `hidden` (..., width)."""
    return (hidden.detach().abs() <= threshold).reshape(-1, hidden.shape[-1]).all(0)
