"""What may be combined: the features of a run, and for each pair of them the test that proves it.

Torch-free data. `check` refuses a recipe that uses a pair which is not listed here, before any process group exists; a
test of ours reads this table, runs every pair it lists against one process, and fails where a named test is gone.
"""

from collections.abc import Iterable
from itertools import combinations
from types import MappingProxyType

PARITY = "tests/parallel/test_parity.py::test_every_listed_combination_equals_one_process"

FEATURES = MappingProxyType(
    {
        "dp_shard": "parallel.dp_shard > 1",
        "dp_replicate": "parallel.dp_replicate > 1",
        "accumulate": "train.global_batch larger than one micro-batch per rank",
        "reduce_each": "transforms.shard.reduce = 'each'",
        "bf16": "precision.compute = 'bf16'",
        "bf16_state": "precision.state = 'bf16'",
        "recompute": "transforms.recompute",
        "compile": "transforms.compile",
    }
)
"""Name of a feature -> the keys that switch it on."""

PROVEN: MappingProxyType[frozenset[str], str] = MappingProxyType(
    {frozenset(features): PARITY for size in (1, 2) for features in combinations(FEATURES, size)}
)
"""Every feature alone and every pair of them -> the test that compares it with one process."""


def unproven(features: Iterable[str]) -> list[tuple[str, ...]]:
    """Features, or pairs of proven ones, that no test proves; sorted."""
    used = sorted(set(features))
    alone = [(name,) for name in used if frozenset({name}) not in PROVEN]
    known = [name for name in used if frozenset({name}) in PROVEN]
    return alone + [pair for pair in combinations(known, 2) if frozenset(pair) not in PROVEN]
