"""Models with images as folders in the Hugging Face format.

    from transformers import AutoModelForImageTextToText

    from forge_vlm.hf import register

    register()
    model = AutoModelForImageTextToText.from_pretrained("path/of/a/folder")

`register` needs transformers; importing this package does not.
"""

from typing import TYPE_CHECKING

from forge_core.exports import lazy_exports

if TYPE_CHECKING:
    from forge_vlm.hf.auto_model import register as register
    from forge_vlm.hf.mllama import load_vision as load_vision

__getattr__, __dir__ = lazy_exports(__name__, {"load_vision": "mllama", "register": "auto_model"})
