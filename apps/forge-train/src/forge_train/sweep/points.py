"""Points of a sweep: each one setting of what varies, with a name that is made from it and stays."""

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from random import Random
from typing import Any

from forge_core.config.toml import value_text
from forge_train.sweep.axes import Axis

SEED = "job.seed"
LONGEST = 100
"""Characters of a name; a longer one is cut and ends with a digest."""
_UNSAFE = re.compile(r"[^A-Za-z0-9.+_-]+")  # without `=`, a name reads in one way


@dataclass(frozen=True)
class Point:
    """One run of a sweep. `values` has a value for every key that varies; `setting` is the same without the seed of a repeat."""

    name: str
    values: Mapping[str, Any]
    setting: str

    def overrides(self) -> list[str]:
        """The values as a command line has them: `--optimizer.lr=0.001`."""
        return [f"--{key}={value_text(value)}" for key, value in self.values.items()]


def grid(axes: Sequence[Axis]) -> list[dict[str, Any]]:
    """Every combination, the last axis fastest."""
    return [_joined(axes, chosen) for chosen in itertools.product(*(axis.every() for axis in axes))]


def drawn(axes: Sequence[Axis], samples: int, seed: int) -> list[dict[str, Any]]:
    """`samples` different settings. What is drawn for a key depends on the seed, the number of the draw and the key alone, so
    more samples, or another key, change none of the others. Fewer come back where the space has no more."""
    found: dict[str, dict[str, Any]] = {}
    for number in range(20 * samples):
        chosen = [axis.draw(Random(f"{seed}/{number}/{'/'.join(axis.keys)}")) for axis in axes]
        values = _joined(axes, chosen)
        found.setdefault(json.dumps(values, sort_keys=True, default=str), values)
        if len(found) == samples:
            break
    return list(found.values())


def named(settings: Iterable[Mapping[str, Any]], seeds: Sequence[int] = ()) -> list[Point]:
    """A point for every setting, or for every seed of each one, `optimizer.lr = 1e-3` as `lr=0.001`.

    A name depends on the point's own values and on which keys vary, so other values leave it as it is. Keys that end alike
    have more of their path in it; values that look alike have a digest.
    """
    settings = [dict(values) for values in settings]
    keys = list(dict.fromkeys(key for values in settings for key in values)) + ([SEED] if seeds else [])
    short = _short(keys)
    points = []
    for values in settings:
        setting = _name(values, short)
        for extra in [{SEED: seed} for seed in seeds] or [{}]:
            whole = {**values, **extra}
            points.append(Point(_name(whole, short), whole, setting))
    return points


def _joined(axes: Sequence[Axis], chosen: Iterable[tuple[Any, ...]]) -> dict[str, Any]:
    return {key: value for axis, values in zip(axes, chosen, strict=True) for key, value in zip(axis.keys, values, strict=True)}


def _short(keys: Sequence[str]) -> dict[str, str]:
    """Every key by as much of its end as tells it from the others."""

    def end(key: str, length: int) -> list[str]:
        return key.split(".")[-length:]

    found = {}
    for key in keys:
        lengths = range(1, key.count(".") + 2)
        alone = [length for length in lengths if all(other == key or end(other, length) != end(key, length) for other in keys)]
        found[key] = ".".join(end(key, alone[0] if alone else lengths[-1]))
    return found


def _name(values: Mapping[str, Any], short: Mapping[str, str]) -> str:
    parts, exact = [], True
    for key, value in values.items():
        text = value if isinstance(value, str) else value_text(value)
        safe = _UNSAFE.sub("-", text)
        exact = exact and safe == text
        parts.append(f"{_UNSAFE.sub('-', short[key])}={safe}")
    name = "_".join(parts)
    if exact and len(name) <= LONGEST:
        return name
    digest = blake2b(json.dumps(values, sort_keys=True, default=str).encode(), digest_size=4).hexdigest()
    return f"{name[:LONGEST]}_{digest}"
