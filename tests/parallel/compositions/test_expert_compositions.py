"""The table of proven pairs for models with experts, run by run, against one process; see `test_compositions`."""

from itertools import combinations
from pathlib import Path

import pytest

from forge_parallel.verify import proven
from forge_parallel.verify.proven import FEATURES, is_proven
from forge_parallel.verify.proven_experts import EXPERT_RUNS, LARGE_EXPERT_RUNS, SLOW_EXPERT_RUNS
from harness.pool import World
from parallel.compositions.test_compositions import WITH_FEW, _name, equals_one_process, layout_of


@pytest.mark.parametrize("run", EXPERT_RUNS, ids=_name)
def test_a_run_equals_one_process(world: World, run: frozenset[str]) -> None:
    equals_one_process(world, run, tied=False)


@pytest.mark.slow
@pytest.mark.parametrize("run", SLOW_EXPERT_RUNS, ids=_name)
def test_the_remaining_pairs_equal_one_process(world: World, run: frozenset[str]) -> None:
    equals_one_process(world, run, tied=True)


@pytest.mark.slow
@pytest.mark.parametrize("run", LARGE_EXPERT_RUNS, ids=_name)
def test_pairs_on_eight_ranks_equal_one_process(world: World, run: frozenset[str]) -> None:
    equals_one_process(world, run, tied=False)


def test_the_table_is_what_it_says() -> None:
    assert len(EXPERT_RUNS) <= 14
    for run in (*EXPERT_RUNS, *SLOW_EXPERT_RUNS, *LARGE_EXPERT_RUNS):
        assert run <= FEATURES.keys()
        assert layout_of(run).world == 8 if run in LARGE_EXPERT_RUNS else layout_of(run).world <= 4
        assert "accumulate" in run or layout_of(run).pp == 1, "a pipeline always has several micro-batches"
        assert run.isdisjoint({"compile"}) or "bf16" in run, "experts compile in bf16 only"
    for test in (proven.EXPERT_TEST, proven.SLOW_EXPERT_TEST, proven.LARGE_EXPERT_TEST):
        file, _, name = test.partition("::")
        assert Path(__file__).match(file)
        assert name in globals()


def test_every_pair_with_experts_is_proven() -> None:
    mine = {name for name in FEATURES if name in ("experts", "etp") or name.startswith("ep_")}
    refused = {"tp_asynchronous", "tp_whole", "offload"}
    missing = {
        pair
        for pair in combinations(FEATURES, 2)
        if set(pair) & mine
        and not set(pair) & (refused | WITH_FEW)
        and not all(name.startswith("ep_") for name in pair)
        and not is_proven(pair)
    }
    assert not missing
