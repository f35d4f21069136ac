"""The time that a scheduler leaves, against what saves have taken. Clocks are given."""

import math

from forge_train.run.saves import END, Grace


def test_without_a_grace_or_a_measured_save_nothing_lacks() -> None:
    grace = Grace(None, {})
    grace.took(1e6)
    assert (grace.left(), grace.lacks(), grace.too_short()) == (math.inf, 0.0, "")
    grace = Grace(5.0, {}, since=lambda: 100.0)
    assert (grace.needed, grace.lacks()) == (0.0, 95.0), "its time is over, so nothing is begun"


def test_fault_30_what_is_left_is_the_shorter_of_grace_and_job() -> None:
    grace = Grace(30.0, {END: "1000"}, since=lambda: 12.0, clock=lambda: 990.0)
    assert grace.left() == 10.0
    assert Grace(30.0, {END: "1000"}, since=lambda: 25.0, clock=lambda: 990.0).left() == 5.0
    assert Grace(None, {END: "1000"}, clock=lambda: 990.0).left() == 10.0


def test_an_end_that_has_passed_or_says_nothing_is_not_believed() -> None:
    for text in ("900", "", "soon", "-5"):
        assert Grace(30.0, {END: text}, clock=lambda: 990.0).left() == 30.0


def test_fault_30_a_save_lacks_what_the_median_of_the_newest_takes_longer() -> None:
    grace = Grace(30.0, {})
    for seconds in (500.0, 500.0, 500.0, 40.0, 32.0, 33.0, 31.0, 900.0):
        grace.took(seconds)
    assert grace.needed == 33.0 and grace.lacks() == 3.0
    assert grace.too_short().startswith("a save takes 33 s, but checkpoint.grace leaves 30 s after a signal")
    grace.seconds = 33.0
    assert (grace.lacks(), grace.too_short()) == (0.0, "")
