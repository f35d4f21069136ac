"""Muon in every layout against torch's Muon and AdamW on one process, in fp64, with an orthogonalization by SVD."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import _muon as theirs

from forge_core.layout import Layout
from forge_models.objectives import CrossEntropy
from forge_parallel.model.plan import Plan
from forge_parallel.optim.groups import ParameterGroup
from forge_parallel.optim.optimizers import MuonConfig
from forge_parallel.transforms.shard import FullyShard
from forge_parallel.verify.parity import Case, Measurement, compare, measure
from harness.pool import World
from harness.siblings import fast
from parallel.compositions.rows import DECODER, EXPERTS, VOCAB, case_of, measured
from parallel.one_process import alone
from parallel.tiny import VOCAB as FEW
from parallel.tiny import Tiny, cross_entropy

CPU = torch.device("cpu")
RATES = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9}
DECODER_OF_EXPERTS = replace(DECODER, moe=EXPERTS)


def by_svd(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """What Newton-Schulz does, on singular values: x (a + b x^2 + c x^4), again and again."""
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    a, b, c = coefficients
    values = values / max(float(matrix.norm()), eps)
    for _ in range(steps):
        values = a * values + b * values**3 + c * values**5
    return left * values @ right


def matrices(name: str, tensor: Tensor) -> Iterator[Tensor]:
    """By logical name: one for each expert, three where a layer makes q, k and v, and nothing for other parameters."""
    last = name.rpartition(".")[2]
    if any(word in name for word in ("embed", "head", "norm", "router", "bias")):
        return
    yield from tensor if ".experts." in name else tensor.chunk(3) if "qkv" in name else [tensor]
    assert last in ("weight", "gate_proj", "up_proj", "down_proj"), name


class Reference:
    """torch's optimizers on views of a model's parameters."""

    def __init__(self, model: Any, nesterov: bool, scale: str, steps: int) -> None:
        self.model, self.views = model, []
        rest: dict[bool, list[Tensor]] = {True: [], False: []}
        for name, tensor, _ in model.trainable():
            whole = list(matrices(name, tensor.detach()))
            if not whole:
                rest["head" in name or "router" in name].append(tensor)
            self.views += [(tensor, index, nn.Parameter(view)) for index, view in enumerate(whole)]
            assert tensor.dtype == torch.float64
        self.names = {id(tensor): name for name, tensor, _ in model.trainable()}
        of_muon = [view for *_, view in self.views]
        adjust = {**RATES, "nesterov": nesterov, "adjust_lr_fn": scale, "ns_steps": steps}
        self.optimizers = [theirs.Muon(of_muon, **adjust)] if of_muon else []
        groups = [{"params": rest[True], "weight_decay": 0.1}, {"params": rest[False], "weight_decay": 0.0}]
        self.optimizers.append(torch.optim.AdamW([g for g in groups if g["params"]], lr=3e-3, betas=(0.9, 0.95), eps=1e-8))

    def step(self, skip: Tensor) -> None:
        assert skip == 0
        for tensor, index, view in self.views:
            assert tensor.grad is not None
            view.grad = list(matrices(self.names[id(tensor)], tensor.grad))[index].clone()
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for _, tensor, _ in self.model.trainable():
            tensor.grad = None


VARIANTS = (
    {"nesterov": True, "scale": "original", "steps": 5},
    {"nesterov": False, "scale": "match_rms_adamw", "steps": 3},
)


def _case(variant: int, **changes: Any) -> Case:
    options = {key: value for key, value in VARIANTS[variant].items() if key != "steps"}
    component = MuonConfig(**RATES, **options, newton_schulz_steps=VARIANTS[variant]["steps"], adamw_lr=3e-3)  # type: ignore[arg-type]
    objective = CrossEntropy().build()
    case = Case(DECODER_OF_EXPERTS.build, objective, component.build, VOCAB, rows=8, micro_batch=2, steps=20)  # type: ignore[arg-type]
    return replace(case, **changes)


def _reference(case: Case, variant: int) -> Measurement:
    """One process; what torch orthogonalizes in bf16 is orthogonalized exactly."""
    kept = theirs._zeropower_via_newtonschulz
    theirs._zeropower_via_newtonschulz = by_svd  # type: ignore[assignment]
    try:
        made = replace(case, optimizer=lambda model: Reference(model, **VARIANTS[variant]))  # type: ignore[arg-type]
        return measure(made, Plan.of([], Layout()), CPU)
    finally:
        theirs._zeropower_via_newtonschulz = kept


LAYOUTS = {
    "1": "",
    "dp2": "",
    "hsdp2x2": "",
    "hsdp2x1": "",
    "tp2": "tp",
    "pp2": "pp_1f1b",
    "dp2tp2": "tp",
    "dp2ep2": "ep_all_to_all",
    "dp2tp2ep2etp2": "etp",
}


@pytest.mark.parametrize("layout", fast("pp2", of=LAYOUTS))
def test_twenty_steps_equal_torch_on_one_process(world: World, layout: str) -> None:
    case = _case(0)
    exact = alone(_reference, case, 0)
    found = world.run(measured, Layout.parse(layout).world, case, layout, frozenset(LAYOUTS[layout].split()), timeout=400)
    for each in found:
        difference = compare(exact, each)
        assert difference.accepted("fp64"), difference


@pytest.mark.parametrize("layout", fast("1", "dp2", of=["1", "dp2", "hsdp2x2"]))
def test_fused_matrices_and_the_other_conventions_equal_torch(world: World, layout: str) -> None:
    """Of a model whose q, k and v are one parameter, with another scale and without Nesterov; shards are uneven."""
    changes = {"build": Tiny, "objective": cross_entropy, "vocab_size": FEW}
    case = _case(1, **changes)
    exact = alone(_reference, case, 1)
    for each in world.run(_fused, Layout.parse(layout).world, case, layout):
        difference = compare(exact, each)
        assert difference.accepted("fp64"), difference


def _fused(case: Case, layout: str) -> Measurement:
    return measure(case, Plan.of([FullyShard()], Layout.parse(layout)), CPU)


HALVED = "blocks.*.attention.*"


@pytest.mark.parametrize(("layout", "ranks"), [("1", 1), ("dp2", 2)])
def test_half_the_rate_is_half_the_step(world: World, layout: str, ranks: int) -> None:
    row = frozenset({"muon", "accumulate"} | ({"dp_shard"} if ranks > 1 else set()))
    plain = replace(case_of(row), steps=1, rows=8, micro_batch=1)
    whole = alone(measured, plain, "1", row)
    groups = (ParameterGroup(match=HALVED, lr=0.5),)
    for found in world.run(measured, ranks, replace(plain, groups=groups), layout, row):
        halved = 0
        for name, before in whole.initial.items():
            factor = 0.5 if ".attention." in name else 1.0
            halved += factor != 1
            expected = before + factor * (whole.weights[name] - before)
            torch.testing.assert_close(found.weights[name], expected, rtol=1e-9, atol=1e-11, msg=lambda t, n=name: f"{n}: {t}")
        assert halved > 0
