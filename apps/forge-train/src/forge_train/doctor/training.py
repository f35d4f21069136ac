"""Trains the recipe for some steps, compares its speed and memory with the plan, and runs the GPU tests of the repository."""

import math
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

import forge_train
from forge_core.protocols.run import Hook, StepResult
from forge_core.registry import Registry
from forge_core.terminal import size
from forge_parallel.accelerator import name, take_peaks, use, warns_of_waits
from forge_train.doctor.measure import device, wait
from forge_train.doctor.peaks import peak
from forge_train.doctor.step import Check, DoctorSettings, Skip
from forge_train.process.ranks import JobRanks
from forge_train.recipe.load import Recipe, load_recipe
from forge_train.run.loop import fit
from forge_train.run.start import start_run

_STEPS, _CPU_STEPS = 20, 6
_WARM = 3
"""Number of first steps that are not timed, because kernels are loaded and chosen in them."""
_MICRO_BATCHES = 2
_NEAR = 0.15
_MEMORY = 1.25
_MFU = 0.25
_JITTER = 1.5


class Watching(Hook):
    """Records seconds, losses and synchronizations of every step; ends the run after `limit` seconds (0: never)."""

    def __init__(self, here: torch.device, limit: float = 0.0) -> None:
        self.here, self.limit = here, limit
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.waits: list[int] = []
        self.told: list[warnings.WarningMessage] = []
        self.warned = False
        self.peak: int | None = None

    def start(self, run: Any) -> None:
        """Starts the clock."""
        wait(self.here)
        self.began = self.mark = perf_counter()

    def after_step(self, run: Any, result: StepResult) -> None:
        """Records the loss, which synchronizes with the device, and the time."""
        self.losses.append(result.numbers()["loss"])
        now = perf_counter()
        self.seconds.append(now - self.mark)
        self.mark = now
        self.waits.append(sum("synchroniz" in str(one.message) for one in self.told))
        self.told.clear()
        if self.limit and now - self.began > self.limit:
            run.stop.asked = True


def examine_training(settings: DoctorSettings) -> Iterator[Check]:
    """Step `training`: trains the recipe for some steps; checks losses, speed and memory."""
    here = _device()
    steps = _CPU_STEPS if here.type == "cpu" else _STEPS
    recipe, watching = _trained(settings, here, steps)
    yield _losses(recipe, watching.losses)
    timed = sorted(watching.seconds[_WARM:])
    middle = timed[len(timed) // 2]
    train, length = recipe.job.train, recipe.job.data.sequence_length
    rate = train.global_batch * length / middle
    yield Check("tokens per second", "PASS", rate, "tokens/s", "report only", "", "higher")
    yield Check("first step", "PASS", watching.seconds[0], "s", "report only; includes compilation")
    yield _used(recipe, rate, length, here)
    if watching.warned:
        waits = max(watching.waits[_WARM:])
        yield Check(
            "waits of the host in a step", "PASS", float(waits), "", "report only: 0 for a dense model, 1 per layer with experts"
        )
    if watching.peak is not None:
        yield _memory(recipe, watching.peak)


def endure(settings: DoctorSettings) -> Iterator[Check]:
    """Step `endurance`: trains the recipe for minutes; checks losses and that steps stay equally fast."""
    if not settings.minutes:
        raise Skip("--minutes is not set", "set --minutes 30")
    here = _device()
    recipe, watching = _trained(settings, here, 10**7, 60 * settings.minutes)
    yield _losses(recipe, watching.losses)
    timed = sorted(watching.seconds[_WARM:] or watching.seconds)
    middle, last = timed[len(timed) // 2], timed[min(len(timed) - 1, len(timed) * 99 // 100)]
    name, expected = "99th percentile of a step over the median", f"{_JITTER} at most"
    remedy = "check clocks and temperature over time (nvidia-smi dmon), and other processes on this node"
    jitters = last > _JITTER * middle
    judged = "SLOW" if jitters and here.type != "cpu" else "PASS"
    yield Check(name, judged, last / middle, "", expected, remedy if judged == "SLOW" else "", "lower")
    yield Check("steps", "PASS", float(len(watching.seconds)), "", "report only")


def _device() -> torch.device:
    here = device()
    return here if here.type == "cpu" else torch.device(here.type, 0)


def _trained(settings: DoctorSettings, here: torch.device, steps: int, limit: float = 0.0) -> tuple[Recipe, Watching]:
    """Trains the recipe for some steps with random tokens, few micro-batches and no hooks, in a temporary folder."""
    registry, watching = Registry(), Watching(here, limit)
    train = load_recipe(settings.recipe, settings.overrides, None, registry).job.train
    vocabulary = getattr(load_recipe(settings.recipe, settings.overrides, None, registry).job.model, "vocab_size")  # noqa: B009
    with tempfile.TemporaryDirectory(prefix=".forge-doctor-", dir=settings.directory) as folder:
        changes = [
            f"--job.dir={Path(folder) / 'run'}",
            f"--data.sources=[{{name='random',vocab_size={vocabulary},tokens=10000000}}]",
            "--hooks=[]",
            f"--train.max_steps={steps}",
            f"--train.global_batch={_MICRO_BATCHES * train.micro_batch}",
            "--schedule.name=constant",
        ]
        recipe = load_recipe(settings.recipe, [*settings.overrides, *changes], 1, registry)
        if here.index is not None:
            use(here.index)
        run = start_run(recipe, JobRanks(device=here))
        run.hooks.append(watching)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            watching.told = told
            take_peaks(here)
            watching.warned = warns_of_waits(here)
            fit(run)
            watching.peak = take_peaks(here).get("device_memory")
            for tracker in run.trackers:
                tracker.close()
    return recipe, watching


def _losses(recipe: Recipe, losses: list[float]) -> Check:
    """Checks losses: tokens are uniformly random, so the best loss is the logarithm of the vocabulary size, and a new model is
    slightly worse."""
    best = math.log(getattr(recipe.job.model, "vocab_size"))  # noqa: B009 (a plugin's model may call it otherwise)
    expected = f"within {_NEAR:.0%} of {best:.3f}, the entropy of its random tokens, in every step"
    wrong = [index for index, loss in enumerate(losses) if not abs(loss - best) <= _NEAR * best]
    if wrong:
        told = f"{losses[wrong[0]]:.4f} in step {wrong[0] + 1}"
        remedy = "lower the learning rate if it is too high (--optimizer.lr); otherwise see the steps above"
        return Check("loss", "FAIL", told, "", expected, remedy)
    return Check("loss", "PASS", losses[-1], "nats per token", expected)


def _used(recipe: Recipe, rate: float, length: int, here: torch.device) -> Check:
    """Checks MFU: the share of the device's peak used for matrix products of the model."""
    from forge_models.flops import CONVENTION, counts_of

    label, counts = "MFU", counts_of(recipe.job.model)
    known = None if here.type == "cpu" else peak(name(here))
    if counts is None or known is None:
        return Check(label, "SKIPPED", "the peak of this device is not known" if counts else "the model declares no products")
    most = known.bf16 if recipe.job.precision.compute == "bf16" else known.fp32
    share = rate * counts.training(length) / most
    expected = f"{_MFU:.0%} at least; {CONVENTION}"
    if share < _MFU:
        remedy = "compile blocks or use larger micro-batches; the steps matmul and kernels show whether the GPU is at fault"
        return Check(label, "SLOW", 100 * share, "%", expected, remedy, "higher")
    return Check(label, "PASS", 100 * share, "%", expected, "", "higher")


def _memory(recipe: Recipe, peak_bytes: int) -> Check:
    """Compares peak memory with a dry run of the same recipe."""
    from forge_train.plan import dry_run

    assert recipe.layout is not None, "it was loaded for one process"
    plan = dry_run(recipe.job, recipe.layout, Registry(), 1)
    wanted = sum(plan.ranks[0].peak.values())
    expected = f"{size(wanted)} by forge-train plan, and at most {_MEMORY - 1:.0%} more"
    if peak_bytes > _MEMORY * wanted:
        remedy = "see the step kernels for those that keep too much, and plan with this much more memory"
        return Check("peak memory", "SLOW", peak_bytes / 2**30, "GiB", expected, remedy, "lower")
    return Check("peak memory", "PASS", peak_bytes / 2**30, "GiB", expected, "", "lower")


_TESTS = Path("tests/parallel/test_gpu.py")
_TESTS_SECONDS = 1700


def examine_tests(_: DoctorSettings) -> Iterator[Check]:
    """Step `tests`: runs the GPU tests of the repository."""
    if device().type == "cpu":
        raise Skip("no accelerator is visible", "see the step torch for the reason")
    root = next((folder for folder in Path(forge_train.__file__).parents if (folder / _TESTS).is_file()), None)
    if root is None or find_spec("pytest") is None or find_spec("hypothesis") is None:
        raise Skip(
            "the tests are not available", "clone the repository, install its packages, pytest and hypothesis, and run it there"
        )
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "gpu", "-p", "no:cacheprovider", str(root / "tests")]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=_TESTS_SECONDS, check=False)
    print(done.stdout)
    yield judge_tests(done.returncode, done.stdout)


def judge_tests(code: int, printed: str) -> Check:
    """Returns a check from pytest's exit code and output."""
    told = next((line for line in reversed(printed.splitlines()) if re.search(r"\d+ (passed|failed|error|skipped)", line)), "")
    expected = "every test passes or is skipped"
    if code == 0:
        return Check("pytest -m gpu", "PASS", told, "", expected)
    failed = ", ".join(re.findall(r"^(?:FAILED|ERROR) (\S+)", printed, re.MULTILINE)[:10])
    return Check(
        "pytest -m gpu", "FAIL", f"{told} {failed}".strip() or f"exit code {code}", "", expected, "report it with this file"
    )
