"""Polar Express and NorMuon against the papers: polynomials by an exchange algorithm, updates by loops over rows, all layouts."""

from dataclasses import replace
from math import sqrt
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from forge_core.layout import Layout
from forge_models.objectives import CrossEntropy
from forge_parallel.model.plan import Plan
from forge_parallel.optim.muon import POLAR_EXPRESS, orthogonalized
from forge_parallel.optim.optimizers import MuonConfig
from forge_parallel.transforms.shard import FullyShard
from forge_parallel.verify.parity import Case, Measurement, compare, measure
from forge_testing.checks.parallel import Held
from harness.pool import World
from harness.siblings import fast
from parallel.compositions.rows import DECODER, EXPERTS, VOCAB, measured
from parallel.one_process import alone
from parallel.optimizers.test_muon import matrices
from parallel.tiny import VOCAB as FEW
from parallel.tiny import Tiny, cross_entropy

CPU = torch.device("cpu")
LR, DECAY, MOMENTUM, BETA, STEPS, REST = 0.02, 0.1, 0.9, 0.8, 6, 3e-3
SMALLEST, CUSHION, MARGIN = 1e-3, 0.02407327424182761, 1.01
"""Of the paper of Polar Express: the lower end of singular values, and two guards against rounding in 16 bits."""


def best_quintic(low: float, high: float) -> np.ndarray:
    """The odd polynomial of degree 5 nearest to 1 on an interval, in the largest distance: that whose distance has equal size and
    alternating signs at four points (Chebyshev), found by exchanging two of them for the extrema (Remez)."""
    inner = np.linspace(low, high, 4)[1:3]
    for _ in range(100):
        points = np.array([low, *inner, high])
        powers = np.stack([points, points**3, points**5, (-1.0) ** np.arange(4)], axis=1)
        *found, _ = np.linalg.solve(powers, np.ones(4))
        a, b, c = found
        extrema = np.sort(np.sqrt(np.roots([5 * c, 3 * b, a]).real))
        if np.allclose(extrema, inner, rtol=0, atol=1e-15):
            break
        inner = extrema
    return np.array(found)


def polynomials(count: int) -> list[np.ndarray]:
    low, high, found = SMALLEST, 1.0, []
    for _ in range(count):
        a, b, c = best = best_quintic(max(low, CUSHION * high), high)
        low_now, high_now = (a * x + b * x**3 + c * x**5 for x in (low, high))
        best = best * 2 / (low_now + high_now)
        a, b, c = best
        low = a * low + b * low**3 + c * low**5
        high = 2 - low
        found.append(best)
    return found


def test_the_table_is_that_of_the_best_polynomials() -> None:
    found = polynomials(6)
    np.testing.assert_allclose(POLAR_EXPRESS[:6], found, rtol=1e-7)
    a, b, c = POLAR_EXPRESS[-1]  # the one that is 1 at 1, with two derivatives of 0
    assert (a + b + c, a + 3 * b + 5 * c, 6 * b + 20 * c) == (1, 0, 0)
    np.testing.assert_allclose(POLAR_EXPRESS[6], POLAR_EXPRESS[7], atol=3e-6)


def test_no_other_polynomial_of_degree_five_is_nearer_to_one() -> None:
    """A property that needs no algorithm: without the cushion, on a grid, any step away from the best is worse."""
    grid = np.linspace(0.1, 1, 4001)
    powers = np.stack([grid, grid**3, grid**5], axis=1)
    best = best_quintic(0.1, 1.0)
    distance = np.abs(powers @ best - 1).max()
    for direction in np.random.default_rng(0).normal(size=(200, 3)):
        assert np.abs(powers @ (best + 1e-3 * direction) - 1).max() > distance


def spectrum(values: Tensor, coefficients: str, steps: int) -> Tensor:
    """Singular values of what becomes of a matrix with these singular values, in fp64."""
    generator = torch.Generator().manual_seed(3)
    left, right = (torch.linalg.qr(torch.randn(64, 64, generator=generator, dtype=torch.float64))[0] for _ in range(2))
    return torch.linalg.svdvals(orthogonalized(left @ values.diag() @ right.T, steps, coefficients))  # type: ignore[arg-type]


def test_singular_values_converge_to_one() -> None:
    """All from a thousandth of the norm on; those of the original polynomial do not."""
    values = torch.logspace(-2.5, 0, 64, dtype=torch.float64)
    distance = [float((spectrum(values, "polar_express", steps) - 1).abs().max()) for steps in (5, 6, 7, 8, 9, 12)]
    assert distance == sorted(distance, reverse=True)
    assert distance[0] < 0.35 and distance[-1] < 1e-9
    assert float((spectrum(values, "original", 12) - 1).abs().max()) > 0.1
    for few in (5, 6):
        assert float((spectrum(values, "polar_express", few) - 1).abs().mean()) < float(
            (spectrum(values, "original", few) - 1).abs().mean()
        )


def test_a_matrix_of_zeros_stays_zero_and_a_tall_one_is_as_a_wide_one() -> None:
    assert torch.equal(orthogonalized(torch.zeros(3, 5), 5, "polar_express"), torch.zeros(3, 5))
    matrix = torch.randn(7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    tall, wide = orthogonalized(matrix, 5, "polar_express"), orthogonalized(matrix.T, 5, "polar_express")
    torch.testing.assert_close(tall, wide.T)


def by_svd(matrix: Tensor, express: bool) -> Tensor:
    """What the iterations do to singular values."""
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values / max(float(matrix.norm()) * (MARGIN if express else 1), 1e-7)
    table = [tuple(map(float, each)) for each in polynomials(STEPS)] if express else [(3.4445, -4.775, 2.0315)] * STEPS
    for a, b, c in table:
        y = values / MARGIN if express else values
        values = a * y + b * y**3 + c * y**5
    return left * values @ right


class Reference:
    """NorMuon by its paper's algorithm, one row after the other, on views of a model's parameters; torch's AdamW for the rest."""

    def __init__(self, model: Any, express: bool, neurons: bool) -> None:
        self.model, self.express, self.neurons = model, express, neurons
        self.views: list[tuple[str, Tensor, int, Tensor]] = []
        rest: dict[bool, list[Tensor]] = {True: [], False: []}
        for name, tensor, _ in model.trainable():
            whole = list(matrices(name, tensor.detach()))
            if not whole:
                rest["head" in name or "router" in name].append(tensor)
            self.views += [(name, tensor, index, view) for index, view in enumerate(whole)]
        self.momentum = [torch.zeros_like(view) for *_, view in self.views]
        self.squares = [[0.0] * view.shape[0] for *_, view in self.views]
        groups = [{"params": rest[True], "weight_decay": DECAY}, {"params": rest[False], "weight_decay": 0.0}]
        self.adamw = torch.optim.AdamW([g for g in groups if g["params"]], lr=REST, betas=(0.9, 0.95), eps=1e-8)

    @torch.no_grad()
    def step(self, skip: Tensor) -> None:
        assert skip == 0
        for which, (name, tensor, index, view) in enumerate(self.views):
            assert tensor.grad is not None
            grad = list(matrices(name, tensor.grad))[index]
            mean = self.momentum[which]
            mean.mul_(MOMENTUM).add_(grad, alpha=1 - MOMENTUM)
            made = by_svd((1 - MOMENTUM) * grad + MOMENTUM * mean, self.express)
            if self.neurons:
                norm, squares = float(made.norm()), self.squares[which]
                for row in range(made.shape[0]):
                    here = float(made[row] @ made[row]) / made.shape[1]
                    squares[row] = BETA * squares[row] + (1 - BETA) * here
                    made[row] /= sqrt(squares[row]) + 1e-10
                made *= norm / float(made.norm())
            rows, columns = view.shape
            view.mul_(1 - LR * DECAY).sub_(made * LR * sqrt(max(1, rows / columns)))
        self.adamw.step()

    def zero_grad(self) -> None:
        for _, tensor, _ in self.model.trainable():
            tensor.grad = None


def case(express: bool, neurons: bool, **changes: Any) -> Case:
    component = MuonConfig(
        lr=LR,
        weight_decay=DECAY,
        momentum=MOMENTUM,
        newton_schulz_steps=STEPS,
        coefficients="polar_express" if express else "original",
        neuron_beta=BETA if neurons else None,
        adamw_lr=REST,
    )
    model, objective = replace(DECODER, moe=EXPERTS), CrossEntropy().build()
    made = Case(model.build, objective, component.build, VOCAB, rows=8, micro_batch=2, steps=5)  # type: ignore[arg-type]
    return replace(made, **changes)


def reference(made: Case, express: bool, neurons: bool) -> Measurement:
    alone_with = replace(made, optimizer=lambda model: Reference(model, express, neurons))  # type: ignore[arg-type]
    return measure(alone_with, Plan.of([], Layout()), CPU)


LAYOUTS = {
    "1": "",
    "dp2": "",
    "hsdp2x2": "",
    "tp2": "tp",
    "pp2": "pp_1f1b",
    "dp2tp2": "tp",
    "dp2ep2": "ep_all_to_all",
    "dp2tp2ep2etp2": "etp",
}


@pytest.mark.parametrize("layout", fast("1", "dp2ep2", of=LAYOUTS))
def test_every_layout_equals_the_paper_on_one_process(world: World, layout: str) -> None:
    made = case(express=True, neurons=True)
    exact = alone(reference, made, True, True)
    for each in world.run(measured, Layout.parse(layout).world, made, layout, frozenset(LAYOUTS[layout].split()), timeout=400):
        difference = compare(exact, each)
        assert difference.accepted("fp64"), difference


@pytest.mark.parametrize(("express", "neurons"), [(True, False), (False, True)])
@pytest.mark.parametrize("layout", ["1", "dp2"])
def test_fused_matrices_and_each_option_alone(world: World, layout: str, express: bool, neurons: bool) -> None:
    """Of a model whose q, k and v are one parameter; shards are uneven."""
    made = case(express, neurons, build=Tiny, objective=cross_entropy, vocab_size=FEW)
    exact = alone(reference, made, express, neurons)
    for each in world.run(_fused, Layout.parse(layout).world, made, layout):
        difference = compare(exact, each)
        assert difference.accepted("fp64"), difference


def _fused(made: Case, layout: str) -> Measurement:
    return measure(made, Plan.of([FullyShard()], Layout.parse(layout)), CPU)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_means_of_squares_keep_all_bits_of_fp32(precision: str) -> None:
    """They travel with matrices in 16 bits, in which a mean that moves by less than 1/256 would stand still."""
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.zeros(12, 10))
    optimizer: Any = MuonConfig(neuron_beta=0.999, precision=precision).build(Held({"a.weight": weight}))  # type: ignore[arg-type]
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    momentum, squares = torch.zeros(12, 10), torch.zeros(12, 1, dtype=torch.float64)
    for _ in range(5):
        weight.grad = torch.randn(12, 10, generator=generator)
        momentum = torch.lerp(momentum, weight.grad, 0.05)
        made = orthogonalized(torch.lerp(weight.grad, momentum, 0.95).to(dtype), 5).double()
        squares = 0.999 * squares + 0.001 * made.square().mean(1, keepdim=True)
        optimizer.step()
    (found,) = optimizer.state()["neurons"].values()
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), squares, rtol=1e-6, atol=0)
    before = [tensor.clone() for tensors in optimizer.state().values() for tensor in tensors.values()]
    optimizer.step(torch.ones((), dtype=torch.int32))
    assert all(map(torch.equal, before, (tensor for tensors in optimizer.state().values() for tensor in tensors.values())))


def test_without_the_option_there_is_no_state_of_rows() -> None:
    weight = nn.Parameter(torch.zeros(12, 10))
    assert set(MuonConfig().build(Held({"a.weight": weight})).state()) == {"momentum", "exp_avg", "exp_avg_sq", "step"}  # type: ignore[arg-type]
