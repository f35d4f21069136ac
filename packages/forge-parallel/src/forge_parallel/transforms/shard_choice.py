"""What `auto` stands for in `[transforms.shard]`: a rule over bytes, without torch, the same on every rank.

To sum gradients once a step, or to keep weights gathered from forward to backward, takes memory and saves traffic. Of the ways
that fit into a device the one that exchanges least is chosen; where none fits, or no device is known, the one that takes least.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

Reduce = Literal["last", "each"]

USABLE = 0.9
"""Share of a device's memory that may be planned for. The rest is for what is not counted: its context, buffers of collectives,
fragments, and the estimate's error."""


@dataclass(frozen=True)
class Needs:
    """Bytes of the rank that holds most, and how often it exchanges.

    Attributes:
        lasting: parameters, gradients and optimizer state as they are sharded.
        activations: what forwards keep for their backwards.
        passing: what is whole for a moment in any case: the units that are gathered at once, and their gradients.
        gradients: all gradients, whole, in the format in which they are summed.
        weights: the weights of all blocks, whole, in the format in which they are gathered.
        micro_batches: of a step.
        pipelined: a pipeline reduces once a step, whichever is asked for, and gathers once if it keeps.
    """

    lasting: int
    activations: int
    passing: int
    gradients: int
    weights: int
    micro_batches: int
    pipelined: bool = False


@dataclass(frozen=True)
class Option:
    """One way to shard, as the keys of `transforms.shard` say it: bytes that a rank holds at most, and exchanges in a step."""

    reduce: Reduce
    reshard: bool | None
    memory: int
    traffic: int


def options(needs: Needs, reduces: Sequence[Reduce], reshards: Sequence[bool | None]) -> tuple[Option, ...]:
    """Every pair of these values with its price, in this order. An unset `reshard` is yes, but no in a pipeline."""
    return tuple(_priced(needs, *pair) for pair in product(reduces, reshards))


def _priced(needs: Needs, reduce: Reduce, reshard: bool | None) -> Option:
    steps = needs.micro_batches
    once = reduce == "last" or needs.pipelined
    frees = not needs.pipelined if reshard is None else reshard
    whole = needs.gradients if once and steps > 1 else 0
    gathers = 2 * steps if frees else 1 if needs.pipelined else steps
    return Option(
        reduce,
        reshard,
        memory=needs.lasting + needs.activations + needs.passing + whole + (0 if frees else needs.weights),
        traffic=gathers * needs.weights + (1 if once else steps) * needs.gradients,
    )


def choose(found: Sequence[Option], memory: int | None, before: Reduce | None = None) -> Option:
    """The option that exchanges least of those that fit into `memory` bytes of a device; else the one that takes least.

    Ties go to less memory, then to the first one. `before`: how the run has summed so far. Sums in another order have other last
    bits, so it is kept while it fits; what is gathered when changes no number.
    """
    fitting = [option for option in found if memory is not None and option.memory <= USABLE * memory]
    of = fitting or found
    if fitting or memory is None:
        of = [option for option in of if option.reduce == before] or of
    return min(of, key=lambda option: (option.traffic, option.memory) if fitting else (option.memory, option.traffic))


def nominal(memory: int, sizes: Sequence[int]) -> int:
    """Bytes of a device as its vendor names it, where one of `sizes` is within 2 %; else whole GiB.

    Equal devices differ by some MiB, which drivers keep, and must not choose differently.
    """
    near = min(sizes, key=lambda size: abs(size - memory), default=0)
    return near if abs(near - memory) <= 0.02 * near else memory >> 30 << 30
