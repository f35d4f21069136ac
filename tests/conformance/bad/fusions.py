"""Fusions that do not do what they have to."""

from typing import Any

import torch
from torch import nn

from forge_core.specs import Init, TensorSpec
from forge_models.blocks.block import Block
from forge_vlm.fusion import FusionBase


class Bad:
    """A fusion of blocks that `add` something to the stream: (x, shared visual vectors) -> x."""

    def __init__(self, add: Any, feature: str = "fusion_bad", in_stream: bool = True, spec: bool | None = None) -> None:
        self.add, self.feature, self.in_stream, self.spec = add, feature, in_stream, spec

    def build(self, context: Any) -> "BadFusion":
        return BadFusion(context, self)


class BadFusion(FusionBase):
    def __init__(self, context: Any, bad: Bad) -> None:
        super().__init__(context)
        self.bad, self.in_stream = bad, bad.in_stream

    def block(self, shape: Any, layer: int) -> nn.Module:
        return BadBlock(shape, layer, self.bad)

    def shared(self, inputs: Any) -> dict[str, Any]:
        return {"visual": inputs.visual}


class BadBlock(Block):
    """`spec` None: it has no parameter more than a block; else whether the one that it has is described."""

    def __init__(self, shape: Any, layer: int, bad: Bad) -> None:
        super().__init__(shape, layer)
        self.bad, self.reads = bad, ("visual",)
        if bad.spec is not None:
            self.idle = nn.Parameter(torch.empty(3))

    def forward(self, x: Any, *given: Any, visual: Any = None) -> Any:
        return super().forward(self.bad.add(x, visual), *given)

    def tensor_specs(self) -> dict[str, TensorSpec]:
        return {"idle": TensorSpec((None,), Init("zeros"), "vector")} if self.bad.spec else {}


def nothing(x: Any, _visual: Any) -> Any:
    return x


def other_rows(x: Any, _visual: Any) -> Any:
    return x + x.mean(0, keepdim=True)


def all_tokens(x: Any, _visual: Any) -> Any:
    return x + x.mean(1, keepdim=True)


def any_image(x: Any, visual: Any) -> Any:
    return x if visual is None else x + visual.mean()


BAD = {
    "check_specs": [(Bad(nothing, spec=False), "specs leave out blocks.0.idle")],
    "check_feature": [
        (Bad(nothing, feature="joint"), "does not begin"),
        (Bad(nothing, feature=3), "not a string"),  # type: ignore[arg-type]
    ],
    "check_images_count": [
        (Bad(nothing, in_stream=False), "does not depend on its image"),
        (Bad(other_rows), "image of another row"),
    ],
    "check_causality": [(Bad(all_tokens), "depends on a later one")],
    "check_text": [(Bad(any_image), "an unused image")],
    "check_gradients": [(Bad(nothing, spec=True), "no gradient for blocks.0.idle")],
}
