"""Runs the pipeline stages of one rank in the order of a torch schedule."""

import json
import re
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
from forge_parallel.step.reduce import bound
from forge_parallel.torch_private import after_backward, is_view, stage_backward_input, stage_backward_weight

Forward = Callable[[int, int, Tensor | None], Tensor]
"""(stage, micro-batch, hidden states of the previous stage) -> hidden states; of the last stage the loss (1,)."""


class ScheduledStage(PipelineStage):
    """One part of the model as a pipeline stage. Create it while the part's own parameters are in place.

    Only hidden states are sent between stages. The schedule passes the index of the micro-batch, by which `forward` finds the
    part's other inputs: every stage has tokens, positions, documents and labels from its own data rank. Shapes are given in
    advance, so stages do not exchange metadata.
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
        self._scored = loss.dtype if index == count - 1 else None
        self._weights = list(part.parameters())

    def forward_maybe_with_nosync(self, *args: Tensor, micro_batch: Tensor) -> Tensor:
        """Runs the part on the micro-batch whose index is `micro_batch`."""
        hidden = args[0] if args else None
        if hidden is not None and hidden.requires_grad:
            hidden = hidden.view_as(hidden)
            hidden.register_hook(Tensor.contiguous)  # only contiguous gradients can be sent
        out = self._forward(self.stage_index, int(micro_batch), hidden)
        if self._scored is not None:
            out = out.to(self._scored)  # of a foreign loss; torch 2.11 checks the dtype
        # The schedule detaches outputs in place after sending them, which torch does not allow for views.
        return out if out.is_contiguous() and not is_view(out) else out.clone(memory_format=torch.contiguous_format)

    def backward_maybe_with_nosync(self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False) -> Any:
        """Like torch's method, except for the two halves of a backward.

        While a part computes in another dtype, its slots hold casts, and gradients accumulated into casts would be lost. So
        both halves get the parameters themselves.
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
    """Gathers parameters that the forward of this or another micro-batch has freed (`transforms.shard.reshard = true`).

    A full backward gathers them in its hooks. The halves of a backward look up the module's current parameters in the graph; if
    these are shards, gradients of whole blocks would be missing.
    """
    for module in part.modules():
        if isinstance(module, FSDPModule):
            module.unshard()


def _accumulate(part: nn.Module) -> None:
    """Moves gradients of gathered parameters to where FSDP sums them, in its reduction dtype.

    A full backward does so in its hooks, but the weight half of a backward does not run them, and gradients of several
    micro-batches would be summed in the compute dtype.
    """
    for module in part.modules():
        if isinstance(module, FSDPModule):
            after_backward(module)


_WRAPPED = re.compile(r"[Ff]ailed to run (forward|stage backward)")
"""The first line of the errors in which torch wraps what a stage raises; the rest lists shapes."""


@dataclass
class _Scored:
    """The micro-batches of a training step: stores the loss terms of each by index and returns the loss for the backward.

    The loss has shape (1,), because a stage must return a tensor with a dimension.
    """

    divisor: Tensor
    batches: Sequence[Batch]
    terms: dict[int, LossTerms] = field(default_factory=dict)

    def __call__(self, number: int, terms: LossTerms) -> Tensor:
        self.terms[number] = terms._replace(sum=terms.sum.detach())
        return torch.stack([terms.sum / self.divisor])


class PipelineRunner:
    """Runs the stages of one rank for one objective.

    Args:
        model: the model to which the stages belong.
        objective: the loss to minimize.
        agree: maps this rank's names of the objective's metrics to those of the last stage; by default by a broadcast.
    """

    def __init__(self, model: ParallelModel, objective: Objective, agree: Callable[[list[str]], list[str]] | None = None) -> None:
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
        """Collective: runs forward and backward of a step's micro-batches. Returns their loss terms on the last stage's rank, and
        an empty list on other ranks.

        Raises:
            PlanError: micro-batches differ in shape, or the schedule does not support their number.
            Exception: what a stage raises, in place of the error in which torch wraps it; a note names the stage.
        """
        self._work = work = _Scored(divisor, batches)
        numbers = torch.arange(len(batches))
        schedule = self._schedule(batches)
        try:
            with self._model.computing():
                # The last stage returns the loss, so torch's loss function only returns its argument; the target is not used.
                schedule.step(micro_batch=numbers, target=numbers)
        except RuntimeError as error:
            cause, what = error.__cause__, str(error).strip().partition("\n")[0].rstrip(":")
            if not isinstance(cause, Exception) or not _WRAPPED.search(what):
                raise
            if not isinstance(cause, ForgeError):
                cause.add_note(what)
            raise cause from None
        self._work = None
        return [terms for _, terms in sorted(work.terms.items())]

    def metric_names(self, terms: Sequence[LossTerms]) -> list[str]:
        """Returns the names of the objective's metrics. Collective in the first step, when all ranks get them from the last
        stage."""
        current = sorted(terms[0].metrics) if terms else []
        if self._names is None:
            self._names = tuple(self._agree(current))
        names = list(self._names)
        if self._cut.last and current != names:
            raise PlanError(f"the objective's metrics were {names} in the first step, but are {current} now; keep them the same")
        return names

    def _told(self, names: list[str]) -> list[str]:
        """Collective: returns the last stage's names on all ranks of its pipeline."""
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
        """Collective: runs forward passes on any number of batches. Yields loss terms on the last stage's rank, otherwise
        nothing.

        Stages send to each other directly, without a schedule. With one stage per rank, batches follow each other through the
        pipeline; with several, a batch waits for the previous one. `objective` replaces the training objective.
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
                    under_way.append((work, sent))  # keeps the tensor alive until it is received
            while len(under_way) > ahead:
                _arrived(*under_way.popleft())
        while under_way:
            _arrived(*under_way.popleft())

    def _schedule(self, batches: Sequence[Batch]) -> Any:
        """Returns the schedule for batches of this number and shape; its stages keep buffers of the shape."""
        shapes = {tuple(batch.tokens.shape) for batch in batches}
        if why := self._order.refusal(self._ranks, len(batches)):
            raise PlanError(why)
        if len(shapes) > 1:
            raise PlanError(f"a pipeline needs micro-batches of equal shapes, but got {sorted(shapes)}; pad the rows")
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
        """Runs one stage on one micro-batch; called by the schedule."""
        work = self._work
        assert work is not None
        part, batch = self._parts[stage], work.batches[number]
        for transform in self._model.plan.transforms:
            transform.before_micro_batch(part, number == len(work.batches) - 1)
        out = self._call(stage, part, hidden, batch, self._objective)
        return work(number, out) if stage == len(self._cut.placement) - 1 else self._checked(stage, out, batch)

    def _call(self, stage: int, part: Any, hidden: Tensor | None, batch: Batch, objective: Any) -> Any:
        inputs = batch.inputs(self._model.specs.needs)
        if stage == len(self._cut.placement) - 1:
            inputs |= {"labels": batch.labels, "objective": bound(objective, batch)}
            inputs |= {} if batch.mtp_targets is None else {"mtp_targets": batch.mtp_targets}
        if hidden is not None:
            length = batch.tokens.shape[1]
            if batch.positions is None and hidden.shape[1] != length:  # split, so shorter than the row
                inputs["positions"] = torch.arange(length, device=hidden.device).expand_as(batch.tokens)
            if "tokens" in self._model.specs.needs:
                inputs["tokens"] = batch.tokens
        return part(batch.tokens if hidden is None else hidden, **inputs)

    def _hidden(self, batch: Batch) -> tuple[int, ...]:
        """Returns the local shape of the hidden states between stages."""
        model = self._model
        if "embed" not in model.specs.units:
            raise PlanError("a pipeline needs the width of the hidden states; add it as specs().units['embed']")
        streams = () if model.specs.streams is None else (model.specs.streams,)
        shape = (*batch.tokens.shape, *streams, model.specs.units["embed"])
        for transform in model.plan.transforms:
            shape = transform.hidden_shape(shape, model.contexts[0])
        return shape

    def _checked(self, stage: int, out: Any, batch: Batch) -> Tensor:
        """Returns `out`, or raises `PlanError` if it is not what the next stage expects."""
        shape, dtype = self._hidden(batch), self._model.compute
        if not isinstance(out, Tensor) or tuple(out.shape) != shape or out.dtype != dtype:
            output = f"{tuple(out.shape)} in {out.dtype}" if isinstance(out, Tensor) else type(out).__name__
            raise PlanError(
                f"pipeline stage {stage} returned {output}, but must return hidden states {shape} in {dtype}; correct the model"
            )
        return out

    def _peer(self, stage: int) -> int:
        return dist.get_global_rank(self._group, self._cut.placement[stage])


def _arrived(work: Any, _sent: Tensor) -> None:
    work.wait()
