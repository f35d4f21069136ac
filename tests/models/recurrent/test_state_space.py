"""The state space of Mamba-2 in chunks against the recurrence, one token at a time, in fp64: values and gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor

from forge_models.blocks.chunks import CHUNK
from forge_models.blocks.state_space import state_space
from models.recurrent.test_delta_rule import differentiated, largest

LENGTHS = (1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 5)


def stepwise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    step: Tensor,
    skip: Tensor,
    state: Tensor | None = None,
    documents: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The definition; arguments as of `state_space`."""
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
    outputs, rows = [], []
    for row in range(v.shape[0]):
        s = v.new_zeros(v.shape[2], k.shape[3], v.shape[3]) if state is None else state[row]
        for t in range(v.shape[1]):
            if documents is not None and t and documents[row, t] != documents[row, t - 1]:
                s = torch.zeros_like(s)
            s = g[row, t].exp()[:, None, None] * s
            s = s + torch.einsum("hk,hv->hkv", k[row, t], step[row, t][:, None] * v[row, t])
            outputs.append(torch.einsum("hkv,hk->hv", s, q[row, t]) + skip[:, None] * v[row, t])
        rows.append(s)
    return torch.stack(outputs).unflatten(0, (v.shape[0], -1)), torch.stack(rows)


def inputs(
    rows: int, length: int, groups: int = 2, heads: int = 4, widths: tuple[int, int] = (5, 3), seed: int = 0
) -> list[Tensor]:
    """q, k, v, g, step and skip in fp64, with gradients; g is below 0, the step above."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    q, k = normal(rows, length, groups, widths[0]), normal(rows, length, groups, widths[0])
    v, step = normal(rows, length, heads, widths[1]), normal(rows, length, heads).exp()
    made = [q, k, v, -0.3 * normal(rows, length, heads).exp(), step, normal(heads)]
    return [x.requires_grad_() for x in made]


def first_state(heads: int, widths: tuple[int, int]) -> Tensor:
    draw = torch.Generator().manual_seed(3)
    return torch.randn(2, heads, *widths, dtype=torch.float64, generator=draw).requires_grad_()


@pytest.mark.parametrize("length", LENGTHS)
def test_equals_the_recurrence(length: int) -> None:
    given = inputs(2, length)
    assert largest(differentiated(state_space, given), differentiated(stepwise, given)) < 1e-9


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 16, 40])
@pytest.mark.parametrize("heads", [(2, 4), (3, 3), (1, 3)])
def test_every_chunk_and_number_of_heads_with_a_first_state(chunk: int, heads: tuple[int, int]) -> None:
    given = inputs(2, 33, *heads, widths=(4, 6))
    more: dict[str, Any] = {"state": first_state(heads[1], (4, 6))}
    assert largest(differentiated(state_space, given, **more, chunk=chunk), differentiated(stepwise, given, **more)) < 1e-9


@pytest.mark.parametrize("chunk", [1, 4, 7, 64])
@pytest.mark.parametrize("borders", [(1,), (4,), (5,), (8, 9), (3, 4, 5, 16), (19,)])
def test_documents_begin_with_an_empty_state(chunk: int, borders: tuple[int, ...]) -> None:
    given = inputs(2, 20)
    documents = torch.zeros(2, 20, dtype=torch.int32)
    for border in borders:
        documents[0, border:] += 1
    documents[1, 7:] = -1  # as padding has it
    more: dict[str, Any] = {"documents": documents, "state": first_state(4, (5, 3))}
    assert largest(differentiated(state_space, given, **more, chunk=chunk), differentiated(stepwise, given, **more)) < 1e-9


def test_no_bit_of_a_document_depends_on_another() -> None:
    """Numbers as large as fp32 has in the other document change neither values nor gradients."""
    found = []
    for scale in (1.0, 1e18):
        given = [x.detach().float() for x in inputs(1, 100, seed=2)]
        given[0][:, 50:] *= scale
        given[2][:, 50:] *= scale
        given = [x.requires_grad_() for x in given]
        documents = (torch.arange(100) >= 50).int()[None]
        out, _ = state_space(*given, documents=documents)
        grads = torch.autograd.grad(out[:, :50].sum() + 0 * out[:, 50:].sum(), given)
        found.append([x[:, :50] for x in (out, *grads[:5])])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_decays_of_any_size_give_finite_numbers() -> None:
    q, k, v, g, step, skip = inputs(1, 130)
    given = [q, k, v, (g.detach() * 1e4).requires_grad_(), step, skip]
    assert largest(differentiated(state_space, given), differentiated(stepwise, given)) < 1e-9


def test_narrow_inputs_are_computed_in_fp32() -> None:
    given = [x.detach().float() for x in inputs(1, 150)]
    out, after = state_space(*given)
    expected, last = stepwise(*(x.double() for x in given))
    assert out.dtype == after.dtype == torch.float32
    assert largest([out.double(), after.double()], [expected, last]) < 1e-4
    narrow = [x.bfloat16() for x in given]
    rounded, state = state_space(*narrow)
    assert rounded.dtype == torch.bfloat16 and state.dtype == torch.float32
    assert torch.equal(rounded, state_space(*(x.float() for x in narrow))[0].bfloat16())


def test_groups_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="3 groups do not divide 4 heads"):
        state_space(*inputs(1, 4, groups=3))


def test_compiled_code_has_one_operator() -> None:
    given = inputs(1, 70)
    documents = (torch.arange(70) >= 50).int()[None]

    def run(*given: Tensor) -> tuple[Tensor, Tensor]:
        return state_space(*given, documents=documents)

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    assert largest(differentiated(compiled, given), differentiated(run, given)) < 1e-12


def test_the_operator_is_a_well_behaved_one_of_torch() -> None:
    given = [x.detach() for x in inputs(2, 70)]
    runs = (torch.arange(70) >= 50).long().expand(2, -1)
    tested = ("test_schema", "test_autograd_registration", "test_faketensor")
    operator = torch.ops.forge_models.state_space.default
    for documents in (None, runs):
        given = [x.requires_grad_() for x in given]
        torch.library.opcheck(operator, (*given, first_state(4, (5, 3)), documents, 64), test_utils=tested)
