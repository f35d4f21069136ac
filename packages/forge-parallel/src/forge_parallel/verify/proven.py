"""What may be combined: the features of a run, and for each pair of them the test that proves it.

Torch-free data. `check` refuses a recipe that uses a pair which is not listed here, before any process group exists. Each row
of `RUNS` and `SLOW_RUNS` is a run that a test of ours compares with one process; a pair is proven when it occurs in a row.
"""

from collections.abc import Collection, Iterable
from itertools import combinations
from types import MappingProxyType

from forge_parallel.verify.proven_experts import EXPERT_RUNS, LARGE_EXPERT_RUNS, SLOW_EXPERT_RUNS
from forge_parallel.verify.proven_options import (
    EXPERT_OPTION_RUNS,
    LARGE_EXPERT_OPTION_RUNS,
    LARGE_OPTION_RUNS,
    MTP_OPTION_RUNS,
    OPTION_RUNS,
)

FEATURES = MappingProxyType(
    {
        "dp_shard": "parallel.dp_shard > 1",
        "dp_replicate": "parallel.dp_replicate > 1",
        "tp": "parallel.tp > 1",
        "tp_whole": "transforms.tensor.sequence_parallel = false",
        "tp_asynchronous": "transforms.tensor.asynchronous = true",
        "cp_all_gather": "parallel.cp > 1 with transforms.context.kind = 'all_gather'",
        "cp_ring": "parallel.cp > 1 with transforms.context.kind = 'ring'",
        "cp_ulysses": "parallel.cp > 1 with transforms.context.kind = 'ulysses'",
        "pp_gpipe": "parallel.pp > 1 with parallel.pipeline.schedule = {name = 'gpipe'}",
        "pp_1f1b": "parallel.pp > 1 with parallel.pipeline.schedule = {name = '1f1b'}",
        "pp_interleaved": "parallel.pp > 1 with parallel.pipeline.schedule = {name = 'interleaved'}",
        "pp_interleaved_zero_bubble": "parallel.pp > 1 with parallel.pipeline.schedule = {name = 'interleaved_zero_bubble'}",
        "pp_zbv": "parallel.pp > 1 with parallel.pipeline.schedule = {name = 'zbv'}",
        "pp_dualpipev": "parallel.pp > 1 with parallel.pipeline.schedule = {name = 'dualpipev'}",
        "more_stages": "parallel.pipeline.schedule.stages_per_rank above 2",
        "accumulate": "train.global_batch larger than one micro-batch per rank",
        "reduce_each": "transforms.shard.reduce = 'each'",
        "reshard": "transforms.shard.reshard = true with parallel.pp > 1",
        "keep_gathered": "transforms.shard.reshard = false",
        "offload": "transforms.shard.offload = true",
        "recompute": "transforms.recompute",
        "recompute_full": "transforms.recompute.policy = 'full'",
        "compile": "transforms.compile",
        "compile_budget": "transforms.compile.budget below 1",
        "bf16": "precision.compute = 'bf16'",
        "bf16_state": "precision.state = 'bf16'",
        "float8": "transforms.float8",
        "float8_rowwise": "transforms.float8.recipe = 'rowwise'",
        "float8_wide_gather": "transforms.float8.all_gather = false",
        "float8_experts": "transforms.float8.experts = true",
        "mtp": "model.mtp",
        "experts": "[model.moe]",
        "ep_all_to_all": "parallel.ep > 1 with transforms.expert.dispatcher = 'all_to_all'",
        "ep_all_gather": "parallel.ep > 1 with transforms.expert.dispatcher = 'all_gather'",
        "ep_hierarchical": "parallel.ep > 1 with transforms.expert.dispatcher = 'hierarchical'",
        "ep_in_turn": "transforms.expert.overlap = false",
        "etp": "parallel.etp > 1",
    }
)
"""Name of a feature -> the keys that switch it on."""

RUNS = tuple(
    frozenset(row.split())
    for row in (
        "dp_shard tp accumulate reduce_each recompute compile",
        "tp cp_ring accumulate reduce_each recompute compile",
        "tp pp_1f1b accumulate recompute compile",
        "dp_shard dp_replicate accumulate reduce_each recompute recompute_full",
        "dp_replicate tp",
        "tp cp_all_gather accumulate reduce_each recompute",
        "tp cp_ulysses accumulate reduce_each recompute keep_gathered",
        "dp_shard cp_all_gather keep_gathered",
        "dp_shard cp_ring",
        "dp_replicate cp_ulysses",
        "dp_shard pp_gpipe accumulate reduce_each recompute reshard",
        "dp_shard pp_interleaved accumulate reduce_each recompute recompute_full",
        "dp_shard pp_interleaved_zero_bubble accumulate reduce_each reshard",
        "dp_shard pp_zbv accumulate reduce_each reshard",
        "dp_replicate pp_1f1b accumulate reduce_each",
        "dp_replicate pp_dualpipev accumulate reduce_each reshard",
        "tp pp_interleaved accumulate",
        "tp pp_zbv accumulate",
        "tp pp_dualpipev accumulate",
        "cp_all_gather pp_1f1b accumulate",
        "cp_ring pp_zbv accumulate",
        "cp_ulysses pp_interleaved accumulate",
        "cp_ring pp_gpipe accumulate",
        "cp_ulysses pp_dualpipev accumulate",
        "cp_all_gather pp_interleaved_zero_bubble accumulate",
        "dp_shard dp_replicate accumulate reduce_each recompute bf16 bf16_state",
        "tp cp_ring bf16 bf16_state",
        "cp_all_gather pp_1f1b accumulate bf16 bf16_state",
        "dp_shard tp accumulate reduce_each recompute float8",
        "cp_ring pp_1f1b accumulate float8",
    )
)
"""Runs on at most four ranks. Together they have every pair of axes' kinds, and every feature with every other one that it can
have beside it, but for those below."""

SLOW_RUNS = tuple(
    frozenset(row.split())
    for row in (
        "tp pp_gpipe accumulate",
        "tp pp_interleaved_zero_bubble accumulate",
        "dp_shard pp_1f1b accumulate",
        "dp_shard pp_dualpipev accumulate",
        "dp_shard cp_ulysses compile",
        "dp_replicate cp_ring",
        "dp_replicate cp_all_gather",
        "dp_replicate pp_gpipe accumulate compile",
        "dp_replicate pp_interleaved accumulate",
        "dp_replicate pp_interleaved_zero_bubble accumulate",
        "dp_replicate pp_zbv accumulate",
        "cp_all_gather pp_gpipe accumulate compile",
        "cp_all_gather pp_interleaved accumulate",
        "cp_all_gather pp_zbv accumulate",
        "cp_all_gather pp_dualpipev accumulate",
        "cp_ring pp_1f1b accumulate",
        "cp_ring pp_interleaved accumulate compile",
        "cp_ring pp_interleaved_zero_bubble accumulate",
        "cp_ring pp_dualpipev accumulate",
        "cp_ulysses pp_gpipe accumulate",
        "cp_ulysses pp_1f1b accumulate",
        "cp_ulysses pp_interleaved_zero_bubble accumulate",
        "cp_ulysses pp_zbv accumulate",
        "dp_shard tp tp_whole accumulate reduce_each recompute compile",
        "dp_replicate tp tp_whole",
        "tp tp_whole cp_all_gather",
        "tp tp_whole cp_ring",
        "tp tp_whole cp_ulysses",
        "tp tp_whole pp_gpipe accumulate",
        "tp tp_whole pp_1f1b accumulate",
        "tp tp_whole pp_interleaved accumulate",
        "tp tp_whole pp_interleaved_zero_bubble accumulate",
        "tp tp_whole pp_zbv accumulate",
        "tp tp_whole pp_dualpipev accumulate",
        "dp_shard tp tp_whole bf16 bf16_state",
        "dp_shard tp tp_whole float8",
        "dp_shard tp accumulate reduce_each recompute float8 float8_rowwise",
        "dp_replicate float8 float8_rowwise",
        "pp_1f1b accumulate float8 float8_rowwise",
        "dp_shard compile bf16 bf16_state",
        "cp_ulysses pp_gpipe accumulate bf16 bf16_state",
        "dp_shard pp_interleaved accumulate bf16 bf16_state",
        "dp_shard pp_interleaved_zero_bubble accumulate bf16 bf16_state",
        "dp_shard pp_zbv accumulate bf16 bf16_state",
        "dp_shard pp_dualpipev accumulate bf16 bf16_state",
        "dp_shard bf16 bf16_state float8",
        "dp_replicate compile float8",
        "tp cp_all_gather float8",
        "cp_ulysses pp_gpipe accumulate float8",
        "pp_interleaved accumulate float8",
        "pp_interleaved_zero_bubble accumulate float8",
        "pp_zbv accumulate float8",
        "pp_dualpipev accumulate float8",
    )
)
"""The pairs that are left. Schedules that split a backward are not offered with `recompute` and `compile`; `tp_asynchronous`
and `offload`, which need GPUs, are in no row, and so refused until one proves them."""

GPU_RUNS = tuple(
    frozenset(row.split())
    for row in (
        "offload",
        "offload accumulate reduce_each recompute",
        "offload accumulate compile bf16",
        "offload accumulate recompute bf16 bf16_state",
        "dp_shard offload accumulate reduce_each",
        "dp_shard dp_replicate offload accumulate",
    )
)
"""What `pytest -m gpu` compares with one process on the same device. That is no part of every change, so it proves no pair."""

MTP_RUNS = tuple(
    frozenset(f"{row} mtp".split())
    for row in (
        "dp_shard accumulate reduce_each recompute",
        "dp_shard tp accumulate",
        "cp_ring pp_1f1b accumulate",
        "tp pp_interleaved accumulate",
        "pp_zbv accumulate",
        "experts dp_shard ep_all_to_all accumulate",
    )
)
"""Models with multi-token prediction."""

SLOW_MTP_RUNS = tuple(
    frozenset(f"{row} mtp".split())
    for row in (
        "dp_shard tp accumulate recompute compile",
        "dp_shard dp_replicate accumulate reduce_each recompute",
        "tp tp_whole cp_all_gather",
        "dp_shard cp_ulysses",
        "dp_shard pp_zbv accumulate",
        "tp cp_ring accumulate recompute",
        "cp_all_gather pp_gpipe accumulate",
        "dp_replicate pp_interleaved_zero_bubble accumulate",
        "dp_shard pp_dualpipev accumulate",
        "cp_ulysses pp_interleaved accumulate",
        "tp pp_1f1b accumulate recompute",
        "tp pp_zbv accumulate",
        "dp_shard tp bf16 bf16_state",
        "dp_shard tp float8",
        "cp_ring pp_1f1b accumulate bf16",
        "dp_replicate pp_1f1b accumulate float8",
        "dp_shard float8 float8_rowwise",
    )
)
"""The remaining pairs with multi-token prediction, and the triples in which a table is looked up on two stages."""

LARGE_RUNS = tuple(
    frozenset(row.split())
    for row in (
        "dp_shard tp pp_1f1b accumulate recompute",
        "dp_shard tp cp_ring accumulate",
        "dp_shard tp pp_zbv accumulate",
        "dp_shard dp_replicate tp accumulate",
        "tp cp_all_gather pp_interleaved accumulate recompute",
        "dp_shard cp_ulysses pp_dualpipev accumulate",
    )
)
"""Triples of axes, on eight ranks."""

OPTION_TEST = "tests/parallel/compositions/test_options.py::test_an_option_equals_one_process"

TEST = "tests/parallel/compositions/test_compositions.py::test_a_run_equals_one_process"
SLOW_TEST = "tests/parallel/compositions/test_compositions.py::test_the_remaining_pairs_equal_one_process"

MTP_TEST = "tests/parallel/compositions/test_mtp.py::test_a_run_equals_one_process"
SLOW_MTP_TEST = "tests/parallel/compositions/test_mtp.py::test_the_remaining_pairs_equal_one_process"

EXPERT_TEST = "tests/parallel/compositions/test_expert_compositions.py::test_a_run_equals_one_process"
SLOW_EXPERT_TEST = "tests/parallel/compositions/test_expert_compositions.py::test_the_remaining_pairs_equal_one_process"
LARGE_EXPERT_TEST = "tests/parallel/compositions/test_expert_compositions.py::test_pairs_on_eight_ranks_equal_one_process"


EVIDENCE = (
    (RUNS, TEST),
    (SLOW_RUNS, SLOW_TEST),
    (MTP_RUNS, MTP_TEST),
    (SLOW_MTP_RUNS, SLOW_MTP_TEST),
    (EXPERT_RUNS, EXPERT_TEST),
    (SLOW_EXPERT_RUNS, SLOW_EXPERT_TEST),
    (LARGE_EXPERT_RUNS, LARGE_EXPERT_TEST),
    (LARGE_EXPERT_OPTION_RUNS, OPTION_TEST),
    (EXPERT_OPTION_RUNS, OPTION_TEST),
    (MTP_OPTION_RUNS, OPTION_TEST),
    (LARGE_OPTION_RUNS, OPTION_TEST),
    (OPTION_RUNS, OPTION_TEST),
)
"""Runs, and the test that compares each of them with one process: it proves every feature and every pair in them."""


def is_proven(features: Collection[str]) -> bool:
    """Whether a test runs these together: one feature, or a pair."""
    together = frozenset(features)
    return any(together <= run for runs, _ in EVIDENCE for run in runs)


def unproven(features: Iterable[str]) -> list[tuple[str, ...]]:
    """Features, or pairs of proven ones, that no test proves; sorted."""
    used = sorted(set(features))
    alone = [(name,) for name in used if not is_proven([name])]
    known = [name for name in used if is_proven([name])]
    return alone + [pair for pair in combinations(known, 2) if not is_proven(pair)]
