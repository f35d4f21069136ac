"""Models with images in the Hugging Face format, chosen by `--family` and by the `model_type` of a folder."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from forge_core.component import Component

if TYPE_CHECKING:
    from forge_core.protocols.convert import HfModel


@dataclass(frozen=True, kw_only=True)
class Llava(Component):
    """A joint decoder with a published tower as `LlavaForConditionalGeneration` (Liu et al., 2023)."""

    def build(self) -> "HfModel":
        from forge_vlm.hf.llava import Llava

        return Llava()
