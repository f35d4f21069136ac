"""The lookup table: torch's numbers, and in bf16 on a CPU the sums that torch makes on an accelerator."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forge_models.blocks.layers import Embedding


def table(rows: int, width: int, dtype: torch.dtype) -> Embedding:
    torch.manual_seed(0)
    made = Embedding(rows, width)
    nn.init.normal_(made.weight)
    return made.to(dtype)


def gradient(embedding: Embedding, tokens: Tensor, above: Tensor) -> Tensor:
    embedding(tokens).backward(above)
    assert embedding.weight.grad is not None
    return embedding.weight.grad


def test_a_token_that_comes_often_gets_its_whole_gradient() -> None:
    """A sum of ones in bf16 stops at 256."""
    found = gradient(table(3, 2, torch.bfloat16), torch.ones(4096, dtype=torch.int64), torch.ones(4096, 2, dtype=torch.bfloat16))
    assert found.tolist() == [[0, 0], [4096, 4096], [0, 0]]


@pytest.mark.parametrize("shape", [(0,), (1,), (64,), (8, 16), (2, 3, 100)], ids=str)
def test_in_bf16_sums_are_rounded_once(shape: tuple[int, ...]) -> None:
    embedding, tokens = table(13, 4, torch.bfloat16), torch.randint(13, shape)
    above = torch.randn(*shape, 4).bfloat16()
    exact = torch.zeros(13, 4, dtype=torch.float64).index_add_(0, tokens.flatten(), above.double().reshape(-1, 4))
    assert torch.equal(gradient(embedding, tokens, above), exact.float().bfloat16())
    assert torch.equal(embedding(tokens), F.embedding(tokens, embedding.weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_in_wider_precision_every_bit_is_torchs(dtype: torch.dtype) -> None:
    embedding, other = table(13, 4, dtype), table(13, 4, dtype)
    tokens, above = torch.randint(13, (8, 100)), torch.randn(8, 100, 4, dtype=dtype)
    F.embedding(tokens, other.weight).backward(above)
    assert torch.equal(gradient(embedding, tokens, above), other.weight.grad)  # type: ignore[arg-type]
