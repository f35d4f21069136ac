"""Model cards of runs: data, evaluation, versions and recipe from a checkpoint and the metrics of its run."""

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any

from forge_core.config.toml import to_toml
from forge_core.config.tree import UNSET
from forge_core.errors import DataError, ForgeError
from forge_core.files import replace_file
from forge_core.terminal import duration
from forge_models.hf.card import card, cell, table
from forge_models.hf.names import shapes_of
from forge_train.formats.forge import ForgeWeights
from forge_train.report.record import read_record
from forge_train.run.checkpoints import SECONDS

EVALUATED = ("evaluation/", "tasks/", "answers/")
"""First parts of the names of metrics that are results of an evaluation."""
MARK = "<!-- Written by forge-train card; it replaces only a file with this SHA-256 of the text above: {} -->\n"


def base_of(recipe: Mapping[str, Any]) -> str:
    """Returns the weights that a run started from; empty if they were drawn."""
    for section, key in (("model", "from_hf"), ("start", "weights")):
        value = (recipe.get(section) or {}).get(key)
        if isinstance(value, str) and value != UNSET:
            return value
    return ""


def history_of(weights: ForgeWeights) -> str:
    """Returns the sections of a model card about the training of a checkpoint, as Markdown."""
    meta = weights.meta
    if "data" not in weights.facts.recipe:  # converted weights
        return ""
    used = {item["distribution"]: item["version"] for item in meta.get("plugins", ())} | dict(meta.get("versions", {}))
    seconds = meta.get(SECONDS)
    facts = {
        "Steps": f"{weights.facts.step:,}",
        "Tokens": f"{meta['tokens']:,}" if "tokens" in meta else "unknown",
        "Time of training": duration(seconds) if isinstance(seconds, int | float) else "unknown",
        "Layout": f"`{meta.get('layout', 'unknown')}`",
        "Versions": ", ".join(f"{name} {version}" for name, version in sorted(used.items())) or "unknown",
    }
    parts = {
        "Training": table(facts),
        "Data": _data(meta),
        "Evaluation": _evaluation(weights),
        "Recipe": _recipe(weights.facts.recipe),
    }
    return "\n".join(f"## {title}\n\n{text}" for title, text in parts.items())


def _data(meta: Mapping[str, Any]) -> str:
    cursor = meta.get("cursor") or {}
    identity = cursor.get("identity") or {}
    sources = identity.get("sources") or {}
    lines = ["| source | share | fingerprint |", "|---|---|---|"]
    for name, source in sources.items():
        known = source if isinstance(source, Mapping) else {}
        lines.append(f"| {cell(name)} | {cell(known.get('share', 'unknown'))} | `{known.get('fingerprint', 'unknown')}` |")
    listed = "\n".join(lines) if sources else "The sources are unknown."
    tokenizer = meta.get("tokenizer")
    facts = {
        "Order of samples": f"`{cursor['fingerprint']}`" if "fingerprint" in cursor else "unknown",
        "Tokenizer": f"`{tokenizer}`" if tokenizer else "unknown",
        "Tokens of a row": identity.get("sequence_length", "unknown"),
        "License of the data, persons in it": "unknown",
    }
    return f"{listed}\n\n{table(facts)}"


def _evaluation(weights: ForgeWeights) -> str:
    """Returns the newest results up to the step of the weights."""
    if weights.facts.run is None:
        return "Unknown: the metrics of the run are not next to the checkpoint.\n"
    try:
        series = read_record(weights.facts.run).history.series
    except DataError as cause:
        return f"Unknown: {cause}.\n"
    lines = ["| result | value | at step |", "|---|---|---|"]
    for name, one in sorted(series.items()):
        at = bisect_right(one.steps, weights.facts.step) - 1
        if name.startswith(EVALUATED) and at >= 0:
            value = f"{one.values[at]:.6g}" if math.isfinite(one.values[at]) else "not finite"
            lines.append(f"| {cell(name)} | {value} | {one.steps[at]:,} |")
    if len(lines) == 2:
        return "The run recorded no evaluation up to this step.\n"
    return "\n".join([*lines, "", "Results of the run itself. A loss is in nats per token.", ""])


def _recipe(recipe: Mapping[str, Any]) -> str:
    text = to_toml(recipe)
    fence = "````" if "```" in text else "```"
    return f"Every key, as the run used it; secrets are removed.\n\n{fence}toml\n{text.rstrip()}\n{fence}\n"


def card_of_run(weights: ForgeWeights, where: str) -> str:
    """Returns the model card of the run of a checkpoint; `where` is its path, for commands that the card shows.

    Raises:
        ForgeError: the checkpoint is not of a run.
    """
    history = history_of(weights)
    if not history:
        raise ForgeError(
            f"{weights.facts.origin} is not of a run, so it has no recipe and no data; convert --to hf writes its card"
        )
    weights.facts = replace(weights.facts, history=history, base=base_of(weights.facts.recipe))
    shapes = shapes_of(weights.model)
    dtypes = sorted({weights.tensors[name].dtype for name in shapes if name in weights.tensors})
    name = (weights.facts.recipe.get("job") or {}).get("name")
    title = name if isinstance(name, str) and name != UNSET else type(weights.model).__name__
    usage = f"""from pathlib import Path

from forge_train.formats import Forge
from forge_train.inference import load_model

model = load_model(Forge().build().read(Path({where!r})))
"""
    origin = f"A run of Forge. `forge-train convert {where} exported --to hf` writes a folder that opens without Forge."
    count, dtype = sum(map(prod, shapes.values())), ", ".join(dtypes) or "unknown"
    return card(weights, title, type(weights.model).__name__, "", dtype=dtype, count=count, usage=usage, origin=origin)


def write_card(path: Path, text: str) -> None:
    """Writes a card with a mark, by which a later call knows that nobody has edited it.

    Raises:
        ForgeError: the file is not one that this function wrote, or it was edited.
    """
    if path.exists():
        above, mark, _ = _opened(path).rpartition(MARK.partition("{")[0])
        if not mark or _opened(path) != _marked(above):
            raise ForgeError(f"{path} was not written by this command, or was edited since; choose another file with --out")
    replace_file(path, _marked(text).encode())


def _opened(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as cause:
        raise ForgeError(f"{path} cannot be read: {cause}; choose another file with --out") from cause


def _marked(text: str) -> str:
    return text + MARK.format(sha256(text.encode()).hexdigest())
