"""What a builder's constructors do to parameters, against the same constructors with memory: in one process, plain torch."""

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from forge_core.errors import PlanError
from forge_parallel import parallelize
from forge_parallel.foreign.weights import of_builder
from harness.pool import World
from parallel.foreign_modules import BUILDERS


class Scaled(nn.Module):
    """As nanoGPT: an `_init_weights` of its own, then projections that are scaled by depth."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleDict({"fc": nn.Linear(32, 32), "c_proj": nn.Linear(32, 32)}) for _ in range(2))
        self.apply(self._init_weights)
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * 50))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)


class Many(nn.Module):
    """Most things that constructors do to parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 16)
        nn.init.zeros_(self.gate.weight)
        self.gate.bias.data.fill_(3.0)
        self.scale = nn.Parameter(torch.linspace(0, 1, 8))
        self.drawn = nn.Parameter(torch.randn(64, 64) * 0.3)
        early = torch.empty(8)
        early.fill_(4.0)
        self.early = nn.Parameter(early)
        mine = torch.Generator().manual_seed(0)
        self.mine, self.mine_too = nn.Parameter(torch.empty(64)), nn.Parameter(torch.empty(64))
        nn.init.normal_(self.mine, generator=mine)
        nn.init.normal_(self.mine_too, generator=mine)
        self.there = nn.Parameter(self.gate.bias.detach().to(self.gate.bias.device, copy=True) + 1)
        late = nn.Parameter(torch.empty(64, 64))
        self.late = late
        nn.init.trunc_normal_(late, std=0.5)
        self.clone = copy.deepcopy(self.gate)
        with torch.no_grad():
            self.clone.weight.copy_(torch.eye(16))
            self.clone.bias[:4] = 7.0
        self.turned = nn.Linear(64, 64, bias=False)
        nn.init.orthogonal_(self.turned.weight)
        self.lower = nn.Linear(64, 64, bias=False)
        self.lower.weight.data = self.lower.weight.data * 0.5
        self.follows = nn.Parameter(self.drawn.detach() + 1)
        self.short = nn.Linear(64, 64)
        nn.init.trunc_normal_(self.short.weight, std=0.5)
        if self.short.weight.device.type == "cpu":
            nn.init.trunc_normal_(self.short.bias, a=1.0, b=2.0)
        self.table = nn.Embedding(64, 16, padding_idx=3)
        self.packed = nn.Linear(64, 128, bias=False)
        nn.init.zeros_(self.packed.weight[64:])
        self.stack = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 8), 2, enable_nested_tensor=False)
        shared = nn.Parameter(torch.ones(3))
        self.one, self.other = nn.Module(), nn.Module()
        self.one.weight = self.other.weight = shared
        shared.data.mul_(2.0)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_embd=64, n_head=4, n_layer=2, vocab_size=97, n_positions=16))


MADE: dict[str, Callable[[], nn.Module]] = {"scaled": Scaled, "many": Many, "gpt2": gpt2, **BUILDERS}


@pytest.mark.parametrize("name", MADE)
def test_e3_a_builders_initial_values_are_its_constructors(name: str) -> None:
    """What does not depend on random numbers is equal, what does has the same spread."""
    found = {key: value for part in of_builder(MADE[name], 5).values() for key, value in part.items()}
    torch.manual_seed(0)
    one, other = (dict(MADE[name]().named_parameters()) for _ in range(2))
    assert found.keys() == one.keys()
    for key, value in one.items():
        assert found[key].shape == value.shape
        assert found[key].dtype == value.dtype
        if key.startswith("mine"):  # from a generator of the constructor's: other draws, see below
            continue
        if torch.equal(value, other[key]):
            assert torch.equal(found[key], value), key
            continue
        drawn = value != other[key]
        assert torch.equal(found[key][~drawn], value[~drawn]), key
        near = max(0.1, 8 / math.sqrt(int(drawn.sum())))
        assert found[key][drawn].std().item() == pytest.approx(value[drawn].std().item(), rel=near), key
        assert abs(found[key][drawn].mean() - value[drawn].mean()) < near * value[drawn].std(), key


def test_e3_what_constructors_relate_stays_related() -> None:
    skeleton = of_builder(Many, 5)
    found, second = ({key: value for part in skeleton.values() for key, value in part.items()} for _ in range(2))
    assert all(torch.equal(found[key], second[key]) for key in found)
    assert torch.equal(found["follows"], found["drawn"] + 1)
    assert torch.equal(found["turned.weight"] @ found["turned.weight"].T, found["turned.weight"] @ found["turned.weight"].T)
    torch.testing.assert_close(found["turned.weight"] @ found["turned.weight"].T, torch.eye(64), rtol=0, atol=1e-5)
    assert torch.equal(found["stack.layers.0.linear1.weight"], found["stack.layers.1.linear1.weight"]), "torch clones a layer"
    assert not torch.equal(found["late"], found["drawn"])
    assert torch.equal(found["one.weight"], torch.full((3,), 2.0))
    assert "other.weight" not in found
    assert not torch.equal(found["mine"], found["mine_too"]), "a generator goes on"
    assert torch.equal(found["early"], torch.full((8,), 4.0))
    again = {key: value for part in of_builder(Many, 5).values() for key, value in part.items()}
    other = {key: value for part in of_builder(Many, 6).values() for key, value in part.items()}
    assert all(torch.equal(found[key], again[key]) for key in found)
    assert not torch.equal(found["late"], other["late"])
    assert not torch.equal(found["drawn"], other["drawn"])


def test_e3_a_builder_leaves_the_callers_random_numbers_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    for _ in of_builder(Many, 5).values():
        pass
    assert torch.equal(torch.rand(3), expected)


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(3))
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))


def test_e3_a_parameter_that_nothing_initializes_is_refused() -> None:
    with pytest.raises(PlanError, match="leaves parameter scale uninitialized"):
        parallelize(Bare, "1")


class Parametrized(nn.Module):
    """A layer whose weight is computed, and a parameter without elements."""

    def __init__(self, make: Callable[[nn.Linear], nn.Module]) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(6, 6), make(nn.Linear(6, 6))
        self.empty = nn.Parameter(torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.first(x))


PARAMETRIZED: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "orthogonal": parametrizations.orthogonal,
    "cayley": partial(parametrizations.orthogonal, orthogonal_map="cayley"),
    "householder": partial(parametrizations.orthogonal, orthogonal_map="householder", use_trivialization=False),
    "spectral_norm": parametrizations.spectral_norm,
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm with hooks": torch.nn.utils.spectral_norm,
}


@pytest.mark.parametrize("name", PARAMETRIZED)
def test_trials_d10_weights_that_are_computed_begin_as_their_constructors_make_them(name: str) -> None:
    """Buffers that follow from parameters are replayed, too, and operators whose results torch cannot foresee run with values."""
    build = partial(Parametrized, PARAMETRIZED[name])
    model = parallelize(build, "1", seed=5)
    module = build()
    state = model.state_dict(whole=True)
    missing, unexpected = module.load_state_dict(state, strict=False)
    assert not unexpected
    for key in missing:  # what is not persistent
        path, _, slot = key.rpartition(".")
        module.get_submodule(path)._buffers[slot] = model.module.get_submodule(path)._buffers[slot]
    assert not [key for key, tensor in module.state_dict().items() if tensor.is_meta or not tensor.isfinite().all()]
    model.module.eval(), module.eval()
    x = torch.linspace(-1, 1, 12).view(2, 6)
    assert torch.equal(model.module(x), module(x))
    weight: Any = module.layer.weight
    norms = torch.linalg.svdvals(weight.detach())
    if name in ("orthogonal", "cayley", "householder"):
        torch.testing.assert_close(norms, torch.ones(6), rtol=0, atol=1e-5)
    elif name == "spectral_norm":
        assert norms[0].item() == pytest.approx(1, rel=0.05), "its vectors have been through fifteen iterations"
    other = parallelize(build, "1", seed=6)
    assert not torch.equal(model.module(x), other.module(x)), "drawn by the seed"


def test_trials_d10_a_parameter_without_a_size_is_refused() -> None:
    with pytest.raises(PlanError, match=r"weight of a LazyLinear is lazy and has no shape yet; give sizes"):
        parallelize(lambda: nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 3)), "1")
    with pytest.raises(PlanError, match=r"0\.weight is lazy"):
        parallelize(nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 3)), "1")


def _whole(layout: str) -> dict[str, Tensor]:
    found = {}
    for name, make in PARAMETRIZED.items():
        if name.startswith("weight"):
            continue
        model = parallelize(partial(Parametrized, make), layout, seed=5)
        out = model.module(torch.linspace(-1, 1, 12).view(2, 6))
        out.sum().backward()
        found |= {f"{name}, {key}": value for key, value in model.state_dict(whole=True).items()} | {name: out.detach()}
    return found


def test_trials_d10_computed_weights_begin_alike_in_every_layout(world: World) -> None:
    expected = _whole("1")
    for found in world.run(_whole, 2, "dp2"):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-6, msg=lambda text, at=key: f"{at}: {text}")
