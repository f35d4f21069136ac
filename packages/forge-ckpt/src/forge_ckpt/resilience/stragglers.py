"""Which rank is slower than those that do the same work, judged by times that every rank has measured of itself.

In one window a rank is slow when it takes `ratio` times as long as the median of the others, by more than their scatter (their
median absolute deviation) and by enough to matter for a step. It is a straggler once it was slow in `most` of the last `WINDOWS`
windows, and until it was slow in none of them: one slow window is noise.
"""

from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

WINDOWS = 5
MOST = 3
RATIO = 1.5
SCATTERS = 5.0
"""Standard deviations of the others, by their median absolute deviation, that a slow rank lies above their median."""

SHARE = 0.1
"""What a slow rank costs at least: this part of the time of a step."""

_SIGMA = 1.4826
"""A normal distribution's standard deviation over its median absolute deviation."""


class Time(NamedTuple):
    """What a rank has measured of a window.

    Attributes:
        own: seconds of a step that it worked by itself, a median over the steps.
        step: seconds of a whole step, waiting included.
        alike: of ranks that do the same work, such as those of a pipeline stage; only they are compared.
    """

    own: float
    step: float
    alike: Hashable = 0


class Slow(NamedTuple):
    """A rank that has just become a straggler, or is none any more.

    Attributes:
        own, others: seconds of a step, of this rank and of the median of the others, in the newest window.
        over: whether it is none any more.
    """

    rank: int
    own: float
    others: float
    over: bool = False


@dataclass
class Stragglers:
    """Judges window after window; the same times give the same answer on every rank.

    Args:
        ratio: how many times as long as the others a slow rank takes.
        most: slow windows among the last `WINDOWS` that make a straggler.
        resolution: seconds; a smaller difference is not measured.
    """

    ratio: float = RATIO
    most: int = MOST
    resolution: float = 0.0
    named: set[int] = field(default_factory=set)
    _slow: defaultdict[int, deque[bool]] = field(default_factory=lambda: defaultdict(lambda: deque(maxlen=WINDOWS)))

    def take(self, times: Sequence[Time]) -> list[Slow]:
        """The times of one window, by rank; what has changed."""
        changed = []
        for rank, mine in enumerate(times):
            others = [time.own for other, time in enumerate(times) if other != rank and time.alike == mine.alike]
            usual = median(others) if others else mine.own
            seen = self._slow[rank]
            seen.append(self._is_slow(mine, others, usual))
            if rank not in self.named and sum(seen) >= self.most:
                self.named.add(rank)
                changed.append(Slow(rank, mine.own, usual))
            elif rank in self.named and not any(seen):
                self.named.discard(rank)
                changed.append(Slow(rank, mine.own, usual, over=True))
        return changed

    def _is_slow(self, mine: Time, others: Sequence[float], usual: float) -> bool:
        scatter = _SIGMA * median(abs(other - usual) for other in others) if others else 0.0
        more = mine.own - usual
        return more > max((self.ratio - 1) * usual, SCATTERS * scatter, SHARE * mine.step, self.resolution)
