"""Weights and matrix products of a vision-language model: those of its decoder, and those of images.

Products of the decoder are those of `forge_models.flops`: every place of the stream, also that of an image, costs as much as in a
text model, since each token passes through the weights of one modality. For encoder and adapter torch's `FlopCounterMode` counts
one image on the meta device. The forward of a cross block costs

    2 (2 D H Dh + P)    for each token of a row that has images, with P the weights of its feed-forward part
    2 (2 D K Dh)        for each vector of an image, K being the heads of keys and values
    2 (2 H Dh)          for each pair of a token and a vector in a row

A backward costs twice its forward; an encoder that is frozen as a whole has none. Padding counts as tokens, missing images do not
count.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from forge_core.batch import Batch
from forge_models import flops
from forge_models.flops import Counts
from forge_models.shape import DecoderShape

_ENCODER = "encoder."


@dataclass(frozen=True)
class VisionCounts(Counts):
    """Counts of a decoder and of the parts for images.

    Attributes:
        vision: weights that a text model does not have.
        encoder: forward FLOPs of the encoder for one image.
        adapter: forward FLOPs of the adapter for one image, with those of its time.
        vectors: number of the adapter's vectors of one image.
        per_token: multiply-adds of all cross blocks for a token of a row with images.
        per_vector: their multiply-adds for a vector of an image.
        per_pair: their multiply-adds for a pair of a token and a vector.
    """

    vision: int = 0
    encoder: int = 0
    adapter: int = 0
    vectors: int = 0
    per_token: int = 0
    per_vector: int = 0
    per_pair: int = 0

    @property
    def parameters(self) -> int:
        """All weights; a tied table counts once."""
        return super().parameters + self.vision

    @property
    def note(self) -> str:
        """The cost of an image before the stream, in words."""
        each = 3 * (self.encoder + self.adapter + 2 * self.vectors * self.per_vector) / 1e6
        return f", and {each:,.4g} MFLOP an image in front of it" if each else ""

    def beyond(self, batches: Sequence[Batch], frozen: Collection[str] = ()) -> float:
        """See `Counts`: FLOPs of encoder, adapter and cross blocks."""
        trained = not any(name.startswith(_ENCODER) for name in frozen)
        total = 0.0
        for batch in batches:
            if "image_rows" not in batch.extras:
                continue
            counts = (batch.extras["image_rows"] >= 0).sum(1).tolist()
            length = batch.tokens.shape[1]
            total += sum(counts) * ((3 if trained else 1) * self.encoder + 3 * self.adapter)
            for count in filter(None, counts):
                vectors = count * self.vectors
                total += 6 * (length * self.per_token + vectors * self.per_vector + length * vectors * self.per_pair)
        return total


def count(model: Any) -> VisionCounts:
    """Counts of a `forge_vlm.components.model.VLM`.

    Raises:
        ValueError: a part does not declare its matrix products.
    """
    shape, fusion = _as_routed(model)
    text = flops.count_flops(shape)
    with torch.device("meta"):
        module = model.build()
    own = {name: parameter.numel() for name, parameter in module.named_parameters()}
    vision = sum(own.values()) - text.parameters
    added = sum(own[name] for name in module.specs().roles.get("fusion", ()))
    counts: dict[str, Any] = {field.name: getattr(text, field.name) for field in fields(text)}
    if model.images == "encoder":
        context = model.adapter_context
        counts |= {
            "encoder": _products(module.encoder, model.vision.input_shape, *([(2,)] if model.native is not None else [])),
            "adapter": _products(module.adapter, (context.tokens, context.width))
            + (0 if module.frame_time is None else _products(module.frame_time, ())),
            "vectors": model.chosen_adapter.tokens(context.tokens),
        }
    if hasattr(fusion, "blocks"):
        counts |= _cross(shape, fusion.blocks(shape.layers))
    else:
        counts["idle"] += added
        counts["matrix"] += _foresight(model, shape)
    return VisionCounts(**counts, vision=vision)


def _as_routed(model: Any) -> tuple[DecoderShape, Any]:
    """The shape with the mean number of experts of a token; it is one where experts choose."""
    shape, fusion = model.shape, model.chosen_fusion
    if getattr(fusion, "routing", "token_choice") == "token_choice":
        return shape, fusion
    return replace(shape, moe=replace(shape.moe, top_k=1)), fusion


def _foresight(model: Any, shape: DecoderShape) -> int:
    """Weights of the routers that predict the choice of experts."""
    if getattr(model.chosen_fusion, "routing", "") != "expert_choice":
        return 0
    return sum(map(shape.has_experts, range(shape.layers))) * shape.moe.experts * shape.dim  # type: ignore[union-attr]


def _cross(shape: DecoderShape, layers: Sequence[int]) -> dict[str, int]:
    contexts = [shape.context(layer) for layer in layers]
    heads = [context.heads * context.head_dim for context in contexts]
    mlp: Any = shape.mlp
    wide = [sum(prod(matrix.shape) for matrix in mlp.matrices(context).values()) for context in contexts]
    return {
        "per_token": sum(2 * shape.dim * width + other for width, other in zip(heads, wide, strict=True)),
        "per_vector": sum(2 * shape.dim * context.kv_heads * context.head_dim for context in contexts),
        "per_pair": 2 * sum(heads),
    }


def _products(module: torch.nn.Module, *given: tuple[int, ...]) -> int:
    """FLOPs for one image; `given` are shapes without their first dimension."""
    # With gradients: otherwise the counter refuses a parameter as the input of a module.
    with torch.enable_grad(), FlopCounterMode(display=False) as counter:
        module(*(torch.empty((1, *shape), device="meta") for shape in given))
    return counter.get_total_flops()
