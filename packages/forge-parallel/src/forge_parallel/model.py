"""What `realize` returns: the only thing that a step or an optimizer accepts."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from forge_core.protocols.ckpt import Piece
from forge_core.protocols.model import NamedTensor
from forge_core.specs import Specs
from forge_parallel.boxes import local_box
from forge_parallel.owner import owns
from forge_parallel.plan import Plan
from forge_parallel.precision import cast_parameters
from forge_parallel.topology import Topology


@dataclass(frozen=True)
class ParallelModel:
    """A model laid out over ranks, with every tensor filled. Only `realize` makes one.

    Attributes:
        parts: what this rank runs, in order; one unless a pipeline is cut.
        specs: how the model describes itself, by global name.
        plan: what was applied, in order.
        topology: this rank's place.
        compute: dtype of parameters in forward and backward.
    """

    parts: tuple[nn.Module, ...]
    specs: Specs
    plan: Plan
    topology: Topology
    compute: torch.dtype

    @property
    def part(self) -> nn.Module:
        """The only part.

        Raises:
            RuntimeError: under a pipeline there is no single module; use `parts`.
        """
        if len(self.parts) != 1:
            raise RuntimeError(f"this rank holds {len(self.parts)} pipeline parts; use .parts")
        return self.parts[0]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Global name and live tensor of every local parameter and persistent buffer; a tied copy is not repeated."""
        for part in self.parts:
            yield from part.named_parameters()
            yield from ((name, buffer) for name, buffer in part.named_buffers() if name in part.state_dict())

    def trainable(self) -> list[NamedTensor]:
        """Every local parameter that takes a gradient, once."""
        return [
            NamedTensor(name, parameter, self.specs.tensors[name].group)
            for part in self.parts
            for name, parameter in part.named_parameters()
            if parameter.requires_grad
        ]

    def pieces(self) -> Iterator[Piece]:
        """The local boxes of all parameters and buffers under `model/<global name>`, for a checkpoint."""
        for name, tensor in self.tensors():
            yield self.piece(f"model/{name}", tensor)

    def piece(self, name: str, tensor: torch.Tensor) -> Piece:
        """The local box of a tensor of the model or of its optimizer's state."""
        box = local_box(tensor)
        return Piece(name, box.shape, box.offset, box.local, owns(tensor, self.topology) and box.local.numel() > 0)

    def computing(self) -> AbstractContextManager[None]:
        """Spans one forward and backward: parameters have the compute dtype inside."""
        if isinstance(self.part, FSDPModule):
            return nullcontext()
        return cast_parameters(self.part, self.compute)

    def before_micro_batch(self, last: bool) -> None:
        """Tells every strategy that a micro-batch begins, and whether it is the step's last one."""
        for transform in self.plan.transforms:
            for part in self.parts:
                transform.before_micro_batch(part, last)

    def parameter_count(self) -> int:
        """Parameters of the whole model, counted once over all ranks and ties."""
        owned = sum(local_box(p).local.numel() for _, p, _ in self.trainable() if owns(p, self.topology))
        count = torch.tensor(owned, dtype=torch.int64, device=self.topology.device)
        return int(self.topology.all_reduce(count))
