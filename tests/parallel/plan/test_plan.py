"""Order by construction; clashes and gaps are refused."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from forge_core.errors import PlanError
from forge_core.layout import Layout
from forge_core.protocols.model import Transform
from forge_core.specs import Init, TensorSpec
from forge_parallel.model.plan import Order, Plan, default_transforms
from forge_parallel.model.realize import Blueprint, realize
from forge_parallel.placement.topology import Topology
from forge_parallel.transforms.shard import FullyShard
from parallel.tiny import TiedTiny, Tiny


@dataclass(frozen=True)
class Probe(Transform):
    name: str
    order: int
    axes: frozenset[str] = frozenset()
    seen: list[str] = field(default_factory=list)

    def apply(self, part: nn.Module, context: Any) -> nn.Module:
        assert all(p.is_meta for p in part.parameters()), "transforms see the meta device only"
        self.seen.append(self.name)
        return part


def test_a_plan_applies_transforms_by_their_order() -> None:
    seen: list[str] = []
    given = [Probe(order.name, order, seen=seen) for order in (Order.SHARD, Order.QUANTIZE, Order.COMPILE, Order.TENSOR)]
    layout = Layout()
    realize(Blueprint.of(Tiny), Plan.of(given, layout), Topology(layout, torch.device("cpu")), 0)
    assert seen == ["QUANTIZE", "TENSOR", "COMPILE", "SHARD"]


@pytest.mark.parametrize(
    ("transforms", "layout", "names"),
    [
        ([Probe("a", Order.TENSOR), Probe("b", Order.TENSOR)], "1", ("'a'", "'b'", "TENSOR")),
        ([Probe("a", 9), Probe("b", 9)], "1", ("'a'", "'b'", "order 9")),
        ([Probe("a", Order.TENSOR, frozenset({"tp"})), Probe("b", Order.SHARD, frozenset({"tp"}))], "tp2", ("'a'", "'b'", "tp")),
        ([FullyShard()], "dp2tp2", ("parallel.tp = 2", "transforms.tensor")),
        ([], "dp2", ("dp_shard", "transforms.shard")),
    ],
)
def test_what_does_not_fit_is_refused(transforms: list[Any], layout: str, names: tuple[str, ...]) -> None:
    with pytest.raises(PlanError) as refusal:
        Plan.of(transforms, Layout.parse(layout))
    assert all(name in str(refusal.value) for name in names)


def test_axes_pull_in_their_transform() -> None:
    assert default_transforms(Layout.parse("hsdp2x2"), []) == ("shard",)
    assert default_transforms(Layout.parse("dp2"), ["shard"]) == ()
    assert default_transforms(Layout.parse("cp2"), ["context"]) == ("shard",)
    assert default_transforms(Layout.parse("dp2cp2"), []) == ("shard", "context")
    assert default_transforms(Layout(), []) == ()


class Uncovered(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Parameter(torch.empty(3))


class Undescribed(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)


class Allocating(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(8, device="cpu")


class Overspecified(Tiny):
    def specs(self) -> Any:
        specs = super().specs()
        specs.tensors["ghost"] = TensorSpec((None,), Init("ones"), "vector")  # type: ignore[index]
        return specs


class SecretlyTied(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].out.weight = self.blocks[0].out.weight


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (Uncovered, "extra"),
        (Undescribed, "specs()"),
        (Allocating, "scale"),
        (Overspecified, "ghost"),
        (SecretlyTied, "blocks.1.out.weight"),
    ],
)
def test_a_model_that_does_not_describe_itself_fully_is_refused(build: type[nn.Module], named: str) -> None:
    with pytest.raises(PlanError, match="(?s).*" + named.replace("(", r"\(").replace(")", r"\)")):
        Blueprint.of(build)


def test_every_tensor_is_filled_exactly_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from forge_parallel.model import realize as module

    filled: list[str] = []
    fill = module.fill
    monkeypatch.setattr(module, "fill", lambda box, spec, name, *rest: (filled.append(name), fill(box, spec, name, *rest)))
    layout = Layout()
    model = realize(Blueprint.of(TiedTiny), Plan.of([], layout), Topology(layout, torch.device("cpu")), 0)
    part = model.part
    expected = sorted([name for name, _ in part.named_parameters()] + [name for name, _ in part.named_buffers()])
    assert sorted(filled) == expected
    assert torch.equal(part.blocks[0].norm.weight, torch.ones(8))
    assert torch.equal(part.scale, torch.ones(8))
    assert part.head.weight is part.embed.weight
    assert all(torch.isfinite(tensor).all() for _, tensor in model.tensors())


def test_a_plan_for_another_layout_is_refused() -> None:
    with pytest.raises(PlanError, match="layout"):
        realize(Blueprint.of(Tiny), Plan.of([FullyShard()], Layout.parse("dp2")), Topology(Layout(), torch.device("cpu")), 0)
