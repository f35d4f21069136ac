"""Float8 against hand-written rounding, against torchao's own conversion, and in every layout against one process in float8.

An exact run is no reference: what float8 rounds away is far above any tolerance. In fp32, a layout that multiplies the same
operands with the same scales differs from one process by the order of summation, and is held to fp32's tolerance. Where
operands differ in the last bit before they are cast, which in bf16 all sums over ranks do, some are rounded to the other
neighbor: such a run may be as far from one process as that is from a run without float8, and no farther.
"""

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from forge_core.layout import Layout
from forge_models.components.decoder import DecoderConfig
from forge_models.objectives import CrossEntropy
from forge_parallel.dryrun.estimate import Workload, dry_run
from forge_parallel.model.parallel_model import Context
from forge_parallel.model.plan import Plan
from forge_parallel.model.realize import Blueprint, realize
from forge_parallel.optim.optimizers import AdamWConfig
from forge_parallel.pipeline import schedules as schedules
from forge_parallel.placement.boxes import local_box
from forge_parallel.placement.topology import Topology
from forge_parallel.sections import PipelineConfig
from forge_parallel.step.step import Step
from forge_parallel.transforms.compile import Compile
from forge_parallel.transforms.context.transform import ContextParallel
from forge_parallel.transforms.float8 import conversion
from forge_parallel.transforms.float8.transform import Float8
from forge_parallel.transforms.shard import FullyShard
from forge_parallel.transforms.tensor.transform import TensorParallel as TensorParallel
from forge_parallel.verify.parity import Case, Measurement, compare, measure, share, synthetic
from harness.closeness import below
from harness.pool import World
from harness.siblings import fast
from parallel.one_process import alone

CPU = torch.device("cpu")
VOCAB = 61
DECODER = DecoderConfig(dim=64, layers=2, heads=4, kv_heads=2, ffn_dim=64, vocab_size=VOCAB, max_length=32, tied_embeddings=True)
"""Every matrix, cut in two, has dimensions that 16 divides; the output head has not."""
CASE = Case(
    DECODER.build,
    CrossEntropy().build(),
    AdamWConfig(lr=1e-2).build,
    VOCAB,
    rows=8,
    micro_batch=2,
    steps=1,
    compute="fp32",
    state="fp32",
)

RECIPES = ("tensorwise", "rowwise")
SCHEDULES = {
    "pp_gpipe": schedules.GPipe(),
    "pp_1f1b": schedules.OneForwardOneBackward(),
    "pp_interleaved": schedules.Interleaved(),
    "pp_interleaved_zero_bubble": schedules.InterleavedZeroBubble(),
    "pp_zbv": schedules.ZeroBubbleV(),
    "pp_dualpipev": schedules.DualPipeV(),
}


def _measure(
    case: Case, layout: str, recipe: str | None = "tensorwise", *more: Any, schedule: Any = None, **fields: Any
) -> Measurement:
    at = Layout.parse(layout)
    transforms = [FullyShard(), *more]
    if recipe is not None:
        transforms.append(Float8(recipe=recipe, **fields).build())
    if at.tp > 1:
        transforms.append(TensorParallel())
    with warnings.catch_warnings():
        if any(isinstance(transform, Compile) for transform in more):
            warnings.simplefilter("ignore")  # the compiler's own imports warn
        return measure(case, Plan.of(transforms, at, PipelineConfig(schedule=schedule).build() if schedule else None), CPU)


# ---------------------------------------------------------------------------------------------- independent references


def _rounded(x: Tensor, dtype: torch.dtype, dim: int | None) -> Tensor:
    """`x` as float8 can say it: scaled so that its largest element, or that of each row along `dim`, is the format's largest."""
    largest = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = (torch.finfo(dtype).max / largest.double()).float()
    if dim is not None:
        scale = torch.tensor(2.0) ** scale.log2().floor()
    return (x * scale).to(dtype).float() / scale


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_three_products_of_a_layer_are_those_of_rounded_operands(recipe: str) -> None:
    rowwise, generator = recipe == "rowwise", torch.Generator().manual_seed(0)
    conversion.require_torchao()
    from forge_parallel.transforms.float8.linear import Casting, float8_class

    layer: Any = nn.Linear(48, 32)
    layer.__class__, layer.casting = float8_class(nn.Linear), Casting.of(recipe, emulate=True)
    x = torch.randn(2, 8, 48, generator=generator).requires_grad_()
    slope = torch.randn(2, 8, 32, generator=generator) * 1e-3
    out = layer(x)
    out.backward(slope)
    narrow, wide = torch.float8_e4m3fn, torch.float8_e4m3fn if rowwise else torch.float8_e5m2
    rows, columns = (1, 0) if rowwise else (None, None)
    flat, grad, weight = x.detach().flatten(0, 1), slope.flatten(0, 1), layer.weight.detach()
    expected = _rounded(flat, narrow, rows) @ _rounded(weight, narrow, rows).T + layer.bias.detach()
    assert x.grad is not None
    for found, wanted in (
        (out.detach().flatten(0, 1), expected),
        (x.grad.flatten(0, 1), _rounded(grad, wide, rows) @ _rounded(weight, narrow, columns)),
        (layer.weight.grad, _rounded(grad, wide, columns).T @ _rounded(flat, narrow, columns)),
        (layer.bias.grad, grad.sum(0)),
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6 * wanted.abs().max().item())
    exact = flat @ weight.T + layer.bias.detach()
    assert 0.01 < (expected - exact).norm() / exact.norm() < 0.1, "the reference must round"


@pytest.mark.parametrize("recipe", RECIPES)
def test_one_process_equals_a_model_that_torchao_converted(recipe: str) -> None:
    """Nothing of ours but the model: torchao replaces the modules, torch sums and divides."""
    case = replace(CASE, micro_batch=8)
    found = _measure(case, "1", recipe)
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    module: Any = convert_to_float8_training(case.build().float(), config=config)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(found.initial[name])
    batch = synthetic(case, 0)
    terms = module(
        batch.tokens, positions=batch.positions, documents=batch.documents, labels=batch.labels, objective=case.objective
    )
    (terms.sum / terms.tokens).backward()
    gradients = {name: parameter.grad.double() for name, parameter in module.named_parameters()}
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    expected = Measurement(
        [(terms.sum / terms.tokens).item()], [norm.item()], found.tokens, found.initial, gradients, {}, found.by_source
    )
    difference = compare(expected, replace(found, weights={}))
    assert difference.accepted("fp32"), difference


# ------------------------------------------------------------------------------------------- layouts against one process


@pytest.mark.parametrize("layout", fast("dp3", "tp2", of=["dp2", "dp3", "hsdp2x1", "tp2", "dp2tp2"]))
def test_rowwise_equals_one_process(world: World, layout: str) -> None:
    """On three ranks, shards are uneven."""
    case = replace(CASE, rows=6 if layout == "dp3" else 8)
    reference = _measure(case, "1", "rowwise")
    for found in world.run(_measure, Layout.parse(layout).world, case, layout, "rowwise"):
        difference = compare(reference, found)
        assert difference.accepted("fp32"), difference


@pytest.mark.parametrize("layout", fast("dp3", of=["dp2", "dp3"]))
@pytest.mark.parametrize("gathered", [True, False])
def test_how_weights_are_gathered_changes_no_bit(world: World, layout: str, gathered: bool) -> None:
    """In bf16, where weights are rounded once before they are cast; three optimizer steps, so that scales move.

    Adam makes whole steps of gradients that differ in the last bit of a sum over ranks, so later losses are not bitwise
    equal. Old scales would move them by about as much as float8 itself does, which is what their distance is held against.
    No weight is tied: both of its gradients are bf16, and FSDP of torch 2.15 rounds their sum once less.
    """
    case = replace(CASE, build=replace(DECODER, tied_embeddings=False).build, rows=12, compute="bf16", steps=3)
    reference, unrounded = alone(_measure, case, "1"), alone(_measure, case, "1", None)
    moved = max(abs(one - other) for one, other in zip(reference.loss, unrounded.loss, strict=True))
    for found in world.run(_measure, Layout.parse(layout).world, case, layout, "tensorwise", all_gather=gathered):
        assert found.loss[0] == reference.loss[0]
        assert below(compare(reference, found).gradients, 1e-6), "sums over ranks in fp32"
        off = max(abs(one - other) for one, other in zip(found.loss, reference.loss, strict=True))
        assert below(off, 0.03 * moved, "later losses"), (off, moved)


def _evaluated(layout: str) -> Tensor:
    """Logits after one update, in bf16."""
    at = Layout.parse(layout)
    topology = Topology.of(at, CPU)
    model = realize(Blueprint.of(DECODER.build), Plan.of([Float8().build(), FullyShard()], at), topology, 0, "bf16", "fp32")
    step, optimizer, batch = Step(model, CASE.objective), AdamWConfig(lr=0.3).build(model), synthetic(CASE, 0)
    optimizer.step(step(share(batch, topology.data_rank, topology.data_size, 4)).skip)
    with model.inference():
        return model.part(batch.tokens[:2], positions=batch.positions[:2], documents=batch.documents[:2])


def test_an_evaluation_after_an_update_uses_new_scales(world: World) -> None:
    """Scales that a step found are void once its weights have moved."""
    expected = _evaluated("1")
    for found in world.run(_evaluated, 2, "dp2"):
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-2 * expected.abs().max().item())


def _distance(one: Measurement, other: Measurement) -> float:
    """Norm of the difference of all gradients."""
    return sum((one.gradients[name] - other.gradients[name]).square().sum().item() for name in one.gradients) ** 0.5


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("layout", fast("tp2", "cp2", of=["tp2", "tp4", "cp2"]))
def test_what_rounds_elsewhere_is_no_farther_than_float8_is_from_exact(world: World, layout: str, recipe: str) -> None:
    """In bf16. On tp4 two ranks share a key-value head, and each casts its summand of that head's gradient."""
    case = replace(CASE, compute="bf16")
    exact, one = _measure(case, "1", None), _measure(case, "1", recipe)
    context = [ContextParallel()] if "cp" in layout else []
    for found in world.run(_measure, Layout.parse(layout).world, case, layout, recipe, *context):
        assert compare(one, found).initial
        assert below(_distance(one, found), _distance(exact, one))
        assert found.loss[0] == pytest.approx(one.loss[0], rel=1e-3)


# ------------------------------------------------------------------------------------------------- what stays as it was


def _realized(layout: str, **fields: Any) -> Any:
    at = Layout.parse(layout)
    transforms = [Float8(**fields).build(), FullyShard(), TensorParallel()]
    return realize(Blueprint.of(DECODER.build), Plan.of(transforms, at), Topology.of(at, CPU), 0, "bf16", "fp32")


def test_names_parameters_hooks_and_classes_stay() -> None:
    before = Blueprint.of(DECODER.build)
    parameters, modules = dict(before.module.named_parameters()), dict(before.module.named_modules())
    called: list[str] = []
    modules["blocks.0.mlp.up_proj"].register_forward_hook(lambda *_: called.append("up_proj"))
    at = Layout()
    context = Context(before.specs, Topology(at, CPU), torch.float32, torch.float32)
    part = Float8(exclude=["blocks.1.attention.*"]).build().apply(before.module, context)
    assert dict(part.named_parameters()) == parameters, "the very same objects"
    assert dict(part.named_modules()) == modules
    converted = {path for path, module in modules.items() if hasattr(module, "casting")}
    attention = {f"blocks.0.attention.{name}_proj" for name in "qkvo"}
    assert converted == attention | {f"blocks.{i}.mlp.{name}_proj" for i in (0, 1) for name in ("gate", "up", "down")}
    assert all(isinstance(modules[path], nn.Linear) for path in converted)
    part.to_empty(device="cpu")
    part(torch.zeros(1, 16, dtype=torch.int64))
    assert called == ["up_proj"]


def _layers_of_a_rank(layout: str) -> tuple[list[str], list[str], set[str], set[str], list[str], bool]:
    """Classes that make up a column and a row layer; dtypes of weights inside forward and between steps; parameters without
    gradient; whether a step with an infinite weight is refused."""
    model = _realized(layout)
    inside: list[str] = []
    up, down = (model.part.get_submodule(f"blocks.0.mlp.{name}_proj") for name in ("up", "down"))

    def note(module: Any, *_: Any) -> None:
        weight = module._parameters["weight"]
        inside.append(type(weight._local_tensor if isinstance(weight, DTensor) else weight).__name__)

    up.register_forward_hook(note)
    batch = share(synthetic(CASE, 0), model.topology.data_rank, model.topology.data_size, 2)
    step, optimizer = Step(model, CASE.objective), CASE.optimizer(model)
    result = step(batch)
    without = [name for name, tensor, _ in model.trainable() if tensor.grad is None]
    optimizer.step(result.skip)
    optimizer.zero_grad()
    kept = {str(local_box(tensor).local.dtype) for _, tensor, _ in model.trainable()}
    kept |= {str(local_box(tensor).local.dtype) for tensor in optimizer.state()["exp_avg"].values()}
    assert all(type(local_box(tensor).local) is Tensor for _, tensor, _ in model.trainable())
    with torch.no_grad():
        weight = dict(model.tensors())["blocks.0.mlp.up_proj.weight"]
        local_box(weight).local.fill_(torch.inf)
    refused = bool(step(batch).skip)
    mro = [[kind.__name__ for kind in type(module).__mro__] for module in (up, down)]
    return *mro, set(inside), kept, without, refused


def test_tensor_parallelism_wraps_converted_layers_and_master_weights_stay_fp32(world: World) -> None:
    for up, down, inside, kept, without, refused in world.run(_layers_of_a_rank, 4, "dp2tp2"):
        for kinds, role in ((up, "Split"), (down, "RowParallelLinear")):
            assert kinds.index(role) < kinds.index("Float8Linear") < kinds.index("Linear"), kinds
        assert inside == {"Float8TrainingTensor"}, "gathered in float8"
        assert kept == {"torch.float32"}
        assert without == []
        assert refused, "a weight that is not finite must show"


def _hooks_of_torchao() -> tuple[int, int]:
    conversion.require_torchao()
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    block = parallelize_module(nn.Sequential(nn.Linear(32, 32)), mesh, {"0": ColwiseParallel()})
    before = len(block[0]._forward_pre_hooks) + len(block[0]._forward_hooks)
    convert_to_float8_training(block, config=Float8LinearConfig(emulate=True))
    return before, len(block[0]._forward_pre_hooks) + len(block[0]._forward_hooks)


def test_the_other_order_would_drop_what_tensor_parallelism_attached(world: World) -> None:
    """Why float8 stands first (docs/adr/0001): torchao's conversion of a parallel layer forgets its hooks, and says nothing."""
    assert world.run(_hooks_of_torchao, 2)[0] == (2, 0)
    plan = Plan.of([FullyShard(), TensorParallel(), Float8().build()], Layout.parse("dp2tp2"))
    assert plan.names() == ("float8", "tensor", "shard")


def test_the_gate_sees_scales_that_ranks_do_not_share(world: World) -> None:
    difference = compare(_measure(CASE, "1"), world.run(_with_local_scales, 2, fresh=True)[0])
    assert not difference.accepted("fp32")


def _with_local_scales() -> Measurement:
    conversion._shared = lambda casting, _recipe, _path, _context: casting  # type: ignore[assignment]
    return _measure(CASE, "tp2")


@pytest.mark.slow
def test_matrices_are_gathered_in_one_byte_an_element_and_their_scales_found_at_once() -> None:
    def flows(**fields: Any) -> tuple[int, int]:
        """Bytes of all-gathers, and number of all-reduces, of a step of three micro-batches."""
        work = Workload(DECODER.build, CASE.objective, CASE.optimizer, rows=2, length=16, micro_batches=3)
        found = dry_run(work, Plan.of([FullyShard(), Float8(**fields).build()], Layout.parse("dp2"))).flows
        gathered = sum(flow.payload for flow in found if flow.kind == "all_gather")
        return gathered, sum(flow.count for flow in found if flow.kind == "all_reduce")

    matrices = sum(p.numel() for name, p in Blueprint.of(DECODER.build).module.named_parameters() if "proj" in name)
    (wide, few), (narrow, more) = flows(all_gather=False), flows()
    assert wide - narrow == 3 * 2 * matrices, "before a block's forward, and before its backward"
    assert more - few == 3
