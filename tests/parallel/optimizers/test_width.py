"""Width scaling: the factors of Table 3 of Yang et al. (2022), and that steps change models of all widths alike."""

from dataclasses import replace
from math import sqrt
from typing import Any

import pytest
import torch

from forge_core.errors import PlanError
from forge_core.layout import Layout
from forge_models.components.experts import MoEConfig, SoftmaxTopKConfig
from forge_parallel.model.plan import Plan
from forge_parallel.model.realize import Blueprint, realize
from forge_parallel.optim import optimizers
from forge_parallel.optim.groups import ParameterGroup as Group
from forge_parallel.optim.optimizers import AdamWConfig
from forge_parallel.optim.stages import apply, settings_of
from forge_parallel.placement.topology import Topology
from forge_parallel.step.step import Step
from forge_parallel.verify.parity import Case, share, synthetic
from parallel.compositions.rows import DECODER, VOCAB
from parallel.tiny import cross_entropy


def width(factor: int) -> Any:
    """Two blocks with heads of 4, whose number grows."""
    return replace(DECODER, layers=2, dim=16 * factor, ffn_dim=24 * factor, heads=4 * factor, kv_heads=2 * factor)


def test_rates_and_initial_weights_have_the_closed_form() -> None:
    moe = MoEConfig(experts=4, top_k=2, ffn_dim=16, router=SoftmaxTopKConfig())
    narrow = Blueprint.of(replace(width(1), moe=moe).build)
    wide = Blueprint.of(replace(width(4), ffn_dim=48, moe=replace(moe, ffn_dim=48)).build)
    found = settings_of(wide, [Group(match="*.q_proj.weight", lr=0.5)], narrow)
    old, own = narrow.specs.tensors, wide.specs.tensors
    hidden = {"q_proj": 4, "k_proj": 4, "v_proj": 4, "o_proj": 4, "gate": 4, "up": 4}
    seen = set()
    for name, spec in own.items():
        setting, std = found.of(name), found.std.get(name)
        if name == "head.weight":
            assert (setting.lr, setting.decay, std) == (1 / 4, 4, old[name].init.std / 4)
        elif name == "embed.weight":
            assert (setting.lr, setting.decay, std) == (1, 1, old[name].init.std)
        elif spec.group == "router":
            assert (setting.lr, setting.decay, std) == (1 / 4, 4, old[name].init.std / 4)  # to a fixed number of experts
        elif spec.group == "matrix":
            ratio = 3 if "down" in name else 4
            assert setting.decay == ratio and setting.lr == (0.5 if "q_proj" in name else 1) / ratio, name
            assert std == pytest.approx(old[name].init.std / sqrt(ratio)), name
        else:
            assert (setting, std) == (found.of("nothing"), None), name
            continue
        seen.add(spec.group if spec.group == "router" else name.rpartition(".")[0].rpartition(".")[2])
    assert {*list(hidden)[:4], "head", "embed", "router"} <= seen
    drawn = apply(wide, found).specs.tensors
    assert all(drawn[name].init.std == std for name, std in found.std.items())


@pytest.mark.parametrize(
    ("model", "narrow", "said"),
    [
        (width(2), replace(width(1), heads=2, kv_heads=2), "heads are 4 wide in the model and 8"),
        (replace(width(2), tied_embeddings=True), replace(width(1), tied_embeddings=True), "head.weight is tied to embed.weight"),
        (width(2), replace(width(1), layers=1), "only one of the model and its narrow model has"),
        (width(2), width(2), "no matrix of the model is wider"),
    ],
)
def test_what_it_does_not_cover_is_refused(model: Any, narrow: Any, said: str) -> None:
    with pytest.raises(PlanError, match=f"parameters.width_base: .*{said}"):
        settings_of(Blueprint.of(model.build), (), Blueprint.of(narrow.build))


def _change(factor: int, scaled: bool) -> float:
    """How much four steps change the logits of a batch, root mean square."""
    case = Case(
        width(factor).build,
        cross_entropy,
        AssertionError,
        VOCAB,
        rows=4,
        narrow=width(1).build if scaled and factor > 1 else None,
    )
    blueprint, settings = case.blueprint()
    layout = Layout()
    model = realize(blueprint, Plan.of([], layout), Topology(layout, torch.device("cpu")), 0, "fp32", "fp32")
    optimizer, step = (
        optimizers.build_optimizer(AdamWConfig(lr=1e-2, weight_decay=0.0), model, settings),
        Step(model, cross_entropy),
    )
    (batch,) = share(synthetic(case, 0), 0, 1, 4)

    def logits() -> torch.Tensor:
        with model.inference():
            return model.part(batch.tokens, positions=batch.positions, documents=batch.documents)

    before = logits()
    for _ in range(4):
        result = step([batch])
        optimizer.step(result.skip)
        optimizer.zero_grad()
    return float((logits() - before).square().mean().sqrt())


def test_with_it_steps_change_the_logits_of_all_widths_alike() -> None:
    """The coordinate check of the paper (appendix D.1): with one rate for all, wider models are changed more and more."""
    plain = [_change(factor, scaled=False) for factor in (1, 4, 16)]
    scaled = [_change(factor, scaled=True) for factor in (1, 4, 16)]
    assert plain[2] > 4 * plain[0]
    assert all(0.6 < change / scaled[0] < 1.7 for change in scaled), scaled
