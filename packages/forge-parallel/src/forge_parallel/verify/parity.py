"""Parity: a layout is correct if it computes the same numbers as one process.

Every rank reads different rows, with different numbers of valid tokens, packed documents, and one micro-batch without a valid
token. Compared are the loss, in total and by source, the gradient norm, every gradient, and every parameter after updates. In
fp64 the tolerance is 1e-10. In fp32 it is 2e-6 of a parameter's largest element, and only loss, norm and gradients are compared,
since Adam turns a tiny g / |g| into a full update.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from forge_core.batch import IGNORE, Batch, Sources
from forge_core.errors import ForgeError
from forge_core.protocols.model import Objective, Optimizer
from forge_parallel.model.parallel_model import ParallelModel, gathered
from forge_parallel.model.plan import Plan
from forge_parallel.model.realize import Blueprint, realize
from forge_parallel.optim.groups import GroupSection, Settings
from forge_parallel.optim.stages import Stage, apply, settings_of
from forge_parallel.placement.topology import Topology
from forge_parallel.step.reduce import clip_grad_norm
from forge_parallel.step.step import Step
from forge_parallel.verify.proofs import TOLERANCE, within


@dataclass(frozen=True)
class Case:
    """The model and data that every layout runs. The first `silent` rows of a global batch have no labels.

    `optimizer` also gets the settings of parameters if there are `groups`, `stages`, or learning rates scaled from a `narrow`
    model.
    """

    build: Callable[[], nn.Module]
    objective: Objective
    optimizer: Callable[..., Optimizer]
    vocab_size: int
    length: int = 16
    rows: int = 8
    micro_batch: int = 1
    silent: int = 1
    steps: int = 2
    seed: int = 0
    grad_clip: float = 0.5
    compute: str = "fp64"
    state: str = "fp64"
    groups: tuple[GroupSection, ...] = ()
    narrow: Callable[[], nn.Module] | None = None
    stages: tuple[Stage, ...] = ()

    def blueprint(self) -> tuple[Blueprint, Settings]:
        """Returns the model and the settings of its parameters."""
        blueprint = Blueprint.of(self.build)
        narrow = None if self.narrow is None else Blueprint.of(self.narrow)
        settings = settings_of(blueprint, self.groups, narrow, self.stages)
        return apply(blueprint, settings), settings


@dataclass(frozen=True)
class Measurement:
    """Numbers of one layout: per step loss, norm and token count, in total and by source; full gradients of the first step; full
    weights before the first and after the last update, by global name."""

    loss: list[float]
    norm: list[float]
    tokens: list[float]
    initial: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    by_source: list[dict[str, float]] = field(default_factory=list)


def synthetic(case: Case, step: int) -> Batch:
    """Returns the global batch of one step: random tokens in packed documents, rows with very different numbers of labels.

    If `case.silent` is the size of a micro-batch, one micro-batch has no labels.
    """
    generator = torch.Generator().manual_seed(1000 * case.seed + step)
    shape = (case.rows, case.length)
    tokens = torch.randint(case.vocab_size, shape, generator=generator)
    labels = torch.randint(case.vocab_size, shape, generator=generator)
    keep = torch.rand(shape, generator=generator) < torch.linspace(0.2, 1.0, case.rows)[:, None]
    keep[: case.silent] = False
    starts = torch.rand(shape, generator=generator) < 0.25
    starts[:, 0] = False
    documents = starts.cumsum(1).to(torch.int32)
    index = torch.arange(case.length, dtype=torch.int32).expand(shape)
    begins = torch.where(starts, index, torch.zeros_like(index)).cummax(1).values
    row = torch.arange(case.rows)
    sources = Sources(("silent", "even", "odd"), torch.where(row < case.silent, 0, 1 + row % 2))
    labels = labels.where(keep, torch.tensor(IGNORE))
    return Batch(tokens, labels, positions=index - begins, documents=documents, sources=sources)


def share(batch: Batch, rank: int, ranks: int, micro_batch: int) -> list[Batch]:
    """Returns the micro-batches of one data rank, as a loader yields them: contiguous rows of the global batch."""
    rows = batch.tokens.shape[0] // ranks
    if rows % micro_batch or batch.tokens.shape[0] % ranks:
        raise ForgeError(
            f"{batch.tokens.shape[0]} rows cannot be split into micro-batches of {micro_batch} on {ranks} data ranks; "
            "choose a global batch that is a multiple of both together"
        )
    first = rank * rows

    def cut(tensor: torch.Tensor | None, start: int) -> torch.Tensor | None:
        return None if tensor is None else tensor[start : start + micro_batch]

    return [
        Batch(
            batch.tokens[start : start + micro_batch],
            batch.labels[start : start + micro_batch],
            cut(batch.positions, start),
            cut(batch.documents, start),
            sources=None
            if (all_rows := batch.sources) is None
            else Sources(all_rows.names, all_rows.rows[start : start + micro_batch]),
        ).with_document_starts()
        for start in range(first, first + rows, micro_batch)
    ]


def measure(case: Case, plan: Plan, device: torch.device) -> Measurement:
    """Collective: runs the case in one layout; returns the same result on every rank."""
    topology = Topology.of(plan.layout, device)
    blueprint, settings = case.blueprint()
    with_extras = getattr(blueprint.module, "with_extras", lambda batch: batch)
    with_targets = getattr(case.objective, "with_targets", lambda batch: batch)
    model = realize(blueprint, plan, topology, case.seed, case.compute, case.state)
    # Optimizers get no settings for frozen parameters alone: they see only parameters that require gradients.
    with_settings = bool(settings.each or settings.stages)
    optimizer: Any = case.optimizer(model, settings) if with_settings else case.optimizer(model)
    step = Step(model, case.objective)
    initial = gathered(model, _weights(model))
    gradients: dict[str, torch.Tensor] = {}
    numbers = []
    for index in range(case.steps):
        batch = synthetic(case, index)
        micro_batches = share(batch, topology.data_rank, topology.data_size, case.micro_batch)
        if settings.stages:
            optimizer.at_step(index)
            optimizer.set_factor(1.0)
        result = step([with_targets(with_extras(micro_batch)) for micro_batch in micro_batches])
        if index == 0:
            gradients = gathered(model, {name: tensor.grad for name, tensor, _ in model.trainable()})
        clip_grad_norm(model, result.norm, case.grad_clip)
        optimizer.step(result.skip)
        optimizer.zero_grad()
        numbers.append(result.numbers())
    weights = gathered(model, _weights(model))
    column = {key: [row[key] for row in numbers] for key in ("loss", "grad_norm", "tokens")}
    by_source = [{key: value for key, value in row.items() if key.startswith(("source/", "mtp_"))} for row in numbers]
    return Measurement(column["loss"], column["grad_norm"], column["tokens"], initial, gradients, weights, by_source)


def _weights(model: ParallelModel) -> dict[str, torch.Tensor | None]:
    return dict(model.parameters_held())


@dataclass(frozen=True)
class Difference:
    """Largest relative errors of a layout compared with one process; `worst` is the name of the tensor with the largest error."""

    loss: float
    norm: float
    gradients: float
    weights: float
    initial: bool
    worst: str

    def accepted(self, state: str) -> bool:
        """Whether the errors are within tolerance; weights are compared in fp64 only."""
        return self.initial and within(asdict(self), state)


def compare(reference: Measurement, other: Measurement) -> Difference:
    """Compares `other` with the one-process `reference`. A number that is not finite is an infinite error."""
    gradients, worst_gradient = _largest(reference.gradients, other.gradients)
    weights, worst_weight = _largest(reference.weights, other.weights)
    same = reference.initial.keys() == other.initial.keys() and all(
        torch.equal(tensor, other.initial[name]) for name, tensor in reference.initial.items()
    )
    same_tokens = reference.tokens == other.tokens and [*map(list, reference.by_source)] == [*map(list, other.by_source)]
    by_source = [
        _scalars([*mine.values()], [*theirs.values()]) for mine, theirs in zip(reference.by_source, other.by_source, strict=False)
    ]
    return Difference(
        loss=max(_scalars(reference.loss, other.loss), *by_source, 0.0) if same_tokens else float("inf"),
        norm=_scalars(reference.norm, other.norm),
        gradients=gradients,
        weights=weights,
        initial=same,
        worst=worst_gradient if gradients >= weights else worst_weight,
    )


def within_rounding(exact: Measurement, alone: Measurement, found: Measurement) -> bool:
    """Whether a layout in a narrow format is as close to one process as the rounding of the format allows.

    Sums in a different order differ in their last bit; when they are then rounded to float8, the result may be the adjacent
    value, 1/8 away instead of 2^-24. So the bound depends on the format: the error of a gradient may be at most twice that of one
    process in the same format (2-norms, relative to the exact gradient), and a loss or norm may differ from that of one process
    by at most twice the change that rounding has caused so far. The tolerance of fp32 applies if rounding caused less. A missing
    or repeated sum is far outside this bound.

    Args:
        exact: one process without the narrow format.
        alone: one process with it.
        found: the layout with it.
    """
    if not (alone.tokens == found.tokens == exact.tokens and alone.gradients.keys() == found.gradients.keys()):
        return False
    least = TOLERANCE["fp32"]
    for wanted, rounded, other in ((exact.loss, alone.loss, found.loss), (exact.norm, alone.norm, found.norm)):
        moved = 0.0
        for a, b, c in zip(wanted, rounded, other, strict=True):
            moved = max(moved, _scalars([a], [b]))
            if not _scalars([b], [c]) <= max(least, 2 * moved):
                return False
    return all(
        _distance(gradient, found.gradients[name]) <= max(least, 2 * _distance(gradient, alone.gradients[name]))
        for name, gradient in exact.gradients.items()
    )


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Returns the 2-norm of the difference relative to that of `a`; infinite if a number is not finite."""
    difference, whole = float((a.double() - b.double()).norm()), float(a.double().norm())
    distance = difference / whole if whole else difference
    return distance if math.isfinite(distance) else math.inf


def _scalars(reference: Sequence[float], other: Sequence[float]) -> float:
    if len(reference) != len(other):
        return float("inf")
    # Python's floats are fp64; torch.tensor would round them to fp32 by default.
    pairs = torch.tensor([*zip(reference, other, strict=True)], dtype=torch.float64)
    return max((_relative(one, two) for one, two in pairs), default=0.0)


def _largest(reference: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> tuple[float, str]:
    if reference.keys() != other.keys():
        return float("inf"), ", ".join(sorted(reference.keys() ^ other.keys()))
    errors = [(_relative(tensor, other[name]), name) for name, tensor in reference.items()]
    return max(errors, default=(0.0, ""))


def _relative(reference: torch.Tensor, other: torch.Tensor) -> float:
    """Returns the largest absolute difference relative to the largest element; infinite if a number is not finite."""
    a, b = reference.double(), other.double()
    if a.shape != b.shape or not (torch.isfinite(a).all() and torch.isfinite(b).all()):
        return float("inf")
    difference = (a - b).abs().max().item() if a.numel() else 0.0
    scale = a.abs().max().item() if a.numel() else 0.0
    return difference / scale if scale > 0 else (0.0 if difference == 0 else float("inf"))
