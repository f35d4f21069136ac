"""The loss over a vocabulary that is split over ranks: against torch's cross-entropy, and what it holds while it runs."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from forge_core.protocols.model import LossHead
from forge_models.blocks import head as chunking
from forge_models.blocks.head import ChunkedCrossEntropy
from forge_parallel.dryrun.memory import Ledger
from forge_parallel.placement.collectives import Ranks, all_gather
from forge_parallel.placement.shares import chunk
from harness.pool import World
from harness.wide import Wide

VOCAB, DIM, ROWS, Z_LOSS = 23, 6, 600, 0.3


def _problem(rows: int, vocab: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, the projection, labels of which a third is ignored."""
    generator = torch.Generator().manual_seed(rows)
    hidden, weight = (torch.randn(n, DIM, generator=generator, dtype=torch.float64).to(dtype) for n in (rows, vocab))
    labels = torch.randint(vocab, (rows,), generator=generator)
    return hidden, weight, labels.where(torch.rand(rows, generator=generator) > 0.3, -100)


def _head(vocab: int, weight: Tensor) -> tuple[LossHead, Tensor]:
    assert dist.group.WORLD is not None
    ranks = Ranks.of(dist.group.WORLD)
    first, share = chunk(vocab, ranks.size, ranks.rank)
    return ChunkedCrossEntropy().split(first, lambda numbers: all_gather(numbers[None], ranks, 0)), weight[
        first : first + share
    ].clone()


def _found(soft_cap: float | None, dtype: torch.dtype, block: int | None, bytes_of_a_chunk: int) -> list[Tensor]:
    """Total, nll, z, the sum over ranks of the hidden states' gradient, and the weight's."""
    hidden, weight, labels = _problem(ROWS, VOCAB, dtype)
    head, share = _head(VOCAB, weight)
    before = chunking.CHUNK_BYTES, chunking.CPU_BLOCK
    chunking.CHUNK_BYTES, chunking.CPU_BLOCK = bytes_of_a_chunk, chunking.CPU_BLOCK if block is None else block
    try:
        total, nll, z = head(hidden.requires_grad_(), share.requires_grad_(), labels, Z_LOSS, soft_cap)
        (2 * total).backward()
    finally:
        chunking.CHUNK_BYTES, chunking.CPU_BLOCK = before
    assert hidden.grad is not None
    assert share.grad is not None
    dist.all_reduce(hidden.grad)
    shares = [
        torch.zeros(chunk(VOCAB, dist.get_world_size(), rank)[1], DIM, dtype=dtype) for rank in range(dist.get_world_size())
    ]
    for rank, one in enumerate(shares):
        one.copy_(share.grad if rank == dist.get_rank() else one)
        dist.broadcast(one, rank)
    return [total.detach(), nll, z, hidden.grad, torch.cat(shares)]


def _expected(soft_cap: float | None, dtype: torch.dtype) -> list[Tensor]:
    hidden, weight, labels = (x.double() if x.is_floating_point() else x for x in _problem(ROWS, VOCAB, dtype))
    logits = F.linear(hidden.requires_grad_(), weight.requires_grad_())
    logits = logits if soft_cap is None else soft_cap * (logits / soft_cap).tanh()
    nll = F.cross_entropy(logits, labels, reduction="none", ignore_index=-100)
    z = logits.logsumexp(1).square() * (labels != -100)
    total = (nll + Z_LOSS * z).sum()
    (2 * total).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return [x.detach() for x in (total, nll, z, hidden.grad, weight.grad)]


@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("block", [None, 37 * 8], ids=["one block", "blocks"])
def test_it_equals_torch(world: World, soft_cap: float | None, block: int | None) -> None:
    """23 words over 3 ranks, which do not divide; 600 rows in chunks of 256 or 512, of which blocks have 37 or all."""
    for dtype, tolerance, size in ((torch.float64, 1e-12, 0), (torch.float64, 1e-12, 2**25), (torch.bfloat16, 2**-7, 0)):
        expected = _expected(soft_cap, dtype)
        for found in world.run(_found, 3, soft_cap, dtype, block, size):
            for name, one, other in zip(("total", "nll", "z", "hidden", "weight"), found, expected, strict=True):
                error = (one.double() - other).abs().max() / other.abs().max()
                assert error <= tolerance, (name, dtype, float(error))


def _held(rows: int, vocab: int, soft_cap: float | None, block: int) -> tuple[int, int]:
    """Bytes above those of its arguments that a forward holds at most, and those of this rank's logits of all rows."""
    hidden, weight, labels = _problem(rows, vocab, torch.bfloat16)
    head, share = _head(vocab, weight)
    before, chunking.CPU_BLOCK = chunking.CPU_BLOCK, block
    ledger = Ledger()
    try:
        ledger.name("arguments", (hidden, share, labels))
        start = ledger.here()
        with ledger.open():
            head(hidden.requires_grad_(), share.requires_grad_(), labels, 0.0, soft_cap)
        return ledger.record().rise(start, ledger.here()), rows * len(share) * 2
    finally:
        chunking.CPU_BLOCK = before


@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_only_a_chunk_of_logits_exists_and_only_a_block_in_fp32(world: World, soft_cap: float | None) -> None:
    rows, vocab, block = 4096, 4000, 16
    share = vocab // 2
    gradients = rows * DIM * 2 + share * DIM * (4 + 2)  # of hidden states; of the weight in fp32, and one product
    chunk_and_block = 512 * share * 2 + block * share * 4 * (1 if soft_cap is None else 3)  # the cap and its derivative
    numbers = rows * 2 * 4 + 64 * 512 * 8  # nll and z; what a chunk has per row
    for peak, all_logits in world.run(_held, 2, rows, vocab, soft_cap, block * share):
        assert gradients + 512 * share * 2 < peak < gradients + chunk_and_block + numbers
        assert peak < all_logits / 4


@pytest.mark.parametrize("soft_cap", [None, 30.0])
def test_on_an_accelerator_too_only_a_block_is_in_fp32(soft_cap: float | None) -> None:
    """A quarter of the head of an 8B model, without its memory: all in fp32 is at most 256 MiB, but for the sum of the weight's
    gradient. The backward makes no wide copy of that."""
    hidden = torch.empty(8192, 4096, dtype=torch.bfloat16, device="meta", requires_grad=True)
    weight = torch.empty(128256 // 4, 4096, dtype=torch.bfloat16, device="meta", requires_grad=True)
    labels = torch.empty(8192, dtype=torch.int64, device="meta")
    head = ChunkedCrossEntropy().split(128256 // 4, lambda numbers: torch.stack([numbers] * 4))
    with Wide() as forward:
        total = head(hidden, weight, labels, 0.1, soft_cap)[0]
    assert forward.sizes[-1] == weight.numel() and 2**25 < forward.sizes[-2] <= 2**26
    with Wide() as backward:
        total.backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.bfloat16 and 2**25 < backward.sizes[-1] <= 2**26
