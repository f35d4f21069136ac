"""The classes of transformers that have been compared with one process of transformers, and in which layouts.

`causal_lm_classes.json` is made by a walk over all classes (`tests/models/hf/causal_lm_walk.py`). Each has a record: `alone` for
one process, `packed` for rows of several documents, `folder` for what is written, `loss` for a loss without whole logits, and
`dp`, `pp`, `tp`, `ep`; True, or why not.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

PATH = Path(__file__).with_suffix(".json")


@cache
def records() -> dict[str, Any]:
    """Returns {"transformers": version, "classes": {class: record}}; "earlier" has classes that ran under other versions."""
    return json.loads(PATH.read_text(encoding="utf-8"))


def record_of(model_type: str) -> tuple[str, dict[str, Any]] | None:
    """Returns the class of a model type and its record; None if it was not compared."""
    return next(((name, one) for name, one in records()["classes"].items() if model_type in one["model_types"]), None)


def folder_refusal(model_type: str) -> str:
    """Returns why folders of a model type are neither read nor written; empty if `from_pretrained` loads what Forge writes."""
    found = record_of(model_type)
    why = None if found is None else found[1].get("folder")
    if found is None or not isinstance(why, str):
        return ""
    return f"a folder of {found[0]} does not give the same logits in transformers: {why}"
