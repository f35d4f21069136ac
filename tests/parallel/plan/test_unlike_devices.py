"""Devices of ranks that are not alike: refused where kernels would differ, told of where only speed or memory does."""

import torch

from forge_parallel.launch import process_group
from forge_parallel.launch.environment import Launch
from forge_parallel.launch.meeting import Device, judged

GIB = 1 << 30
H100 = Device("one", "cuda", "NVIDIA H100", "9.0", 80 * GIB)
H200 = Device("two", "cuda", "NVIDIA H200", "9.0", 141 * GIB)
A100 = Device("two", "cuda", "NVIDIA A100", "8.0", 80 * GIB)
CPU = Device("two", "cpu", "cpu")


def test_equal_devices_are_nothing_to_speak_of() -> None:
    assert judged([H100] * 3) == judged([CPU, Device("three", "cpu", "cpu")]) == judged([H100]) == ("", "")
    nearly = Device("one", "cuda", "NVIDIA H100", "9.0", 80 * GIB - GIB)
    assert judged([H100, nearly]) == ("", ""), "error correction takes some memory"


def test_a_rank_without_a_gpu_among_ranks_with_one_is_named() -> None:
    fault, remark = judged([H100, H100, CPU])
    assert fault == (
        "ranks have devices of different kinds: ranks 0-1 have NVIDIA H100 of 9.0 80.00 GiB (one), rank 2 has cpu (two); "
        "`forge-train doctor` on two says why torch uses no GPU there"
    )
    assert remark == ""


def test_other_capabilities_are_refused() -> None:
    fault, _ = judged([H100, A100, H100])
    assert "different capabilities: ranks 0, 2 have NVIDIA H100 of 9.0 80.00 GiB (one), rank 1 has NVIDIA A100 of 8.0" in fault
    assert "CUDA_VISIBLE_DEVICES" in fault


def test_other_memory_is_told_of() -> None:
    fault, remark = judged([H100, H200])
    assert (
        fault == "" and "rank 0 has NVIDIA H100 of 9.0 80.00 GiB (one), rank 1 has NVIDIA H200 of 9.0 141.00 GiB (two)" in remark
    )
    slice_of_it = Device("one", "cuda", "NVIDIA H100", "9.0", 40 * GIB)
    assert "the smallest memory counts" in judged([H100, slice_of_it])[1]


def test_many_ranks_are_named_in_few_words() -> None:
    fault, _ = judged([H100 if rank % 2 else A100 for rank in range(64)])
    assert "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 24 more have NVIDIA A100" in fault


def test_one_process_asks_nobody() -> None:
    assert process_group.init_process_groups(Launch(), timeout=1) == torch.device("cpu")
