"""Going on with fewer local ranks, where one place of this machine fails again and again or its device is gone.

A place is what a rank runs on, by the number of its local device. Where two starts in a row ended because of the rank
at the same place, the next one leaves it out; where the machine shows fewer devices than before, the next one uses what is left.
How many of the places that are left a job can use, only the job can say.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from forge_ckpt.resilience.local_ranks import FOLLOWS, Ended

NONE_GONE = 0
"""Of devices: there are none on this machine, or it could not be asked."""


@dataclass
class Fewer:
    """Chooses the places of the next start.

    Args:
        least: ranks, below which nothing is started.
        fits: why a job cannot run on so many ranks; empty where it can.
        devices: how many this machine shows now; `NONE_GONE` where ranks use none.
        blameless: exit codes of a rank that say nothing about its place.
    """

    least: int
    fits: Callable[[int], str]
    devices: Callable[[], int] = lambda: NONE_GONE
    blameless: Sequence[int] = (FOLLOWS,)
    _blamed: int | None = field(default=None, init=False)

    def largest(self, below: int) -> tuple[int, str]:
        """The largest number of ranks from `least` to `below` - 1 that fits; 0 and why none does."""
        why: list[str] = []
        for size in range(below - 1, self.least - 1, -1):
            if not (refusal := self.fits(size)):
                return size, ""
            why.append(f"with {size}: {refusal}")
        return 0, "; ".join(why) or f"{below} ranks cannot get fewer"

    def after(self, ended: Ended, places: Sequence[int]) -> tuple[list[int], str]:
        """The places of the next start, and what to say where they are others.

        Args:
            ended: how the ranks at `places` ended.
        """
        there = self.devices()
        if NONE_GONE < there <= max(places):
            self._blamed = None
            left = list(range(there))
            return self._chosen(left, places, f"this machine shows {there} device{'s' if there > 1 else ''} now")
        place = places[ended.rank] if 0 <= ended.rank < len(places) and ended.code not in self.blameless else None
        again, self._blamed = place is not None and place == self._blamed, place
        if not again:
            return list(places), ""
        self._blamed = None
        left = [other for other in places if other != place]
        return self._chosen(left, places, f"the rank at local place {place} failed twice in a row")

    def _chosen(self, left: Sequence[int], places: Sequence[int], why: str) -> tuple[list[int], str]:
        size, refusal = self.largest(len(left) + 1)
        if not size:
            return list(places), f"{why}, and no smaller number of ranks from {self.least} on fits: {refusal}"
        chosen = list(left[:size])
        listed = ", ".join(map(str, chosen))
        return chosen, f"{why}: going on with {size} of {len(places)} ranks, at local places {listed}"
