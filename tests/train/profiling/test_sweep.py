"""Each instant in exactly one class: against answers worked out by hand, and against a count of every nanosecond."""

import random

from hypothesis import given
from hypothesis import strategies as st

from forge_train.profiling.classes import CLASSES, Stretch, WorkKind, WorkSpan, classify, totals

COMPUTE, COMMUNICATION, MEMORY = WorkKind.COMPUTE, WorkKind.COMMUNICATION, WorkKind.MEMORY


def classes(window: tuple[int, int], *spans: tuple[WorkKind, int, int]) -> tuple[int, ...]:
    """In the order compute, overlapped, exposed, memory, idle."""
    found = totals(classify((WorkSpan(kind, f"{kind}{start}", start, end) for kind, start, end in spans), window))
    return tuple(found[label] for label in CLASSES)


def test_the_classes_are_these_five_in_this_order() -> None:
    assert CLASSES == ("compute", "overlapped", "exposed", "memory", "idle")


def test_nothing_is_idle() -> None:
    assert classes((5, 15)) == (0, 0, 0, 0, 10)


def test_partial_overlap_on_two_streams() -> None:
    # compute 0-10, communication 6-15: 6 alone, 4 overlapped, 5 exposed, 5 of nothing
    assert classes((0, 20), (COMPUTE, 0, 10), (COMMUNICATION, 6, 15)) == (6, 4, 5, 0, 5)


def test_two_kernels_at_once_count_once() -> None:
    assert classes((0, 10), (COMPUTE, 0, 6), (COMPUTE, 2, 8), (COMPUTE, 0, 6)) == (8, 0, 0, 0, 2)


def test_a_copy_counts_only_where_nothing_else_runs() -> None:
    spans = [(MEMORY, 0, 12), (COMPUTE, 2, 4), (COMMUNICATION, 3, 8)]
    # 0-2 memory, 2-3 compute, 3-4 overlapped, 4-8 exposed, 8-12 memory
    assert classes((0, 12), *spans) == (1, 1, 4, 6, 0)


def test_what_lies_outside_is_cut_off_and_what_has_no_length_takes_no_time() -> None:
    spans = [(COMPUTE, -10, 3), (COMMUNICATION, 8, 99), (COMPUTE, 5, 5), (COMPUTE, 20, 30), (COMPUTE, -9, 0), (MEMORY, 10, 12)]
    assert classes((0, 10), *spans) == (3, 0, 2, 0, 5)


def test_nested_and_touching_intervals() -> None:
    spans = [(COMMUNICATION, 0, 10), (COMMUNICATION, 2, 3), (COMPUTE, 10, 12), (COMPUTE, 4, 4), (COMPUTE, 2, 3)]
    assert classes((0, 12), *spans) == (2, 1, 9, 0, 0)


def test_the_one_that_is_waited_for_is_the_one_that_ends_last() -> None:
    spans = [WorkSpan(COMMUNICATION, "short", 0, 4), WorkSpan(COMMUNICATION, "long", 2, 9), WorkSpan(COMPUTE, "gemm", 5, 6)]
    assert classify(spans, (0, 9)) == [
        Stretch(0, 2, "exposed", "short"),
        Stretch(2, 5, "exposed", "long"),
        Stretch(5, 6, "overlapped"),
        Stretch(6, 9, "exposed", "long"),
    ]


def test_one_that_ends_in_the_window_is_not_waited_for_afterwards() -> None:
    """A later end that was pushed first must not hide that it is over, nor one that is over hide a later one."""
    spans = [WorkSpan(COMMUNICATION, "b", 0, 3), WorkSpan(COMMUNICATION, "a", 0, 3), WorkSpan(COMMUNICATION, "c", 4, 5)]
    assert classify(spans, (0, 6)) == [
        Stretch(0, 3, "exposed", "a"),
        Stretch(3, 4, "idle"),
        Stretch(4, 5, "exposed", "c"),
        Stretch(5, 6, "idle"),
    ]


SPANS = st.lists(st.tuples(st.sampled_from(WorkKind), st.integers(-10, 60), st.integers(0, 30)), max_size=25)


@given(SPANS, st.integers(-5, 30), st.integers(1, 40), st.integers())
def test_they_sum_to_the_window_in_any_order_and_equal_a_count_of_every_nanosecond(
    drawn: list[tuple[WorkKind, int, int]], begin: int, length: int, seed: int
) -> None:
    window = (begin, begin + length)
    spans = [WorkSpan(kind, f"{kind}-{start}-{size}", start, start + size) for kind, start, size in drawn]
    stretches = classify(spans, window)
    assert [stretch.start for stretch in stretches[1:]] == [stretch.end for stretch in stretches[:-1]]
    assert (stretches[0].start, stretches[-1].end) == window
    found = totals(stretches)
    assert sum(found.values()) == length
    counted = dict.fromkeys(CLASSES, 0)
    for instant in range(*window):
        running = {span.kind for span in spans if span.start <= instant < span.end}
        both = {COMPUTE, COMMUNICATION} <= running
        label = (
            "overlapped" if both
            else "compute" if COMPUTE in running
            else "exposed" if COMMUNICATION in running
            else "memory" if running
            else "idle"
        )  # fmt: skip
        counted[label] += 1
    assert found == counted
    shuffled = spans.copy()
    random.Random(seed).shuffle(shuffled)
    assert classify(shuffled, window) == stretches
