"""What a process may use of its machine, told by files that are made here."""

import os
from pathlib import Path

import pytest

from forge_core import machine as this_machine
from forge_core.machine import threads_per_process, usable_cores


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of a file system; 64 cores, all of them this process's."""
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_w13_all_cores_without_any_limit(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert usable_cores(machine) == 64
    monkeypatch.delattr(os, "sched_getaffinity")  # macOS
    assert usable_cores(machine) == 64
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_cores(machine) == 1


def test_w13_affinity_counts(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5, 9})
    assert usable_cores(machine) == 3


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("200000 100000", 2), ("250000 100000", 3), ("10000 100000", 1), ("max 100000", 64), ("9900000 100000", 64), ("", 64)],
)
def test_w13_a_quota_of_version_2_is_rounded_up(machine: Path, quota: str, expected: int) -> None:
    write(machine / "proc/self/cgroup", "0::/slurm/job_7/step_0\n")
    write(machine / "sys/fs/cgroup/slurm/job_7/step_0/cpu.max", "max 100000\n")
    write(machine / "sys/fs/cgroup/slurm/job_7/cpu.max", f"{quota}\n")
    assert usable_cores(machine) == expected


def test_w13_a_container_sees_its_group_at_the_root(machine: Path) -> None:
    write(machine / "proc/self/cgroup", "0::/../../elsewhere\n")
    write(machine / "sys/fs/cgroup/cpu.max", "400000 100000")
    write(machine / "sys/elsewhere/cpu.max", "100000 100000")  # no group: it is outside of the mount
    assert usable_cores(machine) == 4


@pytest.mark.parametrize("mount", ["cpu,cpuacct", "cpu"])
@pytest.mark.parametrize(("quota", "expected"), [("150000", 2), ("-1", 64)])
def test_w13_a_quota_of_version_1(machine: Path, mount: str, quota: str, expected: int) -> None:
    write(machine / "proc/self/cgroup", "5:cpuset:/docker/a\n4:cpu,cpuacct:/docker/a\n0::/docker/a\n")
    write(machine / f"sys/fs/cgroup/{mount}/docker/a/cpu.cfs_quota_us", f"{quota}\n")
    write(machine / f"sys/fs/cgroup/{mount}/docker/a/cpu.cfs_period_us", "100000\n")
    write(machine / "sys/fs/cgroup/cpuset/docker/a/cpu.cfs_quota_us", "100000\n")
    write(machine / "sys/fs/cgroup/cpuset/docker/a/cpu.cfs_period_us", "100000\n")
    assert usable_cores(machine) == expected


@pytest.mark.parametrize(
    ("processes", "chosen", "variable", "expected"),
    [
        (1, None, None, "12 threads per process (12 by affinity)"),
        (5, None, None, "2 threads per process (12 by affinity, shared by 5 processes)"),
        (40, None, "", "1 thread per process (12 by affinity, shared by 40 processes)"),
        (2, None, "3", "3 threads per process (OMP_NUM_THREADS)"),
        (2, None, " 4,2", "4 threads per process (OMP_NUM_THREADS)"),
        (2, None, "0", "6 threads per process (12 by affinity, shared by 2 processes)"),
        (2, None, "many", "6 threads per process (12 by affinity, shared by 2 processes)"),
        (2, 7, "3", "7 threads per process (train.threads)"),
    ],
)
def test_w13_threads_of_a_process(
    machine: Path, monkeypatch: pytest.MonkeyPatch, processes: int, chosen: int | None, variable: str | None, expected: str
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)))
    environment = {} if variable is None else {"OMP_NUM_THREADS": variable}
    assert str(threads_per_process(processes, chosen, environment, machine)) == expected


def test_w13_no_package_counts_the_processors_itself() -> None:
    root = Path(__file__).parents[2]
    sources = [file for part in ("packages", "apps") for file in (root / part).glob("*/src/**/*.py")]
    assert len(sources) > 100
    found = [file.name for file in sources if "cpu_count" in file.read_text() or "sched_getaffinity" in file.read_text()]
    assert found == ["machine.py"]


X86 = "processor\t: 0\nmodel name\t: Example 9000\nflags\t\t: fpu avx2 {}\n\nprocessor\t: 1\nflags\t\t: fpu amx_bf16\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (X86.format("avx512f"), False),
        (X86.format("avx512f avx512_bf16"), True),
        (X86.format("amx_bf16 amx_tile"), True),
        ("processor\t: 0\nFeatures\t: fp asimd bf16 i8mm\n", True),
        ("processor\t: 0\nFeatures\t: fp asimd\n", False),
        ("processor\t: 0\n", None),
        (None, None),
    ],
)
def test_w14_units_for_bf16_are_seen_in_the_flags(tmp_path: Path, text: str | None, expected: bool | None) -> None:
    if text is not None:
        write(tmp_path / "proc/cpuinfo", text)
    assert this_machine.multiplies_bf16(tmp_path) is expected
    assert (this_machine.slow_bf16(tmp_path) is not None) == (expected is False)


def test_w14_a_gpu_computes_bf16_whatever_the_processor_does(tmp_path: Path) -> None:
    write(tmp_path / "proc/cpuinfo", X86.format(""))
    assert "(Example 9000) has no bf16 units" in (this_machine.slow_bf16(tmp_path) or "")
    write(tmp_path / "dev/nvidiactl", "")
    assert this_machine.slow_bf16(tmp_path) is None


@pytest.mark.parametrize(
    ("file", "device", "environment", "told"),
    [
        ("dev/nvidia0", "cpu", {}, True),
        ("dev/kfd", "cpu", {"CUDA_VISIBLE_DEVICES": "0,1"}, True),
        ("dev/nvidia0", "cuda", {}, False),
        ("dev/nvidia0", "cpu", {"CUDA_VISIBLE_DEVICES": ""}, False),
        ("dev/kfd", "cpu", {"HIP_VISIBLE_DEVICES": "-1"}, False),
        ("dev/null", "cpu", {}, False),
    ],
)
def test_a_gpu_that_is_not_used_is_told_of(
    tmp_path: Path, file: str, device: str, environment: dict[str, str], told: bool
) -> None:
    """A build of torch without CUDA on a GPU node, or a driver that is too old, would train on the CPU and say nothing."""
    write(tmp_path / file, "")
    assert ("forge-train doctor" in (this_machine.idle_accelerator(device, environment, tmp_path) or "")) == told
