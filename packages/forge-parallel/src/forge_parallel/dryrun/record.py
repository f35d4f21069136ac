"""The record of a step: changes of memory and collectives, in order; and the record of a deeper model, made from that of a
short one.

Everything that a dry run counts in a step is an entry of its record. `StepRecord.unrolled` repeats the entries of repeated
blocks, so whatever is computed from a record needs no rule of its own for blocks that did not run.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

from forge_parallel.dryrun.traffic import Flow, wire_of

WORK = "activations and work"
"""Class of all storages that are not classified."""

GRADIENTS = "gradients"
"""Class of the memory that a step leaves to the optimizer; a loss head may compute some of it in its forward."""


TOUCHED = "touched"
"""Class of entries without memory: outside of blocks, an operator takes tensors of a unit."""


class Unit(NamedTuple):
    """One repetition in a run of equal blocks: the number of the run, and the number of the repetition."""

    run: int
    number: int

    @property
    def next(self) -> "Unit":
        """The next repetition that ran."""
        return self._replace(number=self.number + 1)


Shares = tuple[tuple[Unit, int], ...]
"""Bytes that belong to each unit, sorted; the rest belongs to no unit."""


class Call(NamedTuple):
    """One collective: its traffic, and the number of its ranks."""

    flow: Flow
    ranks: int


class StepEvent(NamedTuple):
    """One event of a step.

    Attributes:
        unit: the unit that caused it; None for what is outside of repeated blocks.
        what: class of the memory, or the collective.
        size: bytes by which memory grows or, if negative, shrinks; or the payload of the collective.
        shares: of an entry of several units: how much of `size` belongs to each.
    """

    unit: Unit | None
    what: str | Call
    size: int
    shares: Shares = ()


class Irregular(Exception):
    """A step cannot be unrolled: repeated blocks do not do the same, or it is unclear which of them an entry belongs to."""


@dataclass(frozen=True)
class StepRecord:
    """The entries of a step, in order. A place is the number of entries before it."""

    entries: Sequence[StepEvent]

    @cached_property
    def _totals(self) -> list[int]:
        return list(accumulate((0 if isinstance(entry.what, Call) else entry.size for entry in self.entries), initial=0))

    def peak(self, first: int = 0, last: int | None = None) -> dict[str, int]:
        """Returns the bytes by class at the moment between two places when the total is largest."""
        last = len(self.entries) if last is None else last
        return self.at(max(range(first, last + 1), key=self._totals.__getitem__))

    def at(self, place: int) -> dict[str, int]:
        """Returns the bytes by class at one place."""
        sizes: Counter[str] = Counter()
        for entry in self.entries[:place]:
            if isinstance(entry.what, str):
                sizes[entry.what] += entry.size
        return {kind: size for kind, size in sizes.items() if size}

    def growth(self, first: int, last: int) -> int:
        """Returns the bytes of activations, work and gradients allocated between two places and not freed by the second."""
        return sum(entry.size for entry in self.entries[first:last] if entry.what in (WORK, GRADIENTS))

    def rise(self, first: int, last: int) -> int:
        """Returns how far the total rises above that at the first place before the second."""
        return max(self._totals[first : last + 1]) - self._totals[first]

    def flows(self, place: int | None = None) -> list[Flow]:
        """Returns the traffic before a place, summed by axis and kind, sorted."""
        summed: dict[tuple[str, str], Flow] = {}
        for flow in self._calls(place):
            key = flow.axis, flow.kind
            summed[key] = summed[key] + flow if key in summed else flow
        return [summed[key] for key in sorted(summed)]

    def largest(self, kind: str) -> int:
        """Returns the bytes of the largest payload of one call of a kind."""
        return max((flow.payload for flow in self._calls() if flow.kind == kind), default=0)

    def _calls(self, place: int | None = None) -> Iterator[Flow]:
        yield from (entry.what.flow for entry in self.entries[:place] if isinstance(entry.what, Call))

    def unrolled(self, missing: Mapping[Unit, int]) -> "Unrolled":
        """Returns the record of the step in which some units are followed by further ones like them.

        Args:
            missing: unit -> number of further ones between it and the next unit of its run, which must be like it.

        Raises:
            Irregular: a unit and the next one of its run do not have the same entries, one directly after the other.
        """
        insertions = sorted(place for unit, times in missing.items() for place in self._insertions(unit, times))
        for (before, _, _), (_, group, _) in pairwise(insertions):
            if group < before:
                raise Irregular("two runs repeat in the same place")
        entries: list[StepEvent] = []
        before = 0
        for place, group, times in insertions:
            entries += [_grown(entry, missing) for entry in self.entries[before:place]]
            entries += list(self.entries[group:place]) * times
            before = place
        entries += [_grown(entry, missing) for entry in self.entries[before:]]
        return Unrolled(StepRecord(entries), tuple((place, (place - group) * times) for place, group, times in insertions))

    def compare(self, unit: Unit) -> None:
        """Checks that a unit and the next one of its run do the same, one directly after the other.

        Raises:
            Irregular: they do not.
        """
        for _ in self._insertions(unit, 1):
            pass

    def _insertions(self, unit: Unit, times: int) -> Iterator[tuple[int, int, int]]:
        """Yields (place of the insertion, first entry before it to repeat, how often) for each time when the unit does something.

        The stretch from the first entry of one of the two units to the first of the other has to be followed by an equal one. It
        may have entries of unknown units.
        """
        following = unit.next
        for entry in self.entries:
            shares = dict(entry.shares)
            if shares.get(unit) != shares.get(following):
                raise Irregular(f"{unit} and {following} have different shares of {entry.what}")
        marks = [(place, entry.unit) for place, entry in enumerate(self.entries) if entry.unit in (unit, following)]
        done = 0
        for at, (start, mark) in enumerate(marks):
            if start < done:
                continue
            middle = next((place for place, other in marks[at:] if other != mark), None)
            if middle is None:
                raise Irregular(f"{mark} does something alone")
            done = 2 * middle - start
            if [entry[1:] for entry in self.entries[start:middle]] != [entry[1:] for entry in self.entries[middle:done]]:
                raise Irregular(f"{unit} and {following} do not do the same")
            yield middle, start, times


@dataclass(frozen=True)
class Unrolled:
    """An unrolled record. `added` has (place in the original, number of entries inserted there), sorted."""

    record: StepRecord
    added: tuple[tuple[int, int], ...] = ()

    def moved(self, place: int) -> int:
        """Returns where a place of the original record is."""
        return place + sum(count for where, count in self.added if where <= place)


def _grown(entry: StepEvent, missing: Mapping[Unit, int]) -> StepEvent:
    """Returns an entry of several units in a step with more of them."""
    further = sum(size * missing.get(unit, 0) for unit, size in entry.shares)
    if not further:
        return entry
    if isinstance(entry.what, str):
        return entry._replace(size=entry.size + further)
    payload = entry.size + further
    flow = replace(entry.what.flow, payload=payload, wire=wire_of(entry.what.flow.kind, payload, entry.what.ranks))
    return entry._replace(what=entry.what._replace(flow=flow), size=payload)
