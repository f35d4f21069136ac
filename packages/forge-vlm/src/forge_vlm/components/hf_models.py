"""Models with images in the Hugging Face format, chosen by `--family` and by the `model_type` of a folder.

`own_code` says that a folder brings code of ours with it; such a folder is only written where it is asked for by name.
"""

from dataclasses import dataclass
from typing import ClassVar

from forge_core.component import Component


@dataclass(frozen=True, kw_only=True)
class LlavaConfig(Component):
    """A joint decoder with a published tower as `LlavaForConditionalGeneration` (Liu et al., 2023)."""

    implementation: ClassVar[str] = "forge_vlm.hf.llava:Llava"


@dataclass(frozen=True, kw_only=True)
class MllamaConfig(Component):
    """Cross-attention with the text part as `MllamaForCausalLM` (Llama 3.2, 2024); encoder and adapter bring code of ours."""

    implementation: ClassVar[str] = "forge_vlm.hf.mllama:Mllama"


@dataclass(frozen=True, kw_only=True)
class StandaloneConfig(Component):
    """Any fusion but cross-attention, with code in plain PyTorch in the folder: for what no class of transformers can hold."""

    implementation: ClassVar[str] = "forge_vlm.hf.standalone.folder:Standalone"

    own_code: ClassVar[bool] = True
