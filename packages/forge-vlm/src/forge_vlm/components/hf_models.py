"""Models with images in the Hugging Face format, chosen by `--family` and by the `model_type` of a folder.

`own_code` says that only classes of ours open a folder; such a folder is only written where it is asked for by name.
"""

from dataclasses import dataclass
from typing import ClassVar

from forge_core.component import Component


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
