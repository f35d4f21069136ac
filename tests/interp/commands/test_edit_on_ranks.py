"""Edits on ranks give the numbers of the same edits on one process."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from forge_core.layout import Layout
from forge_interp.captures import capture
from forge_interp.commands.ranks import capture_sharded, edit_sharded
from forge_interp.edits import Edit, add, edit, mean, patch, project_out, replace, zero
from forge_interp.tap_names import InterpError
from forge_models.objectives import CrossEntropy
from forge_parallel.model.parallel_model import ParallelModel
from forge_parallel.model.plan import Plan
from forge_parallel.model.realize import Blueprint, realize
from forge_parallel.placement.topology import Topology
from forge_parallel.step.step import Step
from forge_parallel.transforms.context.transform import ContextParallel
from forge_parallel.transforms.expert import ExpertParallel
from forge_parallel.transforms.recompute import Recompute
from forge_parallel.transforms.shard import FullyShard
from forge_parallel.transforms.tensor.transform import TensorParallel
from harness.pool import World
from harness.siblings import fast
from interp.commands.test_on_ranks import MODELS, rows, share
from parallel.pipelines import piped


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def autoencoder(x: torch.Tensor) -> torch.Tensor:
    """What a sparse autoencoder of width 48 makes of the stream."""
    return (x @ drawn(16, 48)).relu() @ drawn(48, 16) * 0.1


EDITS: dict[str, tuple[Callable[[], Edit], dict[str, Any]]] = {
    "zero": (zero, {"names": "attention.heads", "layers": [1], "heads": [3, 1]}),
    "add to keys": (lambda: add(torch.tensor(30.0)), {"names": "blocks.1.attention.k", "positions": [3]}),
    "mean": (mean, {"names": "blocks.0.residual_after", "positions": [2, 5]}),
    "mean of neurons": (mean, {"names": "blocks.1.mlp.hidden"}),
    "mean given": (lambda: mean(drawn(16)), {"names": "blocks.1.residual", "positions": slice(3, 9)}),
    "patch": (lambda: patch(drawn(4, 16, 4, 4)), {"names": "blocks.1.attention.heads", "positions": [0, -1]}),
    "patch stream": (lambda: patch({"blocks.2.residual": drawn(1, 16, 16)}), {"names": "blocks.2.residual"}),
    "add": (lambda: add(drawn(26), 2.0), {"names": "mlp.hidden", "layers": [0, -1]}),
    "add last": (lambda: add(drawn(16)), {"names": "blocks.*.residual", "positions": "last"}),
    "project out": (lambda: project_out(drawn(3, 16)), {"names": "blocks.0.residual_after"}),
    "autoencoder": (lambda: replace(autoencoder), {"names": "blocks.1.residual_mid"}),
    "running sum": (lambda: replace(lambda x: x.cumsum(1)), {"names": "blocks.1.residual", "positions": slice(6, 15, 2)}),
    "router": (lambda: add(drawn(4), 3.0), {"names": "blocks.1.router.logits"}),
}


def laid_out(model: str, layout: str, *more: Any) -> ParallelModel:
    at = Layout.parse(layout)
    transforms: list[Any] = [FullyShard(), TensorParallel(), ExpertParallel(), ContextParallel(), *more]
    plan = Plan.of(transforms, at, piped("1f1b")) if at.pp > 1 else Plan.of(transforms, at)
    return realize(Blueprint.of(MODELS[model].build), plan, Topology.of(at, torch.device("cpu")), 3, "fp64", "fp64")


def edited(model: str, layout: str, kind: str, padded: bool) -> tuple[torch.Tensor, float, float]:
    """The stream behind the last norm, the loss with an edit, and the loss after it."""
    ours = laid_out(model, layout)
    with torch.device("meta"):
        whole = MODELS[model].build()
    topology, step = ours.topology, Step(ours, CrossEntropy().build())
    batch = share(rows(0, padded), topology.data_rank, topology.data_size)
    how, options = EDITS[kind]
    with (
        edit_sharded(ours, whole, how=how(), **options),
        capture_sharded(ours, whole, "norm", samples=[batch.samples]) as seen,
    ):
        loss = step.evaluate([batch]).loss
    return seen["norm"], loss, step.evaluate([batch]).loss


def expected(model: str, kind: str, padded: bool) -> tuple[torch.Tensor, float, float]:
    """`edit` on one process."""
    ours, batch = laid_out(model, "1"), rows(0, padded)
    step = Step(ours, CrossEntropy().build())
    how, options = EDITS[kind]
    with edit(ours.part, how=how(), **options), capture(ours.part, "norm") as seen:
        loss = step.evaluate([batch]).loss
    found = seen["norm"] if padded else seen["norm"].flatten(0, 1)
    numbers = torch.tensor(batch.samples)[seen.tokens[0][:, 0]]
    return found[torch.argsort(numbers, stable=True)], loss, step.evaluate([batch]).loss


CASES = [
    *(("dense", layout, kind, False) for layout in ("dp2", "tp2", "cp2", "pp2") for kind in EDITS if kind != "router"),
    *(("dense", layout, kind, True) for layout in ("hsdp2x2", "cp2tp2", "pp2dp2") for kind in ("mean", "add last", "patch")),
    *(("one_kv", layout, "add to keys", False) for layout in ("tp2", "tp4")),
    *(("experts", layout, kind, True) for layout in ("dp2ep2", "pp2dp2ep2") for kind in ("router", "mean", "project out")),
]
FAST = (
    ("dense", "dp2", "mean", False),
    ("dense", "tp2", "autoencoder", False),
    ("dense", "tp2", "mean of neurons", False),
    ("dense", "cp2", "patch", False),
    ("dense", "cp2", "running sum", False),
    ("dense", "cp2tp2", "add last", True),
    ("experts", "dp2ep2", "router", True),
)


@pytest.mark.parametrize(("model", "layout", "kind", "padded"), fast(*FAST, of=CASES))
def test_an_edit_on_ranks_is_that_of_one_process(world: World, model: str, layout: str, kind: str, padded: bool) -> None:
    norm, loss, plain = expected(model, kind, padded)
    assert loss != pytest.approx(plain, abs=1e-6)
    for found in world.run(edited, Layout.parse(layout).world, model, layout, kind, padded):
        torch.testing.assert_close(found[0], norm, rtol=1e-10, atol=1e-12)
        assert found[1:] == pytest.approx((loss, plain), rel=1e-12)


def trained(layout: str, kind: str) -> dict[str, float] | str:
    """Numbers of a training step with an edit, or what it is refused with."""
    ours = laid_out("dense", layout)
    with torch.device("meta"):
        whole = MODELS["dense"].build()
    topology, step = ours.topology, Step(ours, CrossEntropy().build())
    batch = share(rows(0, False), topology.data_rank, topology.data_size)
    how, options = EDITS[kind]
    try:
        with edit_sharded(ours, whole, how=how(), **options):
            return {name: float(value) for name, value in step([batch]).numbers().items() if name in ("loss", "grad_norm")}
    except InterpError as refusal:
        return str(refusal)


def test_a_training_step_has_the_gradient_of_the_edited_model_where_no_rank_shares_the_value(world: World) -> None:
    ours = laid_out("dense", "1")
    with edit(ours.part, "attention.heads", zero(), layers=[1], heads=[3, 1]):
        numbers = Step(ours, CrossEntropy().build())([rows(0, False)]).numbers()
    one = {name: float(value) for name, value in numbers.items() if name in ("loss", "grad_norm")}
    assert len(one) == 2
    for found in world.run(trained, 2, "dp2", "zero"):
        assert found == pytest.approx(one, rel=1e-10)
    for found in world.run(trained, 2, "tp2", "zero"):
        assert found == (
            "blocks.1.attention.heads is split over ranks, so an edit of it has no gradient; edit it in evaluation, or use a "
            "layout that does not split it"
        )


def test_what_cannot_be_edited_is_refused_by_name() -> None:
    ours = laid_out("experts", "1")
    with torch.device("meta"):
        whole = MODELS["experts"].build()
    step, batch = Step(ours, CrossEntropy().build()), rows(0, False)
    for start, options in {
        "positions 'mean' can be captured, not edited": {"names": "norm", "positions": "mean"},
        "positions 'last_of_word' are not supported on several ranks": {"names": "norm", "positions": "last_of_word"},
        "blocks.0.router.experts can be captured, not edited": {"names": "blocks.0.router.experts"},
        "norm has no heads": {"names": "norm", "heads": [0]},
        "position 16 is beyond the 16 tokens": {"names": "norm", "positions": 16},
        "norm: a value of shape (3,) cannot take the place of (4, 16, 16)": {"names": "norm", "how": mean(torch.ones(3))},
    }.items():
        with pytest.raises(InterpError) as refusal, edit_sharded(ours, whole, **{"how": zero(), **options}):
            step.evaluate([batch])
        assert str(refusal.value).startswith(start)
    recomputed = laid_out("dense", "1", Recompute())
    with (
        pytest.raises(InterpError, match="has a wrapped forward"),
        edit_sharded(recomputed, MODELS["dense"].build(), "norm", zero()),
    ):
        Step(recomputed, CrossEntropy().build())([batch])
