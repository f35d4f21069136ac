"""Weights in the Hugging Face format, both ways: safetensors and config.json, no pickle and no foreign code.

    import json
    from pathlib import Path
    from forge_models.hf import FAMILIES, read_model

    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 320}
    config |= {"intermediate_size": 128, "rms_norm_eps": 1e-5, "max_position_embeddings": 128}
    Path("config.json").write_text(json.dumps(config))
    decoder = read_model(Path("."))  # a `forge_models.DecoderConfig`
    assert decoder.layers == 2 and "llama" in FAMILIES

`Folder` opens a folder with its tensors; `HfConverter().write(path, weights)` writes one.
"""

from typing import TYPE_CHECKING

from forge_core.exports import lazy_exports

if TYPE_CHECKING:
    from forge_models.hf.config import Unsupported, read_config
    from forge_models.hf.converter import HfConverter
    from forge_models.hf.families import FAMILIES
    from forge_models.hf.family import Family
    from forge_models.hf.names import TensorPlace, shapes_of
    from forge_models.hf.reader import CheckpointTensors, Folder, facts_in, read_model
    from forge_models.hf.writer import write_folder

__all__ = [
    "FAMILIES",
    "CheckpointTensors",
    "Family",
    "Folder",
    "HfConverter",
    "TensorPlace",
    "Unsupported",
    "facts_in",
    "read_config",
    "read_model",
    "shapes_of",
    "write_folder",
]
__getattr__, __dir__ = lazy_exports(__name__)
