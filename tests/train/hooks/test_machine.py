"""Probes of the machines: a clean run says nothing; what fails is named with rank and host, on all ranks at one step."""

import errno
import os
import re
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from forge_core import files
from forge_core.protocols.run import Hook
from forge_parallel.launch.watch import PeerFailure
from forge_train.hooks import machine
from forge_train.hooks.machine import PROBE_FILE, Machine, MachineFault, collective_probe, device_probe, disk_probe
from forge_train.run.loop import fit
from forge_train.trackers import METRICS, read_metrics
from harness.pool import World
from train.runs import TINY, digest, prepared

HERE = socket.gethostname()


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


def device_that(spoils: Any) -> Any:
    """Products of the size that is probed go wrong; those of the model do not."""
    real = torch.Tensor.__matmul__

    def matmul(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        product = real(left, right)
        return spoils(product) if left.shape == right.shape == (256, 256) else product

    return patch.object(torch.Tensor, "__matmul__", matmul)


def wrong_device() -> Any:
    def spoils(product: torch.Tensor) -> torch.Tensor:
        product[3, 5] += 1
        return product

    return device_that(spoils)


def broken_device() -> Any:
    def spoils(product: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered\nmore lines")

    return device_that(spoils)


def broken_disk(number: int = errno.EIO) -> Any:
    def fsync(handle: int) -> None:
        raise OSError(number, os.strerror(number))

    return patch.object(files.os, "fsync", fsync)


def forgetful_disk() -> Any:
    return patch.object(machine.Path, "read_bytes", lambda path: bytes(path.stat().st_size))


class Breaks(Hook):
    """From step 3 on, something of one rank is broken."""

    def __init__(self, what: Any, rank: int) -> None:
        self.what, self.rank = what, rank

    def after_step(self, run: Any, result: Any) -> None:
        if run.state.step == 3 and run.topology.rank == self.rank:
            self.what().start()


def ended(recipe: Path, folder: Path, what: str, rank: int, **keys: Any) -> tuple[str, str, int, list[str]]:
    """Kind and text of the error of this rank, its step, and its warnings."""
    run, _ = prepared(recipe, [f"--job.dir={folder}", "--train.micro_batch=1"])
    run.hooks[:] = [Breaks(globals()[what], rank), Machine(every=2, **keys)]
    try:
        fit(run)
    except (MachineFault, PeerFailure) as error:
        return type(error).__name__, str(error), run.state.step, run.health.summary()
    finally:
        patch.stopall()
    return "", "", run.state.step, run.health.summary()


@pytest.mark.parametrize(
    ("what", "rank", "says"),
    [
        ("wrong_device", 1, "the device multiplies wrong: 1 of 65536 numbers differ"),
        ("broken_device", 1, "the device fails: CUDA error: uncorrectable ECC error encountered"),
        ("broken_disk", 0, r"\.probe-0 cannot be written: Input/output error"),
        ("forgetful_disk", 0, r"\.probe-0 has other bytes than were written"),
    ],
)
def test_fault_51_what_fails_ends_all_ranks_after_the_same_step_with_rank_and_host(
    world: World, recipe: Path, tmp_path: Path, what: str, rank: int, says: str
) -> None:
    found = world.run(ended, 2, recipe, tmp_path / "run", what, rank)
    assert [kind for kind, *_ in found] == ["MachineFault" if at == rank else "PeerFailure" for at in range(2)]
    for _, text, step, _ in found:
        assert text.startswith(f"after step 4, the machine of rank {rank} on {HERE} fails a probe: ") and step == 4
        assert re.search(says, text) and "more lines" not in text
    assert MachineFault("").exit_code == 6 and PeerFailure("").exit_code == 5
    assert not list((tmp_path / "run").glob(f"{PROBE_FILE}*"))


@pytest.mark.parametrize("rank", range(3))
def test_fault_51_a_wrong_sum_is_found(rank: int) -> None:
    """Of three ranks, which add 1, 2 and 3 times the same numbers; then the last of them is left out."""

    def summed(times: int) -> str:
        return collective_probe(rank, 3, torch.device("cpu"), lambda mine: (mine / (rank + 1)).round() * times)()

    assert summed(6) == ""
    assert summed(3).startswith("a sum over all ranks is wrong in 130")


def _clean(recipe: Path, folder: Path, probed: bool) -> tuple[list[str], str]:
    """Warnings and weights."""
    run, _ = prepared(recipe, [f"--job.dir={folder}", "--train.micro_batch=1", "--train.max_steps=30"])
    run.hooks[:] = [Machine(every=1)] if probed else []
    fit(run)
    assert [hook.writes for hook in run.hooks] == [run.topology.rank == 0] * probed, "one file for each host"
    return run.health.summary(), digest(run)


def test_fault_51_a_clean_run_has_no_alarm_and_the_bits_of_one_that_is_not_probed(
    world: World, recipe: Path, tmp_path: Path
) -> None:
    probed = world.run(_clean, 2, recipe, tmp_path / "probed", True)
    assert probed == world.run(_clean, 2, recipe, tmp_path / "bare", False)
    assert [warned for warned, _ in probed] == [[], []]
    lines = [line for line in read_metrics(tmp_path / "probed" / METRICS) if "machine/device_seconds" in line]
    assert [line["step"] for line in lines] == list(range(1, 31))
    assert all(0 < line[f"machine/{name}_seconds"] < 10 for line in lines for name in ("device", "disk", "collective"))
    assert all(line["machine/free_memory"] > 0 for line in lines)
    assert not list((tmp_path / "probed").glob(f"{PROBE_FILE}*"))


def test_what_is_slow_full_or_short_is_said_once_and_when_it_is_over(recipe: Path, tmp_path: Path) -> None:
    run, _ = prepared(recipe, [f"--job.dir={tmp_path / 'run'}", "--train.max_steps=5"])
    free = iter([2**30, 2**20, 2**20, 2**30, 2**30])
    said = iter([("", False), ("no space", True), ("no space", True), ("", False), ("", False)])
    waits = iter([1.0, 1.0, 0.0, 0.0, 0.0])
    hook = Machine(every=1, slow=0.9)
    run.hooks[:] = [hook, Replaces(hook, lambda: time.sleep(next(waits)) or "")]
    with (
        patch.object(machine, "available_memory", lambda: next(free)),
        patch.object(machine, "disk_probe", lambda path, number: next(said)),
    ):
        fit(run)
    who = f"rank 0 on {HERE}"
    assert [re.sub(r"1\.?\d* s,", "1 s,", line) for line in run.health.summary()] == [
        f"after step 1, {who}: the probe of 'device' takes 1 s, more than hook 'machine' allows (slow = 0.9)",
        f"after step 2, {who}: no space",
        f"after step 2, {who}: only 1.00 MiB of memory are left",
        f"after step 3, {who}: the probe of 'device' is well again",
        f"after step 4, {who}: the probe of 'full' is well again",
        f"after step 4, {who}: the probe of 'memory' is well again",
    ]


class Replaces(Hook):
    """Takes the place of what tries the device."""

    def __init__(self, hook: Machine, probe: Any) -> None:
        self.hook, self.probe = hook, probe

    def start(self, run: Any) -> None:
        self.hook.compute = self.probe


def test_a_disk_that_is_full_is_not_a_fault_and_one_that_fails_once_is_asked_again(tmp_path: Path) -> None:
    with broken_disk(errno.ENOSPC):
        said, full = disk_probe(tmp_path / "a", 1)
    assert full and said == f"{tmp_path / 'a'} cannot be written: No space left on device"
    real, failed = os.fsync, []

    def once(handle: int) -> None:
        if not failed:
            failed.append(1)
            raise OSError(errno.ESTALE, "stale")
        real(handle)

    with patch.object(files.os, "fsync", once):
        assert disk_probe(tmp_path / "a", 1) == ("", False)
    assert failed and list(tmp_path.iterdir()) == []


def test_the_device_of_this_machine_is_well_and_one_that_loses_bytes_is_not() -> None:
    probe, real = device_probe(torch.device("cpu")), torch.Tensor.cpu
    assert probe() == ""
    with patch.object(torch.Tensor, "cpu", lambda tensor: real(tensor) + (tensor.dtype == torch.int32)):
        assert probe() == "the device returns other bytes than were copied to it"


def _by_clock(recipe: Path, folder: Path, minutes: float) -> list[int]:
    """Steps after which this rank probed; only the clock of rank 0 runs, by 29.6 seconds a step."""
    run, _ = prepared(recipe, [f"--job.dir={folder}", "--train.micro_batch=1"])
    hook, steps, now = Machine(every=1, minutes=minutes), [], [0.0]
    hook.act = lambda given: steps.append(given.state.step)  # type: ignore[method-assign]

    class Clock(Hook):
        def before_step(self, run: Any) -> None:
            now[0] += 29.6 * (run.topology.rank == 0)

    run.hooks[:] = [Clock(), hook]
    with patch.object(machine, "time", SimpleNamespace(monotonic=lambda: now[0])):
        fit(run)
    return steps


def test_minutes_are_those_of_rank_0(world: World, recipe: Path, tmp_path: Path) -> None:
    assert world.run(_by_clock, 2, recipe, tmp_path / "run", 1.0) == [[3, 6]] * 2
