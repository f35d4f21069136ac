"""Rows of `forge_parallel.verify.proven` for models with experts, in every row: how they are shared, and with what.

`ep_hierarchical` has four ranks of ep, two in each node, the others two.
"""


def _rows(*rows: str) -> tuple[frozenset[str], ...]:
    return tuple(frozenset(f"experts {row}".split()) for row in rows)


EXPERT_RUNS = _rows(
    "dp_shard dp_replicate ep_all_to_all accumulate reduce_each recompute",
    "dp_shard tp ep_hierarchical reduce_each accumulate",
    "tp cp_ring ep_all_gather",
    "dp_shard pp_interleaved_zero_bubble ep_all_to_all accumulate",
    "dp_shard pp_zbv ep_all_gather accumulate",
    "tp pp_interleaved etp accumulate",
    "dp_shard cp_all_gather ep_all_to_all bf16 bf16_state",
    "dp_shard ep_all_to_all accumulate recompute float8 float8_experts",
)
"""Runs on at most four ranks: every axis, every dispatcher, pipelines that split a backward."""

SLOW_EXPERT_RUNS = _rows(
    # Dispatchers with pipelines.
    "dp_shard pp_1f1b ep_all_to_all accumulate recompute",
    "cp_ulysses pp_dualpipev ep_all_to_all accumulate",
    "dp_shard pp_gpipe accumulate recompute",
    "dp_shard pp_gpipe ep_all_to_all accumulate",
    "tp pp_interleaved ep_all_to_all accumulate",
    "cp_ring pp_zbv ep_all_to_all accumulate",
    "cp_ring pp_gpipe ep_all_gather accumulate",
    "cp_all_gather pp_1f1b ep_all_gather accumulate recompute",
    "cp_ulysses pp_interleaved ep_all_gather accumulate",
    "tp pp_interleaved_zero_bubble ep_all_gather accumulate",
    "dp_shard pp_dualpipev ep_all_gather accumulate",
    # Each expert's width with pipelines.
    "tp pp_gpipe etp accumulate recompute",
    "tp pp_1f1b etp accumulate recompute",
    "tp pp_interleaved_zero_bubble etp accumulate",
    "tp pp_zbv etp accumulate",
    "tp pp_dualpipev etp accumulate",
    # With ranks that hold parts of a row.
    "cp_ring ep_all_to_all accumulate reduce_each",
    "cp_ulysses ep_all_to_all",
    "tp cp_all_gather ep_hierarchical recompute",
    "tp cp_ring ep_hierarchical",
    "tp cp_ulysses ep_hierarchical",
    "tp cp_all_gather etp",
    "tp cp_ring ep_all_to_all etp",
    "tp cp_ulysses ep_all_gather etp",
    "dp_replicate tp etp accumulate reduce_each",
    "dp_shard dp_replicate ep_all_gather accumulate reduce_each recompute",
    "dp_shard tp ep_all_to_all etp accumulate recompute",
    # Each alone.
    "dp_shard ep_all_to_all",
    "tp ep_all_to_all",
    "tp",
    "tp etp",
    "dp_replicate cp_ring",
    # In low precision.
    "dp_shard ep_all_to_all bf16 bf16_state",
    "dp_shard tp ep_all_gather bf16 bf16_state",
    "dp_shard tp ep_hierarchical bf16 bf16_state",
    "dp_shard tp ep_all_to_all etp bf16 bf16_state",
    "dp_replicate tp bf16 bf16_state",
    "dp_shard pp_1f1b ep_all_to_all accumulate bf16 bf16_state",
    # Compiled.
    "dp_shard ep_all_to_all accumulate recompute compile bf16",
    "dp_shard tp ep_all_gather etp compile bf16",
    "dp_shard tp ep_hierarchical compile bf16",
    "dp_shard pp_1f1b ep_all_to_all accumulate compile bf16",
    "tp accumulate compile bf16",
    # Beside layers in float8.
    "dp_shard ep_all_to_all float8",
    "dp_shard tp ep_all_gather etp float8",
    "dp_shard tp ep_hierarchical float8",
    "dp_shard tp ep_all_to_all etp float8 float8_rowwise",
    # Multi-token prediction.
    "dp_shard ep_all_to_all accumulate recompute mtp",
    "tp cp_ring ep_all_gather etp mtp",
    "dp_shard tp ep_hierarchical accumulate mtp",
    "dp_shard pp_zbv ep_all_to_all accumulate mtp",
    "tp pp_1f1b etp accumulate mtp",
    # Multiplied in float8.
    "dp_shard tp ep_all_gather etp float8 float8_experts",
    "dp_shard tp ep_hierarchical float8 float8_rowwise float8_experts",
    "dp_shard ep_all_to_all reduce_each accumulate bf16 bf16_state float8 float8_experts",
    "dp_replicate cp_ring float8 float8_experts",
    "dp_shard cp_all_gather ep_all_to_all float8 float8_experts",
    "dp_shard pp_1f1b ep_all_to_all accumulate float8 float8_experts",
    "dp_shard pp_interleaved ep_all_to_all accumulate float8 float8_experts",
    "dp_shard pp_zbv ep_all_to_all accumulate float8 float8_experts",
    "dp_shard compile bf16 float8 float8_experts",
    "dp_shard ep_all_to_all accumulate compile bf16 float8 float8_experts",
)
"""The pairs that are left, on at most four ranks."""

LARGE_EXPERT_RUNS = _rows(
    "dp_shard tp pp_gpipe ep_hierarchical accumulate",
    "dp_shard tp pp_1f1b ep_hierarchical accumulate",
    "dp_shard tp pp_interleaved ep_hierarchical accumulate",
    "dp_shard tp pp_interleaved_zero_bubble ep_hierarchical accumulate",
    "dp_shard tp pp_zbv ep_hierarchical accumulate",
    "dp_shard cp_ring pp_dualpipev ep_hierarchical accumulate",
    "dp_shard dp_replicate tp ep_hierarchical accumulate",
    "dp_shard tp cp_ring ep_hierarchical etp",
)
"""On eight ranks: pairs with four ranks of ep."""
