"""The delta rule with a decay for each channel, in chunks, against the recurrence, one token at a time, in fp64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from forge_models.blocks.channel_delta import BLOCK, channel_delta_rule
from forge_models.blocks.chunks import CHUNK
from models.recurrent.test_delta_rule import differentiated, largest

LENGTHS = (1, 2, BLOCK, BLOCK + 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 5)


def stepwise(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None = None, documents: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The definition; arguments as of `channel_delta_rule`."""
    outputs, rows = [], []
    for row in range(v.shape[0]):
        s = v.new_zeros(v.shape[2], k.shape[3], v.shape[3]) if state is None else state[row]
        for t in range(v.shape[1]):
            if documents is not None and t and documents[row, t] != documents[row, t - 1]:
                s = torch.zeros_like(s)
            s = g[row, t].exp()[:, :, None] * s
            error = v[row, t] - torch.einsum("hkv,hk->hv", s, k[row, t])
            s = s + torch.einsum("hk,hv->hkv", k[row, t], beta[row, t][:, None] * error)
            outputs.append(torch.einsum("hkv,hk->hv", s, q[row, t]))
        rows.append(s)
    return torch.stack(outputs).unflatten(0, (v.shape[0], -1)), torch.stack(rows)


def inputs(rows: int, length: int, heads: int = 3, widths: tuple[int, int] = (5, 4), seed: int = 0) -> list[Tensor]:
    """q, k, v, g and beta in fp64, with gradients; k has length 1, g is below 0, beta within 0 and 1."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    q, k = normal(rows, length, heads, widths[0]), normal(rows, length, heads, widths[0])
    v, g = normal(rows, length, heads, widths[1]), -normal(rows, length, heads, widths[0]).exp()
    made = [q, k / k.norm(dim=-1, keepdim=True), v, g * 0.3, normal(rows, length, heads).sigmoid()]
    return [x.requires_grad_() for x in made]


def first_state(heads: int, widths: tuple[int, int]) -> Tensor:
    draw = torch.Generator().manual_seed(3)
    return torch.randn(2, heads, *widths, dtype=torch.float64, generator=draw).requires_grad_()


@pytest.mark.parametrize("length", LENGTHS)
def test_equals_the_recurrence(length: int) -> None:
    given = inputs(2, length)
    assert largest(differentiated(channel_delta_rule, given), differentiated(stepwise, given)) < 1e-9


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 16, 18, 40])
def test_every_chunk_with_a_first_state(chunk: int) -> None:
    given = inputs(2, 33, 2, widths=(4, 6))
    more: dict[str, Any] = {"state": first_state(2, (4, 6))}
    assert largest(differentiated(channel_delta_rule, given, **more, chunk=chunk), differentiated(stepwise, given, **more)) < 1e-9


@pytest.mark.parametrize("chunk", [1, 4, 7, 64])
@pytest.mark.parametrize("borders", [(1,), (4,), (8, 9), (3, 4, 5, 16), (15,), (16,), (17,), (19, 33)])
def test_documents_begin_with_an_empty_state(chunk: int, borders: tuple[int, ...]) -> None:
    given = inputs(2, 40)
    documents = torch.zeros(2, 40, dtype=torch.int32)
    for border in borders:
        documents[0, border:] += 1
    documents[1, 7:] = -1  # as padding has it
    more: dict[str, Any] = {"documents": documents, "state": first_state(3, (5, 4))}
    assert largest(differentiated(channel_delta_rule, given, **more, chunk=chunk), differentiated(stepwise, given, **more)) < 1e-9


def test_no_bit_of_a_document_depends_on_another() -> None:
    """Numbers as large as fp32 has in the other document change neither values nor gradients."""
    found = []
    for scale in (1.0, 1e18):
        given = [x.detach().float() for x in inputs(1, 100, seed=2)]
        for at in (0, 2, 3):
            given[at][:, 50:] *= scale if at < 3 else min(scale, 1e4)
        given = [x.requires_grad_() for x in given]
        documents = (torch.arange(100) >= 50).int()[None]
        out, _ = channel_delta_rule(*given, documents=documents)
        grads = torch.autograd.grad(out.sum(), given)
        found.append([x[:, :50] for x in (out, *grads)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_decays_of_any_size_give_finite_numbers() -> None:
    q, k, v, g, beta = inputs(1, 130)
    given = [q, k, v, (g.detach() * 1e4).requires_grad_(), beta]
    assert largest(differentiated(channel_delta_rule, given), differentiated(stepwise, given)) < 1e-9


def test_narrow_inputs_are_computed_in_fp32() -> None:
    given = [x.detach().float() for x in inputs(1, 150)]
    out, after = channel_delta_rule(*given)
    expected, last = stepwise(*(x.double() for x in given))
    assert out.dtype == after.dtype == torch.float32
    assert largest([out.double(), after.double()], [expected, last]) < 1e-5
    rounded, state = channel_delta_rule(*(x.bfloat16() for x in given))
    assert rounded.dtype == torch.bfloat16 and state.dtype == torch.float32


def test_compiled_code_has_one_operator() -> None:
    given = inputs(1, 70)
    documents = (torch.arange(70) >= 50).int()[None]

    def run(*given: Tensor) -> tuple[Tensor, Tensor]:
        return channel_delta_rule(*given, documents=documents)

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    assert largest(differentiated(compiled, given), differentiated(run, given)) < 1e-12


def test_the_operator_is_a_well_behaved_one_of_torch() -> None:
    runs = (torch.arange(70) >= 50).long().expand(2, -1)
    tested = ("test_schema", "test_autograd_registration", "test_faketensor")
    operator = torch.ops.forge_models.channel_delta_rule.default
    for documents in (None, runs):
        torch.library.opcheck(operator, (*inputs(2, 70), first_state(3, (5, 4)), documents, 64), test_utils=tested)
