"""The time of a step by its parts: traces with known answers, in microseconds."""

from pathlib import Path
from typing import Any

from forge_core.terminal import Console
from forge_train.commands.reports import draw
from forge_train.profiling.classes import has_parts
from forge_train.profiling.summary import summarize
from train.profiling.traces import GATHER, GEMM, event, host, kernel, trace, window


def part(name: str, start: float, duration: float) -> dict[str, Any]:
    return host(f"forge/{name}", start, duration, "user_annotation")


def launch(correlation: int, at: float, thread: int = 100) -> dict[str, Any]:
    return host("cudaLaunchKernel", at, 1, "cuda_runtime", thread, correlation=correlation)


def split(path: Path, *events: dict[str, Any]) -> dict[str, float]:
    return {name: time / 1000 for name, time in summarize(trace(path, events)).split.items()}


def test_work_of_a_device_belongs_to_the_part_that_launched_it(tmp_path: Path) -> None:
    found = split(
        tmp_path,
        window(0, 200),
        part("forward", 0, 20),
        part("backward", 20, 20),
        part("optimizer", 45, 10),
        launch(1, 5),
        launch(2, 25, thread=101),  # autograd has a thread for a device
        launch(3, 30, thread=101),
        launch(4, 50),
        launch(5, 40),  # between parts
        part("data", 140, 60),
        kernel(GEMM, 10, 40, correlation=1),  # 10-50 forward, though the host went on to the optimizer
        kernel(GATHER, 40, 30, stream=20, correlation=2),  # 50-60 exposed; 60-70 and before 50 overlapped
        kernel(GEMM, 60, 50, correlation=3),  # 60-110 backward
        event("Memcpy DtoD (Device -> Device)", "gpu_memcpy", 100, 20, correlation=4),  # 110-120 optimizer, alone
        kernel(GEMM, 130, 5, correlation=5),  # 130-135 other
        kernel(GEMM, 140, 10, correlation=99),  # nothing tells who launched it, least of all when it ran
    )
    assert found == {"forward": 40, "backward": 50, "optimizer": 10, "other": 15, "exposed": 10, "host": 75}
    assert list(found) == ["forward", "backward", "optimizer", "other", "exposed", "host"]


def test_an_operator_tells_the_part_where_no_launch_does(tmp_path: Path) -> None:
    found = split(
        tmp_path,
        window(0, 100),
        part("forward", 10, 20),
        host("aten::mm", 15, 2, **{"External id": 7}),
        kernel(GEMM, 40, 30, **{"External id": 7}),
    )
    assert found == {"forward": 30, "other": 0, "exposed": 0, "host": 70}


def test_threads_of_a_cpu(tmp_path: Path) -> None:
    found = split(
        tmp_path,
        window(0, 100),
        part("data", 0, 10),
        part("forward", 10, 30),
        part("sum", 20, 10),  # inside another one
        part("reduce", 60, 40),
        host("aten::mm", 12, 26),
        host("aten::sum", 22, 6),
        host("gloo:all_reduce", 30, 60, "user_annotation", thread=7),  # 38-90 exposed but for what follows
        host("aten::copy_", 50, 4),  # in no part
        host("aten::add", 70, 10, thread=101),
    )
    # mm: 12-22 and 28-38; add: 70-80; all_reduce alone: 38-50, 50-54 with a copy only, 54-70, 80-90; nothing: 0-12, 90-100
    assert found == {"forward": 20, "sum": 6, "reduce": 10, "other": 0, "exposed": 42, "host": 22}


def test_traces_of_other_programs_have_no_parts(tmp_path: Path, capsys: Any) -> None:
    foreign = summarize(trace(tmp_path, [window(0, 100), kernel(GEMM, 10, 20)]))
    assert foreign.split == {"other": 20_000, "exposed": 0, "host": 80_000} and not has_parts(foreign.split)
    draw({0: foreign}, 0, Console())
    assert "the time of a step" not in capsys.readouterr().out
    ours = summarize(
        trace(tmp_path, [window(0, 100), part("forward", 0, 9), launch(1, 5), kernel(GEMM, 10, 20, correlation=1)], steps=2)
    )
    draw({0: ours}, 0, Console())
    told = capsys.readouterr().out
    rows = [line.split() for line in told.splitlines()]
    assert ["forward", "0.010", "20.0"] in rows and ["host", "0.040", "80.0"] in rows, told
