"""Modules that change hidden states in place: right, or refused with the name of the layer and the line to change."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forge_core.errors import PlanError
from forge_core.layout import Layout
from forge_parallel.model.parallel_model import gathered
from forge_parallel.transforms.recompute import Recompute
from forge_parallel.transforms.shard import FullyShard
from harness.pool import World
from harness.siblings import fast
from parallel.foreign.test_loops import TOKENS, backward, laid_out, score
from parallel.foreign_modules import Block, Plain


class Layer(Block):
    """Returns a view, as a linear layer with a bias does."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))


class Adding(Layer):
    """Changes its input."""

    def forward(self, x: Tensor) -> Tensor:
        x += super().forward(x.clone())
        return x


class Passing(Layer):
    """The last of them returns its input."""

    number = 0

    def forward(self, x: Tensor) -> Tensor:
        return x if self.number == 2 else super().forward(x)


class Views(Plain):
    """Changes what its blocks return, and its own output is a view."""

    layer: type[Layer] = Layer

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.layer() for _ in range(3))
        for number, block in enumerate(self.blocks):
            block.number = number
        self.head = nn.Linear(8, 19)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            y = block(x)
            y[:, 0] *= 0.5
            y += x
            x = y
        return self.head(self.norm(x))


class Pairs(Views):
    """Its blocks return several tensors, of which one is an input."""

    class Pair(Layer):
        def forward(self, x: Tensor, other: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
            return {"out": super().forward(x).flatten(0, 1).view(x.shape), "other": other.view(x.shape)}

    layer = Pair

    def forward(self, tokens: Tensor) -> Tensor:
        x = other = self.embed(tokens)
        for block in self.blocks:
            found = block(x, other=other)
            found["out"].add_(found["other"])
            x = found["out"]
        return self.head(self.norm(x))


class Masked(Views):
    """Its blocks change an input that has no gradient."""

    class Layer(Layer):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
            mask.clamp_(max=0.5)
            return super().forward(x + mask)

    layer = Layer

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        mask = torch.ones(*tokens.shape, 1, dtype=x.dtype, device=x.device)
        for block in self.blocks:
            x = x + block(x, mask)
        return self.head(self.norm(x))


class Clamped(Views):
    """Its blocks change an input outside of the graph."""

    class Layer(Layer):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                x.clamp_(-1, 1)
            return super().forward(x)

    layer = Layer


class InPlaceInBlocks(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Adding() for _ in range(3))


class ReturnedInput(Views):
    layer = Passing


class Later(Views):
    """Changes the inputs of its blocks once these have returned."""

    class Halving(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * 0.5)

    layer = Halving

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x += block(x)
        return self.head(self.norm(x))


def _gradients(build: Callable[[], nn.Module], layout: str, options: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model, plain = laid_out(layout, build, transforms=options)
    if "pp" in layout:
        backward(model)
    else:
        rows = TOKENS.chunk(model.data_ranks)[model.data_rank]
        output = model(rows)
        output *= 2.0
        score(output, rows).backward()
    output = plain(TOKENS)
    output *= 1.0 if "pp" in layout else 2.0
    score(output, TOKENS).backward()
    right = {name: parameter.grad for name, parameter in plain.named_parameters() if parameter.grad is not None}
    return gathered(model, {name: tensor.grad for name, tensor, _ in model.trainable()}), right


RIGHT = [
    *((build, layout, []) for build in (Views, Pairs, Masked, Later) for layout in ("dp2", "dp2tp2", "tp2", "hsdp2x2")),
    *(
        (build, "dp2", options)
        for build in (Views, Pairs)
        for options in ([FullyShard(reshard=False)], [Recompute(policy="full")])
    ),
    (InPlaceInBlocks, "tp2", []),
]


@pytest.mark.parametrize(
    ("build", "layout", "options"),
    fast((Views, "dp2", []), (Pairs, "dp2", []), (Masked, "dp2", []), (Later, "dp2", []), of=RIGHT),
)
def test_changed_outputs_of_blocks_have_the_gradients_of_one_process(
    world: World, build: Callable[[], nn.Module], layout: str, options: Any
) -> None:
    for found, right in world.run(_gradients, Layout.parse(layout).world, build, layout, options):
        assert found.keys() >= right.keys()
        for name, gradient in right.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-14, msg=lambda text, at=name: f"{at}: {text}")


def _refusals(cases: list[tuple[Callable[[], nn.Module], str, Any]]) -> list[str]:
    found = []
    for build, layout, options in cases:
        try:
            laid_out(layout, build, transforms=options)
        except PlanError as refusal:
            found.append(str(refusal))
        else:
            found.append("no refusal")
    return found


def test_changed_inputs_of_blocks_are_refused_by_name_and_line(world: World) -> None:
    full = [Recompute(policy="full")]
    cases: list[Any] = [
        (InPlaceInBlocks, "dp2", []),
        (InPlaceInBlocks, "pp2", []),
        (InPlaceInBlocks, "tp2", full),
        (ReturnedInput, "dp2", []),
        (Later, "dp2", full),
        (Clamped, "dp2", []),
    ]
    lines = Path(__file__).read_text().splitlines()
    for found in world.run(_refusals, 2, cases):
        starts = [
            "blocks.0 (Adding)",
            "blocks.0 (Adding)",
            "blocks.0 (Adding)",
            "blocks.2 (Passing)",
            "blocks.0 (Halving)",
            "blocks.0 (Layer)",
        ]
        changes = ["x += super().forward(x.clone())"] * 3 + ["y[:, 0] *= 0.5", "x += block(x)", "x.clamp_(-1, 1)"]
        for refusal, start, change in zip(found, starts, changes, strict=True):
            assert refusal.startswith(f"parallelize: an input of {start} is modified in place at {__file__}:"), refusal
            line = int(refusal.partition(f"{__file__}:")[2].partition(",")[0])
            assert lines[line - 1].strip() == change
            assert "write x = x + y there instead of x += y" in refusal
