"""Activation recomputation: saves less between forward and backward, and computes the rest again (Chen et al., 2016).

The wrapper replaces a block's `forward`, inside all hooks of the block's call. So FSDP gathers a block's parameters before its
backward, in which the forward runs again, and modules and parameters keep their names.
"""

import importlib
import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from forge_core.errors import PlanError

if TYPE_CHECKING:
    from forge_core.protocols.model import Context

aten = torch.ops.aten
_log = logging.getLogger(__name__)

KEPT = {
    "matmul": ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm", "linear"),
    "attention": (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
        "_flash_attention_forward",
        "_efficient_attention_forward",
        "torch_attn::_varlen_attn",
    ),
}
"""Name in recipes -> operators whose outputs `selective` can save; without a namespace they belong to aten."""

CHOICES = frozenset({aten.topk.default})
"""Operators that choose. `selective` always saves their results, because other choices among ties would route tokens
differently."""

COLLECTIVES = frozenset({"_c10d_functional", "c10d_functional", "forge_parallel"})
"""Namespaces of operators that communicate. `selective` always saves their results, so that nothing is sent twice."""


def checkpoint_blocks(part: nn.Module, context: "Context", *, keep: tuple[str, ...] | None, every: int) -> None:
    """Wraps every n-th block in place. `keep` has the kinds of operators (keys of `KEPT`) to save; None saves only block
    inputs."""
    settings: dict[str, Any] = {"use_reentrant": False}
    if keep is not None:
        settings["context_fn"] = partial(create_selective_checkpoint_contexts, _Kept(keep))
    for index, path in enumerate(context.specs.blocks):
        if index % every == 0:
            block = part.get_submodule(path)
            block.forward = partial(_checkpointed, block.forward, settings)  # type: ignore[method-assign]


def inside(forward: Callable[..., Any], wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[..., Any]:
    """Applies `wrap`, which compiles functions, inside the recomputation wrapper of `forward`.

    Raises:
        PlanError: the recomputation is selective, which has to see every operator.
    """
    if not (isinstance(forward, partial) and forward.func is _checkpointed):
        return wrap(forward)
    block, settings = forward.args
    if "context_fn" in settings:
        raise PlanError(
            "selective recomputation does not support blocks that transforms.compile compiles in pieces, which are those with "
            "separately sharded experts; set transforms.recompute.policy = 'full', or remove transforms.compile"
        )
    return partial(_checkpointed, wrap(block), settings)


def _checkpointed(forward: Callable[..., Any], settings: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    output = checkpoint(forward, *args, **settings, **kwargs)
    if "context_fn" in settings and not torch.compiler.is_compiling():
        settings["context_fn"].args[0].tell()
    return output


def operators(kinds: tuple[str, ...]) -> frozenset[Any]:
    """Returns the operators of these kinds that exist in this version of torch."""
    packets = (_packet(name) for kind in kinds for name in KEPT[kind])
    overloads = {getattr(packet, overload) for packet in packets if packet is not None for overload in packet.overloads()}
    if "attention" in kinds:
        overloads.add(torch.ops.higher_order.flex_attention)
    return frozenset(overloads)


def _packet(name: str) -> Any:
    namespace, _, operator = name.rpartition("::")
    if namespace == "torch_attn":
        importlib.import_module("torch.nn.attention.varlen")  # registers the operator
    return getattr(getattr(torch.ops, namespace or "aten"), operator, None)


class _Kept:
    """The policy of selective recomputation; records which kinds of operators have run."""

    def __init__(self, kinds: tuple[str, ...]) -> None:
        self._operators = {kind: operators((kind,)) for kind in kinds}
        self._missing, self._told = set(kinds), False

    def __call__(self, _context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        for kind, kept in self._operators.items():
            if operator in kept:
                self._missing.discard(kind)
                return CheckpointPolicy.MUST_SAVE
        if operator in CHOICES or operator.namespace in COLLECTIVES:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    def tell(self) -> None:
        """Warns once, after the first forward of a block, about kinds of operators that never ran and so are not saved."""
        if self._missing and not self._told:
            _log.warning(
                "transforms.recompute.keep contains %s, but no operator of that kind ran in a block, so its results are computed "
                "again. Attention with a soft cap or in fp64 has no kernel; for an attention core of your own, add its operator "
                "to KEPT",
                " and ".join(sorted(self._missing)),
            )
        self._told = True
