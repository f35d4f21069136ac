"""A run in bf16 on a CPU without units for it is told so in its first seconds, and `check` and `doctor` know it; and so is a run
that computes on the CPU of a machine with a GPU."""

import json
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console

from forge_core import machine
from forge_core.registry import Registry
from forge_train.cli import main
from forge_train.doctor import speed, torch_build
from forge_train.doctor.speed import CPU_SECONDS, CPU_SIZE, bf16_remark, cpu_speed
from forge_train.process.ranks import JobRanks
from forge_train.recipe.load import load_recipe
from forge_train.run.start import start_run
from train.runs import TINY


@pytest.fixture
def old_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "processor_flags", lambda root=None: frozenset({"avx2"}))
    monkeypatch.setattr(speed, "multiplies_bf16", lambda: False)
    monkeypatch.setattr(machine, "has_accelerator", lambda root=None: False)


def ticking(*seconds: float) -> "Iterator[float]":
    """Times at which a clock is read when products take `seconds`; nothing else takes time."""
    now = 0.0
    yield now
    for spent in seconds:
        yield now
        now += spent
        yield now


def test_w14_the_fastest_product_counts_and_time_is_bounded() -> None:
    clock = ticking(CPU_SECONDS / 2, CPU_SECONDS / 4, CPU_SECONDS / 3)
    assert cpu_speed(torch.float32, lambda: next(clock)) == pytest.approx(2 * CPU_SIZE**3 / (CPU_SECONDS / 4), rel=1e-9)
    assert not list(clock), "it stops when the time is spent"
    clock = ticking(2 * CPU_SECONDS)
    assert cpu_speed(torch.bfloat16, lambda: next(clock)) == pytest.approx(2 * CPU_SIZE**3 / (2 * CPU_SECONDS), rel=1e-9)


def test_w14_both_figures_are_told_where_bf16_is_slower(old_processor: None, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = {torch.bfloat16: 0.28e9, torch.float32: 122e9}
    monkeypatch.setattr(speed, "cpu_speed", lambda dtype, clock: figures[dtype])
    remark = bf16_remark()
    assert remark is not None and "0.28 GFLOP/s in bf16, 122 in fp32, 436 times as fast" in remark
    figures[torch.bfloat16] = 123e9
    assert bf16_remark() is None
    figures[torch.bfloat16] = 1e9
    monkeypatch.setattr(speed, "multiplies_bf16", lambda: True)
    assert bf16_remark() is None


@pytest.mark.parametrize("compute", ["bf16", "fp32"])
def test_w14_w13_a_run_tells_threads_and_slow_bf16(
    tmp_path: Path, old_processor: None, monkeypatch: pytest.MonkeyPatch, compute: str
) -> None:
    figures = {torch.bfloat16: 1e9, torch.float32: 5e9}
    monkeypatch.setattr(speed, "cpu_speed", lambda dtype, clock: figures[dtype])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    recipe = tmp_path / "tiny.toml"
    recipe.write_text(TINY.replace("threads = 1\n", ""))
    registry, said = Registry(), StringIO()
    resolved = load_recipe(recipe, [f"--job.dir={tmp_path / 'run'}", f"--precision.compute={compute}"], 1, registry)
    start_run(resolved, JobRanks(console=Console(file=said, width=500)))
    text = said.getvalue()
    assert text.startswith("cpu: 1 thread per process (OMP_NUM_THREADS)\n")
    assert ("1 GFLOP/s in bf16, 5 in fp32, 5 times as fast" in text) == (compute == "bf16")
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        (
            torch_build.BuildFacts(seen=True, version="2.13.0+cpu", driver=(12, 8)),
            "torch is built for GPUs: 2.13.0+cpu has no CUDA; needed: a build for CUDA or ROCm, since this node has a GPU. "
            "What to do: pip install torch --index-url https://download.pytorch.org/whl/cu128",
        ),
        (
            torch_build.BuildFacts(
                seen=True, version="2.13.0+cu130", cuda="13.0", driver=(12, 4), error="The NVIDIA driver is too old"
            ),
            "driver: supports CUDA 12.4 at most; needed: CUDA 13.0 or newer, for torch built for 13.0. What to do: install "
            "a newer driver, or a torch for this one: pip install torch --index-url https://download.pytorch.org/whl/cu124",
        ),
    ],
    ids=["a wheel without CUDA", "a driver that is too old"],
)
def test_a_run_on_the_cpu_of_a_machine_with_a_gpu_says_why_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, facts: torch_build.BuildFacts, why: str
) -> None:
    monkeypatch.setattr(machine, "has_accelerator", lambda root=None: True)
    monkeypatch.setattr(torch_build, "facts", lambda: facts)
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    recipe = tmp_path / "tiny.toml"
    recipe.write_text(TINY)
    registry, said = Registry(), StringIO()
    resolved = load_recipe(recipe, [f"--job.dir={tmp_path / 'run'}"], 1, registry)
    start_run(resolved, JobRanks(console=Console(file=said, width=500)))
    assert "warning: this machine shows a GPU, but torch cannot use it, and all work runs on the CPU" in said.getvalue()
    assert f"\n  {why}\n" in said.getvalue()


@pytest.mark.parametrize("compute", ["bf16", "fp32"])
def test_w14_check_warns(tmp_path: Path, old_processor: None, capsys: pytest.CaptureFixture[str], compute: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["check", "debug", f"--precision.compute={compute}", "--json"])
    assert not ended.value.code
    out, err = capsys.readouterr()
    assert (json.loads(out)["warnings"] != []) == (compute == "bf16") == ("no bf16 units" in err)


def test_w14_doctor_warns(old_processor: None, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plugins", "doctor", "debug", "--json"])
    assert "no bf16 units" in capsys.readouterr().err
