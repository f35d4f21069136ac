"""Weights as a GGUF file, both ways: one file with tensors, settings and tokenizer, for llama.cpp and programs that use it.

    from pathlib import Path
    from forge_models import DecoderConfig
    from forge_models.gguf import GgufConverter, architecture_of

    decoder = DecoderConfig(dim=64, layers=2, heads=4, kv_heads=2, vocab_size=257, max_length=128)
    assert architecture_of(decoder).name == "llama"  # the first architecture that fully describes the model
    assert GgufConverter(quantization="q8_0").build()

`forge-train convert SOURCE model.gguf --to gguf` writes one. Needs the gguf package: `pip install 'forge-models[gguf]'`.
"""

from typing import TYPE_CHECKING

from forge_core.exports import lazy_exports

if TYPE_CHECKING:
    from forge_models.gguf.architectures import ARCHITECTURES
    from forge_models.gguf.converter import GgufConverter, architecture_of
    from forge_models.gguf.reader import GgufFile

__all__ = ["ARCHITECTURES", "GgufConverter", "GgufFile", "architecture_of"]
__getattr__, __dir__ = lazy_exports(__name__)
