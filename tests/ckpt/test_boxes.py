"""Box arithmetic against counting every element with numpy."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_ckpt.format.manifest import cover_fault, meeting, overlap


def counted(shape: list[int], boxes: list[tuple[list[int], list[int]]]) -> np.ndarray:
    """How often each element is covered: the slow, obvious way."""
    count = np.zeros(shape, dtype=int)
    for offset, extent in boxes:
        count[tuple(slice(o, o + e) for o, e in zip(offset, extent, strict=True))] += 1
    return count


def table(boxes: list[tuple[list[int], list[int]]], dims: int) -> tuple[np.ndarray, np.ndarray]:
    offset = np.array([box[0] for box in boxes], dtype=np.int64).reshape(-1, dims)
    return offset, np.array([box[1] for box in boxes], dtype=np.int64).reshape(-1, dims)


@st.composite
def partitions(draw: st.DrawFn) -> tuple[list[int], list[tuple[list[int], list[int]]]]:
    """A shape of up to three dimensions, cut into boxes by random straight cuts."""
    shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    boxes = [([0] * len(shape), list(shape))]
    for _ in range(draw(st.integers(0, 8))):
        at = draw(st.integers(0, len(boxes) - 1))
        dim = draw(st.integers(0, len(shape) - 1))
        offset, extent = boxes[at]
        if extent[dim] > 1:
            cut = draw(st.integers(1, extent[dim] - 1))
            left, right = list(extent), list(extent)
            left[dim], right[dim] = cut, extent[dim] - cut
            moved = list(offset)
            moved[dim] += cut
            boxes[at : at + 1] = [(offset, left), (moved, right)]
    return shape, draw(st.permutations(boxes))


@settings(max_examples=150, deadline=None)
@given(partitions(), st.data())
def test_cover_agrees_with_counting(case, data) -> None:
    shape, boxes = case
    offset, extent = table(boxes, len(shape))
    assert cover_fault(np.array(shape), offset, extent) is None
    # any change of one number, a lost box, a doubled box: judged as counting judges it
    at, dim = data.draw(st.integers(0, len(boxes) - 1)), data.draw(st.integers(0, len(shape) - 1))
    changed = [(list(o), list(e)) for o, e in boxes]
    kind = data.draw(st.sampled_from(["grow", "shrink", "move", "lose", "double"]))
    if kind == "grow":
        changed[at][1][dim] += 1
    elif kind == "shrink":
        changed[at][1][dim] -= 1
    elif kind == "move":
        changed[at][0][dim] += data.draw(st.sampled_from([-1, 1]))
    elif kind == "lose":
        del changed[at]
    else:
        changed.append(changed[at])
    inside = all(o >= 0 and e >= 1 and o + e <= s for b in changed for o, e, s in zip(*b, shape, strict=True))
    exact = inside and bool((counted(shape, changed) == 1).all())
    fault = cover_fault(np.array(shape), *table(changed, len(shape)))
    assert (fault is None) == exact, (kind, fault)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 3), st.data())
def test_overlap_of_arbitrary_boxes_agrees_with_counting(dims, data) -> None:
    side = st.lists(st.integers(0, 5), min_size=dims, max_size=dims)
    boxes = data.draw(st.lists(st.tuples(side, st.lists(st.integers(1, 4), min_size=dims, max_size=dims)), max_size=7))
    offset, extent = table(boxes, dims)
    pair = overlap(offset, offset + extent)
    assert (pair is not None) == bool((counted([10] * dims, boxes) > 1).any())
    if pair is not None:
        assert (counted([10] * dims, [boxes[pair[0]], boxes[pair[1]]]) > 1).any()


def test_pinwheel_that_no_straight_cut_splits() -> None:
    boxes = [([0, 0], [1, 2]), ([0, 2], [2, 1]), ([2, 1], [1, 2]), ([1, 0], [2, 1]), ([1, 1], [1, 1])]
    assert cover_fault(np.array([3, 3]), *table(boxes, 2)) is None
    assert "not covered" in str(cover_fault(np.array([3, 3]), *table(boxes[:-1], 2)))
    assert "overlap" in str(cover_fault(np.array([3, 3]), *table([*boxes[:-1], ([1, 0], [1, 2])], 2)))


def test_numbers_near_the_end_of_int64_do_not_wrap_around() -> None:
    huge = 2**62
    for offset, extent in [([huge], [huge]), ([2**63 - 1], [1]), ([1], [2**63 - 1]), ([-(2**63)], [1]), ([0], [-(2**63)])]:
        assert "not inside" in str(cover_fault(np.array([100]), np.array([offset]), np.array([extent])))


def test_irregular_groups_are_bounded() -> None:
    ring = np.zeros((20_000, 1), dtype=np.int64)
    with pytest.raises(ValueError, match="straight cut"):
        overlap(ring, ring + 1)


def test_meeting_finds_exactly_the_boxes_that_share_an_element() -> None:
    offset, extent = table([([0, 0], [2, 4]), ([2, 0], [2, 2]), ([2, 2], [2, 2])], 2)
    assert meeting(offset, extent, np.array([1, 3]), np.array([3, 4])).tolist() == [0, 2]
