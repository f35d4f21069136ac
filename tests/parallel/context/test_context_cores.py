"""Attention over rows that are cut over ranks: the order of places, and each core against torch, one call at a time."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import flex_attention

from forge_core.layout import Layout
from forge_models.blocks.attention import LocalAttention
from forge_parallel.dryrun.traffic import Traffic
from forge_parallel.placement.collectives import Ranks
from forge_parallel.transforms.context import flex_blocks, ring
from forge_parallel.transforms.context.cores import AllGatherAttention
from forge_parallel.transforms.context.ring import RingAttention
from forge_parallel.transforms.context.row_order import SequenceOrder
from forge_parallel.transforms.context.rows import held, held_places
from forge_parallel.transforms.context.ulysses import UlyssesAttention
from harness.pool import World

CPU = torch.device("cpu")
kinds = pytest.mark.parametrize("kind", ["all_gather", "ring", "ulysses"])


# The order of places.


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("balanced", [True, False])
def test_each_place_is_held_by_one_rank_in_ascending_order(ranks: int, balanced: bool) -> None:
    order = SequenceOrder(ranks, balanced)
    length = 3 * order.pieces
    held = [[place for span in order.spans(rank, length) for place in span] for rank in range(ranks)]
    assert sorted(place for places in held for place in places) == list(range(length))
    assert all(places == sorted(places) and len(places) == length // ranks for places in held)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_the_balanced_order_gives_every_rank_the_same_causal_work(ranks: int) -> None:
    """Pairs of a query and a key that it sees; against the keys of each other rank as well."""
    length = 6 * ranks
    held = [[place for span in SequenceOrder(ranks, True).spans(rank, length) for place in span] for rank in range(ranks)]
    seen = [[sum(k <= q for q in mine for k in theirs) for theirs in held] for mine in held]
    assert len({sum(row) for row in seen}) == 1
    assert len({seen[i][j] for i in range(ranks) for j in range(ranks) if i != j}) == 1


# Cores against torch.

LENGTH = 24


@dataclass(frozen=True)
class Shape:
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    width: int = 8
    window: int | None = None
    documents: str = "none"
    soft_cap: float | None = None
    sinks: bool = False


def _documents(which: str) -> Tensor | None:
    """Rows of packed documents; `long` has one that reaches over every rank."""
    if which == "none":
        return None
    starts = {"packed": ([3, 4, 11, 17], [1, 9, 22]), "long": ([2], [23]), "single": ([], [5, 6, 7, 8, 9])}[which]
    documents = torch.zeros(2, LENGTH, dtype=torch.int32)
    for row, places in enumerate(starts):
        for place in places:
            documents[row, place:] += 1
    return documents


def _inputs(shape: Shape, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    sizes = [
        (shape.heads, shape.head_dim),
        (shape.kv_heads, shape.head_dim),
        (shape.kv_heads, shape.width),
        (shape.heads, shape.width),
    ]
    q, k, v, grad = (torch.randn(2, h, LENGTH, d, generator=generator, dtype=torch.float64).to(dtype) for h, d in sizes)
    return q, k, v, grad


def _sinks(shape: Shape) -> list[Tensor]:
    """The sinks of all heads, if there are any: some far above, some far below the scores."""
    return [torch.linspace(-6, 4, shape.heads, dtype=torch.float64)] if shape.sinks else []


def _expected(shape: Shape, dtype: torch.dtype) -> list[Tensor]:
    """Output and gradients by torch's own attention over a mask that is written down pair by pair."""
    q, k, v, grad = (x.double() for x in _inputs(shape, dtype))
    leaves = [x.requires_grad_() for x in (q, k, v, *_sinks(shape))]
    documents = _documents(shape.documents)
    mask = torch.zeros(2, 1, LENGTH, LENGTH, dtype=torch.bool)
    for b in range(2):
        for i in range(LENGTH):
            for j in range(i + 1):
                near = shape.window is None or i - j < shape.window
                mask[b, 0, i, j] = near and (documents is None or documents[b, i] == documents[b, j])
    shares = shape.heads // shape.kv_heads
    keys, values = k.repeat_interleave(shares, 1), v.repeat_interleave(shares, 1)
    if shape.sinks:
        scores = (q @ keys.transpose(-1, -2) * 0.3).masked_fill(~mask, float("-inf"))
        sink = leaves[3].view(1, -1, 1, 1).expand(2, -1, LENGTH, 1)
        out = torch.cat((scores, sink), -1).softmax(-1)[..., :-1] @ values
    elif shape.soft_cap is None:
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=0.3)
    else:
        scores = shape.soft_cap * torch.tanh(q @ keys.transpose(-1, -2) * 0.3 / shape.soft_cap)
        out = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ values
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def _core(kind: str, capped: bool = False, sinks: bool = False) -> tuple[Any, SequenceOrder]:
    assert dist.group.WORLD is not None
    ranks, inner = Ranks.of(dist.group.WORLD), LocalAttention(capped=capped, sinks=sinks)
    order = SequenceOrder(ranks.size, balanced=kind != "ulysses")
    if kind == "ring":
        return RingAttention(inner, order, ranks), order
    if kind == "ulysses":
        return UlyssesAttention(inner, ranks), order
    return AllGatherAttention(inner, order, ranks), order


def _found(kind: str, shape: Shape, dtype: torch.dtype) -> list[Tensor]:
    """This rank's output and gradients, put together with those of the others in natural order."""
    core, order = _core(kind, shape.soft_cap is not None, shape.sinks)
    ranks, rank = dist.get_world_size(), dist.get_rank()

    def mine(x: Tensor) -> Tensor:
        return held(order, rank, x.transpose(1, 2)).transpose(1, 2)

    q, k, v, grad = (mine(x) for x in _inputs(shape, dtype))
    leaves = [x.detach().requires_grad_() for x in (q, k, v, *(sinks.to(dtype) for sinks in _sinks(shape)))]
    documents = _documents(shape.documents)
    local = None if documents is None else held(order, rank, documents)
    shared = core.prepare(local, LENGTH // ranks, shape.window, CPU)
    cap = () if shape.soft_cap is None else (shape.soft_cap,)
    options = {"sinks": leaves[3]} if shape.sinks else {}
    out = core(*leaves[:3], shared, 0.3, *cap, **options)
    assert out.dtype == dtype
    results = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
    whole = []
    if shape.sinks:  # every rank has the gradient of its own queries or heads
        of_sinks = results.pop().double()
        dist.all_reduce(of_sinks)
    for x in results:
        full = torch.zeros(*x.shape[:2], LENGTH, x.shape[3], dtype=torch.float64)
        full[:, :, held_places(order, rank, LENGTH, CPU)] = x.double()
        dist.all_reduce(full)
        whole.append(full)
    return [*whole, of_sinks] if shape.sinks else whole


SHAPES = {
    "plain": Shape(),
    "packed": Shape(documents="packed"),
    "long": Shape(documents="long"),
    "single": Shape(documents="single"),
    "window": Shape(window=5),
    "itself": Shape(window=1),
    "window and documents": Shape(window=13, documents="packed"),
    "wide window": Shape(window=100),
    "all heads": Shape(kv_heads=4, documents="packed"),
    "one head": Shape(kv_heads=1, documents="long"),
    "repeated": Shape(heads=12, kv_heads=6, documents="packed"),  # Ulysses on 4 ranks needs 12
    "narrow values": Shape(kv_heads=4, head_dim=12, width=5, documents="packed"),
    "wide values": Shape(kv_heads=4, head_dim=5, width=12),
    "sinks": Shape(sinks=True),
    "sinks, window and documents": Shape(sinks=True, heads=12, kv_heads=6, window=5, documents="packed"),
}
RESULTS = ("out", "dq", "dk", "dv", "dsinks")
CAPPED = Shape(soft_cap=0.7, documents="packed")


def _all(kind: str, names: list[str], dtype: torch.dtype) -> list[list[Tensor]]:
    return [_found(kind, SHAPES.get(name, CAPPED), dtype) for name in names]


@kinds
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_core_equals_torch(world: World, kind: str, ranks: int) -> None:
    """Output, dq, dk and dv for grouped heads, documents, windows, and values narrower or wider than keys."""
    names = [name for name, shape in SHAPES.items() if kind != "ulysses" or shape.heads % ranks == 0]
    assert names
    for name, found in zip(names, world.run(_all, ranks, kind, names, torch.float64)[0], strict=True):
        for which, expected, actual in zip(RESULTS[: len(found)], _expected(SHAPES[name], torch.float64), found, strict=True):
            error = (actual - expected).abs().max()
            assert error <= 1e-12 * max(1.0, float(expected.abs().max())), (name, which, error)


def _on_flex(names: list[str]) -> list[list[Tensor]]:
    """The ring with the kernel that it has on CUDA, in the plain form that torch has of it."""
    plain = {"_validate_device": lambda *_: None, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG": True}
    before = {name: getattr(flex_attention, name) for name in plain}
    kernel, compiled = ring._kernel, flex_blocks._compiled
    try:
        for name, value in plain.items():
            setattr(flex_attention, name, value)
        ring._kernel = lambda _: flex_blocks  # type: ignore[assignment]
        flex_blocks._compiled = lambda name: getattr(flex_attention, name)  # type: ignore[assignment]
        return _all("ring", names, torch.float64)
    finally:
        ring._kernel, flex_blocks._compiled = kernel, compiled
        for name, value in before.items():
            setattr(flex_attention, name, value)


def test_the_ring_on_flex_equals_torch(world: World) -> None:
    names = ["plain", "itself", "window and documents", "one head", "narrow values", "sinks, window and documents"]
    for name, found in zip(names, world.run(_on_flex, 2, names)[0], strict=True):
        for which, expected, actual in zip(RESULTS[: len(found)], _expected(SHAPES[name], torch.float64), found, strict=True):
            error = (actual - expected).abs().max()
            assert error <= 1e-12 * max(1.0, float(expected.abs().max())), (name, which, error)


@pytest.mark.parametrize("kind", ["all_gather", "ulysses"])
def test_capped_scores(world: World, kind: str) -> None:
    (found,) = world.run(_all, 2, kind, ["capped"], torch.float64)[0]
    for expected, actual in zip(_expected(CAPPED, torch.float64), found, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


@kinds
def test_low_precision_is_rounded_once(world: World, kind: str) -> None:
    """Errors of bf16 stay those of one rounding of inputs, probabilities and results, however many blocks are joined."""
    names = ["packed", "plain", "sinks"]
    for name, found in zip(names, world.run(_all, 4, kind, names, torch.bfloat16)[0], strict=True):
        for expected, actual in zip(_expected(SHAPES[name], torch.bfloat16), found, strict=True):
            assert (actual - expected).abs().max() <= 2**-6 * expected.abs().max()


# What is exchanged and kept, against the formulas that the cores state.


def _costs(kind: str, dtype: torch.dtype) -> tuple[list[int], int]:
    """Bytes that reach this rank in forward and backward, and bytes kept in between beyond q, k and v themselves."""
    core, order = _core(kind)
    layout = Layout(cp=order.ranks)
    q, k, v = (torch.randn(2, h, 6, d, dtype=dtype, requires_grad=True) for h, d in ((8, 8), (2, 8), (2, 4)))
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        if all(x.data_ptr() != given.data_ptr() for given in (q, k, v)):
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    shared = core.prepare(None, 6, None, CPU)
    with Traffic(layout) as forward, torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = core(q, k, v, shared, 0.3)
    with Traffic(layout) as backward:
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    moved = [sum(flow.wire for flow in traffic.flows() if flow.kind != "send") for traffic in (forward, backward)]
    return moved, sum(kept.values())


@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_those_that_a_core_states(world: World, kind: str, dtype: torch.dtype) -> None:
    ranks, rows, places, heads, kv_heads, head_dim, width = 4, 2, 24, 8, 2, 8, 4
    size, pair = dtype.itemsize, kv_heads * (head_dim + width)
    mine = rows * places // ranks * pair
    expected = {
        "all_gather": ((ranks - 1) * mine * size, (ranks - 1) * mine * size),
        "ring": ((ranks - 1) * mine * size, (ranks - 1) * mine * (size + max(size, 4))),
        # two key-value heads are repeated to four
        "ulysses": 2 * (3 * rows * places * (heads * (head_dim + width) + 4 * (head_dim + width)) // 16 * size,),
    }[kind]
    for moved, kept in world.run(_costs, ranks, kind, dtype):
        assert tuple(moved) == expected
        if kind == "ring":  # its output, and one number per query and head
            assert kept == rows * heads * 6 * (width * size + 4)
