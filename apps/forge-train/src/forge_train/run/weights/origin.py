"""What a run keeps of the weights that it starts from, besides their numbers, and whether their ids mean what the run's mean."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forge_core.errors import DataError, ForgeError
from forge_core.protocols.data import Tokenizer
from forge_core.protocols.weights import Weights
from forge_core.registry import Registry
from forge_models.hf.reader import GENERATION
from forge_train.formats.forge import OF_THE_START, ForgeWeights
from forge_train.inference.stored import open_weights
from forge_train.inference.tokenizer import settings_of, tokenizer_for
from forge_train.recipe.load import IGNORE, KEY
from forge_train.recipe.schema import Job
from forge_train.run.weights.warm_start import chosen

TOKENIZER = "tokenizer"
"""Key of a checkpoint's metadata with the fingerprint of the tokenizer that the run's ids are of."""
GENERATION_KEY, TEMPLATE_KEY = OF_THE_START
KEPT = ("special_tokens", "ends", "family", GENERATION_KEY, TEMPLATE_KEY)
"""Keys of a checkpoint's metadata that come from the weights that the run started from."""
_PROBE = "The quick brown fox\n\n  def f(x):\treturn x[0] + 1234.5 # \u00e9\u00df \u732b \u0438 \U0001f642"


def origin(job: Job, registry: Registry, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """What a new run's checkpoints keep of the weights whose tokens it takes over; empty where it takes none.

    Raises:
        ForgeError: the ids of these weights are of another tokenizer than the run's data.
    """
    key, weights = _weights(job, registry)
    if weights is None:
        return {}
    if tokenizer is not None and (why := _other_tokenizer(weights, tokenizer, registry)):
        raise ForgeError(
            f"{key}: the token ids of {weights.facts.origin} are of another tokenizer than those of the data: {why}; set "
            "[data.tokenizer] to the tokenizer of the weights, or leave these weights out"
        )
    return kept_of(weights)


def kept_of(weights: Weights) -> dict[str, Any]:
    """The facts of weights that an export of what is made of them needs: ids, settings of generation, the chat template."""
    facts = weights.facts
    found: dict[str, Any] = {
        "special_tokens": dict(facts.special_tokens),
        "ends": list(facts.ends),
        "family": facts.family,
    }
    if facts.tokenizer is not None:
        found |= {GENERATION_KEY: _generation(facts.tokenizer), TEMPLATE_KEY: _template(facts.tokenizer)}
    elif isinstance(weights, ForgeWeights):
        found |= {name: weights.meta.get(name) for name in (GENERATION_KEY, TEMPLATE_KEY)}
    return {name: value for name, value in found.items() if value}


def carried(meta: Mapping[str, Any]) -> dict[str, Any]:
    """What the checkpoint that a run resumes from keeps of these."""
    return {name: meta[name] for name in KEPT if name in meta}


def _weights(job: Job, registry: Registry) -> tuple[str, Weights | None]:
    """The weights whose table of tokens a run takes, and the key that names them."""
    component: Any = job.model
    if (path := getattr(component, KEY, None)) is not None:
        return f"model.{KEY}", registry.load("forge.converters", "hf")(ignore=getattr(component, IGNORE, ())).build().read(
            Path(path)
        )
    if job.start.weights is None:
        return "", None
    weights = open_weights(job.start.weights, registry, job.start.section)
    started = component.starts_from(weights) if hasattr(component, "starts_from") else weights
    taken = any(name.endswith("embed.weight") for name in chosen(job.start, started.tensors))
    return "start.weights", weights if taken else None


def _other_tokenizer(weights: Weights, tokenizer: Tokenizer, registry: Registry) -> str:
    """How ids differ; empty where they do not, as far as is known."""
    if isinstance(weights, ForgeWeights) and weights.facts.tokenizer is None:
        known = weights.meta.get(TOKENIZER)
        if known in (None, tokenizer.fingerprint):
            return ""
        return f"their run had the one with the fingerprint {known[:12]}, here it is {tokenizer.fingerprint[:12]}"
    if weights.facts.tokenizer is None:
        return ""
    try:
        theirs = tokenizer_for(weights, None, registry, lambda _: None)
    except DataError:
        return ""  # files that Forge does not read
    return difference(tokenizer, theirs)


def difference(ours: Tokenizer, theirs: Tokenizer) -> str:
    """The first id with another text in two tokenizers, or that a text has other ids; empty where there is none.

    Files of one tokenizer may differ in how they are written, so the ids are compared: those that both have, one by one.
    """
    if ours.fingerprint == theirs.fingerprint:
        return ""
    for index in range(min(ours.vocab_size, theirs.vocab_size)):
        if (here := ours.decode([index])) != (there := theirs.decode([index])):
            return f"id {index} is {there!r} there and {here!r} here"
    here, there = ours.encode(_PROBE).tolist(), theirs.encode(_PROBE).tolist()
    if here != there:
        place = next((at for at, (a, b) in enumerate(zip(here, there, strict=False)) if a != b), min(len(here), len(there)))
        return f"the same text has other ids, from {there[place : place + 3]} there and {here[place : place + 3]} here on"
    return ""


def _generation(folder: Path) -> Any:
    path = folder / GENERATION
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def _template(folder: Path) -> Any:
    """The chat template of a tokenizer's folder: one text, or several by name."""
    if (path := folder / "chat_template.jinja").is_file():
        return path.read_text(encoding="utf-8")
    if (path := folder / "chat_template.json").is_file():
        found = json.loads(path.read_text(encoding="utf-8"))
        return found.get("chat_template") if isinstance(found, dict) else None
    return settings_of(folder).get("chat_template")
