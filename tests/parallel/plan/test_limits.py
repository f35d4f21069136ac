"""How long a part of a run may take is learned from it: noise does not raise an alarm, a hang does."""

import random

from forge_parallel.launch.watch import LearnedLimits


def alarms(times: list[float]) -> int:
    """How many of these, one after another, took longer than they might."""
    limits, found = LearnedLimits(0.0), 0
    for seconds in times:
        limit = limits.of("step", 600)
        found += limit is not None and seconds > limit
        limits.took("step", seconds)
    return found


def test_fault_35_no_false_alarm_in_1000_noisy_clean_steps() -> None:
    for seed in range(20):
        noise = random.Random(seed)
        clean = [noise.lognormvariate(0, 0.4) * (5 if noise.random() < 0.02 else 1) for _ in range(1000)]
        assert alarms(clean) == 0
        assert alarms([60.0, *clean]) == 0, "a first step that compiles"
        assert alarms([*clean, 30.0]) == 1, "thirty times the median is a hang"


def test_fault_35_a_limit_is_ten_times_the_ninetieth_percentile_and_never_below_the_floor() -> None:
    limits = LearnedLimits(3.0, waiting=("data",))
    for seconds in range(1, 10):
        limits.took("step", seconds)
    assert limits.of("step", 600) is None, "nine times are too few"
    limits.took("step", 10)
    assert limits.of("step", 600) == 90, "of one to ten, nine are not above nine"
    for _ in range(10):
        limits.took("update", 0.001)
    assert limits.of("update", 600) == 3
    assert limits.of("data", 600) == 600, "as long as ranks wait for each other, until it is known"
    assert limits.of("evaluate", 600) is None
    for _ in range(200):
        limits.took("step", 1)
    assert limits.of("step", 600) == 10, "old times are forgotten"
