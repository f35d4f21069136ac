"""Which frames of a clip are taken: by their times, from the first to the last."""

from collections.abc import Sequence

import numpy as np


def chosen(times: Sequence[float], count: int) -> list[int]:
    """Numbers of at most `count` frames, ascending: for each of `count` equally distant moments from the first time to the last
    the frame nearest to it, each frame once. One frame is the one in the middle.

    Args:
        times: in seconds, ascending.
        count: frames wanted.
    """
    if len(times) <= count:
        return list(range(len(times)))
    moments = np.linspace(times[0], times[-1], count) if count > 1 else [(times[0] + times[-1]) / 2]
    all_times = np.asarray(times, dtype=np.float64)
    return sorted({int(np.abs(all_times - moment).argmin()) for moment in moments})
