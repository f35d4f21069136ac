"""Arithmetic of boxes: do they cover a tensor exactly, and which of them meet a given one.

A box is (offset, extent) per dimension. Tables of boxes are int64 arrays (n, D); tensors of fewer than D dimensions are
padded with offset 0 and extent 1. Nothing here looks at single elements.
"""

import numpy as np

Table = np.ndarray
MAX_IRREGULAR = 16_384
"""Boxes that no straight cut separates are compared in pairs; more than this are refused."""


def cover_fault(shape: Table, offset: Table, extent: Table) -> str | None:
    """Why the boxes do not cover a tensor of `shape` (D,) exactly once; None when they do.

    Disjoint boxes inside the tensor whose volumes add up to its volume cover it. The caller has made sure that the
    tensor's volume fits int64; then so does every sum here.
    """
    inside = (offset >= 0) & (extent >= 1) & (extent <= shape) & (offset <= shape - extent)
    if not inside.all():
        bad = int(np.flatnonzero(~inside.all(axis=1))[0])
        return f"box {_text(offset[bad], extent[bad])} is not inside shape {shape.tolist()}"
    pair = overlap(offset, offset + extent)
    if pair is not None:
        first, second = pair
        return f"boxes {_text(offset[first], extent[first])} and {_text(offset[second], extent[second])} overlap"
    covered, wanted = int(extent.prod(axis=1).sum()), int(shape.prod())
    if covered != wanted:
        return f"{wanted - covered} of {wanted} elements are not covered by any box"
    return None


def overlap(low: Table, high: Table) -> tuple[int, int] | None:
    """Two boxes [low, high) that share an element, or None.

    Straight cuts split the boxes into groups, dimension after dimension; a box alone in its group meets no other. Layouts
    of shards fall apart at once; groups that no cut splits (a pinwheel) are compared in pairs.

    Raises:
        ValueError: a group of more than `MAX_IRREGULAR` boxes cannot be split.
    """
    count, dims = low.shape
    groups = [(np.arange(count), 0, 0)]
    while groups:
        members, dim, failed = groups.pop()
        if len(members) < 2:
            continue
        if failed == dims:
            pair = _overlap_in_pairs(members, low, high)
            if pair is not None:
                return pair
            continue
        starts = low[members, dim]
        order = np.argsort(starts, kind="stable")
        reach = np.maximum.accumulate(high[members[order], dim])
        cuts = np.flatnonzero(starts[order[1:]] >= reach[:-1]) + 1
        following = (dim + 1) % dims
        if cuts.size == 0:
            groups.append((members, following, failed + 1))
        elif cuts.size < len(members) - 1:
            groups.extend((part, following, 1) for part in np.split(members[order], cuts) if len(part) > 1)
    return None


def _overlap_in_pairs(members: Table, low: Table, high: Table) -> tuple[int, int] | None:
    if len(members) > MAX_IRREGULAR:
        raise ValueError(f"{len(members)} boxes cannot be separated by straight cuts; at most {MAX_IRREGULAR} are supported")
    low, high = low[members], high[members]
    for index in range(len(members) - 1):
        rest = slice(index + 1, None)
        meets = ((low[rest] < high[index]) & (low[index] < high[rest])).all(axis=1)
        if meets.any():
            return int(members[index]), int(members[index + 1 + int(np.argmax(meets))])
    return None


def meeting(offset: Table, extent: Table, low: Table, high: Table) -> Table:
    """Indices of the boxes that share an element with [low, high)."""
    return np.flatnonzero(((offset < high) & (offset + extent > low)).all(axis=1))


def _text(offset: Table, extent: Table) -> str:
    return "[" + ", ".join(f"{low}:{low + size}" for low, size in zip(offset.tolist(), extent.tolist(), strict=True)) + "]"
