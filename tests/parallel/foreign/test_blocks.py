"""The blocks of foreign modules are modules that are called and that alone read their parameters; whatever is shared, nested or
never called, gradients under dp are those of one process."""

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forge_core.errors import PlanError
from forge_parallel import parallelize
from forge_parallel.foreign.blocks import find_blocks, watch
from forge_parallel.model.parallel_model import gathered
from forge_parallel.transforms.recompute import Recompute
from harness.pool import World
from harness.siblings import fast

WIDTH, VOCAB = 8, 19


def _block() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())


class Stack(nn.Module):
    """A table, blocks, and a head."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.blocks = nn.ModuleList(blocks or [_block() for _ in range(3)])

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.run(self.embed(tokens)))

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class Shared(Stack):
    """Two of three blocks share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1][0].weight = self.blocks[0][0].weight  # type: ignore[index]


class SharedDeeper(Stack):
    """Blocks share one of two layers, which is then a block that is called twice."""

    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(_block(), nn.Linear(WIDTH, WIDTH)) for _ in range(2)))
        self.blocks[1][1] = self.blocks[0][1]  # type: ignore[index]


class TiedToTheHead(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(WIDTH, WIDTH, bias=False)
        self.extra.weight = self.blocks[2][0].weight  # type: ignore[index]

    def run(self, x: Tensor) -> Tensor:
        return self.extra(super().run(x))


class SameThreeTimes(Stack):
    def __init__(self) -> None:
        super().__init__(*[_block()] * 3)


class TwoInTurns(Stack):
    """As a universal transformer: each of two blocks is called twice."""

    def __init__(self) -> None:
        super().__init__(*[_block(), _block()] * 2)


class Lists(Stack):
    """As x-transformers: a block is a list of modules, and never called."""

    def __init__(self) -> None:
        super().__init__(*(nn.ModuleList([nn.LayerNorm(WIDTH), _block(), nn.Identity()]) for _ in range(3)))

    def run(self, x: Tensor) -> Tensor:
        for norm, block, add in self.blocks:  # type: ignore[misc]
            x = add(x + block(norm(x)))
        return x


class Spaces(Stack):
    """Blocks that have a forward, which nobody calls."""

    class Space(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.other(self.one(x).relu())

    def __init__(self) -> None:
        super().__init__(*(self.Space() for _ in range(2)))

    def run(self, x: Tensor) -> Tensor:
        for space in self.blocks:
            x = x + space.other(space.one(x).relu())  # type: ignore[operator]
        return x


class CalledDirectly(Spaces):
    """By their forward, past all hooks."""

    def run(self, x: Tensor) -> Tensor:
        for space in self.blocks:
            x = x + space.forward(x)
        return x


class Functional(Spaces):
    """Layers that are there for their weights only."""

    def run(self, x: Tensor) -> Tensor:
        for space in self.blocks:
            x = x + F.linear(F.linear(x, space.one.weight), space.other.weight, space.other.bias)  # type: ignore[union-attr]
        return x


class Peeking(Stack):
    """A weight of a block is read outside of it, too: a penalty, or a tied product."""

    def run(self, x: Tensor) -> Tensor:
        return F.linear(super().run(x), self.blocks[1][0].weight.T)  # type: ignore[index, union-attr]


class Experts(Stack):
    """The longest list is in a block, and not the blocks'."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([expert(x) for expert in self.experts]).mean(0)

    def __init__(self) -> None:
        super().__init__(self.Mixed(), self.Mixed())


class TwoTowers(nn.Module):
    """As an encoder and a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.one, self.other = (nn.ModuleList(_block() for _ in range(count)) for count in (2, 3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in [*self.one, *self.other]:
            x = x + block(x)
        return self.head(x)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.head = (
            nn.Embedding(VOCAB, WIDTH),
            nn.LSTM(WIDTH, WIDTH, 2, batch_first=True),
            nn.Linear(WIDTH, VOCAB),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(tokens))[0])


class Stages(nn.Sequential):
    """As a pyramid of stages, each a list of blocks, without any token."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(VOCAB, WIDTH), nn.Sequential(*(nn.Sequential(_block(), _block()) for _ in range(2))))


class Asking(Stack):
    """Cannot be watched without memory."""

    def run(self, x: Tensor) -> Tensor:
        return super().run(x) if x.sum() > -1e9 else x


class Empty(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.empty(0))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24, "vocab_size": VOCAB}
    return BertForMaskedLM(BertConfig(**sizes, **rates, max_position_embeddings=16))


def mamba() -> nn.Module:
    from transformers import MambaConfig, MambaForCausalLM

    return MambaForCausalLM(MambaConfig(hidden_size=16, num_hidden_layers=2, vocab_size=VOCAB, state_size=4))


CASES: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "plain": (Stack, ["blocks.0", "blocks.1", "blocks.2"]),
    "shared": (Shared, ["blocks.2"]),
    "shared deeper": (SharedDeeper, ["blocks.0.0", "blocks.0.1", "blocks.1.0"]),
    "tied to the head": (TiedToTheHead, ["blocks.0", "blocks.1"]),
    "same three times": (SameThreeTimes, []),
    "two in turns": (TwoInTurns, ["blocks.0", "blocks.1"]),
    "lists": (Lists, ["blocks.0.1", "blocks.1.1", "blocks.2.1"]),
    "spaces": (Spaces, ["blocks.0.one", "blocks.0.other", "blocks.1.one", "blocks.1.other"]),
    "called directly": (CalledDirectly, ["blocks.0.one", "blocks.0.other", "blocks.1.one", "blocks.1.other"]),
    "functional": (Functional, []),
    "peeking": (Peeking, ["blocks.0", "blocks.2"]),
    "experts": (Experts, ["blocks.0", "blocks.1"]),
    "two towers": (TwoTowers, ["one.0", "one.1", "other.0", "other.1", "other.2"]),
    "recurrent": (Recurrent, []),
    "stages": (Stages, ["1.0", "1.1"]),
    "asking": (Asking, ["blocks.0", "blocks.1", "blocks.2"]),
    "empty": (Empty, ["blocks.0", "blocks.1", "blocks.2"]),
    "bert": (bert, ["bert.encoder.layer.0", "bert.encoder.layer.1"]),
    "mamba": (mamba, ["backbone.layers.0", "backbone.layers.1"]),
}


@pytest.mark.parametrize("name", fast(*(name for name in CASES if name != "mamba"), of=CASES))
def test_trials_d4_blocks_are_called_and_have_their_parameters_for_themselves(name: str) -> None:
    build, expected = CASES[name]
    module = build()
    assert find_blocks(module, watch(module, None)) == expected


def _inputs(name: str) -> Tensor:
    tokens = torch.arange(20).view(4, 5) % VOCAB
    return F.one_hot(tokens, VOCAB).double() if name == "stages" else tokens


def _loss(module: Any, inputs: Tensor) -> Tensor:
    out = module(inputs)
    return (out if isinstance(out, Tensor) else out.logits).square().mean()


def _gradients(names: list[str], more: list[Any]) -> dict[str, dict[str, Tensor]]:
    found = {}
    for name in names:
        torch.manual_seed(1)
        model = parallelize(CASES[name][0](), "dp2", more, compute="fp64", state="fp64")
        with warnings.catch_warnings():  # torch warns of what a loop may do to the output
            warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
            for inputs in _inputs(name)[model.data_rank :: 2].chunk(2):  # accumulated over two micro-batches
                (_loss(model.module, inputs) / 2).backward()
        found[name] = gathered(model, {name: tensor.grad for name, tensor, _ in model.trainable() if tensor.grad is not None})
    return found


def _equal(world: World, names: list[str], more: list[Any]) -> None:
    for found in world.run(_gradients, 2, names, more, timeout=300):
        for name in names:
            torch.manual_seed(1)
            module = CASES[name][0]().double()
            _loss(module, _inputs(name)).backward()
            for key, parameter in module.named_parameters():
                if parameter.grad is not None and parameter.numel():
                    torch.testing.assert_close(
                        found[name][key],
                        parameter.grad,
                        rtol=0,
                        atol=1e-10,
                        msg=lambda text, at=f"{name}, {key}": f"{at}: {text}",
                    )


SOME = ["shared deeper", "two in turns", "lists", "spaces", "recurrent"]


@pytest.mark.parametrize("names", fast(SOME, of=[SOME, *([name] for name in CASES if name not in SOME)]))
def test_trials_d4_gradients_under_dp_are_those_of_one_process(world: World, names: list[str]) -> None:
    _equal(world, names, [])


@pytest.mark.slow
def test_trials_d4_recomputed_blocks(world: World) -> None:
    _equal(world, [name for name, (_, blocks) in CASES.items() if blocks and name != "mamba"], [Recompute(policy="full")])


REFUSED: list[tuple[Callable[[], nn.Module], list[str], str]] = [
    (Stack, ["blocks"], r"blocks \(ModuleList\) in blocks=\[\.\.\.\] has no forward"),
    (Stack, ["blocks.0", "blocks.0.0"], r"blocks\.0\.0, which lies in blocks\.0"),
    (Stack, ["blocks.7"], r"do not exist: blocks\.7"),
    (Shared, ["blocks.0", "blocks.2"], r"modules outside it share its parameter blocks\.0\.0\.weight"),
    (Peeking, ["blocks.1"], r"blocks\.1\.0\.weight is read outside its forward"),
    (Spaces, ["blocks.0"], r"blocks\.0\.one\.weight is read outside"),
]


def _refusals() -> list[str]:
    found = []
    for build, blocks, _ in REFUSED:
        try:
            parallelize(build, "dp2", blocks=blocks)
            found.append("no refusal")
        except PlanError as refusal:
            found.append(str(refusal))
    return found


def test_trials_d4_blocks_that_cannot_be_are_refused_by_name(world: World) -> None:
    for found in world.run(_refusals, 2):
        for message, (_, _, expected) in zip(found, REFUSED, strict=True):
            assert re.search(expected, message), message


def test_trials_d4_what_needs_blocks_is_refused_without_any() -> None:
    with pytest.raises(PlanError, match=r"recompute needs blocks.*blocks=\[\.\.\.\]"):
        parallelize(Recurrent, "1", [Recompute(policy="full")])
