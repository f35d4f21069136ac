"""The tiny model as something that a pipeline can cut, and variants that it cannot."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from parallel.tiny import DIM, LAYERS, VOCAB, Block, Tiny


class PartTiny(Tiny):
    """The tiny model as something to cut: blocks in a list, parts that describe themselves, a buffer inside what enters."""

    def __init__(self, **said: Any) -> None:
        super().__init__()
        self.said = said
        self.blocks.append(Block(DIM))
        self.enter = nn.Module()
        self.enter.embed = self.embed
        self.enter.register_buffer("scale", torch.empty(DIM))
        del self.embed, self.scale

    def forward(self, x: Any, *, positions: Any = None, documents: Any = None, labels: Any = None, objective: Any = None) -> Any:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        if documents is not None:
            mask = mask & (documents[:, :, None] == documents[:, None, :])
        if self.enter is not None:
            x = self.enter.embed(x) * self.enter.scale
            x = x + (positions[..., None] / 10).to(x.dtype)
        for block in self.blocks:
            x = block(x, mask)
            if self.said.get("strided"):  # what a stage returns, and the gradient of what it takes, are transposed
                x = (x.mT @ torch.eye(x.shape[1], dtype=x.dtype)).mT + 0
        return x if self.head is None else self.head(x, labels, objective)

    def specs(self) -> Any:
        specs = super().specs()
        tensors = {
            name.replace("embed.weight", "enter.embed.weight").replace("scale", "enter.scale"): spec
            for name, spec in specs.tensors.items()
        }
        added = {name.replace(".0.", f".{LAYERS}."): spec for name, spec in tensors.items() if name.startswith("blocks.0.")}
        tensors |= added
        there = {*dict(self.named_parameters()), *dict(self.named_buffers())}
        blocks = tuple(path for path in (*specs.blocks, f"blocks.{LAYERS}") if f"{path}.norm.weight" in there)
        kept = {name: spec for name, spec in tensors.items() if name in there}
        said: dict[str, Any] = {
            "entry": ("enter",) if self.enter is not None else (),
            "exit": ("head",) if self.head is not None else (),
            "units": {**specs.units, "embed": DIM},
        }
        return replace(specs, tensors=kept, blocks=blocks, **(said | self.said.get("specs", {})))


class Strided(PartTiny):
    def __init__(self) -> None:
        super().__init__(strided=True)


class Silent(PartTiny):
    def __init__(self) -> None:
        super().__init__(specs={"exit": ()})


class Stray(PartTiny):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(DIM))

    def specs(self) -> Any:
        specs = super().specs()
        return replace(specs, tensors={**specs.tensors, "gain": specs.tensors["blocks.0.norm.weight"]})


class Wide(PartTiny):
    def __init__(self) -> None:
        super().__init__(specs={"units": {"vocab": VOCAB, "embed": DIM + 1}})


class Frozen(PartTiny):
    """What enters and the first block do not learn: nothing on the first stage does."""

    def __init__(self) -> None:
        super().__init__()
        for module in (self.enter, self.blocks[0]):
            module.requires_grad_(False)
