"""Rows of `forge_parallel.verify.proven` for options of strategies: each value of a field that is declared as a feature, with
what it may be used with."""

OPTION_RUNS = tuple(
    frozenset(row.split())
    for row in (
        # A pipeline that frees and gathers parameters for every micro-batch.
        "dp_shard pp_interleaved accumulate reduce_each recompute recompute_full reshard",
        "dp_shard pp_1f1b accumulate recompute reshard",
        "dp_replicate pp_gpipe accumulate compile reshard",
        "cp_all_gather pp_zbv accumulate reshard",
        "cp_ring pp_1f1b accumulate reshard",
        "cp_ulysses pp_interleaved_zero_bubble accumulate reshard",
        "dp_shard pp_zbv accumulate bf16 bf16_state reshard",
        "dp_shard pp_dualpipev accumulate reshard",
        "dp_shard pp_zbv accumulate float8 reshard",
        "dp_shard pp_1f1b accumulate float8 float8_rowwise reshard",
        # One that does not, as by default; fast rows have others with the option.
        "dp_shard pp_gpipe accumulate reduce_each recompute",
        "dp_shard pp_interleaved accumulate reduce_each recompute",
        "dp_shard pp_interleaved_zero_bubble accumulate reduce_each",
        "dp_shard pp_zbv accumulate reduce_each",
        "dp_replicate pp_dualpipev accumulate reduce_each",
        # Parameters that stay gathered between forward and backward.
        "dp_shard dp_replicate accumulate reduce_each recompute recompute_full keep_gathered",
        "tp tp_whole cp_ring accumulate compile keep_gathered",
        "dp_shard accumulate bf16 bf16_state keep_gathered",
        "dp_shard accumulate float8 keep_gathered",
        "dp_shard accumulate float8 float8_rowwise keep_gathered",
        "dp_shard pp_gpipe accumulate keep_gathered",
        "dp_shard pp_1f1b accumulate keep_gathered",
        "dp_shard pp_interleaved accumulate keep_gathered",
        "dp_shard pp_interleaved_zero_bubble accumulate keep_gathered",
        "dp_shard pp_zbv accumulate keep_gathered",
        "dp_shard pp_dualpipev accumulate keep_gathered",
        # Whole blocks that are computed again, collectives included.
        "dp_shard tp tp_whole accumulate recompute recompute_full",
        "dp_shard cp_all_gather recompute recompute_full compile",
        "tp cp_ring recompute recompute_full",
        "tp cp_ulysses recompute recompute_full",
        "tp pp_1f1b accumulate recompute recompute_full",
        "dp_shard pp_gpipe accumulate recompute recompute_full",
        "dp_shard recompute recompute_full bf16 bf16_state",
        "dp_shard tp recompute recompute_full float8",
        "dp_shard recompute recompute_full float8 float8_rowwise",
        # A compiler that may keep less; with tp, torch cannot partition graphs that hold process groups.
        "dp_shard accumulate compile compile_budget",
        "dp_shard dp_replicate reduce_each accumulate compile compile_budget bf16",
        # Weights that are gathered before they are cast to float8.
        "dp_shard tp accumulate reduce_each recompute float8 float8_wide_gather",
        "dp_shard cp_ring float8 float8_wide_gather bf16 bf16_state",
        "dp_shard dp_replicate accumulate recompute recompute_full float8 float8_wide_gather",
        "dp_shard pp_1f1b accumulate float8 float8_wide_gather",
        # More than two stages on a rank.
        "dp_shard pp_interleaved accumulate reduce_each recompute more_stages",
        "dp_shard pp_interleaved_zero_bubble accumulate reshard more_stages",
        "dp_replicate pp_interleaved accumulate bf16 bf16_state more_stages",
        "tp pp_interleaved accumulate more_stages",
        "cp_ring pp_interleaved_zero_bubble accumulate more_stages",
    )
)
"""On at most four ranks."""

LARGE_OPTION_RUNS = tuple(
    frozenset(row.split())
    for row in (
        "dp_shard tp tp_whole pp_zbv accumulate reshard",
        "dp_shard tp pp_1f1b accumulate recompute reshard",
        "dp_shard tp cp_ulysses accumulate keep_gathered",
    )
)
"""On eight: with tp, for which there is nothing to gather on four."""

MTP_OPTION_RUNS = tuple(
    frozenset(f"{row} mtp".split())
    for row in (
        "dp_shard pp_zbv accumulate reshard",
        "dp_shard accumulate reduce_each keep_gathered",
        "dp_shard tp accumulate recompute recompute_full",
        "dp_shard pp_interleaved accumulate more_stages",
    )
)
"""Models with multi-token prediction."""

EXPERT_OPTION_RUNS = tuple(
    frozenset(f"experts {row}".split())
    for row in (
        "dp_shard pp_zbv ep_all_to_all accumulate reshard",
        "dp_shard pp_1f1b ep_all_gather accumulate reduce_each recompute reshard",
        "tp pp_interleaved etp accumulate reshard",
        "dp_shard ep_all_to_all accumulate reduce_each recompute keep_gathered",
        "dp_shard tp ep_all_gather etp keep_gathered",
        "dp_shard tp ep_hierarchical keep_gathered",
        "dp_shard tp ep_all_to_all accumulate recompute recompute_full",
        "dp_shard tp ep_hierarchical recompute recompute_full",
        "dp_shard tp ep_all_gather etp recompute recompute_full",
        "dp_shard ep_all_to_all accumulate recompute recompute_full float8 float8_experts",
        "dp_shard ep_all_to_all accumulate recompute ep_in_turn",
        "dp_shard tp ep_hierarchical accumulate reduce_each ep_in_turn",
        "tp cp_ring ep_all_to_all etp ep_in_turn",
        "dp_shard pp_1f1b ep_all_gather accumulate ep_in_turn",
        "dp_shard ep_all_to_all bf16 bf16_state ep_in_turn",
    )
)
"""Models with experts."""

LARGE_EXPERT_OPTION_RUNS = (frozenset(["experts", "dp_shard", "tp", "pp_1f1b", "ep_hierarchical", "accumulate", "reshard"]),)
"""On eight ranks."""
