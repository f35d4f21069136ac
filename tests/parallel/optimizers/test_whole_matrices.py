"""Every matrix is whole on one rank, once, in every layout; the plugin of the page shows that others can use it."""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim import _muon as theirs
from torch.utils.flop_counter import FlopCounterMode

from forge_core.component import Component
from forge_core.errors import PlanError
from forge_core.layout import Layout
from forge_core.registry import Registry
from forge_core.specs import Init, TensorSpec
from forge_core.trust import trust_name
from forge_parallel.checks import compositions_are_proven, optimizer_keeps_the_state
from forge_parallel.model.parallel_model import gathered
from forge_parallel.model.plan import Plan
from forge_parallel.model.realize import Blueprint, realize
from forge_parallel.optim.muon import flops, orthogonalized
from forge_parallel.optim.optimizers import MuonConfig
from forge_parallel.optim.whole_matrices import WholeMatrices, matrices_of, owners, rounds
from forge_parallel.placement.boxes import local_box, span_on
from forge_parallel.placement.topology import Topology
from forge_parallel.sections import Parallel, PipelineConfig, Precision
from harness.pool import World
from parallel.compositions.rows import DECODER, EXPERTS, schedule_of, transforms_of
from parallel.tiny import Tiny

CPU = torch.device("cpu")
PAGE = Path(__file__).parents[3] / "docs" / "writing-a-plugin.md"
LAYOUTS = {"dp2": "", "hsdp2x2": "", "dp2tp2": "tp", "pp2dp2": "pp_1f1b", "dp2tp2ep2etp2": "etp", "hsdp2x2ep2": "ep_all_to_all"}


def laid_out(layout: str, state: str = "fp32") -> Any:
    """A decoder with experts in a layout, with as much as the layout asks for."""
    at, row = Layout.parse(layout), frozenset(LAYOUTS.get(layout, "").split())
    pipeline = PipelineConfig(schedule=schedule_of(row)).build() if at.pp > 1 else None
    plan = Plan.of(transforms_of(row).values(), at, pipeline)
    return realize(Blueprint.of(replace(DECODER, moe=EXPERTS).build), plan, Topology.of(at, CPU), 0, state, state)


def _given(model: Any) -> None:
    """Gradients that are the same in every layout, bit by bit."""
    for _, parameter, _ in model.trainable():
        parameter.grad = parameter.detach() * 0.25 + 0.125


def _bits(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    live = {name: tensor for name, tensor, _ in model.trainable()}
    live |= {f"{key}/{name}": t for key, tensors in optimizer.state().items() for name, t in tensors.items()}
    return {name: local_box(tensor).local.clone() for name, tensor in live.items()}


def _updated(layout: str) -> dict[str, Any]:
    """After two updates, in bf16 as usual; one that is skipped; and what this rank owns."""
    model = laid_out(layout)
    optimizer: Any = MuonConfig().build(model)
    for _ in range(2):
        _given(model)
        optimizer.step(torch.zeros(()))
        optimizer.zero_grad()
    before = _bits(model, optimizer)
    for _, parameter, _ in model.trainable():
        parameter.grad = torch.full_like(parameter, torch.nan)
    optimizer.step(torch.ones(()))
    kept = all(torch.equal(before[name], tensor) for name, tensor in _bits(model, optimizer).items())
    boxes = all(
        (box := local_box(tensor)).offset == (span := span_on(tensor, model.topology.layout, model.topology.rank)).offset
        and tuple(box.local.shape) == span.extent
        for _, tensor, _ in model.trainable()
    )
    weights = gathered(model, {name: tensor for name, tensor, _ in model.trainable()})
    small = WholeMatrices(model, most=100)
    _given(model)
    tensors = {name: tensor for name, tensor, _ in small.named}
    twice = [
        torch.equal(update, 2 * part.of(tensors[part.name].grad).double())
        for part, update in small.each(lambda part: part.of(tensors[part.name].grad), lambda m: 2 * m, torch.float64)  # type: ignore[arg-type]
    ]
    owned = [(matrix.name, matrix.offset, matrix.shape) for matrix in optimizer._matrices.owned]
    return {
        "weights": weights,
        "kept": kept,
        "boxes": boxes,
        "twice": all(twice) and len(twice) == len(small.parts),
        "owned": owned,
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_update_has_the_same_bits_in_every_layout_and_is_made_once(world: World, layout: str) -> None:
    alone = _updated("1")
    found = world.run(_updated, Layout.parse(layout).world, layout, timeout=300)
    for rank in (alone, *found):
        assert rank["kept"], "a skipped step changes something"
        assert rank["boxes"] and rank["twice"]
        for name, weight in alone["weights"].items():
            assert torch.equal(weight, rank["weights"][name]), name
    owned = [matrix for rank in found for matrix in rank["owned"]]
    assert sorted(owned) == sorted(alone["owned"])  # so operations of all ranks are those of one process
    assert sum(name.endswith(".experts.up_proj") for name, *_ in owned) == 3 * EXPERTS.experts  # each expert for itself
    assert not any("router" in name or "embed" in name for name, *_ in owned)
    stages = Layout.parse(layout).pp
    work = [sum(flops(*shape, 5) for *_, shape in rank["owned"]) for rank in found]
    for stage in range(stages):
        of_stage = work[stage * len(work) // stages : (stage + 1) * len(work) // stages]
        assert max(of_stage) <= sum(of_stage) / len(of_stage) + max(flops(*shape, 5) for *_, shape in owned)


@pytest.mark.parametrize("shape", [(12, 30), (30, 12), (17, 17)])
def test_newton_schulz_is_torchs_bit_by_bit_in_bf16(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = theirs._zeropower_via_newtonschulz(matrix.clone(), (3.4445, -4.7750, 2.0315), 5, 1e-7)
    assert torch.equal(orthogonalized(matrix, 5), expected)
    assert not orthogonalized(torch.zeros(shape), 5).any()
    with FlopCounterMode(display=False) as counter:
        orthogonalized(matrix, 5)
    assert counter.get_total_flops() == flops(*shape, 5)


def test_which_matrices_a_parameter_has_is_what_its_spec_says() -> None:
    def found(shape: tuple[int, ...], **said: Any) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        spec = TensorSpec((None,) * len(shape), Init("zeros"), "matrix", **said)
        return [(matrix.offset, matrix.extent) for matrix in matrices_of("w", shape, spec)]

    assert found((6, 4)) == [((0, 0), (6, 4))]
    assert found((6, 4), fused=(3, 1, 2)) == [((0, 0), (3, 4)), ((3, 0), (1, 4)), ((4, 0), (2, 4))]
    assert found((2, 3, 4), stacked=True) == [((0, 0, 0), (1, 3, 4)), ((1, 0, 0), (1, 3, 4))]
    assert found((2, 3, 4), stacked=True, fused=(1, 2))[2:] == [((1, 0, 0), (1, 1, 4)), ((1, 1, 0), (1, 2, 4))]
    for shape, said in (((2, 3, 4), {}), ((4,), {}), ((2, 3), {"stacked": True})):
        with pytest.raises(PlanError, match="which by its spec are not matrices"):
            found(shape, **said)


def test_specs_that_fuse_other_rows_than_there_are_are_refused() -> None:
    class Wrong(Tiny):
        def specs(self) -> Any:
            found = super().specs()
            name = "blocks.0.qkv.weight"
            return replace(found, tensors=dict(found.tensors) | {name: replace(found.tensors[name], fused=(8, 8))})

    with pytest.raises(PlanError, match=r"blocks.0.qkv.weight has 24 rows, but its spec fuses matrices of 8 \+ 8"):
        Blueprint.of(Wrong)


def test_owners_share_the_work_and_rounds_are_bounded() -> None:
    shapes = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)]
    spec = TensorSpec((None, None), Init("zeros"), "matrix")
    matrices = [next(matrices_of(f"{layer}.{i}", shape, spec)) for layer in range(32) for i, shape in enumerate(shapes)]
    costs = [flops(*matrix.shape, 5) for matrix in matrices]
    for ranks in (1, 2, 7, 8, 16):
        owner = owners(costs, [()] * len(costs), ranks)
        load = [sum(cost for cost, rank in zip(costs, owner, strict=True) if rank == r) for r in range(ranks)]
        assert sum(load) == sum(costs)
        assert max(load) <= 1.05 * sum(costs) / ranks
        most = 2 * 14336 * 4096
        made = rounds(matrices, owner, costs, most)
        assert sorted(index for one in made for index in one) == list(range(len(matrices)))
        for one in made:
            for rank in range(ranks):
                held = [matrices[index].elements for index in one if owner[index] == rank]
                assert sum(held) <= most or len(held) == 1
    # Experts stay where they are whole, as long as every rank has as much to do.
    assert owners([5] * 8, [(index // 4,) for index in range(8)], 2) == [0, 0, 0, 0, 1, 1, 1, 1]
    assert sorted(owners([5] * 8, [(0,)] * 8, 2)) == [0, 0, 0, 0, 1, 1, 1, 1]


def test_a_matrix_without_a_gradient_stays_as_it_is() -> None:
    model = laid_out("1")
    optimizer: Any = MuonConfig().build(model)
    _given(model)
    tensors = {name: tensor for name, tensor, _ in model.trainable()}
    name = "blocks.0.mlp.up_proj.weight"
    optimizer.step(torch.zeros(()))
    before = _bits(model, optimizer)
    tensors[name].grad = None
    optimizer.step(torch.zeros(()))
    after = _bits(model, optimizer)
    still = {key for key, tensor in after.items() if torch.equal(tensor, before[key])}
    assert {name, f"momentum/{name}"} == still


@pytest.fixture
def plugin(tmp_path: Path) -> str:
    """The optimizer of the page, as a file."""
    (text,) = re.findall(r"^```python\n(# normalized\.py\n.*?)^```", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    (tmp_path / "normalized.py").write_text(text)
    return f"{tmp_path / 'normalized.py'}:Normalized"


def _moved(name: str, layout: str) -> dict[str, torch.Tensor]:
    model = laid_out(layout, "fp64")
    trust_name(name)
    optimizer = Registry().load("forge.optimizers", name)(lr=0.5).build(model)
    before = gathered(model, {name: tensor for name, tensor, _ in model.trainable()})
    _given(model)
    optimizer.step(torch.zeros(()))
    after = gathered(model, {name: tensor for name, tensor, _ in model.trainable()})
    return {name: before[name] - tensor for name, tensor in after.items()}


@pytest.mark.parametrize("layout", ["1", "hsdp2x2ep2"])
def test_the_plugin_of_the_page_moves_every_whole_matrix_by_its_rate(world: World, plugin: str, layout: str) -> None:
    ranks = [_moved(plugin, "1")] if layout == "1" else world.run(_moved, 4, plugin, layout, timeout=200)
    for moved in ranks:
        for name, change in moved.items():
            matrices = [] if change.dim() == 1 else list(change) if change.dim() == 3 else [change]
            assert change.abs().eq(0.5).all() or matrices, f"{name} follows a sign"
            for matrix in matrices:
                assert float(matrix.norm()) == pytest.approx(0.5, abs=1e-12)


def test_an_optimizer_that_gathers_is_proven_by_ours_and_by_receipts_of_others(plugin: str) -> None:
    train = SimpleNamespace(global_batch=8, micro_batch=4)
    precision, model = Precision(compute="fp32"), SimpleNamespace()
    job = SimpleNamespace(
        model=model, train=train, transforms={}, precision=precision, optimizer=MuonConfig(), parallel=Parallel()
    )
    assert list(compositions_are_proven(job, Layout.parse("dp2"))) == []  # type: ignore[arg-type]
    trust_name(plugin)
    job.optimizer = Registry().load("forge.optimizers", plugin)()
    (fault, *_) = compositions_are_proven(job, Layout.parse("dp2"))  # type: ignore[arg-type]
    assert "optimizer.name" in fault.message and "--record" in (fault.hint or "")
    assert list(compositions_are_proven(job, Layout())) == []  # type: ignore[arg-type]


def test_bf16_state_is_refused_by_name() -> None:
    job = SimpleNamespace(optimizer=MuonConfig(), precision=Precision(compute="bf16", state="bf16"))
    (fault,) = optimizer_keeps_the_state(job, Layout())  # type: ignore[arg-type]
    assert fault.key == "precision.state" and "Muon" in fault.message
    job.precision = Precision(compute="bf16")
    assert list(optimizer_keeps_the_state(job, Layout())) == []  # type: ignore[arg-type]
    assert list(optimizer_keeps_the_state(SimpleNamespace(optimizer=Component(), precision=job.precision), Layout())) == []  # type: ignore[arg-type]
    model = realize(Blueprint.of(Tiny), Plan.of([], Layout()), Topology(Layout(), CPU), 0, "bf16", "bf16")
    with pytest.raises(PlanError, match=r"fp32 or fp64, not torch.bfloat16"):
        MuonConfig().build(model)
