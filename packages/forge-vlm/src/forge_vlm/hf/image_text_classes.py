"""The image-text classes of transformers that have been compared with one process of transformers.

`image_text_classes.json` is made by a walk over all classes (`tests/vlm/hf/image_text_walk.py`). Each model_type has a record:
its `class`; `alone` for one process, `rows` for batches of several rows, `folder` for what is written, `recompute`, `frozen` for
a frozen vision tower, `dp`, and of what is offered apart `lora` for adapters, and `tp`; True, or why not.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

PATH = Path(__file__).with_suffix(".json")
OFFERS = {
    "lora": "adapters have not been compared with the peft library",
    "tp": "split layers have not been compared with one process",
}
"""What a class that is trained may lack, and why it is refused without a record."""


@cache
def records() -> dict[str, Any]:
    """Returns {"transformers": version, "kinds": {model_type: record}}; "earlier" has kinds that ran under other versions."""
    return json.loads(PATH.read_text(encoding="utf-8"))


def refusal(model_type: str) -> str:
    """Returns why a model type is not trained; empty if it equals one process of transformers."""
    record = records()["kinds"].get(model_type)
    if record is None:
        return f"model_type {model_type!r} has not been compared with transformers"
    faults = [str(value) for key, value in record.items() if key not in ("class", *OFFERS) and value is not True]
    return f"{record['class']} is refused: {faults[0]}" if faults else ""


def offer_refusal(model_type: str, offer: str) -> str:
    """Returns why an offer of `OFFERS` is not for a model type that is trained; empty if it is."""
    why = records()["kinds"].get(model_type, {}).get(offer, OFFERS[offer])
    return "" if why is True else str(why)
