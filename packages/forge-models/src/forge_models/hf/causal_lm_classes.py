"""The classes of transformers that have been compared with one process of transformers, and in which layouts.

`causal_lm_classes.json` is made by a walk over all classes (`tests/models/hf/causal_lm_walk.py`). Each has a record: `alone` for
one process, `packed` for rows of several documents, `folder` for what is written, and `dp`, `pp`, `tp`, `ep`; True, or why not.
"""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from forge_core.errors import Fault
from forge_core.layout import Layout
from forge_core.protocols.run import Job
from forge_models.components.transformers import TransformersConfig

PATH = Path(__file__).with_suffix(".json")


@cache
def records() -> dict[str, Any]:
    """Returns {"transformers": version, "classes": {class: record}}."""
    return json.loads(PATH.read_text(encoding="utf-8"))


def record_of(model_type: str) -> tuple[str, dict[str, Any]] | None:
    """Returns the class of a model type and its record; None if it was not compared."""
    return next(((name, one) for name, one in records()["classes"].items() if model_type in one["model_types"]), None)


def classes_are_compared(job: Job, layout: Layout) -> Iterator[Fault]:
    """Checks that a class of transformers has been compared with one process in the layout of a recipe, and with its packing."""
    if not isinstance(job.model, TransformersConfig):
        return
    kind = job.model.model_type
    page = "docs/models/transformers.md lists the classes"
    if (found := record_of(kind)) is None:
        yield Fault("model.config", f"model_type {kind!r} has not been compared with transformers", hint=page)
        return
    name, record = found
    if record["alone"] is not True:
        yield Fault("model.config", f"{name} is refused: {record['alone']}", hint=page)
        return
    data = getattr(job, "data", None)
    if getattr(data, "packing", "pad") != "pad" and record["packed"] is not True:
        hint = "set data.packing = 'pad', so that each row has one document"
        yield Fault("data.packing", f"{name} cannot have several documents in a row: {record['packed']}", hint=hint)
    sizes = {"dp": layout.dp_shard * layout.dp_replicate, "pp": layout.pp, "tp": layout.tp, "ep": layout.ep}
    for axis, size in sizes.items():
        if size > 1 and record[axis] is not True:
            key = "parallel.dp_shard" if axis == "dp" else f"parallel.{axis}"
            yield Fault(key, f"{name} is not offered with {axis} = {size}: {record[axis]}", hint=f"set it to 1; {page}")
