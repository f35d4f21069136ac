"""Rules across sections for models with images: pure functions of (job, layout), which run before torch is imported."""

from collections.abc import Iterator
from typing import Any

from forge_core.component import class_name
from forge_core.errors import Fault
from forge_core.layout import Layout
from forge_core.protocols.run import Job
from forge_vlm.components.image_text import ImageTextConfig
from forge_vlm.hf.image_text_classes import offer_refusal, refusal

PAGE = "docs/models/image-text.md lists the classes"
SPLITS = {
    "pp": "it is no chain of blocks",
    "cp": "its rows are not split",
    "ep": "experts are not",
}


def image_text_classes_are_compared(job: Job, layout: Layout) -> Iterator[Fault]:
    """Checks that an image-text class of transformers has been compared with one process, and what it is offered with."""
    if not isinstance(job.model, ImageTextConfig):
        return
    if not (kind := job.model.model_type):
        yield Fault("model.folder", "is missing", hint="give a folder in the Hugging Face format, or model.config")
        return
    if why := refusal(kind):
        yield Fault("model.config", why, hint=PAGE)
        return
    if job.model.lora is not None and (why := offer_refusal(kind, "lora")):
        yield Fault("model.lora", f"is not for model_type {kind!r}: {why}", hint=f"remove it; {PAGE}")
    if layout.tp > 1 and (why := offer_refusal(kind, "tp")):
        yield Fault("parallel.tp", f"= {layout.tp} is not for model_type {kind!r}: {why}", hint=f"set it to 1; {PAGE}")
    for axis, reason in SPLITS.items():
        if (size := layout.size(axis)) > 1:
            what = f"= {size}, but a class with images is offered with data and tensor parallelism alone: {reason}"
            yield Fault(f"parallel.{axis}", what, hint=f"set it to 1, and use parallel.dp_shard; {PAGE}")
    data: Any = getattr(job, "data", None)
    if getattr(data, "packing", "pad") != "pad":
        hint = "set data.packing = 'pad', so that each row has one document"
        yield Fault("data.packing", f"= {data.packing!r}, but a class with images counts positions over whole rows", hint=hint)
    for index, hook in enumerate(getattr(job, "hooks", ())):
        if getattr(hook, "generates", False):
            what = f"{class_name(hook)} generates text, which a class with images does not do in Forge"
            yield Fault(f"hooks.{index}.name", what, hint="remove the hook, and generate with the exported folder")
