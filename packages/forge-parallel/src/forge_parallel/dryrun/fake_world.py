"""Simulates a world of any size in one process: collectives return at once and move nothing, and tensors are fake.

Expert loads are equal, and GPU attention kernels are replaced by operators with the same outputs.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import comb
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from forge_core.errors import LayoutError
from forge_core.protocols.model import AttentionCore, Context, ExpertDispatcher, PositionedTokens, Transform
from forge_parallel.model.plan import Order
from forge_parallel.placement.collectives import Ranks
from forge_parallel.torch_private import (
    GROUPED_MM,
    LOCAL_SCALAR,
    WAIT_TENSOR,
    FakeTensor,
    FakeTensorMode,
    attention_cudnn,
    attention_math,
    fake_store,
    forget_meshes,
    tree_leaves,
)
from forge_parallel.transforms.dispatchers import AllGatherDispatcher, AllToAllDispatcher, ExpertFunction, Route

aten = torch.ops.aten
ARANGE = (aten.arange.default, aten.arange.start, aten.arange.start_step)
ASKED = (torch.bool, torch.int32)
SMALL = 4096
"""Maximum number of elements of integer tensors that keep their values."""


@contextmanager
def fake_world(size: int, rank: int) -> Iterator[None]:
    """Context in which this process is `rank` of `size`. A world of one has no process group, as in a real run.

    Raises:
        LayoutError: this process belongs to a real process group.
    """
    if dist.is_initialized():
        raise LayoutError("this process belongs to a process group; start the dry run in a process of its own")
    if size == 1:
        yield
        return
    store = fake_store()  # registers the backend
    dist.init_process_group("fake", store=store, rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        # DTensor's caches hold meshes with names of groups, which have other ranks in the next world.
        forget_meshes()


class Weightless(FakeTensorMode):
    """Context with fake tensors, which have shapes but no memory, except for small integer tensors on which control flow depends.

    These are indices of micro-batches, and shapes that ranks exchange: a rank receives what it would send itself. If code reads a
    value of a fake tensor, such as whether any key is visible or all stages agree, the value is true.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if FakeTensor in types:
            if func is LOCAL_SCALAR and args[0].dtype in ASKED:
                return True if args[0].dtype == torch.bool else 1
            if func is aten.equal.default:
                return True
            if func is WAIT_TENSOR:  # returns the tensor that it has waited for; torch's shapes say: a new one
                return args[0]
            if func is GROUPED_MM and args[0].dtype != torch.bfloat16:
                return super().__torch_dispatch__(aten.new_empty.default, types, (args[0], _grouped(*args, **(kwargs or {}))))
            return super().__torch_dispatch__(func, types, args, kwargs)
        options = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, options)) if isinstance(leaf, torch.Tensor)]
        if tensors and all(_counts(tensor) for tensor in tensors):
            return aten.clone(args[0]) if func is aten.empty_like.default else func(*args, **options)
        if func in ARANGE and all(isinstance(bound, int) and abs(bound) <= SMALL for bound in args) and _integral(options):
            return func(*args, **options)
        return super().__torch_dispatch__(func, types, args, kwargs)


def _grouped(rows: torch.Tensor, others: torch.Tensor, offs: torch.Tensor, **_: Any) -> list[int]:
    """Returns the shape of a grouped product; torch computes shapes for fake tensors only in bf16."""
    if rows.dim() == others.dim() == 2:
        return [len(offs), rows.shape[0], others.shape[1]]
    return [rows.shape[-2], others.shape[-1]]


def _counts(tensor: torch.Tensor) -> bool:
    plain = type(tensor) is torch.Tensor and tensor.device.type == "cpu"
    return plain and not tensor.is_floating_point() and tensor.numel() <= SMALL


def _integral(settings: Any) -> bool:
    dtype = settings.get("dtype")
    return dtype is None or not dtype.is_floating_point


def expert_probability(experts: int, count: int, top_k: int) -> float:
    """Returns the probability that one of `top_k` of `experts` experts is among `count` given ones."""
    return 1 - comb(experts - count, top_k) / comb(experts, top_k)


def evenly(dispatcher: ExpertDispatcher, experts: int) -> ExpertDispatcher:
    """Returns the dispatcher of a layer with `experts` experts, with equal loads."""
    return _evenly(dispatcher, experts, experts, experts)


def _evenly(dispatcher: ExpertDispatcher, experts: int, present: int, count: int) -> ExpertDispatcher:
    """Returns the dispatcher for tokens that each have one of `present` experts, `count` of which belong to the dispatcher."""
    if isinstance(dispatcher, AllToAllDispatcher):
        share = count // dispatcher.ranks.size
        inner = _evenly(dispatcher.inner, experts, share, share)
        return replace(dispatcher, inner=inner, route=_EvenRoute(experts, present, share))
    if isinstance(dispatcher, AllGatherDispatcher):
        share = count // dispatcher.ranks.size if dispatcher.divided else count
        return _AsMany(replace(dispatcher, inner=_evenly(dispatcher.inner, experts, present, share)))
    return _EvenLoad(experts, present, dispatcher)


def _slots(rows: int, experts: int, present: int, count: int, top_k: int) -> int:
    """Returns the slots of `count` experts, if `rows` is the number of tokens with one of `present` experts."""
    return round(rows / expert_probability(experts, present, top_k) * top_k * count / experts)


@dataclass(frozen=True)
class _EvenRoute:
    experts: int
    present: int
    share: int

    def __call__(self, owners: Tensor, ranks: Ranks) -> Route:
        (tokens, top_k), experts = owners.shape, self.experts
        rows = round(tokens * expert_probability(experts, self.share, top_k) / expert_probability(experts, self.present, top_k))
        counts = [[rows] * ranks.size, [_slots(tokens, experts, self.present, self.share, top_k)] * ranks.size]
        return Route.of(owners, ranks, lambda _: (counts, counts))


@dataclass(frozen=True)
class _AsMany:
    """Assumes that every rank has as many tokens and slots as this one, since exchanged numbers cannot be read from fake
    tensors."""

    everyone: AllGatherDispatcher

    def __call__(
        self,
        x: Tensor,
        experts: Tensor,
        weights: Tensor,
        expert_fn: ExpertFunction,
        num_experts: int,
        slots: int | None = None,
        overlap_with: Callable[[], Tensor] | None = None,
    ) -> Tensor:
        """See `ExpertDispatcher`."""
        numbers = [[number] * self.everyone.ranks.size for number in (len(x), -1 if slots is None else slots)]
        return replace(self.everyone, read=lambda _: numbers)(x, experts, weights, expert_fn, num_experts, slots, overlap_with)


@dataclass(frozen=True)
class _EvenLoad:
    """Wraps the dispatcher of one process, and passes numbers of tokens that the host can read to the experts."""

    experts: int
    present: int
    local: ExpertDispatcher

    def __call__(
        self,
        x: Tensor,
        experts: Tensor,
        weights: Tensor,
        expert_fn: ExpertFunction,
        num_experts: int,
        slots: int | None = None,
        overlap_with: Callable[[], Tensor] | None = None,
    ) -> Tensor:
        """See `ExpertDispatcher`."""
        own_slots = _slots(len(x), self.experts, self.present, num_experts, experts.shape[1]) if slots is None else slots

        def run_evenly(rows: Tensor, _: Any) -> Tensor:
            total = min(own_slots, len(rows))
            each, rest = divmod(total, num_experts)
            return expert_fn(rows, _told([each + (expert < rest) for expert in range(num_experts)], rows.device))

        return self.local(x, experts, weights, run_evenly, num_experts, slots, overlap_with)


def _told(numbers: list[int], device: torch.device) -> Tensor:
    """Returns numbers of tokens in the form that experts' products expect and that the host can read, also from fake tensors."""
    counts = torch.tensor(numbers, device=device)
    if device.type != "cpu":
        counts.tolist = lambda: numbers  # type: ignore[method-assign]
    return counts


GIB = 1 << 30


@dataclass(frozen=True)
class Accelerator:
    """A GPU: its name in options, and its memory in bytes."""

    name: str
    memory: int


ACCELERATORS = MappingProxyType(
    {name: Accelerator(name, size * GIB) for name, size in {"a100": 80, "h100": 80, "h200": 141, "b200": 180}.items()}
)
"""GPUs by their vendor's names; the A100 is the one with 80 GiB."""


class FusedCoreOperator:
    """Replaces a block's attention core by a CUDA operator that computes output and log-sum-exp, without a mask.

    In fp32 without a mask, torch's fused CUDA kernels do not support grouped key-value heads, so torch materializes the scores.
    In fp64 it has no fused kernel.
    """

    def __init__(self, inner: AttentionCore) -> None:
        self.capped, self.causal = getattr(inner, "capped", False), getattr(inner, "causal", True)
        self.masks = inner.prepare if getattr(inner, "masked", False) else None

    def prepare(self, documents: Tensor | None, length: int, window: int | None, device: Any) -> "Causal | Tensor":
        """Returns whether only future positions are hidden; of a core that needs a mask on every device, this mask."""
        if self.masks is not None:
            return self.masks(documents, length, window, device)
        return Causal(documents is None and (window is None or window >= length))

    def prepare_placed(self, queries: PositionedTokens, keys: PositionedTokens, window: int | None) -> "Causal":
        """Returns the mask of a GPU, a list of blocks with less than a byte per 128 x 128 scores."""
        return Causal(False)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        shared: "Causal | Tensor",
        scale: float,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """q (B, heads, T, head_dim), k (B, kv_heads, S, head_dim), v (B, kv_heads, S, width), sinks (heads,) ->
        (B, heads, T, width)."""
        if isinstance(shared, Tensor):
            k, v = (x.expand(-1, q.shape[1], -1, -1) if x.shape[1] == 1 else x for x in (k, v))
            bias = torch.zeros_like(shared, dtype=q.dtype).masked_fill_(~shared, float("-inf"))
            wide = (attention_math(q, k, v, bias, scale=scale),) if q.dtype == torch.float64 else None
            return (wide or attention_cudnn(q, k, v, bias, True, scale=scale))[0]
        if sinks is not None:  # they scale the output of the kernel
            out = self(q, k, v, Causal(False), scale, soft_cap)
            return (out * sinks.view(-1, 1, 1).sigmoid()).to(out.dtype)
        if q.dtype == torch.float64 or (
            q.dtype == torch.float32 and shared.only and soft_cap is None and q.shape[1] != k.shape[1]
        ):
            return attention_math(q, k, v, is_causal=self.causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1])[0]
        return attention_cudnn(q, k, v, None, True, is_causal=self.causal, scale=scale)[0]


@dataclass(frozen=True)
class Causal:
    """Prepared by `FusedCoreOperator`: `only` says that nothing but future positions is hidden."""

    only: bool


@dataclass(frozen=True)
class FusedAttention(Transform):
    """The first transform of the plan, so that other transforms wrap the attention core of a GPU."""

    name: str = "fused_attention"
    order: int = min(Order) - 1
    axes: frozenset[str] = frozenset()

    def block_variant(self, index: int, path: str, modules: Sequence[str]) -> Hashable:
        return None

    def apply(self, part: nn.Module, context: Context) -> nn.Module:
        for path in context.specs.blocks:
            for module in part.get_submodule(path).modules():
                core = getattr(module, "core", None)
                if isinstance(core, AttentionCore):
                    module.core = FusedCoreOperator(core)  # type: ignore[assignment]
        return part
