"""The vision-language model, chosen by `[model] name = "vlm"`.

Models with images in the Hugging Face format, chosen by `--family` and by the `model_type` of a folder.

`own_code` says that only classes of ours open a folder; such a folder is only written where it is asked for by name.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt

from forge_core.component import IDENTITY, Component, Slot
from forge_core.features import Feature
from forge_models.components.decoder import DecoderConfig
from forge_models.components.experts import MoEConfig
from forge_models.shape import AttentionChunk
from forge_vlm.components.adapters import MLPConfig
from forge_vlm.components.encoders import ViT
from forge_vlm.components.fusions import JointDecoder, MixtureOfTransformers, MoMa
from forge_vlm.context import AdapterContext, FusionContext, Modalities, VLMShape
from forge_vlm.images.processing import Native

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from torch import Tensor

    from forge_core.protocols.weights import Weights
    from forge_vlm.flops import VisionCounts
    from forge_vlm.frame_time import FrameTime
    from forge_vlm.model import VisionLanguageModel


IMAGE = "image"
"""The modality of the encoder's vectors."""


@dataclass(frozen=True, kw_only=True)
class FrameTimeConfig:
    """The time of a frame, added to the vectors of the frame: sines and cosines of the seconds, mapped by a matrix that starts at
    zero. Images that are not frames of a clip have no time and stay as they are."""

    key_class: ClassVar = IDENTITY

    features: Annotated[int, Ge(2)] = 64
    """Number of sines and cosines, even."""
    shortest: Annotated[float, Gt(0)] = 1.0
    """Shortest period in seconds."""
    longest: Annotated[float, Gt(0)] = 7200.0
    """Longest period in seconds: the length of the longest clips."""

    def __post_init__(self) -> None:
        if self.features % 2:
            raise ValueError(f"frame_time.features {self.features} is odd, but sines and cosines are as many; make it even")
        if self.longest <= self.shortest:
            raise ValueError(f"frame_time.longest {self.longest} must exceed frame_time.shortest {self.shortest}")


@dataclass(frozen=True, kw_only=True)
class VLM(DecoderConfig):
    """A decoder with image inputs: the keys of `decoder`, plus an encoder, an adapter and a fusion.

    In a row an image is represented by placeholders with the id `image_token`: one per vector of the adapter, or a single one if
    the fusion keeps images out of the stream.
    """

    key_class: ClassVar = IDENTITY

    fusion: Annotated[Component, Slot("forge.fusions", default="joint_decoder")] = Slot.unset()
    """How images enter the decoder."""
    images: Literal["encoder", "tokens"] = "encoder"
    """`encoder`: an encoder turns images into vectors. `tokens`: images are discrete tokens (Chameleon, 2024) with ids in
    `modalities`."""
    encoder: Annotated[Component, Slot("forge.encoders", default="vit")] = Slot.unset()
    """Turns images into features; not built if images are tokens."""
    adapter: Annotated[Component, Slot("forge.adapters", default="mlp")] = Slot.unset()
    """Projects features to the width of the decoder."""
    image_token: Annotated[int, Ge(1)] | None = None
    """Id of the placeholder, which must not occur in text; by default the last id of the vocabulary."""
    frame_time: Annotated[FrameTimeConfig | None, Feature("frame_time", unless=None, plane="model")] = None
    """Adds the time of each frame of a clip to its vectors; absent, time is told by text alone (`timestamps` of a source)."""
    modalities: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Ids of further modalities: name -> [first, last + 1], such as the codes of a quantized image (Chameleon, 2024)."""

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[VLM]":
        """Returns one model per fusion, and one whose images are discrete tokens."""
        small: dict[str, Any] = {
            "dim": 16,
            "layers": 2,
            "heads": 4,
            "kv_heads": 2,
            "ffn_dim": 24,
            "vocab_size": 40,
            "max_length": 64,
        }
        vision = small | {"encoder": ViT(size=8, patch=4, dim=8, layers=1, heads=2), "adapter": MLPConfig()}
        experts = MoEConfig(experts=4, kernel="loop")
        return (
            cls(**vision, fusion=JointDecoder()),
            cls(**vision, fusion=JointDecoder(), frame_time=FrameTimeConfig(features=4)),
            cls(**vision, fusion=MixtureOfTransformers(), norm_placement="post"),
            cls(**vision, fusion=MoMa(), moe=experts),
            cls(**small, fusion=MixtureOfTransformers(), images="tokens", modalities={"image": (30, 40)}),
        )

    def __post_init__(self) -> None:
        if self.moe is None and getattr(self.chosen_fusion, "needs_experts", False):
            object.__setattr__(self, "moe", MoEConfig())  # this default depends on another key
        super().__post_init__()
        if self.mtp is not None:
            raise ValueError("model.name = 'vlm' does not support [model.mtp]; remove it")
        if self.streams is not None:
            raise ValueError("model.name = 'vlm' does not support [model.streams]; remove it")
        if any(map(self.shape.value_embeddings, range(self.layers))):
            raise ValueError("model.name = 'vlm' does not support attention.value_embeddings; remove it")
        if not self.shape.causal:
            raise ValueError("model.name = 'vlm' does not support attention.causal = false; set it to true")
        if any(isinstance(window, AttentionChunk) for window in self.shape.windows()):
            raise ValueError("model.name = 'vlm' does not support attention.chunk; remove it, or set attention.window")
        if self.lora is not None:
            raise ValueError(
                "model.name = 'vlm' does not support [model.lora]; remove it, and freeze parameters with [parameters] groups"
            )
        if self.images == "tokens" and self.image_token is not None:
            raise ValueError(
                "image_token is the placeholder of an encoder's images; set images = 'encoder', or remove image_token"
            )
        if self.images == "tokens" and not self.modalities:
            raise ValueError("images = 'tokens' needs the ids of images; set modalities, such as { image = [first, end] }")
        if self.images == "tokens" and self.frame_time is not None:
            raise ValueError("frame_time is added to an encoder's vectors; set images = 'encoder', or remove frame_time")
        if self.images == "encoder" and IMAGE in self.modalities:
            raise ValueError(f"modality {IMAGE!r} is reserved for the encoder's images; rename it in modalities")
        if fault := self.modality_ids.fault(self.vocab_size):
            raise ValueError(fault)
        check: Any = getattr(self.chosen_fusion, "check", None)
        if check is not None:
            check(self)
        if self.images == "encoder":
            context, adapter = self.adapter_context, self.chosen_adapter
            if hasattr(adapter, "check"):
                adapter.check(context)
            adapter.tokens(context.tokens)
            self._check_native()

    def _check_native(self) -> None:
        if not getattr(self.vision, "flexible", 0):
            return
        if not getattr(self.chosen_adapter, "native", ""):
            raise ValueError(
                "adapter needs a square grid of features, but encoder.patches keeps the proportions of images; set "
                "adapter.name = 'linear', 'mlp' or 'perceiver', or remove encoder.patches"
            )
        if (
            self.native is not None
            and self.native.each
            and getattr(self.chosen_fusion, "image_attention", "") == "bidirectional_image"
        ):
            raise ValueError(
                "fusion.image_attention = 'bidirectional_image' needs the same number of tokens for every image, but "
                "encoder.patches creates one token per patch; set image_attention = 'causal' or 'prefix', or adapter.name = "
                "'perceiver'"
            )

    @property
    def native(self) -> Native | None:
        """Settings for images with native proportions; None if images are square."""
        most = getattr(self.vision, "flexible", 0) if self.images == "encoder" else 0
        if not most:
            return None
        each = getattr(self.chosen_adapter, "native", "") == "each" and self.chosen_fusion.in_stream
        return Native(self.vision.shape.patch_size, most, each)

    @property
    def chosen_fusion(self) -> Any:
        """The fusion's component, or the default."""
        return JointDecoder() if self.fusion is None else self.fusion

    @property
    def vision(self) -> Any:
        """The encoder's component, or the default."""
        return ViT() if self.encoder is None else self.encoder

    @property
    def chosen_adapter(self) -> Any:
        """The adapter's component, or the default."""
        return MLPConfig() if self.adapter is None else self.adapter

    @property
    def placeholder(self) -> int | None:
        """`image_token` with its default; None without an encoder."""
        if self.images == "tokens":
            return None
        return self.vocab_size - 1 if self.image_token is None else self.image_token

    @property
    def modality_ids(self) -> Modalities:
        """Token ids by modality."""
        token = self.placeholder
        images = {} if token is None else {IMAGE: (token, token + 1)}
        return Modalities({**self.modalities, **images})

    @property
    def per_image(self) -> int:
        """Number of placeholders of one image; 0 without an encoder."""
        if self.images == "tokens":
            return 0
        return self.chosen_adapter.tokens(self.adapter_context.tokens) if self.chosen_fusion.in_stream else 1

    @property
    def adapter_context(self) -> AdapterContext:
        """Sizes on both sides of the adapter."""
        encoder = self.vision
        return AdapterContext(width=encoder.width, tokens=encoder.tokens, dim=self.dim, init_std=self.init_std)

    def starts_from(self, weights: "Weights") -> "Weights":
        """Returns the weights for `[start]`: every modality starts from the weights of the text model."""
        from forge_vlm.from_text import from_text

        return from_text(weights, self, self.modality_ids.names)

    def fixed_rows(self) -> "tuple[Tensor, dict[str, Tensor]]":
        """Returns tokens and images for a comparison of logits; see `forge_vlm.model.fixed_rows`."""
        from forge_models.hf.streamed_forward import fixed_tokens
        from forge_vlm import model

        token = self.placeholder
        if token is None:
            return fixed_tokens(self), {}
        if self.native is not None:  # text only: the number of image tokens varies
            tokens = fixed_tokens(self)
            return tokens.masked_fill(tokens == token, token - 1), {}
        shape = self.vision.input_shape
        return model.fixed_rows(self.vocab_size, self.max_length, token, self.per_image, shape, self.chosen_fusion.in_stream)

    @property
    def shape(self) -> VLMShape:
        """Shape of the decoder, with every default resolved."""
        return VLMShape(**vars(super().shape))

    def counts(self) -> "VisionCounts":
        """Returns the numbers of weights and matrix products, including those for images.

        Raises:
            ValueError: a part does not declare its matrix products.
        """
        from forge_vlm.flops import count

        return count(self)

    def context(self) -> FusionContext:
        """The context for building the fusion."""
        native = self.native
        return FusionContext(
            self.shape,
            self.modality_ids,
            self.placeholder,
            self.per_image,
            native=native is not None,
            each=native is not None and getattr(self.chosen_adapter, "native", "") == "each",
            varies=native is not None and native.each,
            timed=self.frame_time is not None,
        )

    def build(self) -> "VisionLanguageModel":
        from forge_vlm.model import VisionLanguageModel

        encoder = self.vision
        context = self.context()
        fusion = self.chosen_fusion.build(context)
        if self.images == "tokens":
            return VisionLanguageModel(context, fusion, None, None, ())
        adapter = self.chosen_adapter.build(self.adapter_context)
        shape = encoder.input_shape
        if context.native:
            shape = (shape[0] + 1, *shape[1:])  # the last row contains the grid
        return VisionLanguageModel(context, fusion, encoder.build(), adapter, shape, self._built_frame_time())

    def _built_frame_time(self) -> "FrameTime | None":
        from forge_vlm.frame_time import FrameTime

        keys = self.frame_time
        return None if keys is None else FrameTime(self.dim, keys.features, keys.shortest, keys.longest)


@dataclass(frozen=True, kw_only=True)
class LlavaConfig(Component):
    """A joint decoder with a published tower, written as `LlavaForConditionalGeneration` (Liu et al., 2023)."""

    implementation: ClassVar[str] = "forge_vlm.hf.llava:Llava"


@dataclass(frozen=True, kw_only=True)
class MllamaConfig(Component):
    """Cross-attention with the text part as `MllamaForCausalLM` (Llama 3.2, 2024); classes of ours open encoder and adapter."""

    implementation: ClassVar[str] = "forge_vlm.hf.mllama:Mllama"


@dataclass(frozen=True, kw_only=True)
class AutoModelFormatConfig(Component):
    """Any fusion but cross-attention, for Auto classes of transformers that forge-vlm registers (`forge_vlm.hf.register`)."""

    implementation: ClassVar[str] = "forge_vlm.hf.auto:AutoModelFormat"

    own_code: ClassVar[bool] = True
