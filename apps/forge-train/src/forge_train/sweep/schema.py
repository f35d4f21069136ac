"""The typed tree of a sweep's file. Every field is a key of it; nothing here imports torch."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Lt

Kind = Literal["grid", "random", "halving"]
Scale = Literal["linear", "log", "int"]


@dataclass(frozen=True, kw_only=True)
class Search:
    """Which points of the space are trained, and what makes one better than another."""

    kind: Kind = "grid"
    """`grid` trains every combination, `random` draws `samples` of them, `halving` trains all a little and the best on."""
    samples: Annotated[int, Gt(0)] | None = None
    """Points to draw, for `random`, and for `halving` over ranges. More of them later leave those that are there as they are."""
    seed: Annotated[int, Ge(0)] = 0
    """Fixes what is drawn. It is not the seed of a run, which is `job.seed`."""
    metric: str = "evaluation/held_out/loss"
    """The result that counts, by the name under which a run logs it."""
    mode: Literal["min", "max"] = "min"
    """Whether less or more is better."""
    repeats: Annotated[int, Gt(0)] = 1
    """Runs of each point, with `job.seed` of the recipe, the next one, and so on; settings are compared by the mean."""
    rungs: list[Annotated[int, Gt(0)]] = field(default_factory=list)
    """Of `halving`: steps after which the points are compared; the last comparison is at the end of the run."""
    keep: Annotated[float, Gt(0), Lt(1)] = 0.5
    """Of `halving`: the part of the points that goes on after each rung, rounded, one at least."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A whole sweep."""

    recipe: str
    """What every run is based on: a TOML file, relative to the sweep's, or the name of a preset."""
    dir: str | None = None
    """Directory of the sweep instead of `sweeps/<name of its file>`."""
    processes: Annotated[int, Gt(0)] = 1
    """Processes of each run, on this machine."""
    search: Search = field(default_factory=Search)
    """How the space is searched."""
    vary: dict[str, Any]
    """Keys of the recipe, each with a list of values or a range `{low, high, scale, count}`."""
    together: list[list[str]] = field(default_factory=list)
    """Groups of keys that vary jointly: the first values of all lists, the second ones, and so on."""
    slurm: dict[str, str | int] = field(default_factory=dict)
    """Further options of `sbatch` for the job array, such as `partition = "gpu"`."""


@dataclass(frozen=True, kw_only=True)
class Range:
    """Values between two numbers, both included."""

    low: float
    """The smallest value."""
    high: float
    """The largest value."""
    scale: Scale = "linear"
    """`linear`; `log` is even in the logarithm; `int` is linear over integers."""
    count: Annotated[int, Gt(1)] | None = None
    """Values of a grid, evenly spaced, `low` and `high` among them."""
