"""Linear probes, steering vectors, effective rank and dead neurons of activations."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from forge_interp.neuro.encoding import standardized
from forge_interp.tap_names import InterpError, require_finite


class LinearProbe(NamedTuple):
    """logits = x @ weight.T + bias.

    Attributes:
        weight: (classes, width) fp64 weights; `bias` is (classes,).
        train_accuracy: accuracy on the training rows.
        accuracy: accuracy on the held-out rows.
        chance: share of the most frequent class among the held-out rows, the accuracy of a constant answer.
    """

    weight: Tensor
    bias: Tensor
    train_accuracy: float
    accuracy: float
    chance: float


def linear_probe(
    x: Tensor, labels: Tensor, *, held_out: float = 0.2, decay: float = 1e-2, groups: Tensor | None = None, seed: int = 0
) -> LinearProbe:
    """Fits a multinomial logistic regression (Alain and Bengio, 2017): minimizes mean nll + decay / 2 |weight|^2 on standardized
    rows.

    Args:
        x: (n, width) activations.
        labels: (n,) classes 0, 1, ...
        held_out: fraction of the groups to hold out.
        decay: weight of the L2 penalty.
        groups: (n,) group of each row, such as its document; a group is held out as a whole. None makes each row its own group.
        seed: seed of the split.

    Raises:
        InterpError: rows and labels differ in number, values are not finite, labels are not classes, or one side of the split has
            no rows or only one class.
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
    varies = standardized(rows[~outside], 0).any(0)  # constant features are ignored, in any units
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
    """Returns (width,) fp64: the mean of `positive` minus the mean of `negative` (Rimsky et al., 2024), for `edit` with `add`."""
    return positive.detach().flatten(0, -2).double().mean(0) - negative.detach().flatten(0, -2).double().mean(0)


def effective_rank(x: Tensor, center: bool = True) -> Tensor:
    """Returns the exponential of the entropy of the normalized singular values (Roy and Vetterli, 2007), from 1 to the width.

    Args:
        x: (..., width) activations.
        center: whether to subtract the mean.

    Raises:
        InterpError: the activations do not vary or are not finite.
    """
    rows = x.detach().reshape(-1, x.shape[-1]).double()
    require_finite("activations", rows)
    sizes = torch.linalg.svdvals(rows - rows.mean(0) if center else rows)
    if not bool((standardized(rows, 0) if center else rows).any()):
        raise InterpError("all rows are equal; their rank says nothing")
    shares = sizes / sizes.sum()
    return torch.special.entr(shares).sum().exp()


def dead_neurons(hidden: Tensor, threshold: float = 0.0) -> Tensor:
    """Returns a (width,) bool mask of the neurons whose absolute value stays within the threshold for all tokens of `hidden`
    (..., width)."""
    return (hidden.detach().abs() <= threshold).reshape(-1, hidden.shape[-1]).all(0)
