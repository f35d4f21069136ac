"""The loss by source of the data: what it is, what it costs, and when nothing is said.

That every layout gives the numbers of one process, and one process those of plain torch, is part of the parity gate.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from forge_core.batch import Batch, Sources
from forge_core.errors import ForgeError
from forge_core.layout import Layout
from forge_core.protocols.model import LossTerms
from forge_parallel.model.plan import Plan
from forge_parallel.model.realize import Blueprint, realize
from forge_parallel.placement.topology import Topology
from forge_parallel.step.step import Step
from forge_parallel.transforms.shard import FullyShard
from forge_parallel.verify.parity import Case, share, synthetic
from harness.pool import World
from parallel.pipelines import decoder_case, realized
from parallel.tiny import VOCAB, Tiny, cross_entropy

CASE = Case(Tiny, cross_entropy, lambda _: None, VOCAB, micro_batch=2)  # type: ignore[arg-type, return-value]


def made(layout: str = "1") -> Step:
    at = Layout.parse(layout)
    model = realize(Blueprint.of(Tiny), Plan.of([FullyShard()], at), Topology.of(at, torch.device("cpu")), 0, "fp64", "fp64")
    return Step(model, cross_entropy)


def batches(step: Step, **changed: Any) -> list[Batch]:
    topology = step.model.topology
    return [replace(batch, **changed) for batch in share(synthetic(CASE, 0), topology.data_rank, topology.data_size, 2)]


def by_source(numbers: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in numbers.items() if key.startswith("source/")}


def test_sources_make_up_the_whole() -> None:
    """With accumulation and, in the model of the second case, a z-loss and its metrics."""
    case = decoder_case()
    decoder = Step(realized(case, "1", "1f1b"), case.objective)
    for step, given in ((made(), batches(made())), (decoder, share(synthetic(case, 0), 0, 1, 2))):
        numbers = step(given).numbers()
        found = by_source(numbers)
        tokens = {key.split("/")[1]: value for key, value in found.items() if key.endswith("tokens")}
        assert list(tokens) == ["even", "odd"], "a source without a valid token has no loss"
        assert sum(tokens.values()) == numbers["tokens"]
        weighted = sum(found[f"source/{name}/loss"] * count for name, count in tokens.items()) / numbers["tokens"]
        assert weighted == pytest.approx(numbers["loss"], rel=1e-13)
        assert found["source/even/loss"] != pytest.approx(numbers["loss"], rel=1e-3), "sources must differ to be told apart"


class Collectives(TorchDispatchMode):
    """Names of the collectives that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def _collectives(layout: str, sources: bool) -> tuple[list[str], dict[str, float]]:
    step = made(layout)
    given = batches(step) if sources else batches(step, sources=None)
    step(given)  # what happens once
    with Collectives() as seen:
        result = step(given)
    assert dist.is_initialized()
    return seen.names, by_source(result.numbers())


def test_they_cost_no_collective(world: World) -> None:
    alone = by_source(made()(batches(made())).numbers())
    counted, plain = (world.run(_collectives, 2, "dp2", sources) for sources in (True, False))
    for (names, found), (others, nothing) in zip(counted, plain, strict=True):
        assert names == others
        assert sum("allreduce" in name for name in names) == 2, "one before the first forward, one after the last backward"
        assert found == pytest.approx(alone, rel=1e-12) and found == counted[0][1], "bitwise the same on both ranks"
        assert nothing == {}


def test_a_loss_that_is_not_finite_stays_with_its_source() -> None:
    step = made()

    def broken(head: Any, hidden: torch.Tensor, labels: torch.Tensor) -> LossTerms:
        terms = cross_entropy(head, hidden, labels)
        assert terms.rows is not None
        return terms._replace(sum=terms.sum * torch.inf, rows=terms.rows * torch.tensor([1.0, torch.inf]))

    numbers = replace(step, objective=broken)(batches(step)).numbers()
    good = step(batches(step)).numbers()
    assert numbers["skipped"] == 1
    assert numbers["source/odd/loss"] == torch.inf
    assert numbers["source/even/loss"] == good["source/even/loss"]


def test_an_objective_that_counts_no_rows_says_nothing() -> None:
    step = made()

    def silent(head: Any, hidden: torch.Tensor, labels: torch.Tensor) -> LossTerms:
        return cross_entropy(head, hidden, labels)._replace(rows=None)

    assert by_source(replace(step, objective=silent)(batches(step)).numbers()) == {}
    assert by_source(step(batches(step, sources=None)).numbers()) == {}


def _sometimes(layout: str) -> dict[str, float]:
    step = made(layout)

    def one_rank(head: Any, hidden: torch.Tensor, labels: torch.Tensor) -> LossTerms:
        terms = cross_entropy(head, hidden, labels)
        return terms if step.model.topology.rank else terms._replace(rows=None)

    return by_source(replace(step, objective=one_rank)(batches(step)).numbers())


def test_nothing_is_said_that_leaves_out_tokens(world: World) -> None:
    assert world.run(_sometimes, 2, "dp2") == [{}, {}]


def test_rows_that_are_not_those_of_the_batch_are_refused() -> None:
    step = made()

    def wrong(head: Any, hidden: torch.Tensor, labels: torch.Tensor) -> LossTerms:
        terms = cross_entropy(head, hidden, labels)
        return terms._replace(rows=terms.sum[None].detach())

    with pytest.raises(ForgeError, match=r"shape \(1,\), but the batch has 2 rows"):
        replace(step, objective=wrong)(batches(step))
    first, *others = batches(step)
    other = replace(first, sources=Sources(("web",), torch.zeros(2, dtype=torch.int64)))
    with pytest.raises(ForgeError, match="micro-batches of one step name different sources"):
        step([other, *others])
