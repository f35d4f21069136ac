"""The local expert dispatcher against a loop over tokens."""

import pytest
import torch

from forge_core.protocols.model import ExpertDispatcher
from forge_models.blocks.moe.dispatch import LocalDispatch


def problem(dropped):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(13, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    matrices = torch.randn(5, 4, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(13, 2, generator=generator, dtype=torch.float64, requires_grad=True)
    experts = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(13)])  # expert 4 gets nothing
    if dropped:
        experts[2, 0] = -1
        experts[7] = -1
    return x, matrices, weights, experts


def run_with(matrices):
    """An expert layer of plain matrices that checks what it is promised: groups in the order of experts, then rows of nobody,
    for which it returns NaN."""

    def run(tokens, counts):
        assert counts.shape == (5,)
        *groups, nobodys = tokens.split([*counts.tolist(), len(tokens) - int(counts.sum())])
        made = [group @ matrix for group, matrix in zip(groups, matrices, strict=True)]
        return torch.cat([*made, nobodys * torch.nan])

    return run


def loop(x, matrices, weights, experts):
    rows = []
    for token in range(len(x)):
        row = torch.zeros(4, dtype=torch.float64)
        for slot in range(2):
            expert = int(experts[token, slot])
            if expert >= 0:
                row = row + weights[token, slot] * (x[token] @ matrices[expert])
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize(("dropped", "told"), [(False, False), (False, True), (True, False), (True, True)])
def test_equals_a_loop_with_gradients(dropped, told):
    x, matrices, weights, experts = problem(dropped)
    slots = int((experts >= 0).sum()) if told else None
    ours = LocalDispatch()(x, experts, weights, run_with(matrices), 5, slots)
    theirs = loop(x, matrices, weights, experts)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    leaves = (x, matrices, weights)
    slope = torch.randn(13, 4, dtype=torch.float64)
    for mine, other in zip(
        torch.autograd.grad((ours * slope).sum(), leaves), torch.autograd.grad((theirs * slope).sum(), leaves), strict=True
    ):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("slots", [None, 0])
def test_everything_dropped_gives_zero_with_a_graph(slots):
    x, matrices, weights, experts = problem(False)
    out = LocalDispatch()(x, torch.full_like(experts, -1), weights, run_with(matrices), 5, slots)
    assert out.count_nonzero() == 0
    out.sum().backward()
    assert x.grad.count_nonzero() == 0


def test_keeps_the_dtype_of_the_tokens():
    x, matrices, weights, experts = problem(False)
    out = LocalDispatch()(x.bfloat16(), experts, weights.float(), run_with(matrices.bfloat16()), 5)
    assert out.dtype == torch.bfloat16
    assert isinstance(LocalDispatch(), ExpertDispatcher)
