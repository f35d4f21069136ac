"""Whole runs over phases and streams: the learning rate, the lengths and the data position follow, on any layout."""

from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from forge_data.order.cursor import merge_cursors
from harness.pool import World
from train.runs import TINY, prepared, train

PHASES = """
[[data.sources]]
name = "SOURCE"
label = "stream"

[[data.phases]]
start = 3
weights = { stream = 3.0 }
lr_scale = 0.25

[[data.phases]]
start = 5
sequence_length = 8
global_batch = 16
"""

SOURCE = '''
from dataclasses import dataclass
import numpy as np
from forge_core.protocols.data import SourceComponent


@dataclass(frozen=True, kw_only=True)
class Drip(SourceComponent):
    """Documents that can only be read in order."""

    def build(self, context):
        return Stream()


class Stream:
    name, fingerprint, shards = "drip", "drip-1", 3
    vocab_size, max_id, tokenizer = 61, 60, None

    def stream(self, shard, start=0):
        for number in range(start, 40):
            yield np.append((np.arange(number % 11) + shard * 7 + number) % 60 + 1, 0)
'''


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "drip.py").write_text(SOURCE)
    head, rest = TINY.split("[train]")
    path = tmp_path / "phases.toml"
    path.write_text(head + PHASES.replace("SOURCE", "./drip.py:Drip") + "\n[train]" + rest)
    return path


def overrides(directory: Path, *more: str) -> list[str]:
    return [f"--job.dir={directory}", "--schedule.name=constant", "--data.shuffle_buffer=5", *more]


def test_one_run_through_all_phases(recipe: Path, tmp_path: Path) -> None:
    run, _ = prepared(recipe, overrides(tmp_path / "whole"))
    factors: list[float] = []
    real = run.optimizer.set_factor
    run.optimizer.set_factor = lambda factor: (factors.append(factor), real(factor))[1]  # type: ignore[method-assign, func-returns-value]
    from forge_train.run.loop import fit

    fit(run)
    assert factors == [1.0] * 3 + [0.25] * 5  # the first step of a phase already has it
    assert run.state.tokens == 8 * 8 * 16 and run.tokens_per_step == 16 * 8
    shapes = [{len(bytes.fromhex(row)) // 8 for row in step} for step in run.step.samples]  # type: ignore[attr-defined]
    assert shapes == [{16}] * 5 + [{8}] * 3 and [len(step) for step in run.step.samples] == [8] * 5 + [16] * 3  # type: ignore[attr-defined]


@pytest.mark.parametrize("workers", [0, 2])
def test_fault_18_stopped_on_two_processes_and_resumed_on_one(world: World, recipe: Path, tmp_path: Path, workers: int) -> None:
    whole = train(recipe, overrides(tmp_path / "whole"))
    cut = overrides(tmp_path / "cut", f"--data.loader_workers={workers}")
    first = world.run(train, 2, recipe, [*cut, "--train.max_steps=6"])
    rest = train(recipe, cut)
    assert rest["step"] == 8
    together = [list(chain.from_iterable(rank["samples"][step] for rank in first)) for step in range(6)]
    assert together + rest["samples"] == whole["samples"]


def test_every_rank_knows_the_whole_position_of_a_stream(world: World, recipe: Path, tmp_path: Path) -> None:
    one, other = world.run(saved_position, 2, recipe, overrides(tmp_path / "run", "--train.max_steps=6"))
    assert one == other and one["stream"]["epoch"] + one["stream"]["window"] > 0


def saved_position(recipe: Path, given: list[str]) -> Any:
    from forge_train.run.loop import fit

    run, _ = prepared(recipe, given)
    fit(run)
    again, _ = prepared(recipe, given)
    assert again.state.cursor == run.state.cursor
    return again.state.cursor["streams"]


def test_merging_is_idempotent() -> None:
    cursor = {"version": 1, "sample": 3, "foreign": {"a": {"0": [0, 0, 0, 0, 0]}}}
    assert merge_cursors([cursor, cursor]) == cursor
