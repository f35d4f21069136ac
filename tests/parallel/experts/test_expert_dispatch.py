"""Dispatchers over ranks against a loop over the tokens of all of them; when and how much travels, against what has to."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from forge_core.layout import Layout
from forge_core.protocols.model import ExpertDispatcher
from forge_models.blocks.moe.dispatch import LocalDispatch
from forge_models.components.decoder import DecoderConfig
from forge_models.components.experts import MoEConfig, SigmoidTopKConfig
from forge_models.shape import RouterContext
from forge_parallel.model.parallel_model import ParallelModel
from forge_parallel.model.plan import Plan
from forge_parallel.model.realize import Blueprint, realize
from forge_parallel.placement.collectives import Ranks
from forge_parallel.placement.topology import Topology
from forge_parallel.transforms.dispatchers import AllGatherDispatcher, AllToAllDispatcher, Route, open_dispatcher
from forge_parallel.transforms.expert import ExpertParallel, Kind
from forge_parallel.transforms.shard import FullyShard
from harness.pool import World
from harness.siblings import fast

WIDTH, HIDDEN = 4, 6


@dataclass(frozen=True)
class Problem:
    """`tokens` of each rank; `choose` gives the experts (n, top_k) of a rank's tokens."""

    tokens: tuple[int, ...]
    experts: int
    top_k: int
    choose: Callable[[int, int, torch.Generator], Tensor] | None = None

    def of(self, rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x, experts, weights, and the slope of the result."""
        generator = torch.Generator().manual_seed(rank)
        count = self.tokens[rank]
        x, slope = (torch.randn(count, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
        weights = torch.rand(count, self.top_k, generator=generator, dtype=torch.float64)
        scores = torch.rand(count, self.experts, generator=generator)
        experts = scores.topk(self.top_k).indices if self.choose is None else self.choose(rank, count, generator)
        return x.requires_grad_(), experts, weights.requires_grad_(), slope

    def matrices(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(99)
        up = torch.randn(self.experts, WIDTH, HIDDEN, generator=generator, dtype=torch.float64)
        down = torch.randn(self.experts, HIDDEN, WIDTH, generator=generator, dtype=torch.float64)
        return up, down


def _dropping(rank: int, count: int, generator: torch.Generator) -> Tensor:
    experts = torch.rand(count, 8, generator=generator).topk(3).indices
    return experts.where(torch.rand(count, 3, generator=generator) > 0.4, -1)


def _but_on_rank_2(rank: int, count: int, _: torch.Generator) -> Tensor:
    return torch.tensor([[-1, -1] if rank == 2 else [1, 6]]).repeat(count, 1)


PROBLEMS = {
    "even": Problem((5, 5, 5, 5), 8, 2),
    "uneven rows, none on one rank": Problem((3, 0, 7, 1), 8, 2),
    "no tokens at all": Problem((0, 0, 0, 0), 8, 2),
    "one expert gets all": Problem((4, 4, 4, 4), 8, 1, lambda rank, n, g: torch.full((n, 1), 5)),
    "experts of three ranks get none": Problem((4, 4, 4, 4), 8, 2, lambda rank, n, g: torch.tensor([[7, 6]]).repeat(n, 1)),
    "one expert gets none": Problem((6, 6, 6, 6), 8, 3, lambda rank, n, g: torch.rand(n, 7, generator=g).topk(3).indices + 1),
    "all of a rank is padding": Problem((4, 4, 4, 4), 8, 2, _but_on_rank_2),
    "all is padding": Problem((2, 2, 2, 2), 8, 2, lambda rank, n, g: torch.full((n, 2), -1)),
    "some slots dropped": Problem((9, 4, 6, 5), 8, 3, _dropping),
    "more chosen than ranks": Problem((5, 3, 4, 6), 16, 7),
    "one chosen": Problem((5, 3, 4, 6), 8, 1),
    "256 experts": Problem((9, 9, 9, 9), 256, 8),
}  # fmt: skip


def _run(up: Tensor, down: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Experts that check what they are promised: groups in their order, then rows of nobody, for which they return NaN."""

    def run(rows: Tensor, counts: Tensor) -> Tensor:
        assert len(counts) == len(up)
        *groups, nobodys = rows.split([*counts.tolist(), len(rows) - int(counts.sum())])
        made = [(group @ a).relu() @ b for group, a, b in zip(groups, up, down, strict=True)]
        return torch.cat([*made, nobodys * torch.nan])

    return run


def _dispatched(layout: str, kind: Any, names: list[str], beside: bool, overlap: bool = True) -> list[tuple[Tensor, ...]]:
    at = Layout.parse(layout)
    topology = Topology.of(at, torch.device("cpu"))
    dispatch: Any = open_dispatcher(LocalDispatch(), topology, kind, 2 if kind == "hierarchical" else None, overlap)
    here, results = topology.coordinates, []
    for name in names:
        problem = PROBLEMS[name]
        x, experts, weights, slope = problem.of(topology.rank)
        whole = problem.matrices()
        share, part = problem.experts // at.ep, HIDDEN // at.etp
        mine = slice(here["ep"] * share, (here["ep"] + 1) * share)
        cut = slice(here["etp"] * part, (here["etp"] + 1) * part)
        up, down = (whole[0][mine, :, cut].clone().requires_grad_(), whole[1][mine, cut].clone().requires_grad_())
        slots = int((experts >= 0).sum())
        told = slots if slots == experts.numel() else None
        added = (lambda x=x: 3 * x) if beside else None
        y = dispatch(x, experts, weights, _run(up, down), problem.experts, told, added)
        results.append((y.detach(), *torch.autograd.grad(y, (x, weights, up, down), slope)))
    return results


def _expected(problem: Problem, beside: bool) -> tuple[list[tuple[Tensor, ...]], Tensor, Tensor]:
    """Per rank result and gradients of tokens and weights; gradients of all matrices. Token by token."""
    up, down = (matrix.requires_grad_() for matrix in problem.matrices())
    leaves, outputs, slopes = [], [], []
    for rank in range(len(problem.tokens)):
        x, experts, weights, slope = problem.of(rank)
        rows = [3 * row if beside else 0 * row for row in x]
        for token, chosen in enumerate(experts.tolist()):
            for slot, expert in enumerate(chosen):
                if expert >= 0:
                    rows[token] = rows[token] + weights[token, slot] * ((x[token] @ up[expert]).relu() @ down[expert])
        leaves += [x, weights]
        outputs.append(torch.stack(rows) if rows else x * 1)
        slopes.append(slope)
    found = torch.autograd.grad(outputs, [*leaves, up, down], slopes, allow_unused=True, materialize_grads=True)
    each = [(y.detach(), found[2 * rank], found[2 * rank + 1]) for rank, y in enumerate(outputs)]
    return each, found[-2], found[-1]


KINDS = [
    ("dp4ep4", "all_to_all"),
    ("dp4ep4", "all_gather"),
    ("dp4ep4", "hierarchical"),
    ("dp4ep2", "all_to_all"),
    ("dp2tp2ep2etp2", "all_to_all"),
    ("dp2tp2ep2etp2", "all_gather"),
    ("dp2tp2etp2", "all_to_all"),
]


FAST = (*((layout, kind, "") for layout, kind in KINDS if layout != "dp4ep2"), ("dp4ep2", "all_to_all", "beside"))


@pytest.mark.parametrize(
    ("layout", "kind", "beside"), fast(*FAST, of=[(*case, more) for case in KINDS for more in ("", "beside")])
)
def test_equals_a_loop_over_all_tokens(world: World, layout: str, kind: str, beside: str) -> None:
    at = Layout.parse(layout)
    found = world.run(_dispatched, 4, layout, kind, list(PROBLEMS), bool(beside))
    for index, (name, problem) in enumerate(PROBLEMS.items()):
        each, up, down = _expected(problem, bool(beside))
        for rank in range(4):
            for mine, other in zip(found[rank][index], each[rank], strict=False):
                torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")
        share, part = problem.experts // at.ep, HIDDEN // at.etp
        total_up, total_down = torch.zeros_like(up), torch.zeros_like(down)
        for rank in range(4):  # what is left of the ranks holds the same experts, and sums their gradients later
            here = at.coordinates(rank)
            mine = slice(here["ep"] * share, (here["ep"] + 1) * share)
            cut = slice(here["etp"] * part, (here["etp"] + 1) * part)
            total_up[mine, :, cut] += found[rank][index][3]
            total_down[mine, cut] += found[rank][index][4]
        torch.testing.assert_close(total_up, up, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(total_down, down, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["all_to_all", "hierarchical"])
def test_overlap_changes_no_bit(world: World, kind: str) -> None:
    names = ["even", "some slots dropped"]
    with_it, without = (world.run(_dispatched, 4, "dp4ep4", kind, names, True, overlap) for overlap in (True, False))
    for one, other in zip(with_it, without, strict=True):
        for a, b in zip(one, other, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def _routes(names: list[str]) -> list[dict[str, Any]]:
    assert dist.group.WORLD is not None
    ranks, found = Ranks.of(dist.group.WORLD), []
    for name in names:
        problem = PROBLEMS[name]
        _, experts, _, _ = problem.of(ranks.rank)
        owners = experts.div(problem.experts // ranks.size, rounding_mode="floor")
        route = Route.of(owners, ranks)
        found.append({"send": route.send, "receive": route.receive, "slots": route.slots, "token": route.token.tolist()})
    return found


def test_each_token_goes_once_to_each_rank_that_it_needs(world: World) -> None:
    found = world.run(_routes, 4, list(PROBLEMS))
    for index, problem in enumerate(PROBLEMS.values()):
        share = problem.experts // 4
        pairs, slots = [], [0] * 4
        for rank in range(4):
            experts = problem.of(rank)[1].tolist()
            pairs.append([sorted({e // share for e in chosen if e >= 0}) for chosen in experts])
            for expert in (e for chosen in experts for e in chosen if e >= 0):
                slots[expert // share] += 1
        for rank in range(4):
            mine = found[rank][index]
            leaving = [[token for token, owners in enumerate(pairs[rank]) if to in owners] for to in range(4)]
            assert mine["send"] == [len(tokens) for tokens in leaving]
            assert mine["token"] == [token for tokens in leaving for token in tokens]
            assert mine["receive"] == [sum(rank in owners for owners in pairs[other]) for other in range(4)]
            assert mine["slots"] == slots[rank]


def _crossing(kind: Any, name: str) -> int:
    """Rows that this rank sends to the other node: ranks 0 and 1 are one, 2 and 3 the other."""
    topology = Topology.of(Layout.parse("dp4ep4"), torch.device("cpu"))
    outer: Any = open_dispatcher(LocalDispatch(), topology, kind, 2 if kind == "hierarchical" else None)
    problem = PROBLEMS[name]
    x, experts, _, _ = problem.of(topology.rank)
    route = Route.of(experts.div(problem.experts // outer.ranks.size, rounding_mode="floor"), outer.ranks)
    here = topology.rank * outer.ranks.size // 4
    node = [to * 2 // outer.ranks.size for to in range(outer.ranks.size)]
    assert len(x) == problem.tokens[topology.rank]
    return sum(rows for rows, at in zip(route.send, node, strict=True) if at != node[here])


def test_nodes_are_crossed_once_by_a_token(world: World) -> None:
    name = "more chosen than ranks"
    problem = PROBLEMS[name]
    share = problem.experts // 4
    directly, once = [], []
    for rank in range(4):
        owners = [{e // share for e in chosen} for chosen in problem.of(rank)[1].tolist()]
        directly.append(sum(owner // 2 != rank // 2 for token in owners for owner in token))
        once.append(sum(any(owner // 2 != rank // 2 for owner in token) for token in owners))
    assert world.run(_crossing, 4, "all_to_all", name) == directly
    assert world.run(_crossing, 4, "hierarchical", name) == once
    assert sum(once) < sum(directly)


def test_dispatchers_are_what_a_model_asks_for() -> None:
    ranks = Ranks("none", 1, 0)
    assert isinstance(AllToAllDispatcher(ranks, LocalDispatch()), ExpertDispatcher)
    assert isinstance(AllGatherDispatcher(ranks, LocalDispatch()), ExpertDispatcher)


CPU = torch.device("cpu")
DIM, VOCAB, LENGTH = 64, 61, 2048


@dataclass(frozen=True)
class Interval:
    start: float
    end: float

    def shared(self, other: "Interval") -> float:
        return max(0.0, min(self.end, other.end) - max(self.start, other.start))


def model_of(moe: MoEConfig, layout: Layout, expert: ExpertParallel) -> ParallelModel:
    decoder = DecoderConfig(dim=DIM, ffn_dim=64, heads=4, layers=1, vocab_size=VOCAB, max_length=LENGTH, moe=moe)
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
    x, weights = torch.randn(len(experts), DIM), torch.rand(experts.shape)
    layout = Layout(dp_shard=4, ep=4)
    dispatch = open_dispatcher(LocalDispatch(), Topology.of(layout, CPU), kind, 2 if kind == "hierarchical" else None)
    with Border(2) as border:
        dispatch(x, experts, weights, lambda rows, _: rows, 8)
    return border.bytes


def test_a_token_crosses_the_border_of_nodes_once(world: World) -> None:
    """And with as many groups of experts as nodes, of which a token may choose one, half of the tokens never do."""
    router = {"bias_rate": 0.0, "n_group": 2}
    x = torch.randn(400, DIM, generator=torch.Generator().manual_seed(0))
    chosen = []
    for limit in (2, 1):
        module = SigmoidTopKConfig(**router, topk_group=limit).build(
            RouterContext(dim=DIM, experts=8, top_k=4, layer=0, init_std=1)
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
            assert hierarchical == away * (4 * DIM + told) + guests * 4 * DIM + counts
            away, guests = visits(experts, 2, {2 - 2 * here, 3 - 2 * here}), 2 * visits(experts, 2, {rank})
            assert flat == away * (4 * DIM + told) + guests * 4 * DIM + 2 * counts
    whole, half = (sum(world.run(crossing, 4, "hierarchical", experts)) for experts in chosen)
    assert half < 0.6 * whole


def visits(experts: Tensor, share: int, holders: set[int]) -> int:
    """How many different (token, holder) there are, when each holder has `share` experts."""
    return len({(t, e // share) for t, row in enumerate(experts.tolist()) for e in row if e // share in holders})
