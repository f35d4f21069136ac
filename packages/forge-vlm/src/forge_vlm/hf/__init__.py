"""Models with images as folders in the Hugging Face format.

    from transformers import AutoConfig
    from forge_vlm.hf import register

    register()  # from now on, transformers' Auto classes open folders that Forge exported
    assert AutoConfig.for_model("forge_standalone").model_type == "forge_standalone"

So `AutoModelForImageTextToText.from_pretrained(folder)` returns the exported model. `register` needs transformers; importing this
package does not.
"""

from typing import TYPE_CHECKING

from forge_core.exports import lazy_exports

if TYPE_CHECKING:
    from forge_vlm.hf.auto_model import register
    from forge_vlm.hf.llava import LlavaFolder
    from forge_vlm.hf.mllama import MllamaFolder, load_vision

__all__ = ["LlavaFolder", "MllamaFolder", "load_vision", "register"]
__getattr__, __dir__ = lazy_exports(__name__)
