"""One optimizer step up to the update: count, forward and backward, reduce.

The loss is the sum over all valid tokens of the step, over every rank and micro-batch, divided by their number. It is the
same number in every layout, and so are its gradients.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from forge_core.batch import Batch
from forge_core.protocols.model import LossTerms, Objective, Observer
from forge_parallel.model.parallel_model import ParallelModel
from forge_parallel.pipeline import stages
from forge_parallel.step.pipeline import Agree, PipelineRunner
from forge_parallel.step.reduce import (
    begin_statistics,
    finish_statistics,
    loss_shares,
    observers,
    reports,
    sources_of,
    squared_grad_norm,
    sums_by_source,
    valid_tokens,
    world_sum,
)
from forge_parallel.step.timing import DeferredRead, StepTimer


@dataclass(frozen=True)
class StepResult:
    """Numbers of one step, the same on every rank; scalars on the device, so nothing waits until `numbers` is called.

    Attributes:
        loss: mean over valid tokens, in nats; 0 when there are none.
        tokens: valid tokens.
        norm: 2-norm of the whole gradient before clipping.
        skip: 1 where loss or norm is not finite: the update must not happen; else 0.
        stop: number of ranks that asked to stop.
        trace: number of ranks that asked for a profile.
        metrics: the objective's further sums, per valid token.
        sources: names of the data's sources, where a run mixes several.
        by_source: (2, sources) fp64, loss and valid tokens of each; zeros where the objective does not count rows.
    """

    loss: torch.Tensor
    tokens: torch.Tensor
    norm: torch.Tensor
    skip: torch.Tensor
    stop: torch.Tensor
    trace: torch.Tensor
    metrics: dict[str, torch.Tensor]
    sources: tuple[str, ...] = ()
    by_source: torch.Tensor | None = None

    def numbers(self) -> dict[str, float]:
        """All numbers on the host, with the losses of sources (`reduce.loss_shares`). The first call is the step's one
        synchronization.

        It waits for what was queued before `send`, which the first call does itself if it has not happened.
        """
        return dict(self._host)

    def send(self) -> None:
        """Queues the numbers' way to the host, behind all that was queued so far; the host does not wait."""
        _ = self._reading

    @cached_property
    def _named(self) -> dict[str, torch.Tensor]:
        return {
            "loss": self.loss,
            "tokens": self.tokens,
            "grad_norm": self.norm,
            "skipped": self.skip,
            "stop": self.stop,
            "trace": self.trace,
        } | self.metrics

    @cached_property
    def _reading(self) -> DeferredRead:
        values = torch.stack([value.double() for value in self._named.values()])
        return DeferredRead(values if self.by_source is None else torch.cat((values, self.by_source.flatten())))

    @cached_property
    def _host(self) -> dict[str, float]:
        found, alone, count = self._reading.numbers(), len(self._named), len(self.sources)
        numbers = dict(zip(self._named, found, strict=False))  # sources follow
        if self.by_source is None:
            return numbers
        rest = found[alone:]
        return numbers | loss_shares(self.sources, rest[:count], rest[count:], numbers["tokens"])


@dataclass(frozen=True)
class Evaluation:
    """Token-weighted mean loss over all ranks, in nats, the number of valid tokens behind it, and sums of metrics over these."""

    loss: float
    tokens: int
    metrics: Mapping[str, float] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Step:
    """Runs a model on the micro-batches of one optimizer step.

    Attributes:
        model: what is run.
        objective: what is minimized.
        agree: how ranks of a pipeline learn the names of the objective's metrics, see `PipelineRunner`; for worlds without other
            ranks.
        phases: named in profiles, and timed when asked for.
    """

    model: ParallelModel
    objective: Objective
    agree: Agree | None = None
    phases: StepTimer = field(default_factory=StepTimer)

    def __call__(self, batches: Sequence[Batch], stop: bool = False, trace: bool = False) -> StepResult:
        """Collective: leaves complete gradients in `.grad` and returns the step's numbers.

        Every rank must bring the same number of micro-batches; rows and valid tokens may differ. `stop` and `trace` are wishes of
        this rank, of which all ranks learn.
        """
        topology = self.model.topology
        with self.phases("count"):
            moved = [local_batch(self.model, batch, self.model.specs.mtp_depth) for batch in batches]
            tokens = valid_tokens(moved, topology)
            divisor = tokens.clamp(min=1)
            refresh(self.model)
            begin_statistics(self._observers, self.model, moved)
        terms, names = self._forward_backward(moved, divisor)
        with self.phases("reduce"):
            return self._reduce(moved, terms, names, (tokens, divisor), (stop, trace))

    def _reduce(
        self,
        moved: Sequence[Batch],
        terms: Sequence[LossTerms],
        names: Sequence[str],
        counted: tuple[torch.Tensor, torch.Tensor],
        wishes: tuple[bool, bool],
    ) -> StepResult:
        """Collective: the numbers of all ranks; `counted` are the step's tokens, and what its sums are divided by."""
        topology, (tokens, divisor) = self.model.topology, counted
        after_backward(self.model)
        sources = sources_of(moved)
        if reports(self.model):
            mine = [_sum(terms, lambda term: term.sum), *(_sum(terms, lambda term, n=name: term.metrics[n]) for name in names)]
            rows = sums_by_source(moved, terms, topology.device)
        else:
            mine = [torch.zeros((), dtype=torch.float64, device=topology.device) for _ in ("loss", *names)]
            rows = torch.zeros(2, len(sources), dtype=torch.float64, device=topology.device)
        asked = [torch.full((), float(wish), device=topology.device) for wish in wishes]
        square, stop, trace, by_source, loss, *metrics = world_sum([squared_grad_norm(self.model), *asked, rows, *mine], topology)
        skip = (~(torch.isfinite(square) & torch.isfinite(loss))).float()
        finish_statistics(self._observers, self.model, skip)
        means = {name: value / divisor for name, value in zip(names, metrics, strict=True)}
        by_source = by_source if sources else None
        return StepResult(loss / divisor, tokens, square.sqrt(), skip, stop, trace, means, sources, by_source)

    def _forward_backward(self, batches: Sequence[Batch], divisor: torch.Tensor) -> tuple[list[LossTerms], list[str]]:
        """The terms of each micro-batch where they are computed, and the names of their metrics everywhere."""
        if self._pipeline is not None:
            with self.phases("forward_backward"):  # of several micro-batches at once
                terms = self._pipeline.train(batches, divisor)
            return terms, self._pipeline.metric_names(terms)
        with self.model.computing():  # around all of them: parameters are cast once a step
            terms = [self._train(batch, divisor, last=index == len(batches) - 1) for index, batch in enumerate(batches)]
        return terms, sorted(terms[0].metrics) if terms else []

    @cached_property
    def _observers(self) -> tuple[Observer, ...]:
        return observers(self.model)

    @cached_property
    def _pipeline(self) -> PipelineRunner | None:
        return None if self.model.cut is None else PipelineRunner(self.model, self.objective, self.agree)

    def _train(self, batch: Batch, divisor: torch.Tensor, last: bool) -> LossTerms:
        before_micro_batch(self.model, last)
        with self.phases("forward"):
            terms = self._forward(batch)
        with self.phases("backward"):
            (terms.sum / divisor).backward()
        return terms._replace(sum=terms.sum.detach())

    def _forward(self, batch: Batch, objective: Objective | None = None) -> LossTerms:
        mtp = {} if batch.mtp_targets is None else {"mtp_targets": batch.mtp_targets}
        return self.model.part(
            batch.tokens,
            labels=batch.labels,
            objective=objective or self.objective,
            **mtp,
            **batch.inputs(self.model.specs.needs),
        )

    def evaluate(self, batches: Iterable[Batch], objective: Objective | None = None, metrics: Sequence[str] = ()) -> Evaluation:
        """Collective: mean loss without gradients, by another `objective` than the step's where one is given. Every rank must
        bring the same number of batches, and the same names of `metrics` of the objective, whose sums are wanted."""
        topology = self.model.topology
        total = torch.zeros(2 + len(metrics), dtype=torch.float64, device=topology.device)
        local = (local_batch(self.model, batch) for batch in batches)
        with self.model.inference():
            if self._pipeline is None:
                every = (self._forward(batch, objective) for batch in local)
            else:
                every = self._pipeline.evaluate(local, objective)
            for terms in every:
                total += torch.stack([terms.sum.double(), terms.tokens.double(), *(terms.metrics[m].double() for m in metrics)])
        loss, count, *sums = topology.all_reduce(total if reports(self.model) else torch.zeros_like(total)).tolist()
        return Evaluation(loss / max(count, 1.0), int(count), dict(zip(metrics, sums, strict=True)))


def _sum(terms: Sequence[LossTerms], take: Callable[[LossTerms], torch.Tensor]) -> torch.Tensor:
    return torch.stack([take(term).double() for term in terms]).sum()


def refresh(model: ParallelModel) -> None:
    """Collective: gives tied copies on other pipeline stages the value of their originals; before a step or an evaluation."""
    if model.cut is not None:
        stages.refresh(model.cut, model.everything, model.topology)


def local_batch(model: ParallelModel, batch: Batch, mtp_depth: int = 0) -> Batch:
    """This rank's share of what its data rank read, on the device; with labels of `mtp_depth` tokens beyond the next one."""
    batch = batch.to(str(model.topology.device)).with_mtp_targets(mtp_depth)
    for transform in model.plan.transforms:
        batch = transform.local_batch(batch, model.contexts[0])
    return batch


def before_micro_batch(model: ParallelModel, last: bool) -> None:
    """Tells every strategy that a micro-batch begins, and whether it is the step's last one."""
    for transform in model.plan.transforms:
        for part in model.parts:
            transform.before_micro_batch(part, last)


def after_backward(model: ParallelModel) -> None:
    """Collective: tells every strategy that the step's last backward is over: gradients are complete afterwards."""
    for transform in reversed(model.plan.transforms):
        for part, context in zip(model.parts, model.contexts, strict=True):
            transform.after_backward(part, context)
    if model.cut is not None:
        stages.add_gradients(model.cut, model.everything, model.topology)
