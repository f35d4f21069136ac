"""Models with images in the Hugging Face format, chosen by `--family` and by the `model_type` of a folder.

`own_code` is True if folders contain code of Forge; such a folder is written only if `--family` names it.
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
    """Cross-attention with the text part of `MllamaForCausalLM` (Llama 3.2, 2024); the folder contains code for encoder and
    adapter."""

    implementation: ClassVar[str] = "forge_vlm.hf.mllama:Mllama"


@dataclass(frozen=True, kw_only=True)
class StandaloneConfig(Component):
    """Any fusion except cross-attention, with plain PyTorch code in the folder: for models without a class in transformers."""

    implementation: ClassVar[str] = "forge_vlm.hf.standalone.folder:Standalone"

    own_code: ClassVar[bool] = True
