"""An optimizer says how it treats parts of tensors, or is refused where there are parts; what it says is tested."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from forge_core.component import Component
from forge_core.errors import PlanError
from forge_core.layout import Layout
from forge_core.registry import Registry
from forge_core.trust import trust_file, trust_name
from forge_parallel.checks import optimizer_takes_parts
from forge_parallel.optim import optimizers
from forge_parallel.optim.optimizers import AdamWConfig
from forge_testing import conforms
from forge_testing.checks.parallel import Held, OptimizerChecks

PLUGINS = '''
from dataclasses import dataclass

import torch

from forge_core.component import Component


class Built:
    """Steepest descent with a direction that `direct` makes of each local gradient."""

    def __init__(self, model, direct):
        self.named, self.direct, self.lr = list(model.trainable()), direct, 0.02

    def set_factor(self, factor):
        self.lr = 0.02 * factor

    @torch.no_grad()
    def step(self, skip=None):
        for _, tensor, _ in self.named:
            weight, slope = (t.to_local() if hasattr(t, "to_local") else t for t in (tensor, tensor.grad))
            moved = weight - self.lr * self.direct(weight, slope)
            weight.copy_(moved if skip is None else torch.where(skip > 0, weight, moved))

    def zero_grad(self):
        for _, tensor, _ in self.named:
            tensor.grad = None

    def state(self):
        return {}


@dataclass(frozen=True, kw_only=True)
class Muon(Component):
    """Orthogonal directions for matrices (Jordan et al., 2024), by an SVD."""

    def build(self, model):
        def direct(weight, slope):
            if slope.dim() != 2 or not slope.numel():
                return slope
            left, _, right = torch.linalg.svd(torch.nan_to_num(slope), full_matrices=False)
            return left @ right

        return Built(model, direct)


@dataclass(frozen=True, kw_only=True)
class Lamb(Component):
    """Directions as long as the weight that they move (You et al., 2020)."""

    def build(self, model):
        return Built(model, lambda weight, slope: slope * weight.norm() / slope.norm().clamp(min=1e-12))


@dataclass(frozen=True, kw_only=True)
class Global(Component):
    """Directions that are clipped by the norm of all gradients that a rank sees."""

    def build(self, model):
        def norm():
            return torch.cat([tensor.grad.flatten() for _, tensor, _ in model.trainable()]).norm()

        return Built(model, lambda weight, slope: slope / norm().clamp(min=1e-12))


@dataclass(frozen=True, kw_only=True)
class Plain(Component):
    """Gradient descent."""

    def build(self, model):
        return Built(model, lambda weight, slope: slope)
'''


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Any:
    file = tmp_path_factory.mktemp("plugins") / "optimizers.py"
    file.write_text(PLUGINS)
    registry = Registry()
    trust_file(file)
    return lambda name: registry.load("forge.optimizers", f"{file}:{name}")


SPLIT = ("dp2", "tp2", "cp2", "pp2", "dp2ep2", "hsdp2x2")


@pytest.mark.parametrize("name", ["Muon", "Lamb"])
def test_e6_an_optimizer_that_does_not_say_how_it_treats_parts_is_refused_in_a_layout(plugins: Any, name: str) -> None:
    job = SimpleNamespace(optimizer=plugins(name)())
    for layout in SPLIT:
        (fault,) = optimizer_takes_parts(job, Layout.parse(layout))
        assert fault.key == "optimizer.name"
        assert name in fault.message and layout in fault.message
        assert "elementwise" in fault.hint
    for layout in ("1", "hsdp4x1"):
        assert list(optimizer_takes_parts(job, Layout.parse(layout))) == []
    assert list(optimizer_takes_parts(SimpleNamespace(optimizer=AdamWConfig()), Layout.parse("dp2tp2"))) == []


def test_e6_the_library_refuses_it_too_and_builds_it_on_one_rank(plugins: Any) -> None:
    def model(layout: str) -> Any:
        tensors = {"norm.weight": torch.nn.Parameter(torch.ones(7))}
        return SimpleNamespace(topology=SimpleNamespace(layout=Layout.parse(layout)), trainable=Held(tensors).trainable)

    with pytest.raises(PlanError, match=r"Muon does not say how it treats parts of parameters, .* dp2"):
        optimizers.build_optimizer(plugins("Muon")(), model("dp2"))
    assert callable(optimizers.build_optimizer(plugins("Muon")(), model("1")).step)
    assert callable(optimizers.build_optimizer(AdamWConfig(), model("dp2")).step)


@dataclass(frozen=True, kw_only=True)
class Misspelled(Component):
    shards: ClassVar[str] = "element-wise"

    def build(self, model: Any) -> Any:
        raise NotImplementedError


def test_e6_a_word_that_means_nothing_is_refused() -> None:
    assert "'element-wise'" in (optimizers.sharding_fault(Misspelled(), Layout.parse("dp2")) or "")


@pytest.mark.parametrize("claim", ["elementwise", "blocks"])
@pytest.mark.parametrize("name", ["Muon", "Lamb", "Global"])
def test_e6_a_false_claim_is_found(plugins: Any, name: str, claim: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cls = plugins(name)
    OptimizerChecks.check_parts(cls())  # it claims nothing yet
    monkeypatch.setattr(cls, "shards", claim, raising=False)
    with pytest.raises(AssertionError, match=f"says '{claim}', but .* in parts differs"):
        OptimizerChecks.check_parts(cls())


def test_e6_true_claims_pass(plugins: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins("Plain"), "shards", "elementwise", raising=False)
    OptimizerChecks.check_parts(plugins("Plain")())
    OptimizerChecks.check_parts(AdamWConfig(lr=0.1))


def test_e6_every_optimizer_of_ours_says_how_it_treats_parts() -> None:
    registry = Registry()
    for entry in registry.of("forge.optimizers"):
        if entry.distribution.startswith("forge-"):
            assert registry.load_entry(entry)().shards in optimizers.WAYS
    lion = f"{Path(__file__).parents[3] / 'examples' / 'plain_file' / 'mine.py'}:Lion"
    trust_name(lion)
    assert registry.load("forge.optimizers", lion)().shards == "elementwise"
    conforms(lion, "forge.optimizers")
