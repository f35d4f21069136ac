"""Collectives with gradients: each against what the whole world's tensors say, and its gradient against its transpose."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from forge_parallel.placement.collectives import Copy, Gather, GatherWide, Join, Ranks, Scatter, Sum, all_to_all
from harness.pool import World
from harness.siblings import fast

SENT = [[2, 0, 3], [1, 4, 0], [0, 0, 0]]
"""Rows that rank i sends to rank j: uneven, some none, one rank has none at all and one receives none from some."""


def _ranks() -> Ranks:
    assert dist.group.WORLD is not None
    return Ranks.of(dist.group.WORLD)


def _given(rank: int, rows: int, *shape: int) -> Tensor:
    return torch.randn(rows, *shape, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def _splits(rank: int) -> tuple[list[int], list[int]]:
    return SENT[rank], [row[rank] for row in SENT]


def _exchange(compiled: bool) -> tuple[Tensor, Tensor]:
    ranks = _ranks()
    send, receive = _splits(ranks.rank)

    def exchange(x: Tensor) -> Tensor:
        return all_to_all(x * 2, send, receive, ranks).sin()

    x = _given(ranks.rank, sum(send), 5).requires_grad_()
    with warnings.catch_warnings():
        if compiled:  # the compiler's own imports warn
            warnings.simplefilter("ignore")
        out = (torch.compile(exchange, fullgraph=True, backend="aot_eager") if compiled else exchange)(x)
        (grad,) = torch.autograd.grad(out, x, _given(7 + ranks.rank, sum(receive), 5))
    return out.detach(), grad


@pytest.mark.parametrize("compiled", fast(False, of=[False, True]))
def test_rows_reach_their_rank_and_gradients_come_back(world: World, compiled: bool) -> None:
    """Uneven splits, none among them, against one process that has the rows of all ranks."""
    size = len(SENT)
    inputs = [_given(rank, sum(SENT[rank]), 5).requires_grad_() for rank in range(size)]
    pieces = [x.split(SENT[rank]) for rank, x in enumerate(inputs)]
    expected = [(2 * torch.cat([pieces[source][rank] for source in range(size)])).sin() for rank in range(size)]
    grads = [_given(7 + rank, len(out), 5) for rank, out in enumerate(expected)]
    by_input = torch.autograd.grad(expected, inputs, grads)
    for rank, (out, grad) in enumerate(world.run(_exchange, size, compiled, timeout=180)):
        torch.testing.assert_close(out, expected[rank].detach(), rtol=0, atol=1e-14)
        torch.testing.assert_close(grad, by_input[rank], rtol=0, atol=1e-14)


Collective = Callable[[Tensor, Ranks], Tensor]
LINEAR: dict[str, tuple[Collective, tuple[int, int], Callable[[list[Tensor], int], Tensor]]] = {
    "gather 0": (lambda x, ranks: Gather.apply(x, ranks, 0), (2, 3), lambda xs, _: torch.cat(xs)),
    "gather 1": (lambda x, ranks: Gather.apply(x, ranks, 1), (2, 3), lambda xs, _: torch.cat(xs, 1)),
    "gather wide": (lambda x, ranks: GatherWide.apply(x, ranks), (2, 3), lambda xs, _: torch.cat(xs)),
    "scatter 0": (lambda x, ranks: Scatter.apply(x, ranks, 0), (6, 2), lambda xs, rank: sum(xs).chunk(3)[rank]),  # type: ignore[union-attr]
    "scatter 1": (lambda x, ranks: Scatter.apply(x, ranks, 1), (2, 6), lambda xs, rank: sum(xs).chunk(3, 1)[rank]),  # type: ignore[union-attr]
}
"""Name -> the collective, the shape that it takes, and what rank r gets when the ranks bring `xs`."""


def _linear() -> dict[str, tuple[Tensor, Tensor]]:
    ranks, found = _ranks(), {}
    for name, (collective, shape, _) in LINEAR.items():
        x = _given(ranks.rank, *shape).requires_grad_()
        out = collective(x, ranks)
        (grad,) = torch.autograd.grad(out, x, _given(7 + ranks.rank, *out.shape))
        found[name] = out.detach(), grad
    return found


def test_gradients_are_those_of_the_sum_of_all_ranks_losses(world: World) -> None:
    results = world.run(_linear, 3)
    for name, (_, shape, whole) in LINEAR.items():
        inputs = [_given(rank, *shape).requires_grad_() for rank in range(3)]
        outs = [whole(inputs, rank) for rank in range(3)]
        grads = torch.autograd.grad(outs, inputs, [_given(7 + rank, *out.shape) for rank, out in enumerate(outs)])
        for rank, found in enumerate(results):
            torch.testing.assert_close(found[name][0], outs[rank].detach(), rtol=0, atol=1e-14, msg=name)
            torch.testing.assert_close(found[name][1], grads[rank], rtol=0, atol=1e-14, msg=name)


def _replicated() -> tuple[list[Tensor], list[Tensor]]:
    """What every rank then uses alike: its gradient is the same on all of them, so it counts once."""
    ranks = _ranks()
    calls: list[tuple[Any, tuple[Any, ...], int]] = [(Copy, (), 3), (Sum, (), 3), (Join, (8,), 8)]
    outs, grads = [], []
    for collective, more, width in calls:
        x = _given(ranks.rank, 2, 3).requires_grad_()
        outs.append(collective.apply(x, ranks, *more))
        # a copy is used for something else on every rank, the two others for the same
        grads += torch.autograd.grad(outs[-1], x, _given(9 if collective is not Copy else 9 + ranks.rank, 2, width))
    return [out.detach() for out in outs], grads


def test_what_all_ranks_use_alike_counts_once(world: World) -> None:
    results = world.run(_replicated, 3)
    inputs = [_given(rank, 2, 3) for rank in range(3)]
    grad, wide = _given(9, 2, 3), _given(9, 2, 8)
    for rank, (outs, grads) in enumerate(results):
        for found, expected in zip(outs, (inputs[rank], sum(inputs), torch.cat(inputs, 1)[:, :8]), strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)
        cut = torch.nn.functional.pad(wide, (0, 1))[:, 3 * rank : 3 * rank + 3]  # of the ninth column nothing is used
        for found, expected in zip(grads, (sum(_given(9 + other, 2, 3) for other in range(3)), grad, cut), strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)


def _narrow() -> Tensor:
    ranks = _ranks()
    x = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.tensor([[1.0], [2.0**-8], [2.0**-8]], dtype=torch.float64)[(torch.arange(3) - ranks.rank) % 3]
    (found,) = torch.autograd.grad(GatherWide.apply(x, ranks), x, grad.to(torch.bfloat16))
    return found


def test_a_wide_sum_rounds_once(world: World) -> None:
    """1 + 2^-8 + 2^-8 is a bf16 number; added one after the other in bf16, both small ones are rounded away."""
    assert all(found.item() == 1 + 2**-7 for found in world.run(_narrow, 3))
