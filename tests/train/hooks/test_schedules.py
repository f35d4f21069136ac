"""Schedules against closed forms and torch's own schedulers."""

import math
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forge_core.errors import ConfigError
from forge_core.layout import Layout
from forge_train.components.schedules import Constant, Cosine, Linear, MultiStep, Schedule, Wsd
from forge_train.recipe.checks import schedule_fits

EVERY = [Constant, Cosine, Linear, MultiStep, Wsd]


def torch_curve(make, steps):
    """The factors that a scheduler of torch gives to an optimizer with rate 1."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = make(optimizer)
    factors = []
    for _ in range(steps):
        factors.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return factors


def test_cosine_equals_torch() -> None:
    expected = torch_curve(lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=40, eta_min=0.1), 40)
    factor = Cosine(min_ratio=0.1).build(40)
    assert [factor(s) for s in range(40)] == pytest.approx(expected, abs=1e-12)


def test_cosine_after_warmup_starts_at_the_full_rate() -> None:
    factor = Cosine(warmup=10, min_ratio=0.2).build(110)
    expected = {0: 0.1, 4: 0.5, 9: 1.0, 10: 1.0, 35: 0.2 + 0.8 * (1 + math.sqrt(0.5)) / 2, 60: 0.6, 110: 0.2}
    assert {s: factor(s) for s in expected} == pytest.approx(expected, abs=1e-12)


def test_linear_equals_torch() -> None:
    expected = torch_curve(lambda o: torch.optim.lr_scheduler.LinearLR(o, start_factor=1.0, end_factor=0.25, total_iters=30), 30)
    factor = Linear(min_ratio=0.25).build(30)
    assert [factor(s) for s in range(30)] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("shape", "quarter", "half"),
    [
        ("linear", 0.75, 0.5),
        ("cosine", (1 + math.cos(math.pi / 4)) / 2, 0.5),
        ("sqrt", math.sqrt(0.75), math.sqrt(0.5)),
        ("one_minus_sqrt", 0.5, 1 - math.sqrt(0.5)),
    ],
)
def test_wsd_closed_form(shape, quarter, half) -> None:
    factor = Wsd(warmup=4, decay=0.2, shape=shape, min_ratio=0.1).build(100)
    expected = {0: 0.25, 3: 1.0, 4: 1.0, 50: 1.0, 79: 1.0, 80: 1.0, 85: 0.1 + 0.9 * quarter, 90: 0.1 + 0.9 * half, 100: 0.1}
    assert {s: factor(s) for s in expected} == pytest.approx(expected, abs=1e-12)


def test_constant_is_one_after_warmup() -> None:
    factor = Constant(warmup=2).build(5)
    assert [factor(s) for s in range(5)] == [0.5, 1.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("kind", EVERY)
@given(steps=st.integers(1, 300), part=st.floats(0, 1))
def test_no_step_is_lost_at_rate_zero(kind: type[Schedule], steps: int, part: float) -> None:
    schedule = kind(warmup=int(part * steps))
    if schedule.faults(steps):
        return
    factor = schedule.build(steps)
    values = [factor(s) for s in range(steps)]
    assert all(0 < value <= 1 for value in values)
    assert max(values) == 1.0


@pytest.mark.parametrize("kind", EVERY)
def test_a_warmup_longer_than_the_run_is_a_fault(kind: type[Schedule]) -> None:
    job = SimpleNamespace(schedule=kind(warmup=11), train=SimpleNamespace(max_steps=10))
    (fault,) = schedule_fits(job, Layout())
    assert fault.key == "schedule.warmup"
    assert "train.max_steps = 10" in fault.message
    with pytest.raises(ConfigError, match=r"schedule\.warmup.*11.*train\.max_steps = 10"):
        job.schedule.build(10)
    assert schedule_fits(SimpleNamespace(schedule=kind(warmup=5), train=SimpleNamespace(max_steps=10)), Layout()) == []


@pytest.mark.parametrize("kind", EVERY)
def test_a_warmup_that_fills_the_run_never_decays_in_silence(kind: type[Schedule]) -> None:
    faults = kind(warmup=10).faults(10)
    assert bool(faults) == (kind is not Constant)


def test_a_decay_inside_the_warmup_is_a_fault() -> None:
    job = SimpleNamespace(schedule=Wsd(warmup=9, decay=0.2), train=SimpleNamespace(max_steps=10))
    (fault,) = schedule_fits(job, Layout())
    assert fault.key == "schedule.decay"
    assert "11" in fault.message


def test_a_schedule_of_a_stranger_needs_no_faults_method() -> None:
    assert schedule_fits(SimpleNamespace(schedule=object(), train=SimpleNamespace(max_steps=1)), Layout()) == []


def test_checks_and_components_import_no_torch() -> None:
    code = (
        "import sys, forge_train.recipe.checks, forge_train.presets, forge_train.components.schedules as s;"
        "import forge_train.components.hooks, forge_train.components.trackers;"
        "s.Wsd(warmup=2).build(100);"
        "heavy = {'torch', 'numpy', 'tokenizers', 'matplotlib', 'rich'} & set(sys.modules);"
        "print(sorted(heavy)); sys.exit(bool(heavy))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_multi_step_equals_torch() -> None:
    expected = torch_curve(lambda o: torch.optim.lr_scheduler.MultiStepLR(o, milestones=[20, 30], gamma=0.1), 40)
    factor = MultiStep(at=(0.5, 0.75), factors=(0.1, 0.01)).build(40)
    assert [factor(s) for s in range(40)] == pytest.approx(expected, rel=1e-12)


def test_multi_step_names_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="give one factor for each"):
        MultiStep(at=(0.5,), factors=(0.1, 0.2))
    with pytest.raises(ValueError, match="must ascend"):
        MultiStep(at=(0.5, 0.5), factors=(0.1, 0.2))
    assert [fault.key for fault in MultiStep(warmup=6, at=(0.5,), factors=(0.1,)).faults(10)] == ["schedule.at"]
    assert MultiStep(warmup=5, at=(0.5,), factors=(0.1,)).faults(10) == []
