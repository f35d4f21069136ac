"""Activation recomputation: keep less between forward and backward, and compute the rest again (Chen et al., 2016).

The wrapper sits on a block's `forward`, inside all that is attached to the call of the block. So sharding gathers a block's
parameters before its backward begins, which is when the forward runs again, and no module or parameter changes its name.
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
    from forge_core.protocols.topology import Context

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
"""Operators whose outputs `selective` may keep, by the name that a recipe uses; without a namespace they are of aten."""

CHOICES = frozenset({aten.topk.default})
"""Operators that choose. `selective` always keeps their results: ties broken otherwise would send tokens to other experts."""

COLLECTIVES = frozenset({"_c10d_functional", "c10d_functional", "forge_parallel"})
"""Namespaces of operators that exchange data. `selective` always keeps their results: no byte crosses ranks twice."""


def checkpoint_blocks(part: nn.Module, context: "Context", *, keep: tuple[str, ...] | None, every: int) -> None:
    """Wraps every n-th block in place. `keep` is None to keep a block's input only, else the kinds of operators of `KEPT`."""
    settings: dict[str, Any] = {"use_reentrant": False}
    if keep is not None:
        settings["context_fn"] = partial(create_selective_checkpoint_contexts, _Kept(keep))
    for index, path in enumerate(context.specs.blocks):
        if index % every == 0:
            block = part.get_submodule(path)
            block.forward = partial(_checkpointed, block.forward, settings)  # type: ignore[method-assign]


def inside(forward: Callable[..., Any], wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[..., Any]:
    """`forward` with `wrap`, which makes compiled functions, around what is computed again and not around the recomputation.

    Raises:
        PlanError: some results are kept, which needs to see every operator.
    """
    if not (isinstance(forward, partial) and forward.func is _checkpointed):
        return wrap(forward)
    block, settings = forward.args
    if "context_fn" in settings:
        raise PlanError(
            "selective recomputation does not support blocks that transforms.compile compiles in pieces: those whose experts are "
            "sharded separately; set transforms.recompute.policy = 'full', or remove transforms.compile"
        )
    return partial(_checkpointed, wrap(block), settings)


def _checkpointed(forward: Callable[..., Any], settings: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    found = checkpoint(forward, *args, **settings, **kwargs)
    if "context_fn" in settings and not torch.compiler.is_compiling():
        settings["context_fn"].args[0].tell()
    return found


def operators(kinds: tuple[str, ...]) -> frozenset[Any]:
    """The operators of some kinds that this version of torch has."""
    packets = (_packet(name) for kind in kinds for name in KEPT[kind])
    found = {getattr(packet, overload) for packet in packets if packet is not None for overload in packet.overloads()}
    if "attention" in kinds:
        found.add(torch.ops.higher_order.flex_attention)
    return frozenset(found)


def _packet(name: str) -> Any:
    namespace, _, operator = name.rpartition("::")
    if namespace == "torch_attn":
        importlib.import_module("torch.nn.attention.varlen")  # registers it
    return getattr(getattr(torch.ops, namespace or "aten"), operator, None)


class _Kept:
    """The policy of selective recomputation, which notices what it was never asked about."""

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
        """Once, after the first forward of a block: a kernel that is not known is computed again, which shows in no number."""
        if self._missing and not self._told:
            _log.warning(
                "transforms.recompute keeps %s, but no operator of that kind ran in a block: its results are computed again. A "
                "soft cap and fp64 have no kernel of attention; for a core of your own, name its operator in KEPT",
                " and ".join(sorted(self._missing)),
            )
        self._told = True
