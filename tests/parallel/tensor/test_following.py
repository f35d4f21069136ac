"""What tensor parallelism would do to a module, found before it is laid out: wrong compositions are refused by name, and the
gradients of parameters on split features are those of one process."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forge_core.errors import PlanError
from forge_parallel import parallelize
from forge_parallel.foreign.description import example_for, rules_of
from forge_parallel.foreign.forward import viewed
from forge_parallel.foreign.tensor_trace import follow
from forge_parallel.model.parallel_model import gathered
from harness.pool import World
from parallel.foreign_modules import BUILDERS

DIM, HEADS = 8, 4


class Attention(nn.Module):
    """With a norm of the queries of each head."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(DIM, DIM) for _ in range(4))
        self.q_norm = nn.RMSNorm(DIM // HEADS, eps=1e-6)
        self.k_norm = nn.LayerNorm(DIM // HEADS)

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, DIM // HEADS)).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q_norm(self.heads(self.q(x))), self.k_norm(self.heads(self.k(x))), self.heads(self.v(x))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class WholeNorm(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.q_norm = nn.RMSNorm(DIM, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.q_norm(self.q(x)) * self.v(x))


class WholeLayerNorm(WholeNorm):
    def __init__(self) -> None:
        super().__init__()
        self.q_norm = nn.LayerNorm(DIM)  # type: ignore[assignment]


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.pieces(self.qkv(x))
        return self.out((q * k.sigmoid() + v).flatten(2))

    def pieces(self, x: Tensor) -> Any:
        return x.chunk(3, -1)


class Split(Fused):
    def pieces(self, x: Tensor) -> Any:
        return x.split([DIM, DIM, DIM], 2)


class Sliced(Fused):
    def pieces(self, x: Tensor) -> Any:
        return x[..., :DIM], x[..., DIM : 2 * DIM], x[..., 2 * DIM :]


class Viewed(Fused):
    def pieces(self, x: Tensor) -> Any:
        return x.view(*x.shape[:2], 3, -1).unbind(2)


class Interleaved(Fused):
    """As GPT-NeoX: queries, keys and values of one head beside each other, which a cut by heads does not touch."""

    def pieces(self, x: Tensor) -> Any:
        return x.unflatten(-1, (-1, 3 * DIM // HEADS)).chunk(3, -1)


class Dropping(Interleaved):
    rate = 0.1

    def pieces(self, x: Tensor) -> Any:
        return super().pieces(F.dropout(x, self.rate, self.training))


class DroppingNothing(Dropping):
    rate = 0.0


class Both(nn.Module):
    """One scale on both sides of a split layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.scale = nn.Linear(DIM, 12), nn.Linear(12, DIM), nn.Parameter(torch.full((1,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x * self.scale) * self.scale)


class Gated(Both):
    """A gate of whole features, one per token, on split ones."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x) * self.gate(x).sigmoid())


class Scaled(Both):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x) * (1 + self.scale.double().to(x.dtype)))


class Indexed(Gated):
    """Meets what whole features choose, which has no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x) * self.gate(x).argmax(-1, keepdim=True)) * self.gate(x)


class Written(Both):
    """Split features go through a tensor that is made empty."""

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        made = torch.zeros(up.shape, device=x.device)
        made[:, :] = up
        return self.down(made * self.scale)


class Read(Both):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.linear(x, self.up.weight))


class Unsummed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x)


class Model(nn.Module):
    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(19, DIM)
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.head = nn.Linear(DIM, 19)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


ATTENTION = {**{f"blocks.*.{name}": "colwise" for name in "qkv"}, "blocks.*.out": "rowwise"}
FUSED = {"blocks.*.qkv": "colwise", "blocks.*.out": "rowwise"}
MLP = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}

REFUSED: list[tuple[Any, dict[str, str], str]] = [
    (WholeNorm, ATTENTION, r"blocks\.0\.q_norm \(.*test_following\.py:\d+\) fails with a tp rank's part"),
    (WholeLayerNorm, ATTENTION, r"blocks\.0\.q_norm \(.*test_following\.py:\d+\) fails with a tp rank's part"),
    (Fused, FUSED, r"blocks\.0 \(.*test_following\.py:\d+\) applies split across features"),
    (Split, FUSED, r"blocks\.0 \(.*:\d+\) fails with a tp rank's part .* sum exactly to 12"),
    (Sliced, FUSED, r"blocks\.0 \(.*test_following\.py:\d+\) applies slice across"),
    (Viewed, FUSED, r"blocks\.0 \(.*test_following\.py:\d+\) applies view across"),
    (Dropping, FUSED, r"blocks\.0, blocks\.1 draws random numbers"),
    (Both, MLP, r"blocks\.0\.scale is used with split and with whole features"),
    (Gated, MLP, r"blocks\.0\.gate\.\w+ is used with split|the output of"),
    (Gated, {**MLP, "embed": "embedding_rowwise"}, r"the output of blocks.0.down is whole, but is combined with split features"),
    (Read, MLP, r"the plan splits blocks\.0\.up\.weight, but it is read outside"),
    (Unsummed, {"blocks.*.up": "colwise"}, r"the module \(.*:\d+\) fails with a tp rank's part .* if it needs all features"),
    (Unsummed, {"head": "colwise"}, "the module's output is split over tp ranks"),
    (Scaled, {**MLP, "blocks.*.down": "colwise"}, r"blocks\.0\.down needs whole features"),
    (Scaled, {"blocks.*.down": "rowwise"}, r"blocks\.0\.down is rowwise, but its input has whole features"),
    (Scaled, {**MLP, "embed": "replicated_with_grad_allreduce"}, r"sums the gradient of embed\.weight"),
]


@pytest.mark.parametrize(
    ("block", "plan", "message"), REFUSED, ids=[f"{block.__name__}{at}" for at, (block, *_) in enumerate(REFUSED)]
)
def test_e4_e5_what_ranks_would_get_wrong_is_refused(block: Any, plan: dict[str, str], message: str) -> None:
    module = Model(block).to("meta")
    with pytest.raises(PlanError, match=message):
        follow(module, rules_of(module, plan), example_for(module), 2)


class Outside(Model):
    """A parameter of a block on the output, too."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * self.blocks[0].scale  # type: ignore[operator]


def test_e4_a_parameter_on_split_features_and_on_the_output_is_refused() -> None:
    module = Outside(Scaled).to("meta")
    with pytest.raises(PlanError, match=r"blocks\.0\.scale is used with split and with whole features"):
        follow(module, rules_of(module, MLP), example_for(module), 2)


GOOD: dict[str, tuple[Any, dict[str, str], set[str]]] = {
    "attention": (Attention, ATTENTION, {"q_norm.weight", "k_norm.weight", "k_norm.bias"}),
    "interleaved": (Interleaved, FUSED, set()),
    "scaled": (Scaled, MLP, {"scale"}),
}


def test_e4_parameters_on_split_features_are_found() -> None:
    static = [(Indexed, MLP, set()), (Written, MLP, {"scale"})]
    for block, plan, names in [*GOOD.values(), *static]:
        module = Model(block).to("meta")
        found = follow(module, rules_of(module, plan), example_for(module), 2)
        assert found == {f"blocks.{index}.{name}" for index in range(2) for name in names}


VIEWED: list[tuple[tuple[int, ...], int, int, tuple[int, ...], tuple[int, int] | None]] = [
    ((2, 8, 12), 2, 1, (2, 8, 3, 4), (2, 1)),
    ((2, 8, 3, 4), 2, 1, (16, 12), (1, 1)),
    ((2, 4, 8, 3), 1, 1, (8, 8, 3), (0, 2)),
    ((8, 8, 3), 0, 2, (2, 4, 8, 3), (1, 1)),
    ((2, 8, 12), 2, 1, (2, 8, 1, 12), (3, 1)),
    ((2, 8, 1, 12), 3, 1, (2, 8, 12, 1), (2, 1)),
    ((6, 4), 0, 3, (2, 3, 4), None),
    ((6, 4), 1, 1, (8, 3), None),
]


@pytest.mark.parametrize(("before", "split", "outer", "after", "expected"), VIEWED)
def test_where_a_split_dimension_goes_in_a_view(
    before: tuple[int, ...], split: int, outer: int, after: tuple[int, ...], expected: tuple[int, int] | None
) -> None:
    assert viewed(before, split, outer, after) == expected


def test_dropout_that_is_switched_off_is_no_random_number() -> None:
    module = Model(DroppingNothing).to("meta")
    assert follow(module, rules_of(module, FUSED), example_for(module), 2) == set()


def test_what_transformers_sums_is_what_is_found() -> None:
    """Qwen3's own plan names the norms of queries and keys; Llama has none."""
    for name, expected in (
        ("qwen3", {"q_norm", "k_norm"}),
        ("llama", set()),
        ("mixtral", set()),
        ("qwen3 moe", {"q_norm", "k_norm"}),
    ):
        module = BUILDERS[name]().to("meta")
        rules = rules_of(module, module._tp_plan)  # type: ignore[arg-type]
        found = follow(module, rules, example_for(module), 2)
        assert found == {f"model.layers.{index}.self_attn.{norm}.weight" for index in range(2) for norm in expected}
        assert rules.summed == found


def test_a_module_that_cannot_be_run_without_memory_needs_an_example() -> None:
    module = Model(Attention).to("meta")
    with pytest.raises(PlanError, match="as example="):
        follow(module, rules_of(module, ATTENTION), {"ids": torch.zeros(2, 4)}, 2)
    with pytest.raises(PlanError, match="no input can be guessed, because Conv1d has no embedding"):
        example_for(nn.Conv1d(1, 1, 1))


def _gradients(name: str, layout: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    block, plan, _ = GOOD[name]
    model = parallelize(lambda: Model(block), layout, tp_plan=plan, compute="fp64", state="fp64")
    start = model.state_dict(whole=True)
    tokens = torch.arange(20).view(2, 10) % 19
    model.module(tokens).square().mean().backward()
    return start, gathered(model, {name: tensor.grad for name, tensor, _ in model.trainable()})


@pytest.mark.parametrize("name", GOOD)
def test_e4_gradients_on_split_features_are_summed(world: World, name: str) -> None:
    results = world.run(_gradients, 2, name, "tp2")
    module = Model(GOOD[name][0]).double()
    module.load_state_dict(results[0][0])
    module(torch.arange(20).view(2, 10) % 19).square().mean().backward()
    for _, found in results:
        for key, parameter in module.named_parameters():
            assert parameter.grad is not None
            torch.testing.assert_close(
                found[key], parameter.grad, rtol=1e-10, atol=1e-12, msg=lambda text, key=key: f"{key}: {text}"
            )
