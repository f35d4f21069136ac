"""What only a CUDA device can show. Runs with `pytest -m gpu`."""

import os
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist

from forge_ckpt.checkpoint.read import load
from forge_ckpt.checkpoint.save import save
from forge_ckpt.store.local import LocalStore
from forge_ckpt.world import SingleProcessWorld
from forge_core.layout import Layout
from forge_core.protocols.checkpoint import Piece
from forge_core.protocols.model import Optimizer, PositionedTokens
from forge_core.specs import Init, TensorSpec
from forge_models.blocks.moe.experts import Experts
from forge_models.components.decoder import DecoderConfig
from forge_models.objectives import CrossEntropy
from forge_parallel import accelerator
from forge_parallel.model.parallel_model import ParallelModel
from forge_parallel.model.plan import Plan
from forge_parallel.model.realize import Blueprint, Restore, fill, realize
from forge_parallel.optim.optimizers import AdamWConfig
from forge_parallel.placement.boxes import Box
from forge_parallel.placement.topology import Topology
from forge_parallel.step.reduce import clip_grad_norm
from forge_parallel.step.step import Step
from forge_parallel.transforms.context import flash_cpu, flex_blocks
from forge_parallel.transforms.float8 import conversion
from forge_parallel.transforms.float8.transform import Float8
from forge_parallel.transforms.shard import FullyShard
from forge_parallel.verify.parity import Case, Measurement, compare, measure, share, synthetic
from forge_parallel.verify.proofs import proven_rows
from forge_parallel.verify.state import drifted
from harness.pool import World
from parallel.compositions.rows import layout_of, measured
from parallel.compositions.test_compositions import equals_one_process
from parallel.tiny import VOCAB, Tiny, cross_entropy

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
CASE = Case(Tiny, cross_entropy, AdamWConfig(lr=1e-2).build, VOCAB)


def test_initial_weights_of_a_box_are_those_of_the_whole() -> None:
    spec = TensorSpec((None, None), Init("normal", 0.02), "matrix")
    whole, part = torch.empty(300, 700, device="cuda"), torch.empty(100, 50, device="cuda")
    fill(Box((300, 700), (0, 0), whole), spec, "w", 0)
    fill(Box((300, 700), (150, 600), part), spec, "w", 0)
    assert torch.equal(part, whole[150:250, 600:650])
    assert abs(whole.std() / 0.02 - 1) < 0.02


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block_of_the_ring_is_that_of_a_cpu(packed: bool, dtype: torch.dtype) -> None:
    """Flex attention and its differentiated join against the flash kernel of a CPU in fp64, which tests compare with torch."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((4, 256, 64), (2, 384, 64), (2, 384, 32), (4, 256, 32))
    q, k, v, grad = (torch.randn(2, *size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes)
    documents = (torch.arange(640, dtype=torch.int32) // 150).repeat(2, 1) if packed else None
    held = [
        PositionedTokens(torch.arange(start, start + length), None if documents is None else documents[:, start : start + length])
        for start, length in ((384, 256), (0, 384))
    ]
    results = []
    for kernel, device, wide in ((flash_cpu, "cpu", torch.float64), (flex_blocks, "cuda", dtype)):
        moved = [x.to(device, wide) for x in (q, k, v, grad)]
        placed = [PositionedTokens(x.places.to(device), None if x.documents is None else x.documents.to(device)) for x in held]
        mask = kernel.mask_between(*placed, 300)
        out, sums = kernel.forward(*moved[:3], mask, False, 0.125)
        joined = sums.logaddexp(torch.zeros_like(sums))  # another block has a log-sum-exp of 0 and values of 0
        whole = out * (sums - joined).exp().unsqueeze(-1).to(out.dtype)
        results.append([out, *kernel.backward(moved[3], *moved[:3], whole, joined, mask, False, 0.125)])
    for expected, found in zip(*results, strict=True):
        error = (found.cpu().double() - expected).abs().max() / expected.abs().max()
        assert error < (2e-2 if dtype == torch.bfloat16 else 5e-3)  # flex may multiply fp32 in TF32


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_no_host_synchronisation_in_a_step() -> None:
    layout = Layout()
    model = realize(Blueprint.of(Tiny), Plan.of([], layout), Topology(layout, torch.device("cuda", 0)), 0, "bf16")
    step, optimizer = Step(model, cross_entropy), AdamWConfig().build(model)
    batches = [batch.to("cuda") for batch in share(synthetic(CASE, 0), 0, 1, 4)]
    step(batches)
    try:
        torch.cuda.set_sync_debug_mode("error")
        result = step(batches)
        clip_grad_norm(model, result.norm, 1.0)
        optimizer.step(result.skip)
        optimizer.zero_grad()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert result.numbers()["skipped"] == 0


def test_numbers_of_a_step_do_not_wait_for_what_is_queued_behind_them() -> None:
    layout = Layout()
    model = realize(Blueprint.of(Tiny), Plan.of([], layout), Topology(layout, torch.device("cuda", 0)), 0, "bf16")
    step, batches = Step(model, cross_entropy), [batch.to("cuda") for batch in share(synthetic(CASE, 0), 0, 1, 4)]
    step(batches).numbers()
    result, product = step(batches), torch.ones(8192, 8192, device="cuda")
    result.send()
    expected = result.loss.clone()
    for _ in range(20):
        product = product @ product * 1e-4
    found = result.numbers()["loss"]
    assert not torch.cuda.current_stream().query(), "seconds of work are queued behind"
    assert found == expected.item()


def test_micro_batches_leave_the_numbers_alone() -> None:
    device = torch.device("cuda", 0)
    whole, cut = (measure(Case(**{**vars(CASE), "micro_batch": size}), Plan.of([], Layout()), device) for size in (8, 1))
    assert compare(whole, cut).accepted("fp64")


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_float8_products_of_the_device_are_the_emulated_ones(recipe: Literal["tensorwise", "rowwise"]) -> None:
    """Kernels may sum with fewer digits than fp32 has; an operand that then differs in its last bit may be cast to a neighbor. So
    the two may be as far apart as float8 is from bf16, and no farther."""
    pytest.importorskip("torchao")
    decoder = DecoderConfig(dim=64, layers=2, heads=4, kv_heads=2, ffn_dim=64, vocab_size=61, max_length=32)
    case = Case(
        decoder.build,
        CrossEntropy().build(),
        AdamWConfig().build,
        61,
        rows=4,
        micro_batch=2,
        steps=1,
        compute="bf16",
        state="fp32",
    )
    device = torch.device("cuda", 0)
    emulated, native = (
        measure(case, Plan.of([Float8(recipe=recipe, emulate=emulate).build()], Layout()), device) for emulate in (True, False)
    )
    exact = measure(case, Plan.of([], Layout()), device)

    def distance(found: Measurement) -> float:
        return sum(float((found.gradients[name] - emulated.gradients[name]).square().sum()) for name in found.gradients) ** 0.5

    assert distance(native) < distance(exact)
    assert native.loss[0] == pytest.approx(emulated.loss[0], rel=1e-3)


@pytest.mark.parametrize("counts", [[100, 0, 17, 139], [0, 0, 0, 0], [256, 0, 0, 0]], ids=str)
def test_float8_products_of_experts_are_the_emulated_ones(counts: list[int]) -> None:
    """Operands and scales are the same bits, so kernels may only sum otherwise, and with fewer digits, before they round to bf16.
    Rows that are nobody's are NaN."""
    pytest.importorskip("torchao")
    if fault := accelerator.float8_groups_fault(torch.device("cuda")):
        pytest.skip(fault)
    conversion.require_torchao()
    from forge_parallel.transforms.float8 import experts as float8

    generator, results = torch.Generator().manual_seed(0), []
    x, grad = torch.randn(2, sum(counts) + 5, 128, generator=generator)
    x[sum(counts) :] = torch.nan
    weights = [torch.randn(4, *shape, generator=generator) * 0.1 for shape in ((192, 128), (192, 128), (128, 192))]
    for multiply in (float8.emulated, float8.native):
        with torch.device("cuda"):
            stack: Any = Experts(DecoderConfig(dim=128, layers=1, heads=2, ffn_dim=192).shape.context(0), 4, "silu", True)
        stack.to(torch.bfloat16)
        stack.__class__, stack.multiply = float8.float8_experts_class(Experts), multiply
        with torch.no_grad():
            for parameter, weight in zip(stack.parameters(), weights, strict=True):
                parameter.copy_(weight)
        rows = x.to("cuda", torch.bfloat16).requires_grad_()
        out = stack(rows, torch.tensor(counts, device="cuda"))[: sum(counts)]
        out.backward(grad[: sum(counts)].to("cuda", torch.bfloat16))
        assert rows.grad is not None
        results.append([out.detach(), rows.grad[: sum(counts)], *(parameter.grad for parameter in stack.parameters())])
    for emulated, native in zip(*results, strict=True):
        assert bool(native.isfinite().all())
        assert float((native.double() - emulated.double()).norm()) <= 2e-2 * float(emulated.double().norm())
    for gradient in results[1][2:]:
        assert [bool(one.count_nonzero()) for one in gradient] == [count > 0 for count in counts]


# Shards on the host.


def _on_its_gpu(case: Case, layout: str, run: frozenset[str]) -> Measurement:
    size, rank = Layout.parse(layout).world, int(os.environ.get("RANK", 0))
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    if size > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl", world_size=size, rank=rank)
    return measured(case, layout, run, device)


@pytest.mark.parametrize("run", proven_rows()["gpu"], ids=lambda run: "+".join(sorted(run)))
def test_a_run_on_gpus_equals_one_process(world: World, run: frozenset[str]) -> None:
    if layout_of(run).world > torch.cuda.device_count():
        pytest.skip(f"needs {layout_of(run).world} GPUs")
    equals_one_process(world, run, _on_its_gpu, group=False)


def _pieces(model: ParallelModel, optimizer: Optimizer) -> list[Piece]:
    state = optimizer.state().items()
    return [*model.pieces(), *(model.piece(f"{key}/{name}", one) for key, named in state for name, one in named.items())]


def _saved_on_the_host(directory: str, precision: str) -> dict[str, bool]:
    """A step, a checkpoint, a second model from it, a step of that and one that is skipped."""
    device, layout, store = torch.device("cuda", 0), Layout(), LocalStore(Path(directory))
    batches = [batch.to("cuda") for batch in share(synthetic(CASE, 0), 0, 1, 4)]
    optimizers: list[Optimizer] = []
    gradients: list[torch.Tensor | None] = []

    def restore(model: ParallelModel) -> None:
        optimizers.append(AdamWConfig(lr=1e-2).build(model))
        load(store, 1, _pieces(model, optimizers[0]), SingleProcessWorld())

    def built(source: int | Restore) -> ParallelModel:
        plan = Plan.of([FullyShard(offload=True)], layout)
        return realize(Blueprint.of(Tiny), plan, Topology(layout, device), source, precision, precision)

    def stepped(model: ParallelModel, optimizer: Optimizer, skip: torch.Tensor | None = None) -> None:
        result = Step(model, cross_entropy)(batches)
        gradients.extend(tensor.grad for _, tensor, _ in model.trainable())
        clip_grad_norm(model, result.norm, 0.5)
        optimizer.step(result.skip if skip is None else skip)
        optimizer.zero_grad()

    def everything(model: ParallelModel, optimizer: Optimizer) -> dict[str, torch.Tensor]:
        return {piece.name: piece.local.clone() for piece in _pieces(model, optimizer)}

    first = built(0)
    optimizer = AdamWConfig(lr=1e-2).build(first)
    stepped(first, optimizer)
    save(store, _pieces(first, optimizer), {}, 1, SingleProcessWorld())
    saved = everything(first, optimizer)
    second = built(restore)
    loaded = everything(second, optimizers[0])
    stepped(second, optimizers[0])
    after = everything(second, optimizers[0])
    stepped(second, optimizers[0], skip=torch.ones((), device=device))
    skipped = everything(second, optimizers[0])
    buffers = {f"model/{name}" for part in second.parts for name, _ in part.named_buffers()}
    return {
        "on the host": all(tensor.device.type == "cpu" for name, tensor in after.items() if name not in buffers)
        and all(gradient is not None and gradient.device.type == "cpu" for gradient in gradients),
        "resumed": saved.keys() == loaded.keys() and all(torch.equal(saved[name], loaded[name]) for name in saved),
        "moved": any(not torch.equal(loaded[name], after[name]) for name in loaded),
        "skipped": all(torch.equal(after[name], skipped[name]) for name in after),
        "one replica": drifted(second) is None,
    }


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_shards_stay_on_the_host_and_come_back_from_a_checkpoint(world: World, tmp_path: Path, precision: str) -> None:
    (found,) = world.run(_saved_on_the_host, 1, str(tmp_path / "c"), precision, group=False)
    assert all(found.values()), found
