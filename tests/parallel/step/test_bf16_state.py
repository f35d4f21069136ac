"""Stochastic rounding: unbiased, the same in every layout, and enough to learn from."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.utils import counters

from forge_core.layout import Layout
from forge_core.protocols.model import NamedTensor
from forge_parallel.model.parallel_model import full
from forge_parallel.model.plan import Plan
from forge_parallel.model.realize import Blueprint, realize
from forge_parallel.optim import elementwise
from forge_parallel.optim.elementwise import (
    ElementwiseOptimizer,
    _kernel,
    _parts,
    adamw_bf16,
    adamw_rule,
    flat_index,
    key_of,
    noise,
    regions,
    rounded,
)
from forge_parallel.optim.optimizers import AdamWConfig
from forge_parallel.placement.boxes import Box
from forge_parallel.placement.topology import Topology
from forge_parallel.sections import Precision
from forge_parallel.step.step import Step
from forge_parallel.transforms.shard import FullyShard
from forge_parallel.verify.parity import Case, share, synthetic
from harness.pool import World
from parallel.tiny import VOCAB, Tiny, cross_entropy

CASE = Case(Tiny, cross_entropy, AdamWConfig().build, VOCAB)
N = 1 << 16


def bits(key: int = 1, step: int = 1, first: int = 0) -> torch.Tensor:
    return noise(torch.arange(first, first + N), key, torch.tensor(step))


def test_noise_is_uniform_and_independent() -> None:
    counts = torch.bincount(bits() >> 8, minlength=256).double()
    assert ((counts - N / 256).square() / (N / 256)).sum() < 255 + 6 * (2 * 255) ** 0.5  # chi squared, six sigma
    streams = [bits(), bits(key=2), bits(step=2), bits(first=1), bits(first=1 << 32)]
    correlation = torch.corrcoef(torch.stack(streams).double())
    assert (correlation - torch.eye(len(streams))).abs().max() < 6 / N**0.5
    assert int(bits().min()) >= 0
    assert int(bits().max()) < 1 << 16


def test_noise_is_the_hash_in_exact_integers() -> None:
    """Recorded runs depend on every bit."""

    def hashed(index: int, key: int, step: int) -> int:
        word = index % 2**32
        for salt in (index >> 32, key, step):
            word = (word + salt * 0x9E3779B1) % 2**32
            for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
                word = (word ^ word >> shift) * factor % 2**32
        return word % 2**16

    for key, step in ((1, 1), (2**31 - 1, 10**6), (0x12345678, 3)):
        index = torch.tensor([0, 1, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 3 * 2**32 + 17, 2**40 - 1])
        expected = [hashed(one, key, step) for one in index.tolist()]
        assert noise(index, key, torch.tensor(step)).tolist() == expected
        assert noise(index, torch.tensor(key), torch.tensor(step)).tolist() == expected


@pytest.mark.parametrize("value", [1.001, -3.14159, 1e-20, 65000.3])
def test_rounding_keeps_the_expected_value(value: float) -> None:
    exact = torch.full((N,), value)
    found = rounded(exact, bits()).float()
    below, above = found.min(), found.max()
    assert below <= exact[0] <= above
    assert set(found.tolist()) == {below.item(), above.item()}
    gap = (above - below).item()
    assert gap <= abs(value) * 2**-7
    assert abs(found.double().mean() - exact[0].double()) < 6 * gap / 2 / N**0.5


def test_what_is_exact_stays_and_what_is_no_number_stays_none() -> None:
    special = torch.tensor([0.0, -0.0, 1.0, -2.5, torch.inf, -torch.inf, torch.nan])
    found = rounded(special, torch.full((7,), 0xFFFF, dtype=torch.int32)).float()
    assert torch.equal(found[:6], special[:6])
    assert found[6].isnan()


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_indices_of_a_box_are_those_of_the_whole(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=0, max_size=3)))
    offset = tuple(data.draw(st.integers(0, size)) for size in shape)
    extent = tuple(data.draw(st.integers(0, size - start)) for size, start in zip(shape, offset, strict=True))
    whole = torch.arange(int(torch.tensor(shape).prod()) if shape else 1).view(shape)
    found = torch.full(extent, -1)
    for region, place in regions(Box(shape, offset, found), data.draw(st.one_of(st.none(), st.integers(1, 50)))):
        found[region] = flat_index(found[region].shape, torch.tensor(place))
    region = tuple(slice(start, start + size) for start, size in zip(offset, extent, strict=True))
    assert torch.equal(found, whole[region])


@pytest.mark.parametrize("elements", [1, 2, 4, 7, None])
def test_indices_of_a_box_that_is_cut_into_parts(elements: int | None) -> None:
    whole, found = torch.arange(9 * 4 * 3).view(9, 4, 3), torch.full((6, 2, 2), -1)
    for region, place in regions(Box((9, 4, 3), (2, 1, 1), found), elements):
        found[region] = flat_index(found[region].shape, torch.tensor(place))
    assert torch.equal(found, whole[2:8, 1:3, 1:])


class Weights:
    """A model of one parameter, as an optimizer sees it."""

    def __init__(self, value: float, dtype: torch.dtype) -> None:
        self.weight = torch.full((N,), value, dtype=dtype, requires_grad=True)

    def trainable(self) -> list[NamedTensor]:
        return [NamedTensor("w", self.weight, "matrix")]


def test_small_steps_add_up_on_average_where_plain_bf16_stands_still() -> None:
    """The mean over many elements follows the exact optimizer; each step is 1/390 of a unit in the last place."""
    low, exact = Weights(1.0, torch.bfloat16), Weights(1.0, torch.float64)
    component = AdamWConfig(lr=1e-5, weight_decay=0.1)
    optimizers = [component.build(model) for model in (low, exact)]  # type: ignore[arg-type]
    plain = torch.ones(N, dtype=torch.bfloat16)
    for number in range(20):
        slope = 0.5 + 0.1 * number
        for model, optimizer in zip((low, exact), optimizers, strict=True):
            model.weight.grad = torch.full_like(model.weight, slope)
            optimizer.step()
            optimizer.zero_grad()
        plain -= 1e-5
    moved, expected = 1 - low.weight.detach().double().mean(), 1 - exact.weight.detach().mean()
    spread = (2**-8 * expected / N) ** 0.5  # of the mean of N elements that each took a whole unit with this chance
    assert moved == pytest.approx(expected.item(), abs=6 * spread.item())
    assert torch.equal(plain, torch.ones_like(plain))


def test_the_weight_and_each_moment_have_noise_of_their_names() -> None:
    """With one stream for all three their errors would go together. From moments of 0, the new ones have a closed form."""
    model = Weights(1.0, torch.bfloat16)
    optimizer = AdamWConfig(lr=0.1, betas=(0.9, 0.95)).build(model)  # type: ignore[arg-type]
    model.weight.grad = torch.full_like(model.weight, 0.3)
    slope = model.weight.grad.float()
    optimizer.step()
    index, zero = torch.arange(N), torch.zeros(N)
    for key, value in (
        ("exp_avg", torch.lerp(zero, slope, 1 - 0.9)),
        ("exp_avg_sq", torch.lerp(zero, slope.square(), 1 - 0.95)),
    ):
        expected = rounded(value, noise(index, key_of("w", key), torch.tensor(1)))
        assert expected.unique().numel() == 2 and torch.equal(optimizer.state()[key]["w"], expected), key


def test_a_skipped_step_changes_no_bit() -> None:
    model = Weights(1.0, torch.bfloat16)
    optimizer = AdamWConfig(lr=0.1).build(model)  # type: ignore[arg-type]
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    before = {(key, name): tensor.clone() for key, tensors in optimizer.state().items() for name, tensor in tensors.items()}
    weight = model.weight.detach().clone()
    model.weight.grad = torch.full_like(model.weight, torch.nan)
    optimizer.step(torch.tensor(1.0))
    assert torch.equal(model.weight, weight)
    assert all(torch.equal(before[key, name], tensor) for key, ts in optimizer.state().items() for name, tensor in ts.items())


def _updated(layout: str) -> dict[str, torch.Tensor]:
    """Weights and moments after two updates from gradients that are the same in every layout, bit by bit."""
    at = Layout.parse(layout)
    topology = Topology.of(at, torch.device("cpu"))
    model = realize(Blueprint.of(Tiny), Plan.of([FullyShard()], at), topology, 0, "bf16", "bf16")
    optimizer = AdamWConfig(lr=1e-3).build(model)
    for _ in range(2):
        for _, parameter, _ in model.trainable():
            parameter.grad = parameter.detach() * 0.25 + 0.125
        optimizer.step()
        optimizer.zero_grad()
    moments = {f"{key}/{name}": full(t) for key, ts in optimizer.state().items() for name, t in ts.items()}
    return moments | {name: full(tensor) for name, tensor, _ in model.trainable()}


def test_updates_are_bitwise_equal_in_every_layout(world: World) -> None:
    reference = _updated("1")
    assert all(tensor.dtype in (torch.bfloat16, torch.int64) for tensor in reference.values())
    for layout, size in (("dp2", 2), ("hsdp2x2", 4)):
        for found in world.run(_updated, size, layout):
            assert all(torch.equal(reference[name], found[name]) for name in reference)


class Several:
    """A model of parameters with 0 to 3 dimensions."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        shapes = {"scale": (), "norm": (77,), "matrix": (30, 20), "wide": (7, 60), "experts": (4, 5, 6)}
        self.named = {name: torch.randn(shape, generator=generator).bfloat16().requires_grad_() for name, shape in shapes.items()}

    def trainable(self) -> list[NamedTensor]:
        return [NamedTensor(name, tensor, "norm" if tensor.dim() < 2 else "matrix") for name, tensor in self.named.items()]


def _steps(optimizer: ElementwiseOptimizer, model: Several) -> dict[str, torch.Tensor]:
    for number in range(4):
        for _, tensor, _ in model.trainable():
            generator = torch.Generator().manual_seed(hash((number, tensor.shape)))
            tensor.grad = torch.randn(tensor.shape, generator=generator).bfloat16()
        optimizer.set_factor(0.5**number)
        optimizer.step(torch.tensor(float(number == 2)))
        optimizer.zero_grad()
    moments = {f"{key}/{name}": tensor for key, tensors in optimizer.state().items() for name, tensor in tensors.items()}
    return moments | {name: tensor.detach() for name, tensor in model.named.items()}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # inductor itself uses what torch has deprecated
def test_on_an_accelerator_a_parameter_is_one_compiled_kernel_with_its_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled there, compiled for a CPU: it draws the same bits, in one graph for each number of dimensions, for all
    rates, decays and places. A compiler may round a sum once less, so an element in hundreds falls to its other neighbor."""
    settings = (1e-2, (0.9, 0.95), 1e-8, 0.1)
    plain = Several()
    expected = _steps(adamw_bf16(plain, *settings), plain)  # type: ignore[arg-type]
    counters.clear()
    model = Several()
    optimizer = adamw_bf16(model, *settings)  # type: ignore[arg-type]
    chosen = adamw_rule(settings[1], settings[2])
    states = chosen.states
    monkeypatch.setattr(optimizer, "_parts", {name: list(_parts(name, t, states, None)) for name, t, _ in model.trainable()})
    monkeypatch.setattr(optimizer, "_update", torch.compile(_kernel(chosen), dynamic=True, fullgraph=True))
    found = _steps(optimizer, model)
    assert counters["stats"]["unique_graphs"] == 4
    for name, tensor in expected.items():
        assert (tensor != found[name]).double().mean() < 0.02, name
        torch.testing.assert_close(found[name], tensor, rtol=2**-7, atol=0, msg=name)


def test_a_shortened_step_updates_one_part_of_each_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a dry run, in which the two thousand parts of 8B parameters would take minutes."""
    monkeypatch.setattr(elementwise, "CHUNK", 100)
    model = Several()
    before = {name: tensor.detach().clone() for name, tensor in model.named.items()}
    optimizer = adamw_bf16(model, 1.0, (0.9, 0.95), 1e-8, 0.1)  # type: ignore[arg-type]
    optimizer.shorten()
    found = _steps(optimizer, model)
    moved = {name: int((found[name] != old).sum()) for name, old in before.items()}
    assert {name: round(share, -1) for name, share in moved.items()} == {
        "scale": 0,
        "norm": 80,
        "matrix": 100,
        "wide": 60,
        "experts": 90,
    }


def test_it_learns() -> None:
    """Loss on one batch falls as it does with fp32 state."""
    ends = []
    for state in ("fp32", "bf16"):
        layout = Layout()
        model = realize(Blueprint.of(Tiny), Plan.of([], layout), Topology(layout, torch.device("cpu")), 0, "bf16", state)
        step, optimizer = Step(model, cross_entropy), AdamWConfig(lr=3e-3).build(model)
        losses = []
        for _ in range(60):
            result = step(share(synthetic(CASE, 0), 0, 1, 8))
            optimizer.step(result.skip)
            optimizer.zero_grad()
            losses.append(result.numbers()["loss"])
        assert losses[-1] < losses[0] - 1
        ends.append(losses[-1])
    assert ends[1] == pytest.approx(ends[0], abs=0.15)


def test_bf16_state_needs_bf16_compute() -> None:
    with pytest.raises(ValueError, match="compute = 'bf16'"):
        Precision(compute="fp32", state="bf16")
