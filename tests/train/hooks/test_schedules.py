"""Schedules against closed forms and torch's own schedulers."""

import importlib
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forge_core.errors import ConfigError
from forge_core.layout import Layout
from forge_core.registry import Registry
from forge_train.recipe.checks import schedule_fits
from forge_train.run.run import Run, State
from forge_train.schedules import (
    Constant,
    Cosine,
    CosineRestarts,
    InverseSqrt,
    Linear,
    MultiStep,
    Rex,
    Schedule,
    Unscheduled,
    Wsd,
)

REGISTERED = {entry.name: Registry().load_entry(entry) for entry in Registry().of("forge.schedules")}
EVERY = [schedule for schedule in REGISTERED.values() if issubclass(schedule, Schedule)]


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
        "import sys, forge_train.recipe.checks, forge_train.presets, forge_train.schedules as s;"
        "import forge_train.hooks.machine, forge_train.hooks.stragglers, forge_train.trackers;"
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
    with pytest.raises(ValueError, match="set one factor for each"):
        MultiStep(at=(0.5,), factors=(0.1, 0.2))
    with pytest.raises(ValueError, match="must ascend"):
        MultiStep(at=(0.5, 0.5), factors=(0.1, 0.2))
    assert [fault.key for fault in MultiStep(warmup=6, at=(0.5,), factors=(0.1,)).faults(10)] == ["schedule.at"]
    assert MultiStep(warmup=5, at=(0.5,), factors=(0.1,)).faults(10) == []


@pytest.mark.parametrize(
    ("at", "steps", "piece"), [((0.01, 0.5), 10, 1), ((0.5, 0.51), 10, 2), ((0.8, 0.99), 10, 3), ((0.8, 0.9), 4, 3)]
)
def test_trials_h_multi_step_refuses_a_piece_that_never_runs(at: tuple[float, ...], steps: int, piece: int) -> None:
    (fault,) = MultiStep(at=at, factors=(0.1,) * len(at)).faults(steps)
    assert fault.key == "schedule.at" and f"piece {piece} of 3 would begin and end at step" in fault.message
    assert MultiStep(at=at, factors=(0.1,) * len(at)).faults(1000) == []


def test_every_schedule_but_one_has_a_warm_up() -> None:
    assert set(REGISTERED.values()) - set(EVERY) == {Unscheduled}
    assert [Unscheduled().build(5)(step) for step in range(6)] == [1.0] * 6


@pytest.mark.parametrize("kind", EVERY)
def test_a_warm_up_rises_in_a_line_to_the_full_rate(kind: type[Schedule], tmp_path) -> None:
    for example in kind.examples(tmp_path):
        factor = replace(example, warmup=40).build(1000)
        assert [factor(step) for step in range(40)] == pytest.approx([(step + 1) / 40 for step in range(40)], abs=1e-15)
        assert factor(40) == pytest.approx(1.0, abs=0.02), "the decay begins where the warm-up ends"


@pytest.mark.parametrize("name", REGISTERED)
def test_a_schedule_multiplies_with_the_rate_of_a_data_phase(name: str) -> None:
    """`Run.update` gives the optimizer the product of both, at the step that is being done."""
    given: list[float] = []
    factor = REGISTERED[name]().build(100)
    run = SimpleNamespace(
        watch=SimpleNamespace(enter=lambda *_: None),
        job=SimpleNamespace(train=SimpleNamespace(grad_clip=None)),
        training=SimpleNamespace(factor=factor),
        health=SimpleNamespace(lr_scale=1.0),
        data=SimpleNamespace(lr_scale=lambda step: 0.25 if step >= 60 else 1.0),
        optimizer=SimpleNamespace(set_factor=given.append, step=lambda skip: None, zero_grad=lambda: None),
        state=State(0, 0, {}),
    )
    for step in range(100):
        run.state.step = step
        Run.update(run, SimpleNamespace(skip=None))  # pyright: ignore[reportArgumentType]
    assert given == [factor(step) * (0.25 if step >= 60 else 1.0) for step in range(100)]


def test_rex_is_the_published_profile() -> None:
    """Chen, Wolfe and Kyrillidis (2021): (1 - z) / (1/2 + 1/2 (1 - z)) with z = t / T; at half of the budget 2/3 are left."""
    factor = Rex().build(200)
    assert factor(100) == pytest.approx(2 / 3, abs=1e-15)
    assert [factor(t) for t in range(200)] == pytest.approx([2 * (200 - t) / (400 - t) for t in range(200)], abs=1e-14)
    later = Rex(warmup=10, min_ratio=0.1).build(210)
    assert {s: later(s) for s in (9, 10, 110, 210)} == pytest.approx(
        {9: 1.0, 10: 1.0, 110: 0.1 + 0.9 * 2 / 3, 210: 0.1}, abs=1e-14
    )


def test_inverse_sqrt_is_that_of_the_paper() -> None:
    """Vaswani et al. (2017), 5.3: min(n^-0.5, n * W^-1.5) of step n = 1, 2, ..., here with its largest value as the full rate."""
    factor = InverseSqrt(warmup=16).build(1000)
    paper = [min(n**-0.5, n * 16**-1.5) * 4 for n in range(1, 1001)]
    assert [factor(s) for s in range(1000)] == pytest.approx(paper, abs=1e-15)


def test_inverse_sqrt_without_a_warm_up_and_with_a_timescale() -> None:
    bare = InverseSqrt().build(100)
    assert [bare(s) for s in (0, 3, 24, 99)] == pytest.approx([1.0, 0.5, 0.2, 0.1], abs=1e-15)
    slow = InverseSqrt(warmup=10, timescale=300).build(1000)  # full at step 9, and 900 steps later at half
    assert [slow(s) for s in (4, 9, 909)] == pytest.approx([0.5, 1.0, 0.5], abs=1e-15)


@pytest.mark.parametrize(("first", "growth", "steps"), [(25, 1, 100), (10, 2, 70), (5, 3, 200)])
def test_restarts_equal_torch(first: int, growth: int, steps: int) -> None:
    count = {100: 4, 70: 3, 200: 4}[steps]  # 25 * 4, 10 + 20 + 40, 5 + 15 + 45 + 135
    expected = torch_curve(
        lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=first, T_mult=growth, eta_min=0.1), steps
    )
    factor = CosineRestarts(cycles=count, growth=float(growth), min_ratio=0.1).build(steps)
    assert [factor(s) for s in range(steps)] == pytest.approx(expected, abs=1e-12)


def test_peaks_of_restarts_sink() -> None:
    factor = CosineRestarts(warmup=4, cycles=3, peak=0.5, min_ratio=0.1).build(64)
    assert [factor(s) for s in (4, 14, 24, 34, 44, 54, 64)] == pytest.approx([1.0, 0.55, 0.5, 0.3, 0.25, 0.175, 0.1], abs=1e-12)
    assert factor(65) == 0.1


def test_cycles_that_do_not_fit_are_refused_before_anything_starts() -> None:
    assert CosineRestarts(cycles=10).faults(10) == []
    job = SimpleNamespace(schedule=CosineRestarts(warmup=1, cycles=10), train=SimpleNamespace(max_steps=10))
    (fault,) = schedule_fits(job, Layout())
    assert fault.key == "schedule.cycles" and "do not fit into the 9 steps" in fault.message
    assert [fault.key for fault in CosineRestarts(cycles=3, growth=100.0).faults(50)] == ["schedule.cycles"]
    assert [fault.key for fault in CosineRestarts(cycles=3, growth=1e300).faults(50)] == ["schedule.cycles"]
    with pytest.raises(ValueError, match=r"below min_ratio = 0\.3; raise peak or lower min_ratio"):
        CosineRestarts(cycles=3, peak=0.5, min_ratio=0.3)


def test_the_page_has_a_picture_of_every_schedule(monkeypatch) -> None:
    """Drawn by the schedules: a line for each example."""
    root = Path(__file__).parents[3]
    monkeypatch.syspath_prepend(str(root / "docs" / "_ext"))
    curves = importlib.import_module("forge_curves")
    drawn = dict(curves.charts())
    assert drawn.keys() == REGISTERED.keys()
    page = (root / "docs/concepts/training.md").read_text()
    assert f"]({curves.PICTURE.name})" in page
    for name, svg in drawn.items():
        assert f"| `{name}` |" in page, "its closed form is on the page"
        picture = ElementTree.fromstring(svg)
        points = [line.get("points", "") for line in picture.iter() if line.tag.endswith("polyline")]
        assert len(points) == len(list(REGISTERED[name].examples(Path()))), name
    number = re.compile(r"\d+\.\d")  # positions are rounded, and the last bit of a cosine differs between machines
    stored, now = curves.PICTURE.read_text(), curves.picture()
    assert number.sub("", stored) == number.sub("", now), "run `python docs/_ext/forge_curves.py`"
    assert [float(n) for n in number.findall(now)] == pytest.approx([float(n) for n in number.findall(stored)], abs=0.11)
    assert curves.curve(Linear())[62:64] == [(248.0, 0.752), (252.0, 0.748)]
    assert curves.settings(Wsd(warmup=50, shape="sqrt")) == "shape = sqrt"
