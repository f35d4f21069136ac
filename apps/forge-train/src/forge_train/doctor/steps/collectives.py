"""Sums and exchanges between the devices of this node: are they right, and how fast? Two processes on a CPU, without devices."""

from collections.abc import Callable, Iterator
from time import perf_counter

import torch
import torch.distributed as dist

from forge_parallel import accelerator
from forge_parallel.launch.spawn import spawn
from forge_train.doctor.step import Check, Settings, Skip
from forge_train.doctor.steps.measure import device, fastest, wait

_MODULE = "forge_train.doctor.steps.collectives"
_SIZES, _CPU_SIZES = (1 << 20, 1 << 25, 1 << 29), (1 << 16, 1 << 20)
"""Bytes that are summed."""

_SQUARE, _CPU_SQUARE = 8192, 256
_STRAGGLER = 1.05


def examine_collectives(_: Settings) -> Iterator[Check]:
    """The step."""
    kind = device().type
    ranks = 2 if kind == "cpu" else accelerator.count()
    if ranks < 2:
        raise Skip("this node shows one device")
    sizes = list(_CPU_SIZES if kind == "cpu" else _SIZES)
    found = spawn(f"{_MODULE}:rank", ranks, [kind, sizes], timeout=240)
    backend = "gloo" if kind == "cpu" else accelerator.COLLECTIVES[kind].upper()
    for name, right in found[0]["right"].items():
        wrong = [str(index) for index, one in enumerate(found) if not one["right"][name]]
        told = "right on every rank" if right and not wrong else f"wrong on rank {', '.join(wrong)}"
        remedy = "" if not wrong else "try NCCL_P2P_DISABLE=1 and NCCL_ALGO=Ring, one at a time: which of them makes it right?"
        yield Check(
            f"{name} by {backend}", "FAIL" if wrong else "PASS", told, "", "the sums and places that arithmetic gives", remedy
        )
    for name in found[0]["rate"]:
        slowest = min(one["rate"][name] for one in found)
        yield Check(f"{name}, {ranks} ranks", "PASS", slowest / 1e9, "GB/s", "report only", "", "higher")
    yield _stragglers([one["seconds"] for one in found], kind)


def _stragglers(seconds: list[float], kind: str) -> Check:
    """Ranks that multiply slower than the middle one: a run waits for them in every step."""
    middle = sorted(seconds)[len(seconds) // 2]
    slow = [str(index) for index, one in enumerate(seconds) if one > _STRAGGLER * middle]
    name, expected = "stragglers", "every device within 5 % of the middle one"
    if not slow or kind == "cpu":  # processes share its cores
        return Check(name, "PASS", "none" if not slow else "not judged on a CPU", "", expected)
    remedy = "look at its clocks and temperature (nvidia-smi -q -d PERFORMANCE,TEMPERATURE); leave it out meanwhile"
    return Check(name, "SLOW", f"device {', '.join(slow)}", "", expected, remedy)


def rank(kind: str, sizes: list[int]) -> dict[str, object]:
    """Collective: what one rank sees."""
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
    square = torch.randn(*[_CPU_SQUARE if kind == "cpu" else _SQUARE] * 2, device=here)
    dist.barrier()
    return {"right": right, "rate": rate, "seconds": fastest(lambda: square @ square, here, 0.1 if kind == "cpu" else 2.0)}


def _timed(work: Callable[[], object], here: torch.device, times: int = 10) -> float:
    """Seconds of one call. Collective calls are counted, since ranks must make the same number of them."""
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
