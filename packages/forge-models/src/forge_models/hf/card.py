"""The model card of an exported folder: facts that the weights bring along, and nothing else."""

from collections.abc import Mapping
from typing import Any

from forge_core.protocols.weights import Weights
from forge_models.components.decoder import Decoder


def card(weights: Weights, config: Mapping[str, Any], dtype: str, count: int, usage: str) -> str:
    """Markdown with the metadata block that model hubs read.

    Args:
        weights: what was written.
        config: the content of `config.json`.
        dtype: of the parameters.
        count: number of parameters.
        usage: code that opens the folder.
    """
    model = weights.model
    assert isinstance(model, Decoder)
    rows = {
        "Architecture": config["architectures"][0],
        "Parameters": f"{count:,}",
        "Layers": model.layers,
        "Width": model.dim,
        "Heads": f"{model.heads} ({model.shape.kv_heads} for keys and values)",
        "Experts": "none" if model.moe is None else f"{model.moe.experts}, {model.moe.top_k} of them for each token",
        "Vocabulary": f"{model.vocab_size:,}",
        "Context": f"{model.max_length:,} tokens",
        "Precision": dtype,
        "Embeddings": "tied" if model.tied_embeddings else "not tied",
        **_left_out(model),
        **{f"Note {number}": note for number, note in enumerate(weights.facts.notes, 1)},
        "Training steps": weights.facts.step or "not recorded",
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return f"""---
library_name: {"transformers" if "transformers" in usage else "pytorch"}
pipeline_tag: {_task(model)}
tags: [{config["model_type"]}, forge]
---

# {config["architectures"][0]}, {count:,} parameters

Exported by Forge. Its logits were compared with those of the weights that it was made from.

| | |
|---|---|
{table}

Data, intended use, limits and license: to be stated by the publisher of the model.

```python
{usage}```
"""


def usage_of(loader: str) -> str:
    """Code that opens a folder by a class of transformers."""
    return f"""from transformers import {loader}

model = {loader}.from_pretrained("path/of/this/folder")
"""


def _task(model: Decoder) -> str:
    return "text-generation" if type(model) is Decoder else "image-text-to-text"


def _left_out(model: Decoder) -> dict[str, str]:
    """What the model has that this format does not hold."""
    if model.mtp is None:
        return {}
    return {"Left out": f"{model.mtp.depth} MTP modules, which do not change logits"}
