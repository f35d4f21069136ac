"""Fusions, chosen inside `[model]` of a model with `name = "vlm"`: `fusion = { name = "mot" }`.

With `in_stream`, the vectors of an image replace its placeholders in the stream, one per placeholder; otherwise an image has a
single placeholder and stays out of the stream. `feature` names the combination that must be tested in each layout. `check(model)`
raises a `ValueError` if the keys of the model do not fit the fusion.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from annotated_types import Gt, Le

from forge_core.component import IDENTITY, Component

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


ImageAttention = Literal["causal", "bidirectional_image", "prefix"]


@dataclass(frozen=True, kw_only=True)
class JointDecoder(Component):
    """Images are tokens of the sequence, in one decoder with one set of weights (LLaVA, Liu et al., 2023)."""

    key_class: ClassVar = IDENTITY
    implementation: ClassVar[str] = "forge_vlm.fusion.fusion:JointFusion"
    feature: ClassVar[str] = "fusion_joint"
    in_stream: ClassVar[bool] = True

    image_attention: ImageAttention = "causal"
    """Tokens that an image token attends to. `causal`: the tokens before it. `bidirectional_image`: also its whole image (Gemma
    3, 2025). `prefix`: all tokens of the prefix attend to each other; the prefix is the prompt, or, if the batch does not mark a
    prompt, all tokens up to the last image of the document (PaliGemma, Beyer et al., 2024)."""

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[JointDecoder]":
        """Returns one fusion per mask."""
        return (cls(), cls(image_attention="bidirectional_image"), cls(image_attention="prefix"))


@dataclass(frozen=True, kw_only=True)
class CrossAttention(Component):
    """Gated blocks in which text attends to images, between the blocks of an unchanged text model (Flamingo, Alayrac et al.,
    2022; Llama 3, 2024, section 7.3). Without images, logits equal those of the text model."""

    key_class: ClassVar = IDENTITY
    implementation: ClassVar[str] = "forge_vlm.fusion.cross:CrossAttentionFusion"
    feature: ClassVar[str] = "fusion_cross"
    in_stream: ClassVar[bool] = False

    every: Annotated[int, Gt(0)] = 4
    """Blocks per cross block: with 4, a cross block precedes the 4th, the 8th, ... block."""

    def check(self, model: Any) -> None:
        """Raises a ValueError if the keys of the model do not fit."""
        if self.every > model.layers:
            raise ValueError(f"fusion.every {self.every} adds no cross block to a model with {model.layers} layers; set it lower")
        if model.images == "tokens":
            raise ValueError("fusion 'cross_attention' needs an image encoder; set images = 'encoder'")

    def blocks(self, layers: int) -> tuple[int, ...]:
        """Returns the layers that a cross block precedes."""
        return tuple(layer for layer in range(layers) if (layer + 1) % self.every == 0)


@dataclass(frozen=True, kw_only=True)
class MixtureOfTransformers(Component):
    """Each modality has its own weights, except for embedding and head; attention is over all tokens (Liang et al., 2024).

    `model.norm_placement = "post"` is the branch norm of the paper's Chameleon, `"pre"` that of Llama. The compute per token is
    that of a text decoder; every modality adds as many weights as the blocks of one decoder. With `[model.moe]` the
    feed-forward parts are experts.
    """

    key_class: ClassVar = IDENTITY
    implementation: ClassVar[str] = "forge_vlm.fusion.modalities:MoTFusion"
    feature: ClassVar[str] = "fusion_mot"
    in_stream: ClassVar[bool] = True

    image_attention: ImageAttention = "causal"
    """As for `joint_decoder`."""


@dataclass(frozen=True, kw_only=True)
class MoMa(Component):
    """Each modality has a group of experts; attention weights are shared (Lin et al., 2024). `[model.moe]` (or its defaults)
    describes the experts of one modality; `shared` experts serve all modalities."""

    key_class: ClassVar = IDENTITY
    implementation: ClassVar[str] = "forge_vlm.fusion.routed:MoMaFusion"
    in_stream: ClassVar[bool] = True
    needs_experts: ClassVar[bool] = True

    routing: Literal["token_choice", "expert_choice", "threshold"] = "token_choice"
    """`token_choice`: each token selects `top_k` experts of its modality with `moe.router` (ERNIE 4.5, 2025). `expert_choice`: in
    training each expert selects its share of a sequence's tokens; in evaluation a router predicts this choice.
    `threshold`: each expert selects the tokens whose score exceeds its threshold, in training and in evaluation."""
    rate: Annotated[float, Gt(0), Le(1)] = 0.05
    """For `threshold`: fraction of the distance to its new value that a threshold moves per step."""

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[MoMa]":
        """Returns one fusion per routing."""
        return (cls(), cls(routing="expert_choice"), cls(routing="threshold", rate=0.1))

    def check(self, model: Any) -> None:
        """Raises a ValueError if the keys of the model do not fit."""
        if self.routing == "token_choice":
            return
        if model.moe.capacity is not None or model.moe.losses.any():
            raise ValueError(
                f"fusion.routing = {self.routing!r} balances experts itself and supports neither moe.capacity nor moe.losses; "
                "remove them"
            )
        if model.moe.router is not None and type(model.moe.router).__name__ != "SoftmaxTopKConfig":
            raise ValueError(f"fusion.routing = {self.routing!r} has its own router; remove moe.router")

    @property
    def feature(self) -> str:
        """The combination that must be tested in each layout, one per routing."""
        return {"token_choice": "fusion_moma", "expert_choice": "fusion_moma_choice", "threshold": "fusion_moma_threshold"}[
            self.routing
        ]
