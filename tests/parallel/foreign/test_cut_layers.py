"""Layers that a plan cuts compute exactly what a linear layer or a table computes, or the plan is refused by name: every way in
which a module can compute something else, against one process in fp64."""

import copy
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

from forge_core.errors import PlanError
from forge_parallel import parallelize
from forge_parallel.foreign.description import rules_of
from forge_parallel.foreign.tensor_trace import follow
from forge_parallel.model.parallel_model import gathered
from harness.pool import World
from parallel.foreign_modules import mixtral

WIDTH, HIDDEN, VOCAB = 8, 12, 20


class Normed(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(super().forward(x), (self.weight.shape[0],))


class Bounded(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


class OwnBias(nn.Linear):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.shift = nn.Parameter(torch.linspace(0, 1, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.shift


class Scaled(nn.Linear):
    factor: Tensor

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.register_buffer("factor", torch.full((outputs,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor


class Standardized(nn.Linear):
    """Looks across its weight, not across its output."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight - self.weight.mean(), self.bias)


class Residual(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x.mean(-1, keepdim=True)


class Twice(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + super().forward(x).mean())


class LowRank(nn.Linear):
    """As loralib: the correction is in the layer itself."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.lora_a = nn.Parameter(torch.full((2, inputs), 0.1))
        self.lora_b = nn.Parameter(torch.full((outputs, 2), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.lora_a.T @ self.lora_b.T


class Constant(nn.Linear):
    """Returns another tensor than the product, of the same shape."""

    def forward(self, x: Tensor) -> Tensor:
        super().forward(x)
        return x.new_ones(*x.shape[:-1], self.out_features)


class Unbiased(nn.Linear):
    """Has a bias, and does not use it."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def _replaced(inputs: int, outputs: int) -> nn.Module:
    layer = nn.Linear(inputs, outputs)
    layer.forward = types.MethodType(lambda self, x: F.linear(x, self.weight, self.bias).tanh(), layer)  # type: ignore[method-assign]
    return layer


def _replaced_alike(inputs: int, outputs: int) -> nn.Module:
    """By the same computation; but what is set on the instance hides what its class becomes."""
    layer = nn.Linear(inputs, outputs)
    layer.forward = types.MethodType(nn.Linear.forward, layer)  # type: ignore[method-assign]
    return layer


def _old_weight_norm(inputs: int, outputs: int) -> nn.Module:
    with pytest.warns(FutureWarning):
        return torch.nn.utils.weight_norm(nn.Linear(inputs, outputs))


class _Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight / weight.norm()


def _parametrized(inputs: int, outputs: int) -> nn.Module:
    layer = nn.Linear(inputs, outputs)
    parametrize.register_parametrization(layer, "weight", _Doubled())
    return layer


class Plain(nn.Linear):
    """The same computation in other words."""

    def forward(self, x: Tensor) -> Tensor:
        """As libraries that keep weights in another format write it."""
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


def _hooked(inputs: int, outputs: int) -> nn.Module:
    layer = nn.Linear(inputs, outputs)
    layer.register_forward_hook(lambda _, __, out: out.tanh())
    return layer


def _pre_hooked(inputs: int, outputs: int) -> nn.Module:
    layer = nn.Linear(inputs, outputs)
    layer.register_forward_pre_hook(lambda _, args: (args[0].sin(),))
    return layer


def _hooked_across(inputs: int, outputs: int) -> nn.Module:
    layer = nn.Linear(inputs, outputs)
    layer.register_forward_hook(lambda _, __, out: out - out.mean(-1, keepdim=True))
    return layer


def _pre_hooked_across(inputs: int, outputs: int) -> nn.Module:
    layer = nn.Linear(inputs, outputs)
    layer.register_forward_pre_hook(lambda _, args: (args[0] - args[0].mean(-1, keepdim=True),))
    return layer


class Calling(nn.Linear):
    """Computes around its forward, not in it."""

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x).sigmoid()


Layer = Callable[[int, int], nn.Module]

REFUSED: dict[str, Layer] = {
    **{made.__name__: made for made in (Normed, Bounded, OwnBias, Scaled, Standardized, Residual, Twice, LowRank, Constant)},
    "Unbiased": Unbiased,
    "replaced": _replaced,
    "replaced by the same": _replaced_alike,
    "weight_norm": lambda a, b: parametrizations.weight_norm(nn.Linear(a, b)),
    "spectral_norm": lambda a, b: parametrizations.spectral_norm(nn.Linear(a, b)),
    "orthogonal": lambda a, b: parametrizations.orthogonal(nn.Linear(a, b), orthogonal_map="cayley"),
    "weight_norm with hooks": _old_weight_norm,
    "parametrized": _parametrized,
}
"""Layers that compute something else than their product and bias."""

RIGHT: dict[str, Layer] = {
    "nn.Linear": nn.Linear,
    "Plain": Plain,
    "hooked": _hooked,
    "pre-hooked": _pre_hooked,
    "Calling": Calling,
}
"""Layers that compute no more than that, and what happens around them is followed."""


class Block(nn.Module):
    def __init__(self, up: Layer, down: Layer) -> None:
        super().__init__()
        self.up, self.down = up(WIDTH, HIDDEN), down(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Model(nn.Module):
    def __init__(
        self, up: Layer = nn.Linear, down: Layer = nn.Linear, table: Callable[[int, int], nn.Module] = nn.Embedding
    ) -> None:
        super().__init__()
        self.embed = table(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(up, down) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise", "embed": "embedding_rowwise"}


def _followed(module: nn.Module, plan: dict[str, str] = PLAN) -> frozenset[str]:
    module = module.to("meta")
    return follow(module, rules_of(module, plan), torch.zeros(2, 4, dtype=torch.int64), 2)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("place", ["up", "down"])
@pytest.mark.parametrize("name", REFUSED)
def test_trials_d2_a_layer_that_computes_something_else_is_refused_by_name(name: str, place: str) -> None:
    with pytest.raises(PlanError, match=rf"blocks\.0\.{place}\b"):
        _followed(Model(**{place: REFUSED[name]}))


@pytest.mark.parametrize(("layer", "place"), [(_hooked_across, "up"), (_pre_hooked_across, "down")])
def test_trials_d2_a_hook_that_looks_across_what_is_split_is_refused(layer: Layer, place: str) -> None:
    with pytest.raises(PlanError, match=r"applies mean across features"):
        _followed(Model(**{place: layer}))


def _doubled(count: int, width: int) -> nn.Module:
    class Doubled(nn.Embedding):
        def forward(self, tokens: Tensor) -> Tensor:
            return super().forward(tokens) * 2 + 1

    return Doubled(count, width)


TABLES: dict[str, Callable[[int, int], nn.Module]] = {
    "own forward": _doubled,
    "max_norm": lambda count, width: nn.Embedding(count, width, max_norm=1.0),
    "scale_grad_by_freq": lambda count, width: nn.Embedding(count, width, scale_grad_by_freq=True),
    "sparse": lambda count, width: nn.Embedding(count, width, sparse=True),
}


@pytest.mark.parametrize("name", TABLES)
def test_trials_d2_a_table_that_computes_something_else_is_refused(name: str) -> None:
    with pytest.raises(PlanError, match=r"tensor: the plan splits embed "):
        _followed(Model(table=TABLES[name]))


class Named(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(input=self.up(x).relu())


def test_trials_d2_a_cut_layer_takes_one_argument_by_place() -> None:
    module = Model()
    module.blocks[0] = Named(nn.Linear, nn.Linear)
    with pytest.raises(PlanError, match=r"blocks\.0\.down is called with 'input' as keyword"):
        _followed(module)


def _like_mixtral(replaced: bool) -> nn.Module:
    module = mixtral()
    for layer in module.model.layers:  # type: ignore[union-attr]
        experts: Any = layer.mlp.experts  # type: ignore[union-attr]
        original = type(experts).forward

        def normed(self: Any, *args: Any, original: Any = original) -> Tensor:
            return F.layer_norm(original(self, *args), (16,))

        if replaced:
            experts.forward = types.MethodType(normed, experts)
        else:
            experts.__class__ = type("NormedExperts", (type(experts),), {"forward": normed})
    return module


@pytest.mark.parametrize("replaced", [False, True])
def test_trials_d2_experts_with_a_forward_of_their_own_are_refused(replaced: bool) -> None:
    with pytest.raises(PlanError, match=r"splits model\.layers\.0\.mlp\.experts \(\w+\) as experts"):
        module = _like_mixtral(replaced)
        _followed(module, module._tp_plan)  # type: ignore[arg-type]


def _padded(at: int) -> Callable[[int, int], nn.Module]:
    return lambda count, width: nn.Embedding(count, width, padding_idx=at)


def _case(name: str) -> Model:
    torch.manual_seed(4)
    if name.startswith("padding"):
        return Model(table=_padded(int(name.split()[1])))
    return Model(RIGHT[name], RIGHT[name])


CASES = [*RIGHT, "padding 0", "padding 3", "padding 10", "padding 19"]


def _gradients() -> dict[str, dict[str, Tensor]]:
    found = {}
    for name in CASES:
        model = parallelize(_case(name), "tp2", tp_plan=PLAN, compute="fp64", state="fp64")
        model.module(torch.arange(VOCAB)[None]).square().mean().backward()
        found[name] = gathered(model, {name: tensor.grad for name, tensor, _ in model.trainable()})
    return found


def test_trials_d2_layers_that_are_cut_have_the_gradients_of_one_process(world: World) -> None:
    for found in world.run(_gradients, 2):
        for name in CASES:
            module = copy.deepcopy(_case(name)).double()
            module(torch.arange(VOCAB)[None]).square().mean().backward()
            for key, parameter in module.named_parameters():
                assert parameter.grad is not None
                torch.testing.assert_close(
                    found[name][key], parameter.grad, rtol=0, atol=1e-12, msg=lambda text, at=f"{name}, {key}": f"{at}: {text}"
                )
