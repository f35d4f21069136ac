"""The gated delta rule in chunks against the recurrence, one token at a time, in fp64: values and gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from forge_models.blocks.chunks import CHUNK
from forge_models.blocks.delta_rule import gated_delta_rule
from models.recurrent.stepwise import inputs, stepwise

LENGTHS = (1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 5)


def differentiated(run: Callable[..., tuple[Tensor, Tensor]], given: list[Tensor], **more: Any) -> list[Tensor]:
    """Outputs, last state, and the gradients of a random function of both."""
    out, after = run(*given, **more)
    draw = torch.Generator().manual_seed(7)
    weights = [torch.randn(x.shape, generator=draw, dtype=torch.float64) for x in (out, after)]
    total = (out * weights[0]).sum() + (after * weights[1]).sum()
    state = [more["state"]] if more.get("state") is not None else []
    return [out, after, *torch.autograd.grad(total, [*given, *state])]


def largest(found: list[Tensor], expected: list[Tensor]) -> float:
    return max((one - other).abs().max().item() for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("length", LENGTHS)
def test_equals_the_recurrence(length: int) -> None:
    given = inputs(2, length)
    assert largest(differentiated(gated_delta_rule, given), differentiated(stepwise, given)) < 1e-9


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 16, 40])
@pytest.mark.parametrize("heads", [(2, 4), (3, 3), (1, 3)])
def test_every_chunk_and_number_of_heads_with_a_first_state(chunk: int, heads: tuple[int, int]) -> None:
    given = inputs(2, 33, *heads, widths=(4, 6))
    state = torch.randn(2, heads[1], 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()
    expected = differentiated(stepwise, given, state=state)
    assert largest(differentiated(gated_delta_rule, given, state=state, chunk=chunk), expected) < 1e-9


@pytest.mark.parametrize("chunk", [1, 4, 7, 64])
@pytest.mark.parametrize("borders", [(1,), (4,), (5,), (8, 9), (3, 4, 5, 16), (19,)])
def test_documents_begin_with_an_empty_state(chunk: int, borders: tuple[int, ...]) -> None:
    given = inputs(2, 20)
    documents = torch.zeros(2, 20, dtype=torch.int32)
    for border in borders:
        documents[0, border:] += 1
    documents[1, 7:] = -1  # as padding has it
    state = torch.randn(2, 4, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()
    more = {"documents": documents, "state": state}
    assert largest(differentiated(gated_delta_rule, given, **more, chunk=chunk), differentiated(stepwise, given, **more)) < 1e-9


def test_a_number_that_comes_again_is_another_document() -> None:
    given = inputs(1, 12)
    documents = torch.tensor([[4, 4, 4, 2, 2, 4, 4, 4, 4, 4, 2, 2]])
    more = {"documents": documents}
    assert largest(differentiated(gated_delta_rule, given, **more, chunk=12), differentiated(stepwise, given, **more)) < 1e-9


def test_no_bit_of_a_document_depends_on_another() -> None:
    """Numbers as large as fp32 has in the other document change neither values nor gradients."""
    found = []
    for scale in (1.0, 1e18):
        given = [x.detach().float() for x in inputs(1, 100, seed=2)]
        given[0][:, 50:] *= scale
        given[2][:, 50:] *= scale
        given = [x.requires_grad_() for x in given]
        documents = (torch.arange(100) >= 50).int()[None]
        out, _ = gated_delta_rule(*given, documents=documents)
        grads = torch.autograd.grad(out.sum(), given)
        found.append([x[:, :50] for x in (out, *grads)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_decays_of_any_size_give_finite_numbers() -> None:
    q, k, v, g, beta = inputs(1, 130)
    given = [q, k, v, (g.detach() * 1e4).requires_grad_(), beta]
    assert largest(differentiated(gated_delta_rule, given), differentiated(stepwise, given)) < 1e-9


def test_narrow_inputs_are_computed_in_fp32() -> None:
    given = [x.detach().float() for x in inputs(1, 150)]
    out, after = gated_delta_rule(*given)
    expected, last = stepwise(*(x.double() for x in given))
    assert out.dtype == after.dtype == torch.float32
    assert largest([out.double(), after.double()], [expected, last]) < 1e-5
    narrow = [x.bfloat16() for x in given]
    rounded, state = gated_delta_rule(*narrow)
    assert rounded.dtype == torch.bfloat16 and state.dtype == torch.float32
    assert torch.equal(rounded, gated_delta_rule(*(x.float() for x in narrow))[0].bfloat16())


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="3 key heads do not divide 4 value heads"):
        gated_delta_rule(*inputs(1, 4, key_heads=3))


def test_compiled_code_has_one_operator() -> None:
    given = inputs(1, 70)
    documents = (torch.arange(70) >= 50).int()[None]

    def run(*given: Tensor) -> tuple[Tensor, Tensor]:
        return gated_delta_rule(*given, documents=documents)

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    assert largest(differentiated(compiled, given), differentiated(run, given)) < 1e-12


def test_the_operator_is_a_well_behaved_one_of_torch() -> None:
    given = [x.detach() for x in inputs(2, 70)]
    runs = (torch.arange(70) >= 50).long().expand(2, -1)
    state = torch.randn(2, 4, 5, 3, dtype=torch.float64).requires_grad_()
    tested = ("test_schema", "test_autograd_registration", "test_faketensor")
    operator = torch.ops.forge_models.gated_delta_rule.default
    for documents in (None, runs):
        torch.library.opcheck(operator, (*(x.requires_grad_() for x in given), state, documents, 64), test_utils=tested)
