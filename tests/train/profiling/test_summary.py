"""Summaries of traces with known answers: kernels, copies, what is exposed, ranges, waits of the host, a CPU's threads."""

import gzip
import json
import random
from pathlib import Path

import pytest

from forge_core.errors import ForgeError
from forge_train.profiling.classes import WorkKind, class_of_kernel, class_of_operator
from forge_train.profiling.summary import UNTIL_THE_END, Exposed, spreads, summarize, waited_for_others
from forge_train.profiling.trace import Event, read_trace
from train.profiling.traces import GATHER, GEMM, REDUCE, event, host, kernel, trace, window


def of(path: Path, *events: dict, **about: object):
    return summarize(trace(path, events, **about))


def classes(found) -> tuple[float, ...]:
    """Microseconds: compute, overlapped, exposed, memory, idle."""
    return tuple(time / 1000 for time in found.classes.values())


STEP = [
    window(100, 100),
    kernel(GEMM, 90, 20),  # began before the window: 10 of it count
    kernel(GATHER, 105, 25, stream=20),  # 105-110 overlapped, 110-130 exposed
    kernel(GEMM, 130, 30, **{"External id": 5}),
    kernel(REDUCE, 140, 40, stream=24),  # 140-160 overlapped, 160-180 exposed
    event("Memcpy DtoH (Device -> Pinned)", "gpu_memcpy", 175, 10),  # 180-185 alone
    event("Memset (Device)", "gpu_memset", 185, 1),
    host("aten::mm", 95, 4, **{"External id": 5}),
    host("record_param_comms", 95, 500),  # an operator of the host, with "mm" in its name
    host("gloo:all_reduce", 95, 500, "user_annotation"),  # a small one of the host: the device does not wait for it
]


def test_a_step_on_three_streams(tmp_path: Path) -> None:
    found = of(tmp_path, *STEP)
    # compute 100-105, 130-140 | overlapped 105-110, 140-160 | exposed 110-130, 160-180 | memory 180-186 | idle 186-200
    assert classes(found) == (15, 25, 40, 6, 14)
    assert found.window == 100_000 and found.device
    assert found.exposed == [
        Exposed(GATHER, "aten::mm", 1, 20_000),
        Exposed(REDUCE, UNTIL_THE_END, 1, 20_000),
    ]
    rows = {kernel.name: (kernel.kind, kernel.count, kernel.busy, kernel.exposed) for kernel in found.kernels}
    assert rows == {
        GEMM: (WorkKind.COMPUTE, 2, 40_000, 0),
        GATHER: (WorkKind.COMMUNICATION, 1, 25_000, 20_000),
        REDUCE: (WorkKind.COMMUNICATION, 1, 40_000, 20_000),
        "Memcpy DtoH (Device -> Pinned)": (WorkKind.MEMORY, 1, 10_000, 0),
        "Memset (Device)": (WorkKind.MEMORY, 1, 1_000, 0),
    }
    assert [row.busy for row in found.kernels] == [40_000, 40_000, 25_000, 10_000, 1_000], "the longest first"


def test_neither_order_nor_copies_of_events_matter(tmp_path: Path) -> None:
    first = of(tmp_path, *STEP)
    for seed in range(5):
        again = [*STEP, *STEP[1:6]]
        random.Random(seed).shuffle(again)
        assert of(tmp_path, *again) == first


def test_no_kernel_is_in_two_classes_and_exposed_rows_sum_to_the_class(tmp_path: Path) -> None:
    found = of(tmp_path, *STEP, kernel(GATHER, 112, 3, stream=30))
    assert sum(row.exposed for row in found.kernels) == sum(row.time for row in found.exposed) == found.classes["exposed"]
    names = [row.name for row in found.kernels]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("name", "category", "kind"),
    [
        (GEMM, "kernel", WorkKind.COMPUTE),
        (GATHER, "kernel", WorkKind.COMMUNICATION),
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", "kernel", WorkKind.COMMUNICATION),
        ("void c10d::symmetric_memory::multimem_all_reduce_kernel<...>", "kernel", WorkKind.COMMUNICATION),
        ("void nvshmem::alltoall<...>", "kernel", WorkKind.COMMUNICATION),
        ("triton_poi_fused__to_copy_all_gather_into_tensor_wait_tensor_3", "kernel", WorkKind.COMPUTE),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>", "kernel", WorkKind.COMPUTE),
        ("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", WorkKind.MEMORY),
        ("Memcpy DtoD (Device -> Device)", "gpu_memcpy", WorkKind.MEMORY),
        ("Memcpy PtoP (Device -> Device)", "gpu_memcpy", WorkKind.COMMUNICATION),
        ("Memset (Device)", "gpu_memset", WorkKind.MEMORY),
    ],
)
def test_kinds_of_work_on_a_device(name: str, category: str, kind: WorkKind) -> None:
    assert class_of_kernel(Event(name, category, ("0", "7"), 0, 1)) is kind


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::mm", WorkKind.COMPUTE),
        ("fsdp::all_gather_copy_in", WorkKind.COMPUTE),
        ("CompiledFunctionBackward", WorkKind.COMPUTE),
        ("aten::copy_", WorkKind.MEMORY),
        ("c10d::allreduce_", WorkKind.COMMUNICATION),
        ("record_param_comms", WorkKind.COMMUNICATION),
        ("autograd::engine::evaluate_function: MmBackward0", None),
        ("RegisterPostBackwardFunctionBackward", None),
    ],
)
def test_kinds_of_operators(name: str, kind: WorkKind | None) -> None:
    assert class_of_operator(name) is kind


def test_threads_of_a_cpu_count_by_the_innermost_operator(tmp_path: Path) -> None:
    found = of(
        tmp_path,
        window(0, 100),
        host("aten::linear", 10, 30),  # 10-12 and 32-40 its own
        host("aten::addmm", 12, 20),  # 12-15 and 20-32 its own
        host("aten::copy_", 15, 5),
        host("aten::zero", 18, 0),  # takes no time
        host("autograd::engine::evaluate_function: MmBackward0", 50, 30),  # calls others
        host("aten::mm", 55, 10),
        host("gloo:all_reduce", 60, 30, "user_annotation", thread=7),
        host("aten::mm", 38, 4, thread=101),  # on another thread: 38-40 is computed anyway
    )
    assert not found.device
    # 10-15, 20-42, 55-60 compute; 60-65 overlapped; 65-90 exposed; 15-20 memory
    assert classes(found) == (32, 5, 25, 5, 33)
    rows = {kernel.name: (kernel.count, kernel.busy) for kernel in found.kernels}
    assert rows == {
        "gloo:all_reduce": (1, 30_000),
        "aten::addmm": (1, 15_000),
        "aten::mm": (2, 14_000),
        "aten::linear": (1, 10_000),
        "aten::copy_": (1, 5_000),
    }
    assert found.exposed == [Exposed("gloo:all_reduce", UNTIL_THE_END, 1, 25_000)]
    assert found.annotations == [], "collectives are not ranges that the program named"


def test_ranges_of_one_name_count_once_where_they_overlap(tmp_path: Path) -> None:
    found = of(
        tmp_path,
        window(0, 100),
        kernel(GEMM, 0, 1),
        host("forge/forward", -20, 30, "user_annotation"),
        host("forge/forward", 20, 20, "user_annotation"),
        host("forge/forward", 25, 5, "user_annotation"),  # nested
        host("ProfilerStep#3", 0, 90, "user_annotation"),
        host("forge/closing", 90, 10, "user_annotation"),
        event("forge/forward", "gpu_user_annotation", 30, 50),
    )
    assert [(row.name, row.count, row.host, row.device) for row in found.annotations] == [("forge/forward", 3, 30_000, 50_000)]


def test_waits_of_the_host_are_counted_by_place(tmp_path: Path) -> None:
    found = of(
        tmp_path,
        window(0, 100),
        kernel(GEMM, 0, 50),
        host("forge/optimizer", 0, 60, "user_annotation"),
        host("aten::nonzero", 10, 20),
        host("cudaStreamSynchronize", 12, 15, "cuda_runtime"),
        host("aten::item", 40, 10),
        host("aten::_local_scalar_dense", 41, 8),
        host("cudaStreamSynchronize", 42, 6, "cuda_runtime"),
        host("aten::item", 70, 3),
        host("aten::_local_scalar_dense", 71, 1),  # of a tensor of the host: no call in it
        host("cudaDeviceSynchronize", 80, 5, "cuda_runtime"),
        host("cudaLaunchKernel", 86, 1, "cuda_runtime"),
        host("forge/closing", 90, 10, "user_annotation"),
        host("cudaDeviceSynchronize", 91, 9, "cuda_runtime"),  # the profile's own
        host("cudaDeviceSynchronize", 200, 9, "cuda_runtime"),  # outside
        host("cudaStreamSynchronize", 13, 15, "cuda_runtime", thread=101),  # another thread, in no operator
    )
    assert [(wait.call, wait.operator, wait.inside, wait.count, wait.time) for wait in found.waits] == [
        ("cudaStreamSynchronize", "", "", 1, 15_000),
        ("cudaStreamSynchronize", "aten::nonzero", "forge/optimizer", 1, 15_000),
        ("cudaStreamSynchronize", "aten::_local_scalar_dense", "forge/optimizer", 1, 6_000),
        ("cudaDeviceSynchronize", "", "", 1, 5_000),
        (".item()", "", "", 1, 1_000),
    ]


def test_without_the_hook_the_window_is_that_of_torchs_steps_and_the_device_may_end_later(tmp_path: Path) -> None:
    steps = [host("ProfilerStep#1", 10, 20, "user_annotation"), host("ProfilerStep#2", 30, 20, "user_annotation")]
    found = of(tmp_path, *steps, kernel(GEMM, 5, 10), kernel(GEMM, 45, 15))
    assert classes(found) == (20, 0, 0, 0, 30), "10-15, 45-60 of 10-60"
    assert of(tmp_path, kernel(GEMM, 5, 10), kernel(GEMM, 45, 15)).window == 55_000, "without steps, all events"


def test_ranks_are_compared_without_their_clocks(tmp_path: Path) -> None:
    """Rank 1's clock is an hour ahead, and it computes longer: the others wait for it in the collective."""
    ranks = {}
    for rank, (offset, busy) in enumerate([(0.0, 20), (3.6e9, 35)]):
        group = {"Process Group Ranks": "[0, 1]", "Collective name": "_allgather_base"}
        ranks[rank] = of(
            tmp_path,
            window(offset, 60),
            kernel(GEMM, offset, busy),
            kernel(GATHER, offset + busy, 50 - busy, stream=20, **group),
            kernel(GEMM, offset + 50, 10),
            rank=rank, world=2,
        )  # fmt: skip
    assert classes(ranks[0]) == (30, 0, 30, 0, 0)
    assert classes(ranks[1]) == (45, 0, 15, 0, 0)
    found = {row.label: row for row in spreads(ranks)}
    assert (found["compute"].mean, found["compute"].most, found["compute"].most_rank) == (37_500, 45_000, 1)
    assert (found["exposed"].least, found["exposed"].least_rank, found["exposed"].most_rank) == (15_000, 1, 0)
    assert found["window"].least == found["window"].most == 60_000
    assert waited_for_others(ranks) == {0: 15_000, 1: 0}, "rank 0 was there 15 microseconds earlier"


def test_groups_that_do_not_match_say_nothing_of_waiting(tmp_path: Path) -> None:
    def rank(count: int, members: str):
        group = {"Process Group Ranks": members, "Collective name": "allreduce"}
        return of(tmp_path, *(kernel(GATHER, 10 * place, 5, **group) for place in range(count)))

    assert waited_for_others({0: rank(2, "[0, 1]"), 1: rank(3, "[0, 1]")}) == {}
    assert waited_for_others({0: rank(2, "[0, 2]"), 1: rank(2, "[1, 3]")}) == {}


def test_traces_are_read_compressed_too_and_others_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.json.gz"
    whole = gzip.compress(json.dumps({"traceEvents": STEP, "forge": {"rank": 3}}).encode())
    path.write_bytes(whole)
    assert classes(summarize(read_trace(path))) == (15, 25, 40, 6, 14) and read_trace(path).about == {"rank": 3}
    for content in (whole[: len(whole) // 2], b"", gzip.compress(b"{}"), gzip.compress(b"[1]")):
        path.write_bytes(content)
        with pytest.raises(ForgeError, match="cannot be read as a trace"):
            read_trace(path)
    with pytest.raises(ForgeError, match="no event that took time"):
        of(tmp_path, host("aten::mm", 3, 0))


def test_fractions_of_microseconds_are_whole_nanoseconds(tmp_path: Path) -> None:
    """As far from zero as clocks of torch are."""
    since = 4657716505088.111
    found = of(tmp_path, window(since, 10.75), kernel(GEMM, since + 0.25, 0.625), kernel(GATHER, since + 10.5, 0.25))
    assert list(found.classes.values()) == [625, 0, 250, 0, 10_750 - 875]
