"""What travels between ranks of experts: when, and how much of it."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from forge_core.layout import Layout
from forge_models.blocks.moe.dispatch import LocalDispatch
from forge_models.components.decoder import DecoderConfig
from forge_models.components.experts import MoEConfig, SigmoidTopKConfig
from forge_models.shape import RouterContext
from forge_parallel.model.parallel_model import ParallelModel
from forge_parallel.model.plan import Plan
from forge_parallel.model.realize import Blueprint, realize
from forge_parallel.placement.topology import Topology
from forge_parallel.transforms.dispatchers import open_dispatcher
from forge_parallel.transforms.expert import ExpertParallel, Kind
from forge_parallel.transforms.shard import FullyShard
from harness.pool import World

CPU = torch.device("cpu")
WIDTH, VOCAB, LENGTH = 64, 61, 2048


@dataclass(frozen=True)
class Interval:
    start: float
    end: float

    def shared(self, other: "Interval") -> float:
        return max(0.0, min(self.end, other.end) - max(self.start, other.start))


def model_of(moe: MoEConfig, layout: Layout, expert: ExpertParallel) -> ParallelModel:
    decoder = DecoderConfig(dim=WIDTH, ffn_dim=64, heads=4, layers=1, vocab_size=VOCAB, max_length=LENGTH, moe=moe)
    return realize(Blueprint.of(decoder.build), Plan.of([FullyShard(), expert], layout), Topology.of(layout, CPU), 0)


def tokens() -> Tensor:
    """Other ones on each rank."""
    return torch.randint(VOCAB, (1, LENGTH), generator=torch.Generator().manual_seed(dist.get_rank()))


def traced(overlap: bool) -> tuple[float, Tensor]:
    """Microseconds in which this rank multiplied matrices while tokens travelled, and the logits."""
    model = model_of(MoEConfig(experts=4, shared=8, ffn_dim=256), Layout(dp_shard=2, ep=2), ExpertParallel(overlap=overlap))
    with model.inference():
        model.part(tokens())
        with profile(activities=[ProfilerActivity.CPU]) as trace:
            logits = model.part(tokens())
    travels, products = (
        [Interval(event.time_range.start, event.time_range.end) for event in trace.events() or () if event.name == name]
        for name in ("gloo:all_to_all", "aten::mm")
    )
    assert travels and products
    return sum(one.shared(other) for one in travels for other in products), logits


def test_shared_experts_are_computed_while_tokens_travel(world: World) -> None:
    apart = world.run(traced, 2, False)
    for _ in range(5):  # on a busy machine tokens may arrive before the first product begins
        together = world.run(traced, 2, True)
        if max(overlapped for overlapped, _ in together) > 0:  # the rank that comes last may find its tokens there already
            break
    assert max(overlapped for overlapped, _ in together) > 0
    for (_, y), (alone, expected) in zip(together, apart, strict=True):
        assert alone == 0
        assert torch.equal(y, expected)


class Border(TorchDispatchMode):
    """Bytes that this rank sends to ranks of other nodes, by torch's operator for an exchange."""

    def __init__(self, node: int) -> None:
        super().__init__()
        self.node, self.bytes = node, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops._c10d_functional.all_to_all_single.default:
            rows, _, sent, name = args
            here = dist.get_rank() // self.node
            for to, count in zip(dist.get_process_group_ranks(_resolve_process_group(name)), sent, strict=True):
                if to // self.node != here:
                    self.bytes += count * rows[:1].numel() * rows.element_size()
        return func(*args, **(kwargs or {}))


def crossing(kind: Kind, experts: Tensor) -> int:
    """Bytes that cross the border between two nodes of two ranks in the forward of one layer of eight experts."""
    x, weights = torch.randn(len(experts), WIDTH), torch.rand(experts.shape)
    layout = Layout(dp_shard=4, ep=4)
    dispatch = open_dispatcher(LocalDispatch(), Topology.of(layout, CPU), kind, 2 if kind == "hierarchical" else None)
    with Border(2) as border:
        dispatch(x, experts, weights, lambda rows, _: rows, 8)
    return border.bytes


def test_a_token_crosses_the_border_of_nodes_once(world: World) -> None:
    """And with as many groups of experts as nodes, of which a token may choose one, half of the tokens never do."""
    router = {"bias_rate": 0.0, "n_group": 2}
    x = torch.randn(400, WIDTH, generator=torch.Generator().manual_seed(0))
    chosen = []
    for limit in (2, 1):
        module = SigmoidTopKConfig(**router, topk_group=limit).build(
            RouterContext(dim=WIDTH, experts=8, top_k=4, layer=0, init_std=1)
        )
        torch.nn.init.normal_(module.weight, generator=torch.Generator().manual_seed(1))
        module.bias.zero_()
        chosen.append(module(x, None).experts)
    assert int((chosen[1] // 4 != chosen[1][:, :1] // 4).sum()) == 0
    told, counts = 4 * 2 * 4, 8 * 2  # weights and numbers of four experts in fp32; two counts in int64
    for experts in chosen:
        found = {kind: world.run(crossing, 4, kind, experts) for kind in ("all_to_all", "hierarchical")}
        for rank, (flat, hierarchical) in enumerate(zip(found["all_to_all"], found["hierarchical"], strict=True)):
            here = rank // 2
            # Every rank has the same tokens. Out go those that have experts on the other node, back go sums for its tokens.
            away, guests = visits(experts, 4, {1 - here}), visits(experts, 4, {here})
            assert hierarchical == away * (4 * WIDTH + told) + guests * 4 * WIDTH + counts
            away, guests = visits(experts, 2, {2 - 2 * here, 3 - 2 * here}), 2 * visits(experts, 2, {rank})
            assert flat == away * (4 * WIDTH + told) + guests * 4 * WIDTH + 2 * counts
    whole, half = (sum(world.run(crossing, 4, "hierarchical", experts)) for experts in chosen)
    assert half < 0.6 * whole


def visits(experts: Tensor, share: int, holders: set[int]) -> int:
    """How many different (token, holder) there are, when each holder has `share` experts."""
    return len({(t, e // share) for t, row in enumerate(experts.tolist()) for e in row if e // share in holders})
