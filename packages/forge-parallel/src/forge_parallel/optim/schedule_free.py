"""Schedule-Free AdamW: averaged weights instead of a learning-rate decay (Defazio et al., 2024, "The road less scheduled").

There are three points: z is updated like the weights of AdamW; x, which is evaluated, is the running mean of all z; gradients are
computed at y, between the two. During training, a parameter holds y and the state z; x follows from both:

    y = (1 - beta1) * z + beta1 * x
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from forge_core.protocols.model import TrainableModel
from forge_parallel.optim.elementwise import Counts, ElementwiseOptimizer, UpdateRule
from forge_parallel.placement.boxes import local_box


def rule(betas: tuple[float, float], eps: float) -> UpdateRule:
    """Returns the update rule. With gradient g at y, learning rate lr, decay wd, and v the corrected mean of g * g as in Adam:

    d = g / (sqrt(v) + eps) + wd * y
    z = z - lr * d
    x = (1 - c) * x + c * z        c = (largest lr so far)^2 / (sum of these squares over all steps)

    Warm-up is part of lr, so steps with a small learning rate have less weight in the mean.
    """

    def advance(counts: Counts, rate: Tensor) -> Counts:
        largest = torch.maximum(counts["largest_rate"], rate)
        return {"largest_rate": largest, "weight_sum": counts["weight_sum"] + largest.square()}

    def numbers(counts: Counts, rate: Tensor) -> Sequence[Tensor]:  # noqa: ARG001 (the signature of all rules)
        # Before the first step with a learning rate above 0, the sum is 0 and the mean is undefined.
        share = torch.where(counts["weight_sum"] > 0, counts["largest_rate"].square() / counts["weight_sum"], 0.0)
        return [1 - betas[1] ** counts["step"].double(), share]

    def update(weight: Tensor, states: Sequence[Tensor], grad: Tensor, numbers: Sequence[Tensor]) -> tuple[Tensor, ...]:
        rate, decay, correction, share = numbers
        z, square = states[0], torch.lerp(states[1], grad.square(), 1 - betas[1])
        direction = grad / ((square / correction).sqrt() + eps) + decay * weight
        # x need not be computed: y changes by beta1 times the change of x.
        updated = torch.lerp(weight, z, share) + rate * (betas[0] * (1 - share) - 1) * direction
        return updated, z - rate * direction, square

    kinds = {"largest_rate": torch.float64, "weight_sum": torch.float64}
    return UpdateRule(("z", "exp_avg_sq"), update, numbers, kinds, advance, frozenset({"z"}))


class ScheduleFree(ElementwiseOptimizer):
    """Updates `model.trainable()`; implements `forge_core.protocols.model.AveragingOptimizer`."""

    def __init__(self, model: TrainableModel, lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
        super().__init__(model, rule(betas, eps), lr, weight_decay)
        self._beta = betas[0]
        if callable(evaluate_with := getattr(model, "evaluate_with", None)):
            evaluate_with(self.averaged)

    by_parameter = ElementwiseOptimizer.by_parameter

    @contextmanager
    def averaged(self) -> Iterator[Mapping[str, Tensor]]:
        """Context in which parameters hold x. Yields y by name, sharded like the parameters; y is restored bit for bit."""
        trained = {name: torch.zeros_like(tensor) for name, tensor, _ in self._named}
        with torch.no_grad():
            for name, tensor, _ in self._named:
                weight, z = local_box(tensor).local, local_box(self._states["z"][name]).local
                local_box(trained[name]).local.copy_(weight)
                weight.copy_(weight.lerp(z, 1 - 1 / self._beta))
        try:
            yield trained
        finally:
            with torch.no_grad():
                for name, tensor, _ in self._named:
                    local_box(tensor).local.copy_(local_box(trained[name]).local)
