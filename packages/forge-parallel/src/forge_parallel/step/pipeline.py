"""Runs the pipeline stages of one rank in the order of a schedule of torch."""

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage

from forge_core.batch import Batch
from forge_core.errors import ForgeError, PlanError
from forge_core.protocols.model import LossTerms, Objective
from forge_parallel.model.parallel_model import ParallelModel
from forge_parallel.torch_private import after_backward, is_view, stage_backward_input, stage_backward_weight

Forward = Callable[[int, int, Tensor | None], Tensor]
"""(stage, micro-batch, hidden states from the stage before) -> hidden states, or from the last stage the loss (1,)."""


class ScheduledStage(PipelineStage):
    """A part of the model on its stage. Made while the part's parameters are in their places.

    Only hidden states travel from stage to stage. A schedule hands on the number of the micro-batch, and `forward` looks up
    what else the part reads: every stage has its tokens, positions, documents and labels from its own data rank. Shapes are
    given, so no stage sends an object to tell another what will come.
    """

    def __init__(
        self,
        part: nn.Module,
        forward: Forward,
        index: int,
        count: int,
        hidden: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        group: dist.ProcessGroup,
    ) -> None:
        stream = torch.empty(hidden, dtype=dtype, device="meta", requires_grad=True)
        loss = torch.empty(1, dtype=torch.promote_types(dtype, torch.float32), device="meta", requires_grad=True)
        super().__init__(
            part,
            index,
            count,
            device,
            input_args=() if index == 0 else (stream,),
            output_args=(loss,) if index == count - 1 else (stream,),
            group=group,
        )
        self._forward = forward
        self._weights = list(part.parameters())

    def forward_maybe_with_nosync(self, *args: Tensor, micro_batch: Tensor) -> Tensor:
        """Runs the part on one micro-batch."""
        hidden = args[0] if args else None
        if hidden is not None and hidden.requires_grad:
            hidden = hidden.view_as(hidden)
            hidden.register_hook(Tensor.contiguous)  # only contiguous gradients can be sent
        out = self._forward(self.stage_index, int(micro_batch), hidden)
        # The schedule detaches outputs in place when they are sent and done with, which a view does not allow.
        return out if out.is_contiguous() and not is_view(out) else out.clone(memory_format=torch.contiguous_format)

    def backward_maybe_with_nosync(self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False) -> Any:
        """As torch's, but for the halves of a backward.

        While a part computes in another precision its slots hold casts, and a gradient given to a cast would be lost: so
        they are told the parameters themselves.
        """
        if not isinstance(self.submod, FSDPModule):
            if backward_type == "input":
                inputs = bwd_kwargs["stage_output"], bwd_kwargs["output_grads"], bwd_kwargs["input_values"]
                return stage_backward_input(*inputs, iter(self._weights))
            if backward_type == "weight":
                return stage_backward_weight(iter(self._weights), bwd_kwargs["param_groups"]), None
        elif backward_type != "full":
            _gather(self.submod)
        result = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        if backward_type == "weight":
            _accumulate(self.submod)
        return result


def _gather(part: nn.Module) -> None:
    """Gathers what the forward of another micro-batch, or its own, freed again (`transforms.shard.reshard = true`).

    A whole backward gathers in its hooks. Halves of one look for the parameters in the graph by those that the part shows, which
    are shards while it is not gathered: the gradients of whole blocks would be left out.
    """
    for module in part.modules():
        if isinstance(module, FSDPModule):
            module.unshard()


def _accumulate(part: nn.Module) -> None:
    """Moves gradients of gathered parameters to where FSDP sums them, in the precision in which it reduces.

    A whole backward does so in its hooks, but gradients of weights alone do not run them, and those of several
    micro-batches would be summed in the precision of compute.
    """
    for module in part.modules():
        if isinstance(module, FSDPModule):
            after_backward(module)


Agree = Callable[[list[str]], list[str]]


@dataclass
class _Scored:
    """A training step: keeps the terms of each micro-batch by its number, and returns what backward starts from.

    A stage returns a tensor with a dimension, so the loss has shape (1,).
    """

    divisor: Tensor
    batches: Sequence[Batch]
    terms: dict[int, LossTerms] = field(default_factory=dict)

    def __call__(self, number: int, terms: LossTerms) -> Tensor:
        self.terms[number] = terms._replace(sum=terms.sum.detach())
        return torch.stack([terms.sum / self.divisor])


class PipelineRunner:
    """The stages of one rank, for one objective.

    Args:
        model: whose stages they are.
        objective: what is minimized.
        agree: names of the objective's metrics on this rank -> those of the last stage; by default all ranks ask that one.
    """

    def __init__(self, model: ParallelModel, objective: Objective, agree: Agree | None = None) -> None:
        assert model.cut is not None
        assert model.plan.pipeline is not None
        self._model, self._objective, self._cut = model, objective, model.cut
        self._order = model.plan.pipeline.schedule
        self._parts = dict(zip(model.cut.local, model.parts, strict=True))
        self._group = model.topology.group("pp")
        self._agree = self._told if agree is None else agree
        self._ranks = model.topology.layout.pp
        self._schedules: dict[tuple[int, tuple[int, ...]], Any] = {}
        self._work: _Scored | None = None
        self._names: tuple[str, ...] | None = None

    def train(self, batches: Sequence[Batch], divisor: Tensor) -> list[LossTerms]:
        """Collective: forward and backward of a step's micro-batches; the terms of each on the rank of the last stage, else none.

        Raises:
            PlanError: micro-batches differ in shape, or the schedule cannot run that many.
        """
        self._work = work = _Scored(divisor, batches)
        numbers = torch.arange(len(batches))
        schedule = self._schedule(batches)
        try:
            with self._model.computing():
                # The last stage returns the loss, so torch's loss function has only to hand it on; its target is not read.
                schedule.step(micro_batch=numbers, target=numbers)
        except RuntimeError as error:
            if isinstance(error.__cause__, ForgeError):  # torch wraps what a stage raises
                raise error.__cause__ from None
            raise
        self._work = None
        return [terms for _, terms in sorted(work.terms.items())]

    def metric_names(self, terms: Sequence[LossTerms]) -> list[str]:
        """Names of the objective's metrics: all ranks learn them from the last stage, in the first step and once."""
        found = sorted(terms[0].metrics) if terms else []
        if self._names is None:
            self._names = tuple(self._agree(found))
        names = list(self._names)
        if self._cut.last and found != names:
            raise PlanError(f"the objective's metrics were {names} in the first step and are {found} now; keep them the same")
        return names

    def _told(self, names: list[str]) -> list[str]:
        """Collective: the last stage's names, on all ranks of its pipeline."""
        payload = json.dumps(names).encode()
        device, last = self._model.topology.device, dist.get_global_rank(self._group, self._cut.placement[-1])
        size = torch.tensor(len(payload), device=device)
        dist.broadcast(size, last, self._group)
        letters = torch.zeros(int(size), dtype=torch.uint8, device=device)
        if self._cut.last:
            letters.copy_(torch.tensor(list(payload), dtype=torch.uint8))
        dist.broadcast(letters, last, self._group)
        return json.loads(bytes(letters.tolist()))

    def evaluate(self, batches: Iterable[Batch], objective: Objective | None = None) -> Iterator[LossTerms]:
        """Collective: forward passes only, for any number of batches; yields their terms on the last stage's rank, else nothing.
        By another `objective` than that of training where one is given.

        Stages send to each other directly, in an order that no schedule decides. With one stage per rank the batches
        follow each other through the pipeline; with several, a batch waits for the one before.
        """
        ahead = 1 if self._order.stages_per_rank > 1 else self._ranks
        under_way: deque[tuple[Any, Tensor]] = deque()
        for batch in batches:
            hidden: Tensor | None = None
            for stage, part in self._parts.items():
                if stage > 0 and self._cut.placement[stage - 1] != self._cut.rank:
                    hidden = torch.empty(self._hidden(batch), dtype=self._model.compute, device=self._model.topology.device)
                    dist.recv(hidden, self._peer(stage - 1), self._group)
                out = self._call(stage, part, hidden, batch, objective or self._objective)
                if stage == len(self._cut.placement) - 1:
                    yield out
                elif self._cut.placement[stage + 1] == self._cut.rank:
                    hidden = self._checked(stage, out, batch)
                else:
                    sent = self._checked(stage, out, batch).contiguous()
                    work = dist.isend(sent, self._peer(stage + 1), self._group)
                    under_way.append((work, sent))  # kept alive until it has arrived
            while len(under_way) > ahead:
                _arrived(*under_way.popleft())
        while under_way:
            _arrived(*under_way.popleft())

    def _schedule(self, batches: Sequence[Batch]) -> Any:
        """The schedule for batches like these; stages keep buffers of their shape."""
        shapes = {tuple(batch.tokens.shape) for batch in batches}
        if why := self._order.refusal(self._ranks, len(batches)):
            raise PlanError(why)
        if len(shapes) > 1:
            raise PlanError(f"the micro-batches of a step have shapes {sorted(shapes)}; a pipeline needs equal shapes")
        key = (len(batches), shapes.pop())
        if key not in self._schedules:
            hidden = self._hidden(batches[0])
            topology, count = self._model.topology, len(self._cut.placement)
            stages = [
                ScheduledStage(part, self._forward, index, count, hidden, self._model.compute, topology.device, self._group)
                for index, part in self._parts.items()
            ]
            self._schedules[key] = self._order(stages, len(batches), lambda output, _: output)
        return self._schedules[key]

    def _forward(self, stage: int, number: int, hidden: Tensor | None) -> Tensor:
        """What a stage of the schedule calls."""
        work = self._work
        assert work is not None
        part, batch = self._parts[stage], work.batches[number]
        for transform in self._model.plan.transforms:
            transform.before_micro_batch(part, number == len(work.batches) - 1)
        out = self._call(stage, part, hidden, batch, self._objective)
        return work(number, out) if stage == len(self._cut.placement) - 1 else self._checked(stage, out, batch)

    def _call(self, stage: int, part: Any, hidden: Tensor | None, batch: Batch, objective: Any) -> Any:
        given = batch.inputs(self._model.specs.needs)
        if stage == len(self._cut.placement) - 1:
            given |= {"labels": batch.labels, "objective": objective}
            given |= {} if batch.mtp_targets is None else {"mtp_targets": batch.mtp_targets}
        if hidden is not None:
            length = batch.tokens.shape[1]
            if batch.positions is None and hidden.shape[1] != length:  # cut along the sequence, so they do not tell its length
                given["positions"] = torch.arange(length, device=hidden.device).expand_as(batch.tokens)
            if "tokens" in self._model.specs.needs:
                given["tokens"] = batch.tokens
        return part(batch.tokens if hidden is None else hidden, **given)

    def _hidden(self, batch: Batch) -> tuple[int, ...]:
        """Local shape of the hidden states between stages."""
        model = self._model
        if "embed" not in model.specs.units:
            raise PlanError("a pipeline needs the width of the hidden states; name it in specs().units['embed']")
        shape = (*batch.tokens.shape, model.specs.units["embed"])
        for transform in model.plan.transforms:
            shape = transform.hidden_shape(shape, model.contexts[0])
        return shape

    def _checked(self, stage: int, out: Any, batch: Batch) -> Tensor:
        """Raises where a part returns something else than the next stage will take for it."""
        shape, dtype = self._hidden(batch), self._model.compute
        if not isinstance(out, Tensor) or tuple(out.shape) != shape or out.dtype != dtype:
            found = f"{tuple(out.shape)} in {out.dtype}" if isinstance(out, Tensor) else type(out).__name__
            raise PlanError(f"stage {stage} returned {found}, but hidden states between stages are {shape} in {dtype}")
        return out

    def _peer(self, stage: int) -> int:
        return dist.get_global_rank(self._group, self._cut.placement[stage])


def _arrived(work: Any, _sent: Tensor) -> None:
    work.wait()
