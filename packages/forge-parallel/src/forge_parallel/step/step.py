"""One optimizer step up to the update: count tokens, run forward and backward, reduce.

The loss is the sum over all valid tokens of the step, over all ranks and micro-batches, divided by their number. So loss and
gradients are the same in every layout.

`StepTimer` names the parts of a step in profiles, and times them only in the steps that request it; otherwise they cost
nothing. On an accelerator, the time is measured on the device between two events in its queue, so work of the host, such as
reading data ahead, does not count. On a CPU it is measured by the clock. `DeferredRead` reads numbers from the device one step
late.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from forge_core.batch import Batch
from forge_core.protocols.model import LossTerms, Objective, Observer
from forge_parallel.accelerator import event_behind, timed_event
from forge_parallel.model.parallel_model import ParallelModel
from forge_parallel.pipeline import stages
from forge_parallel.step.reduce import (
    begin_statistics,
    bound,
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
from forge_parallel.torch_private import profiling

if TYPE_CHECKING:
    from forge_parallel.step.pipeline import PipelineRunner

T = TypeVar("T")

Agree = Callable[[list[str]], list[str]]
"""How ranks of a pipeline get the names of the objective's metrics: the names on this rank -> the names on all ranks."""

PREFIX = "forge/"
"""Prefix of the names in profiles."""


class StepTimer:
    """Times the parts of one rank's steps.

    Attributes:
        timed: whether parts that begin from now on are timed.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.timed = False
        self._device = device or torch.device("cpu")
        self._noted: list[tuple[str, Any, Any]] = []

    def __call__(self, name: str) -> AbstractContextManager[None]:
        """Returns a context for the part `name`: `data`, `forward`, `backward`, `reduce`, `optimizer`, ..."""
        return self._noting(name) if self.timed or profiling() else nullcontext()

    def drawn(self, name: str, items: Iterable[T]) -> Iterator[T]:
        """Yields the items of an iterator and counts the time to get each of them as the part `name`."""
        source = iter(items)
        while True:
            with self(name):
                item = next(source, None)
            if item is None:
                return
            yield item

    def _mark(self) -> Any:
        """Returns a timestamp: an event in the device's queue, or the clock."""
        return perf_counter() if self._device.type == "cpu" else timed_event(self._device)

    def _between(self, before: Any, after: Any) -> float:
        return after - before if self._device.type == "cpu" else before.elapsed_time(after) / 1000

    def take(self) -> dict[str, float]:
        """Returns the seconds of each part since the last call, and the time between parts as `other`; together they are the time
        from the start of the first part to the end of the last. Read a number of the step first, so that the device is done."""
        if not self._noted:
            return {}
        seconds: dict[str, float] = {}
        for name, before, after in self._noted:
            seconds[name] = seconds.get(name, 0.0) + self._between(before, after)
        whole = self._between(self._noted[0][1], self._noted[-1][2])
        self._noted.clear()
        return {**seconds, "other": max(0.0, whole - sum(seconds.values()))}

    @contextmanager
    def _noting(self, name: str) -> Iterator[None]:
        with torch.profiler.record_function(PREFIX + name) if profiling() else nullcontext():
            before = self._mark() if self.timed else None
            try:
                yield
            finally:
                if before is not None:
                    self._noted.append((name, before, self._mark()))


class DeferredRead:
    """Numbers of the device that the host reads later.

    On an accelerator, a copy into pinned memory is queued, followed by an event: the host waits for this event only, while the
    device goes on. On a CPU nothing waits.

    Args:
        values: (n,) of any dtype.
    """

    def __init__(self, values: torch.Tensor) -> None:
        self._values, self._arrived = values, None
        if values.device.type != "cpu":
            # torch's allocator reuses the pinned memory only after the copy is done, even if this object is deleted before.
            self._values = torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)
            self._arrived = event_behind(values.device)

    def numbers(self) -> list[float]:
        """Returns the numbers; blocks until they are on the host."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values.tolist()


@dataclass(frozen=True)
class StepResult:
    """Numbers of one step, the same on every rank. They are scalars on the device; only `numbers` waits for them.

    Attributes:
        loss: mean over valid tokens, in nats; 0 without valid tokens.
        tokens: number of valid tokens.
        norm: 2-norm of the whole gradient before clipping.
        skip: 1 if loss or norm is not finite, so that the update must be skipped; otherwise 0.
        stop: number of ranks that requested a stop.
        trace: number of ranks that requested a profile.
        metrics: further sums of the objective, per valid token.
        sources: names of the data sources, if there are several.
        by_source: (2, sources) fp64, loss and valid tokens of each source; zeros if the objective does not return losses of rows.
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
        """Returns all numbers on the host, with the losses of sources (see `reduce.loss_shares`).

        The first call blocks until the device has computed what was queued before `send`; without an earlier `send`, it calls
        `send` itself. It is the only synchronization of a step.
        """
        return dict(self._host)

    def send(self) -> None:
        """Queues the copy of the numbers to the host, without waiting."""
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
        values, named, count = self._reading.numbers(), len(self._named), len(self.sources)
        numbers = dict(zip(self._named, values, strict=False))  # values of sources follow
        if self.by_source is None:
            return numbers
        rest = values[named:]
        return numbers | loss_shares(self.sources, rest[:count], rest[count:], numbers["tokens"])


@dataclass(frozen=True)
class Evaluation:
    """Mean loss per valid token over all ranks, in nats, the number of these tokens, and sums of metrics over them."""

    loss: float
    tokens: int
    metrics: Mapping[str, float] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Step:
    """Runs forward and backward of one optimizer step.

    Attributes:
        model: the model.
        objective: the loss to minimize.
        agree: how ranks of a pipeline get the names of the objective's metrics, see `PipelineRunner`; set for simulated worlds.
        phases: names the parts of a step in profiles and times them on request.
    """

    model: ParallelModel
    objective: Objective
    agree: Agree | None = None
    phases: StepTimer = field(default_factory=StepTimer)

    def __call__(self, batches: Sequence[Batch], stop: bool = False, trace: bool = False) -> StepResult:
        """Collective: leaves complete gradients in `.grad` and returns the step's numbers.

        Every rank must pass the same number of micro-batches; rows and valid tokens may differ. `stop` and `trace` are requests
        of this rank; the result counts those of all ranks.
        """
        topology = self.model.topology
        with self.phases("count"):
            moved = [local_batch(self.model, self._prepared(batch), self.model.specs.mtp_depth) for batch in batches]
            tokens = valid_tokens(moved, topology, self.objective)
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
        """Collective: returns the numbers of all ranks. `counted` is (valid tokens, divisor of the sums)."""
        topology, (tokens, divisor) = self.model.topology, counted
        after_backward(self.model)
        sources = sources_of(moved)
        if reports(self.model):
            sums = [_sum(terms, lambda term: term.sum), *(_sum(terms, lambda term, n=name: term.metrics[n]) for name in names)]
            rows = sums_by_source(moved, terms, topology.device, self.objective)
        else:
            sums = [torch.zeros((), dtype=torch.float64, device=topology.device) for _ in ("loss", *names)]
            rows = torch.zeros(2, len(sources), dtype=torch.float64, device=topology.device)
        requests = [torch.full((), float(wish), device=topology.device) for wish in wishes]
        square = squared_grad_norm(self.model)
        square, stop, trace, by_source, loss, *metrics = world_sum([square, *requests, rows, *sums], topology)
        skip = (~(torch.isfinite(square) & torch.isfinite(loss))).float()
        finish_statistics(self._observers, self.model, skip)
        means = {name: value / divisor for name, value in zip(names, metrics, strict=True)}
        by_source = by_source if sources else None
        return StepResult(loss / divisor, tokens, square.sqrt(), skip, stop, trace, means, sources, by_source)

    def _forward_backward(self, batches: Sequence[Batch], divisor: torch.Tensor) -> tuple[list[LossTerms], list[str]]:
        """Returns the loss terms of this rank's micro-batches (empty except on the last stage) and, on all ranks, the names of
        their metrics."""
        if self._pipeline is not None:
            with self.phases("forward_backward"):  # a schedule interleaves several micro-batches
                terms = self._pipeline.train(batches, divisor)
            return terms, self._pipeline.metric_names(terms)
        with self.model.computing():  # around all micro-batches, so that parameters are cast once per step
            terms = [self._train(batch, divisor, last=index == len(batches) - 1) for index, batch in enumerate(batches)]
        return terms, sorted(terms[0].metrics) if terms else []

    @cached_property
    def _observers(self) -> tuple[Observer, ...]:
        return observers(self.model)

    @cached_property
    def _pipeline(self) -> "PipelineRunner | None":
        if self.model.cut is None:
            return None
        from forge_parallel.step.pipeline import PipelineRunner  # torch's pipelines import its compiler, most of a second

        return PipelineRunner(self.model, self.objective, self.agree)

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
            objective=bound(objective or self.objective, batch),
            **mtp,
            **batch.inputs(self.model.specs.needs),
        )

    def _prepared(self, batch: Batch, objective: Objective | None = None) -> Batch:
        prepare = getattr(objective or self.objective, "prepared", None)
        return batch if prepare is None else prepare(batch)

    def scored(self, batches: Iterable[Batch], objective: Objective | None = None) -> Iterator[LossTerms]:
        """Collective: yields the loss terms of each batch on ranks of the last pipeline stage, and nothing on others. Call it
        inside `ParallelModel.inference`; `objective` replaces that of the step."""
        local = (local_batch(self.model, self._prepared(batch, objective)) for batch in batches)
        if self._pipeline is None:
            return (self._forward(batch, objective) for batch in local)
        return self._pipeline.evaluate(local, objective)

    def evaluate(self, batches: Iterable[Batch], objective: Objective | None = None, metrics: Sequence[str] = ()) -> Evaluation:
        """Collective: returns the mean loss, computed without gradients. `objective` replaces that of the step. Every rank must
        pass the same number of batches, and the same `metrics`: names of the objective's metrics to sum."""
        topology = self.model.topology
        total = torch.zeros(2 + len(metrics), dtype=torch.float64, device=topology.device)
        with self.model.inference():
            for terms in self.scored(batches, objective):
                total += torch.stack([terms.sum.double(), terms.tokens.double(), *(terms.metrics[m].double() for m in metrics)])
        loss, count, *sums = topology.all_reduce(total if reports(self.model) else torch.zeros_like(total)).tolist()
        return Evaluation(loss / max(count, 1.0), int(count), dict(zip(metrics, sums, strict=True)))


def _sum(terms: Sequence[LossTerms], take: Callable[[LossTerms], torch.Tensor]) -> torch.Tensor:
    return torch.stack([take(term).double() for term in terms]).sum()


def refresh(model: ParallelModel) -> None:
    """Collective: copies tied parameters to other pipeline stages; call it before a step or an evaluation."""
    if model.cut is not None:
        stages.refresh(model.cut, model.everything, model.topology)


def local_batch(model: ParallelModel, batch: Batch, mtp_depth: int = 0) -> Batch:
    """Returns this rank's share of its data rank's batch, on the device, with labels up to `mtp_depth` tokens beyond the next."""
    batch = batch.to(str(model.topology.device)).with_mtp_targets(mtp_depth)
    for transform in model.plan.transforms:
        batch = transform.local_batch(batch, model.contexts[0])
    return batch


def before_micro_batch(model: ParallelModel, last: bool) -> None:
    """Notifies all transforms that a micro-batch begins, and whether it is the last one of the step."""
    for transform in model.plan.transforms:
        for part in model.parts:
            transform.before_micro_batch(part, last)


def after_backward(model: ParallelModel) -> None:
    """Collective: notifies all transforms that the step's last backward is done; afterwards gradients are complete."""
    for transform in reversed(model.plan.transforms):
        for part, context in zip(model.parts, model.contexts, strict=True):
            transform.after_backward(part, context)
    if model.cut is not None:
        stages.add_gradients(model.cut, model.everything, model.topology)
