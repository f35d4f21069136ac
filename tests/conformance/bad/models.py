"""Models that do not do what they have to: decoders with one thing changed."""

from dataclasses import replace

import torch
from torch import nn

from conformance.part import Part
from forge_models.components.decoder import DecoderConfig as Component
from forge_models.components.layers import GELU
from forge_models.decoder import Decoder
from forge_models.shape import Rope

GOOD = Component(dim=16, layers=2, heads=4, kv_heads=2, ffn_dim=24, vocab_size=40, max_length=64)
DYNAMIC = Rope(scaling="dynamic", factor=2.0, original_max_length=16)


def made(cls, **says) -> Part:
    return Part(make=lambda: cls(GOOD.shape), says=tuple(says.items()))


class Undescribed(nn.Module):
    pass


class Unnamed(Decoder):
    def specs(self):
        specs = super().specs()
        return replace(specs, tensors={name: spec for name, spec in specs.tensors.items() if name != "norm.weight"})


class Tied(Decoder):
    """Shares its table, and does not say so."""

    def __init__(self, shape):
        super().__init__(shape)
        self.head.weight = self.embed.weight

    def specs(self):
        specs = super().specs()
        return replace(specs, tensors={name: spec for name, spec in specs.tensors.items() if name != "head.weight"})


class Lost(Decoder):
    def specs(self):
        return replace(super().specs(), blocks=("blocks.7",))


class Average(Decoder):
    def forward(self, x, **given):
        logits = super().forward(x, **given)
        return logits + logits.mean(1, keepdim=True)


class Alone(Decoder):
    """Each token is a document."""

    def forward(self, x, **given):
        return super().forward(x, documents=torch.arange(x.shape[1]).int().expand(x.shape))


class Packed(Decoder):
    """Attends to other documents of the row."""

    def forward(self, x, documents=None, **given):
        return super().forward(x, **given)


class Padded(Packed):
    """Says that it does not keep documents apart, and does not refuse a row with two."""

    packs = False


class Noisy(Decoder):
    def forward(self, x, **given):
        return nn.functional.dropout(super().forward(x, **given), 0.5, training=True)


class Unused(Decoder):
    def __init__(self, shape):
        super().__init__(shape)
        self.scale = nn.Parameter(torch.empty(3))

    def specs(self):
        specs = super().specs()
        return replace(specs, tensors={**specs.tensors, "scale": specs.tensors["norm.weight"]})


class Hidden(Decoder):
    """Keeps numbers that no tensor of its specs holds."""

    def forward(self, x, **given):
        if not hasattr(self, "kept"):
            self.kept = float(self.norm.weight.sum())
        return super().forward(x, **given) * self.kept


class Constant(Decoder):
    def forward(self, x, **given):
        return super().forward(x, **given) * 0


BAD = {
    "check_specs": [
        (Part(make=Undescribed), "does not describe itself"),
        (made(Unnamed), "leave out norm.weight"),
        (made(Tied), "shares tensors"),
        (made(Lost), "not there: blocks.7"),
    ],
    "check_shape": [
        (made(Decoder, shape=replace(GOOD.shape, kv_heads=4)), "shape says units"),
        (made(Decoder, shape=replace(GOOD.shape, rope=DYNAMIC)), "shape says whole_rows"),
        (made(Decoder, shape=replace(GOOD.shape, mlp=GELU())), "shape says that the matrices are"),
    ],
    "check_causality": [(made(Average), "tokens up to 0 see later ones"), (made(Alone), "token 1 does not see token 0")],
    "check_documents": [
        (made(Packed), "second document of a row sees another"),
        (made(Padded), "keeps no documents apart, but takes a row with two"),
    ],
    "check_deterministic": [(made(Noisy), "other outputs the second time")],
    "check_gradients": [(made(Unused), "scale gets no gradient")],
    "check_names": [(made(Hidden), "given all tensors by name"), (made(Constant), "do not depend on the parameters")],
}
