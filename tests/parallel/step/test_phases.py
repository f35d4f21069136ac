"""Parts of a step: their times, their names in a profile, and that they cost nothing otherwise."""

from contextlib import nullcontext
from time import perf_counter, sleep

import pytest
import torch

from forge_parallel.step.step import StepTimer


def test_times_are_those_of_the_clock_added_up_by_name() -> None:
    phases = StepTimer()
    phases.timed = True
    begun = perf_counter()
    for _ in range(2):
        with phases("forward"):
            sleep(0.02)
        sleep(0.01)
    with phases("backward"):
        sleep(0.01)
    whole = perf_counter() - begun
    found = phases.take()
    assert list(found) == ["forward", "backward", "other"]
    assert found["forward"] >= 0.04 and found["backward"] >= 0.01 and found["other"] >= 0.02
    assert sum(found.values()) <= whole and sum(found.values()) == pytest.approx(whole, abs=0.01)
    assert phases.take() == {}, "each once"


def test_parts_that_nobody_asked_for_are_not_kept() -> None:
    phases = StepTimer()
    with phases("forward"):
        phases.timed = True  # from the next one on
    assert phases.take() == {}
    assert type(StepTimer()("forward")) is nullcontext, "no event, no clock, no range"


def test_a_part_that_fails_is_over_and_the_failure_goes_on() -> None:
    phases = StepTimer()
    phases.timed = True
    with pytest.raises(ZeroDivisionError), phases("forward"):
        _ = 1 / 0
    assert list(phases.take()) == ["forward", "other"]


def test_drawing_is_timed_and_what_is_done_with_the_items_is_not() -> None:
    phases = StepTimer()
    phases.timed = True

    def slow():
        for item in range(3):
            sleep(0.01)
            yield item

    seen = []
    for item in phases.drawn("data", slow()):
        seen.append(item)
        sleep(0.05)
    assert seen == [0, 1, 2]
    assert 0.03 <= phases.take()["data"] < 0.1


def test_they_are_ranges_of_a_profile() -> None:
    phases = StepTimer()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler, phases("forward"):
        torch.ones(2).sum()
    events = profiler.events()
    assert events is not None and "forge/forward" in {event.name for event in events}
    assert phases.take() == {}, "a profile does not time by itself"
