"""A step is the same in micro-batches of 1, 2 and 4 rows: every fusion, every router, and every loss that says so."""

from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_core.component import fields_of
from forge_core.layout import Layout
from forge_core.registry import Registry
from forge_models.components.decoder import MTPConfig
from forge_models.components.experts import MoEConfig
from forge_models.objectives import CrossEntropy
from forge_models.shape import LAYOUT_DEPENDENT, Losses
from forge_parallel.model.plan import Plan
from forge_parallel.optim import optimizers
from forge_parallel.optim.optimizers import AdamWConfig
from forge_parallel.verify.parity import Case, compare, measure
from forge_vlm.components.fusions import JointDecoder, MixtureOfTransformers
from harness.siblings import fast
from vlm.tiny import JOINT, SIZES, TEXT

LOSSES = [info.name for info in fields_of(Losses)]
INDEPENDENT = Losses(**{name: 0.3 for name in LOSSES if name not in LAYOUT_DEPENDENT})


def examples(group: str) -> list[Any]:
    """Of every component of a group, so that a new one is compared without being named here."""
    registry = Registry()
    return [example for name in registry.names(group) for example in registry.load(group, name).examples(Path())]


FUSIONS = [None, *examples("forge.fusions")]
DEFAULTS = [fusion for fusion in FUSIONS if fusion is None or fusion == type(fusion)()]
FAST = [fusion for fusion in DEFAULTS if not isinstance(fusion, MixtureOfTransformers)]
ROUTERS = examples("forge.routers")


def model_of(fusion: Any, **parts: Any) -> Any:
    """A text model without a fusion. A cross block stands before the last of `every` layers."""
    layers = {"layers": getattr(fusion, "every", 2)}
    return replace(TEXT, **layers, **parts) if fusion is None else replace(JOINT, **layers, fusion=fusion, **parts)


def experts(router: Any, losses: Losses) -> MoEConfig:
    return MoEConfig(experts=4, top_k=2, ffn_dim=16, kernel="loop", every=2, router=router, losses=losses)


def same_in_micro_batches(model: Any, sizes: tuple[int, ...] = (2, 1)) -> list[bool]:
    """Whether losses, gradients and weights after two steps on four rows are those of one micro-batch, for each other size."""

    def measured(micro_batch: int) -> Any:
        case = Case(
            build=model.build,
            objective=CrossEntropy(z_loss=1e-2, label_smoothing=0.1).build(),
            # A usual `eps` would make a whole step of the rounding of a gradient that happens to be 0.
            optimizer=partial(optimizers.build_optimizer, AdamWConfig(lr=1e-2, eps=1e-4)),
            vocab_size=SIZES["vocab_size"],
            rows=4,
            micro_batch=micro_batch,
        )
        return measure(case, Plan.of((), Layout()), torch.device("cpu"))

    whole = measured(4)
    return [compare(whole, measured(micro_batch)).accepted("fp64") for micro_batch in sizes]


@pytest.mark.parametrize("fusion", fast(*FAST, of=FUSIONS), ids=repr)
def test_trials_c4_no_fusion_router_or_loss_depends_on_the_micro_batch(fusion: Any) -> None:
    compared = []
    if not getattr(fusion, "needs_experts", False):
        assert same_in_micro_batches(model_of(fusion)) == [True, True]
    for router, losses in product(ROUTERS, (INDEPENDENT, Losses())):
        try:
            model = model_of(fusion, moe=experts(router, losses))
        except ValueError:  # a router that does not learn, or a fusion that has its own
            continue
        if (router, True) not in compared:
            assert same_in_micro_batches(model) == [True, True], (router, losses)
        compared.append((router, losses.any()))
    assert compared, "every fusion takes experts"


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("fusion", fast(None, JointDecoder(), of=DEFAULTS), ids=repr)
def test_losses_that_depend_on_the_micro_batch_are_those_that_say_so(fusion: Any, name: str) -> None:
    """One loss after the other, and not lost in the sum of all; what is exempt is seen to depend on it."""
    found = same_in_micro_batches(model_of(fusion, moe=experts(None, Losses(**{name: 0.3}))), sizes=(1,))
    assert found == [name not in LAYOUT_DEPENDENT]


def test_the_loss_of_further_tokens_does_not_depend_on_the_micro_batch() -> None:
    assert same_in_micro_batches(model_of(None, mtp=MTPConfig(depth=1))) == [True, True]
