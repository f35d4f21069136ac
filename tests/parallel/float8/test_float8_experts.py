"""Stacked experts in float8 against a loop over experts that rounds by hand, and in every layout against one process.

What the GPU's kernel is given is checked here too: by torch's own rules for it, and by a stand-in that reads operands and scales
as the kernel's source does. Its numbers are compared in `test_gpu`.
"""

import warnings
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forge_core.errors import PlanError
from forge_core.layout import Layout
from forge_core.protocols.model import ExpertStack
from forge_models.blocks.moe.experts import Experts
from forge_models.components.decoder import DecoderConfig
from forge_models.components.experts import MoEConfig, SigmoidTopKConfig
from forge_models.objectives import CrossEntropy
from forge_parallel.dryrun.estimate import Workload, dry_run
from forge_parallel.model.parallel_model import Context
from forge_parallel.model.plan import Plan
from forge_parallel.model.realize import Blueprint, realize
from forge_parallel.optim.optimizers import AdamWConfig
from forge_parallel.placement.topology import Topology
from forge_parallel.step.step import Step
from forge_parallel.transforms.expert import ExpertParallel
from forge_parallel.transforms.float8 import conversion
from forge_parallel.transforms.float8.transform import Float8
from forge_parallel.transforms.recompute import Recompute
from forge_parallel.transforms.shard import FullyShard
from forge_parallel.transforms.tensor.transform import TensorParallel as TensorParallel
from forge_parallel.verify.parity import Case, Measurement, compare, measure, share, synthetic
from harness.closeness import below
from harness.pool import World
from harness.siblings import fast

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {"dim": 32, "layers": 2, "heads": 2, "ffn_dim": 48, "vocab_size": 61, "max_length": 32}
EXPERTS = MoEConfig(experts=4, top_k=2, shared=1, ffn_dim=32, first_dense=1, router=SigmoidTopKConfig(bias_rate=0.01))
DECODER = DecoderConfig(**SIZES, moe=EXPERTS)
CASE = Case(
    DECODER.build,
    CrossEntropy().build(),
    AdamWConfig(lr=1e-2).build,
    61,
    rows=8,
    micro_batch=2,
    steps=1,
    compute="fp32",
    state="fp32",
)

COUNTS = ([5, 0, 17, 3], [0, 0, 40, 0], [16, 32, 16, 16], [0, 0, 0, 0])
NOBODYS = 3


# ---------------------------------------------------------------------------------------------- independent references


def _rounded(x: Tensor, dim: int) -> Tensor:
    """As E4M3 can say it: each row along `dim` times the largest power of two that leaves it at most 448, rounded."""
    if not x.numel():
        return x
    scale = 2.0 ** (448 / x.abs().amax(dim, keepdim=True).double().clamp(min=1e-12)).float().log2().floor()
    return (x * scale).to(torch.float8_e4m3fn).float() / scale


class _Linear(torch.autograd.Function):
    """x w^T for one expert: three products, each of operands that are rounded along what it sums over."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return _rounded(x, 1) @ _rounded(w, 1).T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        (d,), (x, w) = grads, ctx.saved_tensors
        return _rounded(d, 1) @ _rounded(w, 0), _rounded(d, 0).T @ _rounded(x, 0)


def _by_hand(x: Tensor, counts: list[int], experts: Experts) -> Tensor:
    parts = []
    for e, rows in enumerate(x[: sum(counts)].split(counts)):
        up = _Linear.apply(rows, experts.up_proj[e])
        hidden = F.silu(_Linear.apply(rows, experts.gate_proj[e])) * up if experts.gate_proj is not None else F.silu(up)
        parts.append(_Linear.apply(hidden, experts.down_proj[e]))
    return torch.cat(parts)


def _stack(gated: bool = True, multiply: str = "emulated") -> Any:
    conversion.require_torchao()
    from forge_parallel.transforms.float8 import experts as float8

    stack: Any = Experts(DECODER.shape.context(1), 4, "silu", gated)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.normal_(0, 0.2, generator=generator)
    stack.__class__, stack.multiply = float8.float8_experts_class(Experts), getattr(float8, multiply)
    return stack


def _ran(run: Any, stack: Any, counts: list[int]) -> list[Tensor]:
    """Outputs, and gradients of inputs and of every matrix. What is nobody's is NaN, in rows as in their gradient."""
    generator = torch.Generator().manual_seed(1)
    stack.zero_grad()
    x, d = torch.randn(2, sum(counts) + NOBODYS, 32, generator=generator)
    # Magnitudes of very different rows and columns: a scale along the wrong dimension shows.
    x, d = (y * torch.logspace(-3, 2, len(y)).unsqueeze(1) * torch.logspace(-2, 1, 32) for y in (x, d))
    x[sum(counts) :] = torch.nan
    x.requires_grad_()
    out = run(x)[: sum(counts)]
    out.backward(d[: sum(counts)])
    assert x.grad is not None
    return [out.detach(), x.grad[: sum(counts)], *(parameter.grad for parameter in stack.parameters())]


def _close(found: list[Tensor], wanted: list[Tensor], tolerance: float = 1e-6) -> None:
    for one, other in zip(found, wanted, strict=True):
        largest = other.abs().max().item() if other.numel() else 0.0
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance * largest)


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("gated", [True, False])
def test_all_products_are_those_of_rounded_operands(counts: list[int], gated: bool) -> None:
    stack = _stack(gated)
    wanted = _ran(lambda x: _by_hand(x, counts, stack), stack, counts)
    _close(_ran(lambda x: stack(x, torch.tensor(counts)), stack, counts), wanted)
    for gradient in wanted[2:]:
        assert [bool(one.count_nonzero()) for one in gradient] == [count > 0 for count in counts]


def test_the_reference_rounds() -> None:
    stack, counts = _stack(), COUNTS[0]
    rounded = _ran(lambda x: _by_hand(x, counts, stack), stack, counts)
    stack.__class__ = Experts
    exact = _ran(lambda x: stack(x, torch.tensor(counts)), stack, counts)
    for one, other in zip(rounded, exact, strict=True):
        assert 0.01 < (one - other).norm() / other.norm() < 0.15


def test_a_token_becomes_the_same_whatever_tokens_are_beside_it() -> None:
    """To the bit, and its gradient too."""
    stack, counts = _stack(), COUNTS[0]
    x = torch.randn(sum(counts), 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
    together = stack(x, torch.tensor(counts))
    together.sum().backward()
    assert x.grad is not None
    for row, expert in ((4, 0), (5, 2), (21, 2), (24, 3)):
        alone = x[row : row + 1].detach().requires_grad_()
        out = stack(alone, F.one_hot(torch.tensor(expert), 4))
        out.sum().backward()
        assert torch.equal(out[0], together[row])
        assert alone.grad is not None and torch.equal(alone.grad[0], x.grad[row])


def test_numbers_that_are_not_finite_show() -> None:
    """A step that meets them is skipped: so none may be rounded away."""
    stack = _stack()
    with torch.no_grad():
        stack.up_proj[2, 0, 0] = torch.inf
    counts = torch.tensor([4, 0, 4, 0])
    out = stack(torch.randn(8, 32), counts)
    assert bool(out[:4].isfinite().all())
    assert not bool(out[4:].isfinite().any())
    stack = _stack()
    x = torch.randn(8, 32).requires_grad_()
    grad = torch.randn(8, 32)
    grad[6, 3] = torch.nan
    stack(x, counts).backward(grad)
    assert x.grad is not None
    assert [bool(row.isfinite().all()) for row in x.grad] == [True] * 6 + [False, True]
    for parameter in stack.parameters():
        assert [bool(one.isfinite().all()) for one in parameter.grad] == [True, True, False, True]


# ------------------------------------------------------------------------------------------------- what kernels are given


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_groups_are_of_16_rows_never_empty_and_fit(counts: list[int]) -> None:
    conversion.require_torchao()
    from forge_parallel.transforms.float8.experts import padding

    rows = sum(counts) + NOBODYS
    places, filled, size = padding(torch.tensor(counts), rows)
    assert filled.tolist() == [max(16, -(-count // 16) * 16) for count in counts]
    starts, ends = [0, *filled.cumsum(0).tolist()], filled.cumsum(0).tolist()
    expected = [start + i for start, count in zip(starts, counts, strict=False) for i in range(count)]
    assert places.tolist() == [*expected, *range(places[-NOBODYS], places[-NOBODYS] + NOBODYS)]
    assert places[-NOBODYS] >= ends[-1]
    assert size % 16 == 0
    assert size > int(places.max())
    assert size == padding(torch.tensor(sorted(counts)), rows)[2], "known without the counts"


def test_operands_are_what_torch_asks_of_them() -> None:
    """Its checks of precision, strides, alignment and the shapes of scales are those of the kernel; they need no data."""
    stack = _stack(multiply="native").to(torch.bfloat16).to("meta")
    x = torch.empty(28, 32, dtype=torch.bfloat16, device="meta", requires_grad=True)
    out = stack(x, torch.empty(4, dtype=torch.int64, device="meta"))
    assert (out.shape, out.dtype) == (x.shape, x.dtype)
    out.sum().backward()
    assert all(p.grad.shape == p.shape for p in stack.parameters())


def _kernel(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, ends: Tensor, out_dtype: torch.dtype, use_fast_accum: bool
) -> Tensor:
    """Group by group as the kernel does: operands and factors by their offsets in memory, factors applied to the sums."""
    starts, (m, n) = [0, *ends.tolist()[:-1]], (a.shape[0], b.shape[-1])
    groups = list(zip(starts, ends.tolist(), strict=True))
    if b.ndim == 3:
        out = torch.full((m, n), torch.nan)
        for e, (start, end) in enumerate(groups):
            sums = a[start:end].float() @ b[e].float()
            out[start:end] = sums * a_scale[start:end, None] * b_scale[e]
        return out.to(out_dtype)
    products = []
    for e, (start, end) in enumerate(groups):
        assert end - start > 0 and (end - start) % 16 == 0
        sums = a[:, start:end].float() @ b[start:end].float()
        products.append(sums * a_scale[e * m : e * m + m, None] * b_scale[e * n : e * n + n])
    return torch.stack(products).to(out_dtype)


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_the_kernel_would_multiply_the_same_numbers(counts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forge_parallel.transforms.float8.experts.scaled_grouped_mm", _kernel)
    emulated, native = _stack(), _stack(multiply="native")
    at = torch.tensor(counts)
    _close(_ran(lambda x: native(x, at), native, counts), _ran(lambda x: emulated(x, at), emulated, counts))


# ------------------------------------------------------------------------------------------- layouts against one process


def _measure(case: Case, layout: str, float8: dict[str, Any] | None, *more: Any) -> Measurement:
    at = Layout.parse(layout)
    transforms = [FullyShard(), *more]
    if float8 is not None:
        transforms.append(Float8(experts=True, **float8).build())
    if at.tp > 1:
        transforms.append(TensorParallel())
    if at.ep * at.etp > 1:
        transforms.append(ExpertParallel())
    return measure(case, Plan.of(transforms, at), CPU)


def _distance(one: Measurement, other: Measurement) -> float:
    return sum(float((one.gradients[name] - other.gradients[name]).square().sum()) for name in one.gradients) ** 0.5


@pytest.mark.parametrize("layout", fast("dp2ep2", of=["dp2", "dp2ep2", "tp2etp2"]))
def test_a_layout_gives_one_process_in_float8(world: World, layout: str) -> None:
    """Experts only. The loss is one process's, in fp32; so are gradients, but for what is too small for float8 where other tokens
    are cast together."""
    fields: dict[str, Any] = {"include": ["*.experts"]}
    exact, one = _measure(CASE, "1", None), _measure(CASE, "1", fields)
    for found in world.run(_measure, 2, CASE, layout, fields):
        difference = compare(one, found)
        assert difference.initial
        assert below(difference.loss, 2e-6)
        assert below(_distance(one, found), 2e-3 * _distance(exact, one))
        if layout == "dp2":
            assert difference.accepted("fp32"), difference


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_experts_shared_by_ranks_are_as_near_to_exact_numbers(world: World, recipe: Literal["tensorwise", "rowwise"]) -> None:
    """With all linear layers in float8 as well, in bf16."""
    case, fields = replace(CASE, compute="bf16"), {"recipe": recipe}
    exact, one = _measure(case, "1", None), _measure(case, "1", fields)
    for found in world.run(_measure, 2, case, "dp2ep2", fields):
        assert compare(one, found).initial
        assert below(_distance(exact, found), 1.5 * _distance(exact, one))
        assert found.loss[0] == pytest.approx(one.loss[0], rel=1e-3)


def test_recomputation_changes_no_bit() -> None:
    one, again = _measure(CASE, "1", {}), _measure(CASE, "1", {}, Recompute(keep=["matmul"]))
    assert one.loss == again.loss
    assert all(torch.equal(one.gradients[name], again.gradients[name]) for name in one.gradients)


# ------------------------------------------------------------------------------------------------------ in a whole model


def test_training_learns() -> None:
    at = Layout()
    plan = Plan.of([Float8(experts=True).build(), FullyShard()], at)
    model = realize(Blueprint.of(DECODER.build), plan, Topology(at, CPU), 0, "bf16", "fp32")
    step, optimizer, batch = Step(model, CASE.objective), AdamWConfig(lr=1e-2).build(model), share(synthetic(CASE, 0), 0, 1, 4)
    losses = []
    for _ in range(12):
        result = step(batch)
        losses.append(result.numbers()["loss"])
        optimizer.step(result.skip)
        optimizer.zero_grad()
    assert losses[-1] < losses[0] - 1.0


def _converted(float8: Float8, build: Any = DECODER.build, layout: str = "1", compute: torch.dtype = torch.bfloat16) -> nn.Module:
    blueprint = Blueprint.of(build)
    return float8.build().apply(blueprint.module, Context(blueprint.specs, Topology(Layout.parse(layout), CPU), compute, compute))


def test_parameters_stay_and_patterns_choose() -> None:
    def stacks(**fields: Any) -> set[str]:
        part = _converted(Float8(**fields), replace(DECODER, layers=3).build)
        return {path for path, module in part.named_modules() if isinstance(module, Experts) and hasattr(module, "multiply")}

    assert stacks() == set()
    assert stacks(experts=True) == {"blocks.1.mlp.experts", "blocks.2.mlp.experts"}
    assert stacks(experts=True, exclude=["blocks.1.*"]) == {"blocks.2.mlp.experts"}
    only = _converted(Float8(experts=True, include=["*.experts"]))
    assert not any(hasattr(module, "casting") for module in only.modules())
    plain = Blueprint.of(DECODER.build).module
    assert [name for name, _ in only.named_parameters()] == [name for name, _ in plain.named_parameters()]


@pytest.mark.slow
def test_a_dry_run_counts_the_same_exchanges() -> None:
    """It needs no data: how many rows there are is known before any token is."""
    work = Workload(DECODER.build, CASE.objective, CASE.optimizer, rows=2, length=16, micro_batches=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        only = Float8(experts=True, include=["*.experts"]).build()
        plain, float8 = (
            dry_run(work, Plan.of([FullyShard(), ExpertParallel(), *more], Layout.parse("dp2ep2"))) for more in ([], [only])
        )
    assert float8.flows == plain.flows


# ------------------------------------------------------------------------------------------------------ what is refused


def test_shapes_are_checked_before_the_run_and_named() -> None:
    odd = replace(DECODER, moe=replace(EXPERTS, shared=0, ffn_dim=24))
    with pytest.raises(PlanError, match=r"blocks\.\*\.mlp\.experts\.gate_proj: 24 x 32, .*experts\.down_proj: 32 x 24\. Choose"):
        _converted(Float8(experts=True), odd.build)
    _converted(Float8(), odd.build)
    from forge_parallel.transforms.float8.layers import check_experts

    specs = Blueprint.of(DECODER.build).specs
    shapes = {"blocks.1.mlp.experts.up_proj": (48, 32), "blocks.1.mlp.experts.down_proj": (32, 48)}
    check_experts(shapes, specs, 1)
    with pytest.raises(PlanError, match=r"up_proj: 24 x 32, .*down_proj: 32 x 24 \(split by parallel\.etp = 2\)"):
        check_experts(shapes, specs, 2)


def test_what_cannot_be_converted_is_refused() -> None:
    with pytest.raises(PlanError, match="experts = true converts stacked experts, but the model has none; remove it"):
        _converted(Float8(experts=True), DecoderConfig(**SIZES).build)
    with pytest.raises(PlanError, match="but include and exclude select none of them"):
        _converted(Float8(experts=True, exclude=["*.experts"]))
    with pytest.raises(PlanError, match=r"does not support precision\.compute = 'fp64'"):
        _converted(Float8(experts=True), compute=torch.float64)
    with pytest.raises(PlanError, match="emulate = false, but the device 'cpu' has no float8 products"):
        _converted(Float8(experts=True, emulate=False))


def test_a_stack_that_does_not_say_how_it_multiplies_is_refused() -> None:
    class Opaque(nn.Module):
        tensor_specs = Experts.tensor_specs

        def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
            return tokens

    def build() -> nn.Module:
        model = DECODER.build()
        model.blocks["1"].mlp.experts.__class__ = Opaque  # type: ignore[union-attr, index]
        return model

    assert isinstance(Experts(DECODER.shape.context(1), 4, "silu", True), ExpertStack)
    with pytest.raises(PlanError, match=r'1\.mlp\.experts is a Opaque without `products` .*add "blocks\.1\.mlp\.experts" to'):
        _converted(Float8(experts=True), build)


@pytest.mark.parametrize(("capability", "emulates"), [((8, 9), True), ((9, 0), False), ((10, 0), False), ((12, 0), True)])
def test_the_device_decides(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], emulates: bool) -> None:
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    assert not conversion.emulates("auto", device)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert conversion.emulates_experts("auto", device, torch.bfloat16) is emulates
    assert ["products of stacked experts: they are emulated" in str(one.message) for one in told] == [True] * emulates
    if emulates:
        with pytest.raises(PlanError, match="emulate = false, but a GPU has no float8 products of stacked experts"):
            conversion.emulates_experts(False, device, torch.bfloat16)
        return
    assert conversion.emulates_experts(True, device, torch.float32)
    with pytest.raises(PlanError, match="a GPU supports bf16 results only"):
        conversion.emulates_experts("auto", device, torch.float32)
