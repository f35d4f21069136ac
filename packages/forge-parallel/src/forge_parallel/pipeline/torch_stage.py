"""One stage as torch's schedules see it."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage

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
