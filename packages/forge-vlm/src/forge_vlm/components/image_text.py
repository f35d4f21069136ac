"""Any image-text model of transformers, chosen by `[model] name = "transformers_image_text"`."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from annotated_types import Ge

from forge_core.component import IDENTITY, Component
from forge_models.components.transformers import MISSING, TransformersConfig
from forge_models.hf.config import Unsupported

if TYPE_CHECKING:
    from torch import Tensor

    from forge_vlm.hf.image_arguments import ImageArguments
    from forge_vlm.hf.image_text import ImageTextModel


@dataclass(frozen=True, kw_only=True)
class ImageTextConfig(TransformersConfig):
    """An image-text model as transformers defines it, with the names of its tensors, its own forward and its own processor.

    Use it for models that `[model] name = "vlm"` does not describe. The page `docs/models/image-text.md` lists the classes that
    have been compared with one process of transformers; others are refused. It trains under data parallelism,
    and some classes under tensor parallelism.
    """

    key_class: ClassVar = IDENTITY
    feature: ClassVar[str] = "transformers_image_text"

    processor: str = ""
    """Files of the processor and its tokenizer's settings as JSON, {name: text}, which an export writes again; taken from
    `folder` when absent. The folder itself is needed as long as images are prepared and read."""
    patches: Annotated[int, Ge(4)] = 1024
    """Maximum number of patches of an image, for classes that keep proportions. A batch has this much room for each image, so set
    it, and `size` of the processor in the folder, as low as the task allows."""

    @classmethod
    def described(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the keys that the folder of a recipe determines; see `TransformersConfig.described`."""
        found = super().described(given)
        if found and not given.get("processor"):
            folder = Path(given["folder"])
            texts = {name: (folder / name).read_text(encoding="utf-8") for name in FILES if (folder / name).is_file()}
            found["processor"] = json.dumps(texts, sort_keys=True)
        return found

    @classmethod
    def examples(cls, folder: Path) -> "Iterable[ImageTextConfig]":
        """Returns a small LLaVA."""
        yield cls(config=json.dumps(SMALL), weights_from="draw")

    def fixed_rows(self) -> "tuple[Tensor, dict[str, Tensor]]":
        """Returns tokens and images for a comparison of logits; see `forge_models.hf.streamed_forward.fixed_rows`."""
        import torch

        from forge_core.batch import Batch

        with torch.device("meta"):
            model = self.build()
        tokens = torch.randint(0, model.shape.vocab_size, (3, 48), generator=torch.Generator().manual_seed(20))
        batch = model.with_extras(Batch(tokens, tokens.clone()))
        return batch.tokens, dict(batch.extras)

    def hollow(self) -> Any:
        """Returns the module of the class on the meta device.

        Raises:
            Unsupported: transformers cannot build it.
        """
        from forge_vlm.hf.image_text import hollow

        return hollow(self.config, self.settings)

    def build(self) -> "ImageTextModel":
        """
        Raises:
            Unsupported: there is no configuration, or Forge cannot train its class.
        """
        if not self.config:
            raise Unsupported(MISSING)
        from forge_vlm.hf.image_text import image_text_model

        return self.adapted(image_text_model(self.config, self.settings, self.patches, drawn=self.weights_from == "draw"))

    def image_arguments(self) -> "ImageArguments":
        """Returns the form in which the class takes images.

        Raises:
            Unsupported: Forge cannot train the class.
        """
        import torch

        with torch.device("meta"):
            return self.build().images


@dataclass(frozen=True, kw_only=True)
class ImageTextFormatConfig(Component):
    """An image-text model of transformers, written with the names of its class and with its processor."""

    implementation: ClassVar[str] = "forge_vlm.hf.image_text_folders:ImageTextFormat"


def example() -> ImageTextConfig:
    """Returns a small model of a class that no other component describes."""
    config = {**SMALL, "model_type": "vipllava", "architectures": ["VipLlavaForConditionalGeneration"]}
    return ImageTextConfig(config=json.dumps({**config, "vision_feature_layers": [-1, -2]}), weights_from="draw")


FILES = (
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
"""Files of a folder that `processor` keeps."""
SMALL = {
    "model_type": "llava",
    "architectures": ["LlavaForConditionalGeneration"],
    "image_token_id": 39,
    "text_config": {
        "model_type": "llama",
        "vocab_size": 40,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    },
    "vision_config": {
        "model_type": "clip_vision_model",
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 8,
        "patch_size": 4,
    },
}
"""The configuration of `ImageTextConfig.examples`."""
