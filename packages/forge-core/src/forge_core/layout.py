"""The arithmetic of a parallel layout: the ranks and their coordinates on every axis.

The dense view of the ranks, slowest axis first, is `(pp, dp_replicate, dp_shard, cp, tp)`. Experts use the sparse view of the
same ranks, `(pp, dp_replicate, efsdp, ep, etp)`. Expert parallelism *borrows* ranks, so `efsdp * ep * etp == dp_shard * cp * tp`,
and every data rank still reads its own data.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

from forge_core.errors import LayoutError

DENSE = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
SPARSE = ("pp", "dp_replicate", "efsdp", "ep", "etp")
SIZES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "etp")


@dataclass(frozen=True)
class Layout:
    """Sizes of all axes. Every size is at least 1, and the world size is the product of the dense axes.

    Build it with `Layout.of` (from a recipe) or `Layout.parse` (from a string such as `dp4ep2`).
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 1

    def __post_init__(self) -> None:
        for axis in SIZES:
            if getattr(self, axis) < 1:
                raise LayoutError(f"parallel.{axis} = {getattr(self, axis)}: a size is at least 1")
        borrowed, lenders = self.ep * self.etp, self.dp_shard * self.cp * self.tp
        if lenders % borrowed:
            legal = [ep for ep in divisors(lenders) if lenders % (ep * self.etp) == 0]
            raise LayoutError(
                f"parallel.ep * parallel.etp = {borrowed} does not divide dp_shard * cp * tp = {lenders}: experts borrow "
                f"these ranks; legal values of parallel.ep with etp = {self.etp}: {_listed(legal) or 'none'}; or change "
                f"the world size so that dp_shard * cp * tp is a multiple of {borrowed}"
            )
        if self.etp > 1 and self.etp != self.tp:
            raise LayoutError(f"parallel.etp = {self.etp}: expert tensor parallelism is 1 or equal to parallel.tp = {self.tp}")

    @classmethod
    def of(cls, sizes: Mapping[str, int], world: int) -> "Layout":
        """Returns the layout of `sizes` on `world` ranks; `dp_shard = -1` uses all ranks that the other axes leave.

        Raises:
            LayoutError: the product of the sizes is not `world`; the message names legal sizes.
        """
        if world < 1:
            raise LayoutError(f"a world has at least 1 process, not {world}")
        given = {axis: sizes.get(axis, 1) for axis in SIZES}
        bad = sorted(set(sizes) - set(SIZES))
        if bad:
            raise LayoutError(f"unknown axes {', '.join(bad)}; axes are {', '.join(SIZES)}")
        for axis, size in given.items():
            if size < 1 and not (axis == "dp_shard" and size == -1):
                raise LayoutError(
                    f"parallel.{axis} = {size}: a size is at least 1" + (" (or -1: the rest)" if axis == "dp_shard" else "")
                )
        others = prod(given[axis] for axis in DENSE if axis != "dp_shard")
        if given["dp_shard"] == -1:
            if world % others:
                raise LayoutError(
                    f"the world size {world} is not a multiple of {_product(given, skip='dp_shard')} = {others}; "
                    f"use a multiple of {others}"
                )
            given["dp_shard"] = world // others
        elif others * given["dp_shard"] != world:
            fits = f"set parallel.dp_shard = {world // others}" if world % others == 0 else f"multiples of {others} fit"
            raise LayoutError(
                f"the world size is {world}, but {_product(given)} = {others * given['dp_shard']}; "
                f"start {others * given['dp_shard']} processes or change the sizes ({fits})"
            )
        return cls(**given)

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """Parses a layout string: `pp2`, `dp4ep2`, `hsdp2x2`, `dp2tp2`, ... in any order, `1` for one process.

        `hsdpRxS` means R replicas of S shards; the number of ranks is pp * hsdp * dp * cp * tp.

        Raises:
            LayoutError: the string is not a layout, or its sizes are illegal.
        """
        if text == "1":
            return cls()
        token = re.compile(r"(hsdp)(\d+)x(\d+)|(pp|dp|cp|tp|ep|etp)(\d+)")
        sizes: dict[str, int] = {}
        position = 0
        for match in token.finditer(text):
            if match.start() != position:
                break
            position = match.end()
            part = (
                {"dp_replicate": int(match[2]), "dp_shard": int(match[3])}
                if match[1]
                else {"dp_shard" if match[4] == "dp" else match[4]: int(match[5])}
            )
            if sizes.keys() & part.keys():
                raise LayoutError(f"layout {text!r} sets {', '.join(sizes.keys() & part.keys())} twice")
            sizes |= part
        if position != len(text) or not text:
            raise LayoutError(
                f"cannot read layout {text!r} at {text[position:]!r}; write for example dp4ep2, hsdp2x2, dp2tp2 or 1"
            )
        return cls(**sizes)

    def __str__(self) -> str:
        parts = [f"pp{self.pp}"] if self.pp > 1 else []
        if self.dp_replicate > 1:
            parts.append(f"hsdp{self.dp_replicate}x{self.dp_shard}")
        elif self.dp_shard > 1:
            parts.append(f"dp{self.dp_shard}")
        parts += [f"{axis}{getattr(self, axis)}" for axis in ("cp", "tp", "ep", "etp") if getattr(self, axis) > 1]
        return "".join(parts) or "1"

    @property
    def world(self) -> int:
        """Number of ranks."""
        return prod(self.size(axis) for axis in DENSE)

    @property
    def efsdp(self) -> int:
        """Number of ranks over which one expert is sharded."""
        return self.dp_shard * self.cp * self.tp // (self.ep * self.etp)

    @property
    def data(self) -> int:
        """Number of ranks that read different rows of a global batch."""
        return self.dp_replicate * self.dp_shard

    def size(self, axis: str) -> int:
        """Returns the size of a dense or sparse axis."""
        if axis not in {*DENSE, *SPARSE}:
            raise LayoutError(f"unknown axis {axis!r}; axes are {', '.join(dict.fromkeys((*DENSE, *SPARSE)))}")
        return int(getattr(self, axis))

    def sizes(self) -> dict[str, int]:
        """Returns the sizes as in a recipe's `[parallel]` table."""
        return {axis: int(getattr(self, axis)) for axis in SIZES}

    def active(self) -> tuple[str, ...]:
        """Returns the axes larger than 1, as a recipe names them."""
        return tuple(axis for axis in SIZES if getattr(self, axis) > 1)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Returns the coordinate of `rank` on every axis of both views."""
        if not 0 <= rank < self.world:
            raise LayoutError(f"rank {rank} is not in a world of {self.world}")
        return self._unravel(rank, DENSE) | self._unravel(rank, SPARSE)

    def data_rank(self, rank: int) -> int:
        """Returns the number of the share of the global batch that `rank` reads, from 0 to `data` - 1."""
        at = self.coordinates(rank)
        return at["dp_replicate"] * self.dp_shard + at["dp_shard"]

    def groups(self, axes: Iterable[str]) -> Iterator[tuple[int, ...]]:
        """Yields the groups of ranks that differ only along `axes` (all of one view), in rank order."""
        chosen = tuple(axes)
        view = DENSE if set(chosen) <= set(DENSE) else SPARSE
        if not set(chosen) <= set(view):
            raise LayoutError(f"axes {', '.join(chosen)} do not belong to one view: {DENSE} or {SPARSE}")
        members: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world):
            at = self._unravel(rank, view)
            members.setdefault(tuple(at[axis] for axis in view if axis not in chosen), []).append(rank)
        yield from (tuple(group) for group in members.values())

    def _unravel(self, rank: int, view: tuple[str, ...]) -> dict[str, int]:
        at: dict[str, int] = {}
        for axis in reversed(view):
            rank, at[axis] = divmod(rank, self.size(axis))
        return at


def divisors(number: int) -> list[int]:
    """Returns all divisors in ascending order."""
    return [value for value in range(1, number + 1) if number % value == 0]


def _product(sizes: Mapping[str, int], skip: str = "") -> str:
    named = [f"{axis} {sizes[axis]}" for axis in DENSE if axis != skip and sizes[axis] > 1]
    return " * ".join(named) or "the product of all sizes"


def _listed(values: Iterable[int]) -> str:
    return ", ".join(str(value) for value in values)
