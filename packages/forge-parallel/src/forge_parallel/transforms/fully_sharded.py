"""Fully sharded data parallelism (FSDP2) and its hybrid form (HSDP), with gradients summed, not averaged.

The loss is already a sum over the world's valid tokens divided by their number, so FSDP's own division must be off:
otherwise the number of ranks would leak into the gradient. `Context.average` keeps it for loops that take a mean on each rank.

With `offload` shards lie in the host's memory (Ren et al., 2021): one goes to the device before it is gathered, its gradient
comes back once it is reduced. Ranks exchange tensors of the device only; so numbers that are made from shards or gradients go
there first, and a step has to wait for the device: clipping and skipping an update happen on the host.

FSDP keeps what lies outside of the blocks gathered after a forward, for the backward that it expects. `GatheredCopies` frees it
where no backward follows, so that no forward computes with weights that have changed since.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as Cut

from forge_core.errors import PlanError
from forge_core.specs import Specs
from forge_parallel.launch.process_group import alone
from forge_parallel.placement.shares import apart
from forge_parallel.torch_private import base_of, before_backward, end_forward, expect_views_from_units, in_backward, tree_iter

if TYPE_CHECKING:
    from forge_core.protocols.topology import Context


def shard(part: nn.Module, context: "Context", *, reshard: bool | None, offload: bool) -> None:
    """Applies FSDP2 to each block of `part`, then to the rest. On one data rank it does nothing, unless shards lie on the host.

    Ranks that split a sequence (`cp`) shard parameters like data ranks: each has a part of every gradient's sum.

    Raises:
        PlanError: the model names no blocks, so the whole of it would be gathered at once; or shards cannot lie on the host.
    """
    layout = context.topology.layout
    experts_apart = apart(context.specs, layout)
    if layout.dp_shard * layout.dp_replicate * layout.cp == 1 and not experts_apart and not offload:
        return
    if not context.specs.blocks and not context.average:  # without any, a module of somebody else is one unit
        raise PlanError("shard: the model's specs name no blocks to shard one by one; list them in Specs.blocks")
    where = _host(part, context) if offload else OffloadPolicy()
    mesh = context.topology.data_mesh
    # Sums over ranks are never rounded to less than fp32, even where the result is kept in bf16.
    policy = MixedPrecisionPolicy(
        param_dtype=context.compute if context.compute != context.state else None,
        reduce_dtype=torch.promote_types(context.state, torch.float32) if context.compute == torch.bfloat16 else None,
        cast_forward_inputs=False,
    )
    reshard = layout.pp == 1 if reshard is None else reshard
    for path in experts_apart:
        experts, ranks = part.get_submodule(path), context.topology.experts_mesh
        by = partial(_placement, layout.efsdp)
        fully_shard(
            experts, mesh=ranks, mp_policy=policy, offload_policy=where, reshard_after_forward=reshard, shard_placement_fn=by
        )
    for path in context.specs.blocks:
        block = part.get_submodule(path)
        fully_shard(block, mesh=mesh, mp_policy=policy, offload_policy=where, reshard_after_forward=reshard)
        if within := [part.get_submodule(stack) for stack in experts_apart if stack.startswith(f"{path}.")]:
            block.register_forward_hook(partial(_gather_together, within))
    fully_shard(part, mesh=mesh, mp_policy=policy, offload_policy=where, reshard_after_forward=False)
    for module in part.modules():
        if isinstance(module, FSDPModule):
            if not context.average:
                module.set_gradient_divide_factor(1.0)
            # gloo has no fused multiply-and-sum; with a factor of 1 there is nothing to multiply anyway.
            module.set_force_sum_reduction_for_comms(True)
            module.register_forward_hook(_gather_for_views, with_kwargs=True)
    expect_views_from_units()
    if layout.ep > 1:
        _gather_ahead(part, context.specs, experts_apart)
    part.gathered_copies = GatheredCopies(part)  # type: ignore[assignment]


class GatheredCopies:
    """Decides when a forward may use parameters that an earlier forward gathered.

    A copy that is still there may be older than its parameters, and nothing tells whether they were written since: `.data` and
    optimizers over lists of DTensors change no version counter. So copies are freed after a forward without gradients, and
    before a forward that finds some whose backward did not come. A backward that does come gathers them again. Inside of `kept`
    nobody changes parameters, so every copy is used as long as FSDP keeps it.
    """

    def __init__(self, part: nn.Module) -> None:
        self._groups = [module for module in part.modules() if isinstance(module, FSDPModule)]
        self._spans = 0
        self._forwards = 0
        # Before FSDP's own hook, which gathers; and after an error, too.
        part.register_forward_pre_hook(self._before_forward, prepend=True)
        part.register_forward_hook(self._after_forward, always_call=True)

    def free(self) -> None:
        """Frees every copy; parameters of the module are its shards again."""
        for group in self._groups:
            group.reshard()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Copies that are made inside are used by every forward inside, and by none outside."""
        if not self._spans:
            self.free()
        self._spans += 1
        try:
            yield
        finally:
            self._spans -= 1
            if not self._spans:
                self.free()

    def _before_forward(self, _module: nn.Module, _inputs: Any) -> None:
        self._forwards += 1
        if self._forwards == 1 and not self._spans and not in_backward():
            self.free()

    def _after_forward(self, _module: nn.Module, _inputs: Any, _output: Any) -> None:
        self._forwards -= 1
        if self._forwards or in_backward():
            return
        for group in self._groups:
            end_forward(group)  # which an error leaves open
        if not self._spans and not torch.is_grad_enabled():
            self.free()


def reduce_next(part: nn.Module, on: bool) -> None:
    """Whether gradients are reduced in the backward that comes next."""
    if isinstance(part, FSDPModule):
        part.set_requires_gradient_sync(on)


def _gather_ahead(part: Any, specs: Specs, experts_apart: Sequence[str]) -> None:
    """Each block has the next one gathered, experts included, before it begins, and its backward the one before.

    Where experts are on other ranks, the host waits inside of a block for how many tokens arrive. By itself FSDP would have the
    next block gathered after that, and experts when they are reached. One more block is whole at a time.
    """
    whole = {
        path: [part.get_submodule(name) for name in (path, *(s for s in experts_apart if s.startswith(f"{path}.")))]
        for path in specs.blocks
    }
    # Those behind the last repeated block, of multi-token prediction, only run in training: what is gathered has to be used.
    always = [path for path in specs.blocks if not path.startswith(tuple(f"{name}." for name in specs.exit))]
    for before, path in pairwise(["", *always]):
        part.get_submodule(before).set_modules_to_forward_prefetch(whole[path])
    for after, path in pairwise(["", *reversed(specs.blocks)]):
        part.get_submodule(after).set_modules_to_backward_prefetch(whole[path])


def _gather_together(within: list[nn.Module], _block: nn.Module, _inputs: Any, output: Any) -> None:
    """Before the backward of a block begins, what is sharded by itself in it is gathered, too: a block that is run again then
    finds it there. FSDP would gather it in the middle, which is more operators than there were in the forward, and
    selective recomputation tells operators by their number."""
    for tensor in output if isinstance(output, tuple) else (output,):
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            for module in within:
                tensor.register_hook(before_backward(module))


def _gather_for_views(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    """FSDP gathers a unit when a gradient of its outputs is there. A view that is changed in place gets another history, in which
    nothing knows of that; so what it is a view of gathers, too, if the unit made it."""
    for tensor in tree_iter(output):
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad and (base := base_of(tensor)) is not None and base.grad_fn:
            given = (leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, torch.Tensor))
            if all(base is not leaf and base is not base_of(leaf) for leaf in given):
                base.register_hook(before_backward(module))


def _host(part: nn.Module, context: "Context") -> OffloadPolicy:
    """What keeps shards on the host.

    Raises:
        PlanError: the device is the host, or weights are cast before they are gathered.
    """
    device = context.topology.device
    if device.type == "cpu":
        raise PlanError(
            "shard: offload moves parameters from an accelerator to the host, and this run computes on a CPU; "
            "set transforms.shard.offload = false"
        )
    if getattr(part, "float8_weights", None):
        raise PlanError(
            "shard: offload gathers weights as they lie on the host, and these are to be cast to float8 on the device first; "
            "set transforms.float8.all_gather = false or transforms.shard.offload = false"
        )
    if not dist.is_initialized():
        alone(device)  # FSDP finds devices through a mesh, also where nothing is shared
    return CPUOffloadPolicy()


def _placement(ranks: int, parameter: nn.Parameter) -> Cut:
    """By expert where every rank gets one, else by the next dimension, if that divides: ranks without any would idle."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return Cut(1) if local.shape[0] < ranks and local.shape[1] % ranks == 0 else Cut(0)
