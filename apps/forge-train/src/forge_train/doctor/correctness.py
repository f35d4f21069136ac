"""Checks that the device computes correctly: memory, repeated products, collectives, and training compared with fp64."""

from collections.abc import Callable, Iterator
from time import perf_counter

import torch
import torch.distributed as dist

from forge_core.layout import Layout
from forge_core.protocols.model import Optimizer
from forge_core.registry import Registry
from forge_core.terminal import size
from forge_parallel import accelerator
from forge_parallel.accelerator import float8_fault
from forge_parallel.launch.local_processes import spawn_local
from forge_parallel.model.parallel_model import ParallelModel
from forge_parallel.model.realize import fill
from forge_parallel.placement.boxes import local_box
from forge_parallel.verify.parity import Case, Measurement, compare, measure
from forge_parallel.verify.proofs import TOLERANCE
from forge_train.doctor.measure import device, fastest, wait
from forge_train.doctor.step import Check, DoctorSettings, Skip
from forge_train.plan import plan_of
from forge_train.recipe.load import load_recipe

_MEMORY_SHARE = 0.9
_MEMORY_CHUNK = 1 << 30
_PRODUCT_SECONDS = 15.0
_PRODUCT_SIZE = 4096


def examine_device(_: DoctorSettings) -> Iterator[Check]:
    """Step `device`: yields a check of memory and a check of products for each device."""
    kind = device().type
    if kind == "cpu":
        raise Skip("no accelerator is visible", "see the step torch for the reason")
    for index in range(accelerator.count()):
        one = accelerator.use(index)
        yield _memory(one)
        accelerator.forget_cache()
        yield _products(one, _PRODUCT_SECONDS)


def _memory(one: torch.device) -> Check:
    """Checks memory: writes each number's index to nearly all of the memory, then reads all numbers back."""
    name = f"memory of device {one.index}"
    free = accelerator.free_memory(one)
    if free is None:
        return Check(name, "SKIPPED", "this device does not report its memory size")
    wanted = int(free * _MEMORY_SHARE) // _MEMORY_CHUNK * _MEMORY_CHUNK or int(free * _MEMORY_SHARE) // 8 * 8
    chunk = min(wanted, _MEMORY_CHUNK)
    expected = "every number is read back unchanged"
    try:
        held = [torch.arange(start, start + chunk // 8, device=one) for start in range(0, wanted // 8, chunk // 8)]
    except torch.OutOfMemoryError as cause:
        remedy = "if another process uses the memory (nvidia-smi), end it; otherwise restart the node"
        return Check(name, "FAIL", str(cause).partition(".")[0], expected=f"{size(wanted)} can be allocated", remedy=remedy)
    wrong = 0
    for number, written in enumerate(held):
        start = number * (chunk // 8)
        wrong += int((written != torch.arange(start, start + chunk // 8, device=one)).sum())
    if wrong:
        remedy = "take the device out of service: look for ECC errors (nvidia-smi -q -d ECC)"
        return Check(name, "FAIL", f"{wrong} of {wanted // 8} numbers changed", expected=expected, remedy=remedy)
    return Check(name, "PASS", f"{size(wanted)} of {size(free)} free", expected=expected)


def _products(one: torch.device, seconds: float) -> Check:
    """Checks products: repeats the same product, whose bits must not change."""
    name, expected = f"products of device {one.index}", "the same bits each time"
    generator = torch.Generator(one).manual_seed(0)
    dtype = torch.bfloat16
    a, b = (torch.randn(_PRODUCT_SIZE, _PRODUCT_SIZE, generator=generator, device=one, dtype=dtype) for _ in range(2))
    first, times, end = a @ b, 0, perf_counter() + seconds
    while perf_counter() < end or not times:
        times += 1
        if not torch.equal(a @ b, first):
            remedy = "take the device out of service: it corrupts numbers silently"
            return Check(name, "FAIL", f"product {times + 1} differs", expected=expected, remedy=remedy)
    return Check(name, "PASS", f"{times + 1} products", expected=expected)


_MODULE = "forge_train.doctor.correctness"
_COLLECTIVE_SIZES, _CPU_COLLECTIVE_SIZES = (1 << 20, 1 << 25, 1 << 29), (1 << 16, 1 << 20)
"""Sizes in bytes of the measured all-reduces."""

_STRAGGLER_SQUARE, _CPU_STRAGGLER_SQUARE = 8192, 256
_STRAGGLER = 1.05


def examine_collectives(_: DoctorSettings) -> Iterator[Check]:
    """Step `collectives`: checks results and rates of collectives between the devices of this node."""
    kind = device().type
    ranks = 2 if kind == "cpu" else accelerator.count()
    if ranks < 2:
        raise Skip("this node has only one visible device")
    sizes = list(_CPU_COLLECTIVE_SIZES if kind == "cpu" else _COLLECTIVE_SIZES)
    found = spawn_local(f"{_MODULE}:rank", ranks, [kind, sizes], timeout=240)
    backend = "gloo" if kind == "cpu" else accelerator.COLLECTIVES[kind].upper()
    for name, right in found[0]["right"].items():
        wrong = [str(index) for index, one in enumerate(found) if not one["right"][name]]
        told = "correct on every rank" if right and not wrong else f"wrong on rank {', '.join(wrong)}"
        remedy = "" if not wrong else "try NCCL_P2P_DISABLE=1 and NCCL_ALGO=Ring, one at a time, to find the faulty link"
        yield Check(f"{name} by {backend}", "FAIL" if wrong else "PASS", told, "", "results equal to arithmetic", remedy)
    for name in found[0]["rate"]:
        slowest = min(one["rate"][name] for one in found)
        yield Check(f"{name}, {ranks} ranks", "PASS", slowest / 1e9, "GB/s", "report only", "", "higher")
    yield _stragglers([one["seconds"] for one in found], kind)


def _stragglers(seconds: list[float], kind: str) -> Check:
    """Checks for devices that multiply more slowly than the median, because a run waits for them in every step."""
    middle = sorted(seconds)[len(seconds) // 2]
    slow = [str(index) for index, one in enumerate(seconds) if one > _STRAGGLER * middle]
    name, expected = "stragglers", "every device within 5 % of the median"
    if not slow or kind == "cpu":  # processes share the cores of a CPU
        return Check(name, "PASS", "none" if not slow else "not checked on a CPU", "", expected)
    remedy = "check its clocks and temperature (nvidia-smi -q -d PERFORMANCE,TEMPERATURE), and do not use it meanwhile"
    return Check(name, "SLOW", f"device {', '.join(slow)}", "", expected, remedy)


def rank(kind: str, sizes: list[int]) -> dict[str, object]:
    """Collective: returns the results of one rank: correctness of collectives, their rates, and seconds of a product."""
    index, ranks = dist.get_rank(), dist.get_world_size()
    here = torch.device(kind) if kind == "cpu" else accelerator.use(index)
    group = dist.new_group(backend="gloo" if kind == "cpu" else accelerator.COLLECTIVES[kind])
    assert isinstance(group, dist.ProcessGroup), "every rank is in it"
    right = {name: bool(torch.equal(*work(here, index, ranks, group))) for name, work in _CASES.items()}
    rate = {}
    for length in sizes:
        numbers = torch.zeros(length // 4, device=here)
        seconds = _timed(lambda: dist.all_reduce(numbers, group=group), here)  # noqa: B023 (called at once)
        rate[f"all-reduce of {length >> 10} KiB, bus"] = 2 * (ranks - 1) / ranks * length / seconds
    square = torch.randn(*[_CPU_STRAGGLER_SQUARE if kind == "cpu" else _STRAGGLER_SQUARE] * 2, device=here)
    dist.barrier()
    return {"right": right, "rate": rate, "seconds": fastest(lambda: square @ square, here, 0.1 if kind == "cpu" else 2.0)}


def _timed(work: Callable[[], object], here: torch.device, times: int = 10) -> float:
    """Returns the seconds of one call. The number of calls is fixed, because all ranks must make the same number."""
    work()
    wait(here)
    began = perf_counter()
    for _ in range(times):
        work()
    wait(here)
    return (perf_counter() - began) / times


_Pair = tuple[torch.Tensor, torch.Tensor]


def _all_reduce(here: torch.device, index: int, ranks: int, group: dist.ProcessGroup) -> _Pair:
    found = torch.full((1000,), float(index + 1), device=here)
    dist.all_reduce(found, group=group)
    return found, torch.full((1000,), ranks * (ranks + 1) / 2, device=here)


def _all_gather(here: torch.device, index: int, ranks: int, group: dist.ProcessGroup) -> _Pair:
    found = torch.empty(ranks * 100, device=here)
    dist.all_gather_into_tensor(found, torch.full((100,), float(index), device=here), group=group)
    return found, torch.arange(float(ranks), device=here).repeat_interleave(100)


def _reduce_scatter(here: torch.device, index: int, ranks: int, group: dist.ProcessGroup) -> _Pair:
    found = torch.empty(100, device=here)
    dist.reduce_scatter_tensor(found, torch.arange(100.0 * ranks, device=here), group=group)
    return found, ranks * torch.arange(100.0 * index, 100.0 * (index + 1), device=here)


def _all_to_all(here: torch.device, index: int, ranks: int, group: dist.ProcessGroup) -> _Pair:
    found = torch.empty(ranks, device=here)
    dist.all_to_all_single(found, 10.0 * index + torch.arange(float(ranks), device=here), group=group)
    return found, index + 10.0 * torch.arange(float(ranks), device=here)


_CASES: dict[str, Callable[[torch.device, int, int, dist.ProcessGroup], _Pair]] = {
    "all-reduce": _all_reduce,
    "all-gather": _all_gather,
    "reduce-scatter": _reduce_scatter,
    "all-to-all": _all_to_all,
}


_TINY = {"dense": "debug", "experts": "debug-moe"}
_SMALL = ("--model.dim=32", "--model.layers=2", "--hooks=[]")
_ANGLES = 1e-5
"""Maximum relative difference in fp64 between kinds of devices: angles of rotary positions, their sines and cosines are fp32, and
each kind rounds their last bit otherwise. An H200 is 2e-6 away from a CPU, and 1e-12 with the CPU's angles."""
_ROUNDED = {"fp32": 1e-4, "bf16": 3e-2}
"""Maximum relative difference between the loss and that in fp64."""


def examine_numbers(_: DoctorSettings) -> Iterator[Check]:
    """Step `numbers`: compares training on the device with fp64 on a CPU. The device processes all rows at once, the CPU one at a
    time, so that results do not agree only because sums have the same order."""
    here = device()
    closest = TOLERANCE["fp64"] if here.type == "cpu" else _ANGLES
    for label, preset in _TINY.items():
        exact = _measured(preset, torch.device("cpu"), 1, "fp64")
        yield _exact(label, exact, _measured(preset, here, 8, "fp64"), closest)
        for precision, limit in _ROUNDED.items():
            found = _measured(preset, here, 8, precision)
            yield _rounded(f"{label}, {precision}", exact, found, limit)
    yield from _float8(here)


def _as_on_a_cpu(model: ParallelModel, seed: int) -> None:
    """Initializes the weights with the random streams of a CPU, because each kind of device has different streams."""
    with torch.no_grad():
        for name, tensor, _ in model.trainable():
            fill(local_box(tensor), model.specs.tensors[name], name, seed, torch.device("cpu"))


def _measured(preset: str, here: torch.device, micro_batch: int, precision: str, float8: str = "") -> Measurement:
    registry = Registry()
    transforms = (f"--transforms.float8.emulate={float8}",) if float8 else ()
    job = load_recipe(preset, [*_SMALL, *transforms], None, registry).job

    def optimizer(model: ParallelModel) -> Optimizer:
        # Built before anything is measured, and it keeps no copy of the weights until its first step.
        _as_on_a_cpu(model, seed=0)
        return job.optimizer.build(model)

    case = Case(
        build=job.model.build,
        objective=job.objective.build(),
        optimizer=optimizer,
        vocab_size=getattr(job.model, "vocab_size"),  # noqa: B009 (a plugin's model may call it otherwise)
        micro_batch=micro_batch,
        steps=3,
        compute=precision,
        state="fp64" if precision == "fp64" else "fp32",
    )
    return measure(case, plan_of(job, Layout(), registry), here)


def _exact(label: str, exact: Measurement, found: Measurement, limit: float) -> Check:
    difference = compare(exact, found)
    worst = max(difference.loss, difference.norm, difference.gradients, difference.weights)
    expected = f"loss, gradients and weights within {limit} of a CPU, after 3 steps"
    if difference.initial and worst <= limit:  # a number that is not finite is not
        return Check(f"{label}, fp64", "PASS", worst, "relative", expected)
    told = f"{worst:.1e}, worst: {difference.worst}" if difference.initial else "initial weights differ"
    remedy = "this installation computes wrong numbers: do not train, and report it with this file"
    return Check(f"{label}, fp64", "FAIL", told, "", expected, remedy)


def _rounded(label: str, exact: Measurement, found: Measurement, limit: float) -> Check:
    worst = max(abs(one - other) / abs(one) for one, other in zip(exact.loss, found.loss, strict=True))
    expected = f"loss within {limit} of fp64"
    if worst <= limit:  # a number that is not finite is not
        return Check(label, "PASS", worst, "relative", expected)
    return Check(label, "FAIL", worst, "relative", expected, "report it with this file; train in fp32 until then")


def _float8(here: torch.device) -> Iterator[Check]:
    from importlib.util import find_spec

    label = "float8, native against emulated"
    if find_spec("torchao") is None:
        yield Check(label, "SKIPPED", "torchao is not installed", remedy='pip install "forge-parallel[float8]"')
        return
    if fault := float8_fault(here):
        yield Check(label, "SKIPPED", fault, remedy="remove transforms.float8 from recipes for this device")
        return
    native, emulated = (_measured("debug", here, 8, "bf16", emulate) for emulate in ("false", "true"))
    yield _rounded(label, emulated, native, 1e-2)
