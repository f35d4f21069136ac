"""Models with images in the Hugging Face format, chosen by `--family` and by the `model_type` of a folder.

`own_code` says that only classes of ours open a folder; such a folder is only written where it is asked for by name.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from forge_core.component import Component

if TYPE_CHECKING:
    from forge_core.protocols.weights import HfModel


@dataclass(frozen=True, kw_only=True)
class Llava(Component):
    """A joint decoder with a published tower as `LlavaForConditionalGeneration` (Liu et al., 2023)."""

    def build(self) -> "HfModel":
        from forge_vlm.hf.llava import Llava

        return Llava()


@dataclass(frozen=True, kw_only=True)
class Mllama(Component):
    """Cross-attention with the text part as `MllamaForCausalLM` (Llama 3.2, 2024); classes of ours open encoder and adapter."""

    def build(self) -> "HfModel":
        from forge_vlm.hf.mllama import Mllama

        return Mllama()


@dataclass(frozen=True, kw_only=True)
class AutoModelFolder(Component):
    """Any fusion but cross-attention, for Auto classes of transformers that forge-vlm registers (`forge_vlm.hf.register`)."""

    own_code: ClassVar[bool] = True

    def build(self) -> "HfModel":
        from forge_vlm.hf.auto import AutoModelFormat

        return AutoModelFormat()
