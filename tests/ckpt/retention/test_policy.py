"""What each rule of retention keeps, against definitions that are written out here, over random runs."""

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from forge_ckpt.checkpoint.retention import RetentionPolicy, judge
from forge_ckpt.format.names import Committed, committed, step_name

STEPS = some.lists(some.integers(0, 5000), min_size=1, max_size=40, unique=True).map(sorted)
RULES = some.fixed_dictionaries(
    {
        "last": some.integers(1, 4),
        "every": some.sampled_from([0, 1, 7, 100]),
        "log_spaced": some.none() | some.integers(0, 300),
        "hours": some.sampled_from([0.0, 0.5, 3.0]),
    }
)


def entries(steps: list[int]) -> list[Committed]:
    return committed(map(step_name, steps))


def seconds(steps: list[int]) -> dict[str, float]:
    """Of a run with 9 s a step."""
    return {step_name(step): 9.0 * step for step in steps}


def kept(steps: list[int], policy: RetentionPolicy, **more: Any) -> set[int]:
    return {found.entry.step for found in judge(entries(steps), policy, seconds(steps), **more) if found.kept_by}


def pruned_on_the_way(steps: list[int], policy: RetentionPolicy) -> set[int]:
    """What is left when a run prunes after each save."""
    held: list[int] = []
    for step in steps:
        held = sorted(kept([*held, step], policy))
    return set(held)


def by_definition(steps: list[int], rules: dict[str, Any]) -> set[int]:
    wanted = set(steps[-rules["last"] :])
    if rules["every"]:
        wanted |= {step for step in steps if step % rules["every"] == 0}
    if rules["log_spaced"] is not None:
        starts = [rules["log_spaced"], *(rules["log_spaced"] + 2**k for k in range(14))]
        for low, high in zip(starts, [*starts[1:], math.inf], strict=True):
            wanted |= set([step for step in steps if low <= step < high][:1])
    if rules["hours"]:
        for window in range(int(5000 * 9 / 3600 / rules["hours"]) + 1):
            low, high = window * rules["hours"] * 3600, (window + 1) * rules["hours"] * 3600
            wanted |= set([step for step in steps if low <= 9 * step < high][:1])
    return wanted


@settings(max_examples=150, deadline=None)
@given(STEPS, RULES)
def test_rules_keep_what_their_definitions_say_and_add_up(steps: list[int], rules: dict[str, Any]) -> None:
    assert kept(steps, RetentionPolicy(**rules)) == by_definition(steps, rules)


@settings(max_examples=100, deadline=None)
@given(STEPS, RULES)
def test_one_at_a_time_or_all_at_once_is_the_same(steps: list[int], rules: dict[str, Any]) -> None:
    rules["last"] = 1  # a run that keeps more has pruned what was among the last ones then; the end is the same
    assert pruned_on_the_way(steps, RetentionPolicy(**rules)) == kept(steps, RetentionPolicy(**rules))


@settings(max_examples=150, deadline=None)
@given(STEPS, some.integers(0, 300))
def test_log_spaced_is_few_and_leaves_no_hole(steps: list[int], start: int) -> None:
    left = pruned_on_the_way(steps, RetentionPolicy(last=1, log_spaced=start))
    reach = max(2, steps[-1])
    assert len(left) <= 1 + 2 + math.log2(reach)  # one is the newest
    for step in steps:
        if step > start:
            assert any(start + (step - start) / 2 < found <= step for found in left), step
    if start in steps:
        assert start in left


def test_log_spaced_of_a_run_that_saves_each_step() -> None:
    assert pruned_on_the_way(list(range(1001)), RetentionPolicy(last=1, log_spaced=0)) == {
        0,
        1,
        2,
        4,
        8,
        16,
        32,
        64,
        128,
        256,
        512,
        1000,
    }
    assert len(kept(list(range(100_000)), RetentionPolicy(last=1, log_spaced=0))) == 19


def test_nothing_goes_without_a_limit() -> None:
    assert kept([1, 2, 3], RetentionPolicy()) == {1, 2, 3} == kept([1, 2, 3], RetentionPolicy(every=100))


def test_of_a_step_the_last_generation_counts() -> None:
    found = judge(committed(["step-00000002", "step-00000001-g2", "step-00000001"]), RetentionPolicy(last=2))
    assert [(verdict.entry.name, verdict.kept_by, verdict.why) for verdict in found[1:]] == [
        ("step-00000001-g2", ("last 2",), "no rule keeps it"),
        ("step-00000001", (), "replaced by step-00000001-g2"),
    ]


def test_verdicts_name_every_rule() -> None:
    policy = RetentionPolicy(last=1, every=64, log_spaced=0, hours=0.25)
    found = judge(entries([64, 100]), policy, seconds([64, 100]), spare={64: "mark best"})
    assert found[0].kept_by == ("last 1", "first after 0.25 h of training")
    assert found[1].kept_by == ("every 64 steps", "first from step 64", "first after 0 h of training", "mark best")
    assert judge(entries([1, 2]), RetentionPolicy(last=1), spare=(1,))[1].kept_by == ("spared",)


def test_a_checkpoint_without_a_time_has_no_window() -> None:
    names = [step_name(step) for step in (1, 2, 3)]
    found = judge(entries([1, 2, 3]), RetentionPolicy(last=1, hours=1.0), {names[1]: 10.0})
    assert [verdict.entry.step for verdict in found if verdict.kept_by] == [3, 2]


@pytest.mark.parametrize("rules", [{"last": -1}, {"every": -1}, {"log_spaced": -1}, {"hours": -1.0}, {"hours": math.nan}])
def test_rules_are_not_negative(rules: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="not be negative"):
        RetentionPolicy(**rules)
