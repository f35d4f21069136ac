"""Fully sharded data parallelism (FSDP2) and its hybrid form (HSDP), with gradients summed instead of averaged.

The loss is already divided by the valid tokens of all ranks. So FSDP must not divide gradients by the number of ranks, unless
`Context.average` is set, for loops that compute a mean on each rank.

With `offload`, shards are in host memory (Ren et al., 2021): a shard is copied to the device before it is gathered, and its
gradient is copied back after it is reduced. Ranks exchange only device tensors, so numbers computed from shards or gradients are
copied to the device first. Clipping and skipping happen on the host, so a step has to wait for the device.

After a forward, FSDP keeps parameters outside blocks gathered for the expected backward. `GatheredCopies` frees them if no
backward follows, so that no forward uses outdated weights.
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
    from forge_core.protocols.model import Context


def shard(part: nn.Module, context: "Context", *, reshard: bool | None, offload: bool) -> None:
    """Applies FSDP2 to each block of `part`, then to the rest. Does nothing on one data rank, unless shards are offloaded.

    Ranks that split sequences (`cp`) shard parameters like data ranks, because each has a summand of every gradient.

    Raises:
        PlanError: the specs name no blocks, so the whole model would be gathered at once; or offloading is not possible.
    """
    layout = context.topology.layout
    experts_apart = apart(context.specs, layout)
    if layout.dp_shard * layout.dp_replicate * layout.cp == 1 and not experts_apart and not offload:
        return
    if not context.specs.blocks and not context.average:  # a foreign module without blocks is sharded as one unit
        raise PlanError("shard: the model's specs name no blocks to shard one by one; add them to Specs.blocks")
    where = _host(part, context) if offload else OffloadPolicy()
    mesh = context.topology.data_mesh
    # Sums over ranks are at least fp32, even if results are stored in bf16.
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
            # gloo has no fused scaling and sum; with a factor of 1 it is not needed.
            module.set_force_sum_reduction_for_comms(True)
            module.register_forward_hook(_gather_for_views, with_kwargs=True)
    expect_views_from_units()
    if layout.ep > 1:
        _gather_ahead(part, context.specs, experts_apart)
    part.gathered_copies = GatheredCopies(part)  # type: ignore[assignment]


class GatheredCopies:
    """Decides whether a forward may use parameters that an earlier forward has gathered.

    A gathered copy may be outdated, which cannot be detected: `.data` and optimizers over lists of DTensors do not change version
    counters. So copies are freed after a forward without gradients, and before a forward that finds copies whose backward never
    ran. A backward gathers them again. Inside `kept`, parameters do not change, so copies are used as long as FSDP keeps them.
    """

    def __init__(self, part: nn.Module) -> None:
        self._groups = [module for module in part.modules() if isinstance(module, FSDPModule)]
        self._spans = 0
        self._forwards = 0
        # Runs before FSDP's own hook, which gathers, and also after an error.
        part.register_forward_pre_hook(self._before_forward, prepend=True)
        part.register_forward_hook(self._after_forward, always_call=True)

    def free(self) -> None:
        """Frees every copy, so that the module's parameters are its shards again."""
        for group in self._groups:
            group.reshard()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Context whose forwards share gathered copies; these are not used outside."""
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
            end_forward(group)  # an error leaves the forward open
        if not self._spans and not torch.is_grad_enabled():
            self.free()


def reduce_next(part: nn.Module, on: bool) -> None:
    """Sets whether the next backward reduces gradients."""
    if isinstance(part, FSDPModule):
        part.set_requires_gradient_sync(on)


def _gather_ahead(part: Any, specs: Specs, experts_apart: Sequence[str]) -> None:
    """Makes each block gather the next block, experts included, before it runs, and its backward the previous block.

    With experts on other ranks, the host waits inside a block for the number of arriving tokens. By default, FSDP would gather
    the next block only after that, and experts only when they are reached. One more block is gathered at a time.
    """
    whole = {
        path: [part.get_submodule(name) for name in (path, *(s for s in experts_apart if s.startswith(f"{path}.")))]
        for path in specs.blocks
    }
    # Blocks of multi-token prediction after the last repeated one run only in training; gathered blocks must be used.
    always = [path for path in specs.blocks if not path.startswith(tuple(f"{name}." for name in specs.exit))]
    for before, path in pairwise(["", *always]):
        part.get_submodule(before).set_modules_to_forward_prefetch(whole[path])
    for after, path in pairwise(["", *reversed(specs.blocks)]):
        part.get_submodule(after).set_modules_to_backward_prefetch(whole[path])


def _gather_together(within: list[nn.Module], _block: nn.Module, _inputs: Any, output: Any) -> None:
    """Gathers separately sharded modules of a block before the block's backward, so that recomputation finds them gathered. FSDP
    would gather them in the middle, with more operators than in the forward, and selective recomputation identifies operators
    by their index."""
    for tensor in output if isinstance(output, tuple) else (output,):
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            for module in within:
                tensor.register_hook(before_backward(module))


def _gather_for_views(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    """Gathers a unit before the backward of views of its outputs. FSDP gathers when a gradient of an output arrives, but a view
    that is modified in place has a new autograd history without FSDP's hook. So the view's base gathers as well, if the unit
    created it."""
    for tensor in tree_iter(output):
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad and (base := base_of(tensor)) is not None and base.grad_fn:
            inputs = (leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, torch.Tensor))
            if all(base is not leaf and base is not base_of(leaf) for leaf in inputs):
                base.register_hook(before_backward(module))


def _host(part: nn.Module, context: "Context") -> OffloadPolicy:
    """Returns the policy that keeps shards on the host.

    Raises:
        PlanError: the run computes on a CPU, or weights are cast before they are gathered.
    """
    device = context.topology.device
    if device.type == "cpu":
        raise PlanError(
            "shard: offload moves parameters from an accelerator to the host, but this run computes on a CPU; "
            "set transforms.shard.offload = false"
        )
    if getattr(part, "float8_weights", None):
        raise PlanError(
            "shard: offload gathers weights from the host, but float8 weights have to be cast on the device first; "
            "set transforms.float8.all_gather = false or transforms.shard.offload = false"
        )
    if not dist.is_initialized():
        alone(device)  # FSDP needs a mesh to find the device, even without sharding
    return CPUOffloadPolicy()


def _placement(ranks: int, parameter: nn.Parameter) -> Cut:
    """Shards by expert; or by the next dimension, if it divides, when there are fewer experts than ranks."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return Cut(1) if local.shape[0] < ranks and local.shape[1] % ranks == 0 else Cut(0)
