"""What may be combined: every row is a run that a test of ours compares with one process.

Torch-free. `check` refuses a recipe that uses a feature, or a pair of features whose planes interact, that is together in no row,
before any process group exists. The rows are made by `tests/parallel/compositions/generate.py`: as few as have all pairs.
"""

import json
from collections.abc import Collection, Iterable
from functools import cache
from itertools import combinations
from pathlib import Path
from types import MappingProxyType

from forge_core.features import Use, interact
from forge_parallel.features import is_ours

TESTS = MappingProxyType(
    {
        "fast": "tests/parallel/compositions/test_compositions.py::test_a_run_equals_one_process",
        "slow": "tests/parallel/compositions/test_compositions.py::test_the_remaining_pairs_equal_one_process",
        "large": "tests/parallel/compositions/test_compositions.py::test_three_axes_and_more_equal_one_process",
        "fusions": "tests/vlm/test_layouts.py::test_a_fusion_equals_one_process",
        "fusions_slow": "tests/vlm/test_layouts.py::test_the_remaining_fusions_equal_one_process",
    }
)
"""Kind of row -> the test that runs its rows. Fast and slow ones take at most four ranks, but for pairs that need eight."""


@cache
def rows() -> MappingProxyType[str, tuple[frozenset[str], ...]]:
    """Kind of row -> the features of each of its runs. Runs of the kind `gpu` prove nothing: they do not run on every change."""
    read = json.loads(Path(__file__).with_name("rows.json").read_text())
    return MappingProxyType({kind: tuple(frozenset(row.split()) for row in runs) for kind, runs in read.items()})


def is_proven(features: Collection[str]) -> bool:
    """Whether a test runs these together: one feature, or several."""
    together = frozenset(features)
    return any(together <= row for kind in TESTS for row in rows()[kind])


def unproven(uses: Iterable[Use], brought: Collection[frozenset[str]] = ()) -> list[tuple[Use, ...]]:
    """Features, or pairs of proven ones that interact, that no test proves; sorted by name.

    Args:
        uses: of a job in a layout.
        brought: features that receipts prove together, where a plugin brings one of them.
    """

    def proven(*uses: Use) -> bool:
        names = frozenset(use.name for use in uses)
        return is_proven(names) or (any(not is_ours(name) for name in names) and any(names <= row for row in brought))

    ordered = sorted(uses, key=lambda use: use.name)
    alone = [(use,) for use in ordered if not proven(use)]
    known = [use for use in ordered if (use,) not in alone]
    return [*alone, *(pair for pair in combinations(known, 2) if _meet(*pair) and not proven(*pair))]


def _meet(one: Use, other: Use) -> bool:
    """Whether a pair has to be proven. Of a plugin only what it does in layouts: the rest is what it does on one process."""
    ours = is_ours(one.name) and is_ours(other.name)
    return interact(one.plane, other.plane) and (ours or "layout" in (one.plane, other.plane))
