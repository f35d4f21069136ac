"""Model cards: Markdown with the front matter that model hubs read. What is not known is said to be unknown."""

import json
from typing import Any

from forge_core.component import Component, fields_of
from forge_core.protocols.weights import Weights
from forge_models.components.decoder import DecoderConfig

TO_BE_STATED = "to be stated by the publisher of the model"


def card(weights: Weights, title: str, architecture: str, kind: str, *, dtype: str, count: int, usage: str, origin: str) -> str:
    """Returns the text of a model card.

    Args:
        weights: the weights; `facts` has what is known about their training.
        title: heading.
        architecture: class of the model.
        kind: `model_type`, a tag; may be empty.
        dtype: dtype of the parameters.
        count: number of parameters.
        usage: code that opens the weights.
        origin: sentences about how the weights were written.
    """
    model, known = weights.model, weights.facts
    rows = {
        "Architecture": architecture,
        "Parameters": f"{count:,}",
        "Precision": dtype,
        **(_sizes(model) if isinstance(model, DecoderConfig) else _keys(model)),
        **{f"Note {number}": note for number, note in enumerate(known.notes, 1)},
        "Training steps": known.step or "not recorded",
        "Base model": known.base or ("none: trained from random weights" if known.history else "unknown"),
        "Languages": "unknown",
        "License": TO_BE_STATED,
    }
    front = {
        "library_name": "transformers" if "transformers" in usage else "pytorch",
        "pipeline_tag": _task(model),
        "tags": f"[{', '.join(filter(None, (kind, 'forge')))}]",
        **({"base_model": json.dumps(known.base, ensure_ascii=False)} if known.base else {}),
    }
    history = known.history or "## Training\n\nData, evaluation, recipe and versions of the training are unknown.\n"
    return f"""---
{"".join(f"{name}: {value}{chr(10)}" for name, value in front.items())}# license: {TO_BE_STATED}
# language: unknown
---

# {title}, {count:,} parameters

{origin}

{table(rows)}
Intended use and limits: {TO_BE_STATED}.

```python
{usage}```

{history}"""


def table(rows: dict[str, Any]) -> str:
    """Returns a table with two columns."""
    lines = "".join(f"| {name} | {cell(value)} |\n" for name, value in rows.items())
    return f"| | |\n|---|---|\n{lines}"


def cell(value: Any) -> str:
    """Returns a value as the text of one cell of a table."""
    return " ".join(str(value).replace("|", "\\|").split())


def usage_of(loader: str) -> str:
    """Returns code that opens a folder with a class of transformers."""
    return f"""from transformers import {loader}

model = {loader}.from_pretrained("path/of/this/folder")
"""


def _sizes(model: DecoderConfig) -> dict[str, Any]:
    return {
        "Layers": model.layers,
        "Width": model.dim,
        "Heads": f"{model.heads} ({model.shape.kv_heads} for keys and values)",
        "Experts": "none" if model.moe is None else f"{model.moe.experts}, {model.moe.top_k} of them for each token",
        "Vocabulary": f"{model.vocab_size:,}",
        "Context": f"{model.max_length:,} tokens",
        "Embeddings": "tied" if model.tied_embeddings else "not tied",
        **_left_out(model),
    }


def _keys(model: Component) -> dict[str, Any]:
    """Returns the keys of a model that is no decoder, such as one of a plugin, without those that are components."""
    return {
        f"`{info.name}`": value
        for info in fields_of(type(model))
        if not isinstance(value := getattr(model, info.name), Component)
    }


def _task(model: Component) -> str:
    images = isinstance(model, DecoderConfig) and type(model) is not DecoderConfig
    if getattr(model, "labels", ()):
        return "text-classification"
    return "image-text-to-text" if images else "text-generation"


def _left_out(model: DecoderConfig) -> dict[str, str]:
    """Returns parts of the model that this format cannot hold."""
    if model.mtp is None:
        return {}
    return {"Left out": f"{model.mtp.depth} MTP modules, which do not change logits"}
