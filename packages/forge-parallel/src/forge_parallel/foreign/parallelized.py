"""A foreign module as `parallelize` leaves it: for a loop that is not ours."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from forge_core.batch import Batch
from forge_core.errors import PlanError
from forge_core.protocols.model import LossTerms
from forge_parallel.build.parallel_model import ParallelModel
from forge_parallel.pipeline.runner import Runner
from forge_parallel.placement.boxes import local_box
from forge_parallel.step.clipping import clip
from forge_parallel.step.reduce import squared_norm, world_sum
from forge_parallel.step.strategies import after_backward, before_micro_batch, refresh
from forge_parallel.verify.gather import gathered

Loss = Callable[[Any, Mapping[str, Tensor]], Tensor]
"""(the module's output, the batch) -> sum over the batch's valid tokens."""


@dataclass(frozen=True)
class Parallelized(ParallelModel):
    """A laid out module for a loop that is not ours."""

    @property
    def module(self) -> nn.Module:
        """The module as this rank runs it; call it, and its loss's `backward`, as ever.

        Raises:
            PlanError: under a pipeline no rank has a single module.
        """
        return self.part

    @property
    def data_rank(self) -> int:
        """Which share of the data this rank has to read: ranks with the same one need the same data."""
        return self.topology.data_rank

    @property
    def data_ranks(self) -> int:
        """Into how many shares the data is cut."""
        return self.topology.data_size

    def parameters(self) -> Iterator[nn.Parameter]:
        """What an optimizer takes: this rank's share of every trainable parameter, a tied one once."""
        yield from (tensor for _, tensor, _ in self.trainable())  # type: ignore[misc]

    def clip_grad_norm(self, limit: float) -> Tensor:
        """Scales all gradients by min(1, limit / norm); returns the norm over all parameters and ranks, equal on all of them."""
        (square,) = world_sum([squared_norm(self)], self.topology)
        clip(self, square.sqrt(), limit)
        return square.sqrt()

    def mean(self, value: Tensor) -> float:
        """The mean over data ranks of a number that each has from its own share of the data, such as a loss."""
        (total,) = world_sum([self._counted(value.detach())], self.topology)
        return float(total) / self.data_ranks

    def step(
        self,
        batches: Sequence[Mapping[str, Tensor]],
        loss: Loss,
        tokens: Callable[[Mapping[str, Tensor]], Tensor],
    ) -> Tensor:
        """Forward and backward of several micro-batches; the gradient is that of the mean over the tokens of all ranks.

        Args:
            batches: keyword arguments of the module, as many on every rank; a single one under a pipeline.
            loss: (output, batch) -> sum over the batch's valid tokens, a scalar with its graph; `output` is the module's, or
                under a pipeline its first tensor.
            tokens: batch -> number of its valid tokens, a scalar.

        Returns:
            The mean loss per valid token over all ranks and micro-batches.
        """
        counts = torch.stack([tokens(batch).to(self.topology.device, torch.float64) for batch in batches]).sum()
        (count,) = world_sum([self._counted(counts, first=True)], self.topology)
        # Gradients are averaged over data ranks, as loops outside of Forge expect; here they are to be summed.
        divisor = count.clamp(min=1) / self.data_ranks
        refresh(self)
        run = self._plain if self.cut is None else self._pipelined
        total = torch.zeros((), dtype=torch.float64, device=self.topology.device)
        for term in run(batches, loss, divisor):
            total += term.detach().double()
        after_backward(self)
        (whole,) = world_sum([self._counted(total)], self.topology)
        return whole / count.clamp(min=1)

    def _plain(self, batches: Sequence[Mapping[str, Tensor]], loss: Loss, divisor: Tensor) -> Iterator[Tensor]:
        for index, batch in enumerate(batches):
            before_micro_batch(self, last=index == len(batches) - 1)
            with self.computing():
                found = loss(self.module(**batch), batch)
                (found / divisor.to(found.dtype)).backward()
            yield found

    def _pipelined(self, batches: Sequence[Mapping[str, Tensor]], loss: Loss, divisor: Tensor) -> Iterator[Tensor]:
        def objective(head: Any, hidden: Tensor, labels: Tensor) -> LossTerms:  # noqa: ARG001
            """A pipeline's names for the output and the batch's number."""
            return LossTerms(loss(hidden, batches[int(labels)]), labels, {})

        inputs = [self._only_input(batch) for batch in batches]
        numbered = [Batch(tokens, torch.tensor(number)) for number, tokens in enumerate(inputs)]
        yield from (term.sum for term in Runner(self, objective).train(numbered, divisor))

    def _only_input(self, batch: Mapping[str, Tensor]) -> Tensor:
        if len(batch) != 1:
            raise PlanError(
                f"a pipeline hands one input through foreign modules, but a batch has {', '.join(sorted(batch))}; give what the "
                "loss needs by closure, or set pp to 1"
            )
        return next(iter(batch.values())).to(self.topology.device)

    def _counted(self, value: Tensor, first: bool = False) -> Tensor:
        """One of the ranks that read the same data speaks for all: for losses one that has them, else (`first`) any."""
        at = self.topology.coordinates
        speaks = at["tp"] == 0 and (at["pp"] == 0 if first or self.cut is None else self.scores)
        return value if speaks else torch.zeros_like(value)

    def state_dict(self, whole: bool = False) -> dict[str, Tensor]:
        """Parameters and persistent buffers under the module's own names: this rank's (packed experts with a dimension for what
        is packed), or with `whole` complete copies on the host of every rank (small models, exports)."""
        mine = dict(self.tensors())
        if not whole:
            return mine
        full = gathered(self, mine)
        dtype = next((tensor.dtype for _, tensor, _ in self.trainable()), torch.float32)
        buffers = {name: tensor.detach().cpu() for name, tensor in mine.items() if name not in self.shapes}
        return {name: tensor.to(dtype) for name, tensor in full.items()} | buffers

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes whole tensors under the module's own names; every rank brings all of them.

        Raises:
            PlanError: names or shapes differ.
        """
        mine = dict(self.tensors())
        known = set(self.shapes) | set(mine)
        if unknown := sorted(set(state) - known - set(self.specs.ties)):
            raise PlanError(f"load_state_dict: the module has no {', '.join(unknown)}")
        if missing := sorted(set(mine) - set(state)):
            raise PlanError(f"load_state_dict: the state lacks {', '.join(missing)}")
        for name, tensor in mine.items():
            shape = self.shapes.get(name, tuple(tensor.shape))
            if tuple(state[name].shape) != shape:
                raise PlanError(f"load_state_dict: {name} is {shape} here and {tuple(state[name].shape)} there")
            box = local_box(tensor)
            box.local.copy_(box.within(state[name].reshape(box.shape)))
