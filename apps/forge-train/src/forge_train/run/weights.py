"""Initial weights of a run, from `[model] from_hf`, parts of the model, or `[start]`, and facts about them for checkpoints.

`[start]` takes some of the weights of another run. All tensors are compared before any is changed, and an error lists all tensors
that do not fit. Tensors that are not taken are initialized from `job.seed` and reported.
"""

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from forge_core.component import fields_of
from forge_core.errors import DataError, ForgeError
from forge_core.protocols.data import Tokenizer
from forge_core.protocols.weights import Weights
from forge_core.registry import Registry
from forge_models.classification import HEAD, has_head
from forge_models.hf.reader import GENERATION
from forge_models.lora_weights import MergedWeights
from forge_parallel.model.parallel_model import ParallelModel
from forge_parallel.model.realize import initialize
from forge_train.formats.forge import OF_THE_START, ForgeWeights
from forge_train.inference.stored import fill_from, open_weights
from forge_train.inference.tokenizer import settings_of, tokenizer_for
from forge_train.recipe.load import FROM_HF, FROM_HF_IGNORE
from forge_train.recipe.schema import Job, Start
from forge_train.run.base import FrozenBase


class InitialWeights:
    """Initial weights of a new run, for `forge_parallel.model.realize.realize`.

    They come from `[model] from_hf` or `[start]`, else from `job.seed`. Parts of the model that come with weights use those.

    Attributes:
        notes: notes on tensors that were taken, initialized, ignored and left out; complete after the call.
    """

    def __init__(self, job: Job, registry: Registry, base: FrozenBase | None = None) -> None:
        """`base` is that of an adapter, if the model has one.

        Raises:
            ForgeError: the recipe has two sources for the same weights.
        """
        self.notes: list[str] = []
        self._base = base
        self._job, self._registry = job, registry
        self._folder: str | None = getattr(job.model, FROM_HF, None)
        self._parts = weighted_parts(job.model)
        if self._parts and self._folder is not None:
            raise ForgeError(
                f"model.{FROM_HF} and the weights of model.{next(iter(self._parts))} are two sources of weights, and Forge "
                "cannot tell which tensor comes from which; remove one of them"
            )
        if job.start.weights is not None and self._folder is not None:
            raise ForgeError(f"model.{FROM_HF} and start.weights are two sources of weights; remove one of them")

    def __call__(self, model: ParallelModel) -> None:
        """Fills this rank's share of every tensor.

        Raises:
            ForgeError: the weights do not fit the model.
        """
        if self._base is not None:
            self._base.fill(model)
            self._base.begin(model)
            self.notes += self._base.notes
        elif self._job.start.weights is not None:
            self._take(self._job.start, model)
        elif self._folder is not None:
            self._read(self._folder, model)
        elif (weights := own_weights(self._job.model)) is not None:
            self.notes += [f"{weights.facts.origin}: {note}" for note in weights.facts.notes]
            fill_from(weights, model)
        else:
            initialize(model, self._job.job.seed)
        self._fill_parts(model)

    def _read(self, folder: str, model: ParallelModel) -> None:
        """Loads the weights of a Hugging Face folder."""
        ignored = getattr(self._job.model, FROM_HF_IGNORE, ())
        weights = self._registry.load("forge.converters", "hf")(ignore=ignored).build().read(Path(folder))
        self.notes += [f"{folder}: {note}" for note in weights.facts.notes]
        labels = getattr(self._job.model, "labels", ())
        if not labels or has_head(labels, weights):
            fill_from(weights, model)
            return
        taken = {name: name for name in weights.tensors if name != HEAD}
        if lost := sorted({name for name, tensor in model.parameters_held()} - {*taken, HEAD}):
            raise ForgeError(f"{folder} does not fit [model]; remove the keys of [model] that differ: it lacks {_some(lost)}")
        left = check_start(taken, weights, model)
        if left:
            raise ForgeError(f"{folder} does not fit [model]; remove the keys of [model] that differ: it also has {_some(left)}")
        initialize(model, self._job.job.seed)
        copy_tensors(taken, weights, model)
        self.notes.append(_new_head(labels))

    def _take(self, start: Start, model: ParallelModel) -> None:
        """Loads the tensors that `[start]` selects. If the model's component has a method `starts_from(weights)`, it selects the
        tensors of weights of another kind of model."""
        component: Any = self._job.model
        path = start.weights
        assert path is not None, "the caller has looked"
        weights = open_weights(path, self._registry, start.section)
        if getattr(weights.model, "lora", None) is not None:
            weights = MergedWeights(weights)
            self.notes.append(f"{path} has an adapter, which was merged into its base")
        if hasattr(component, "starts_from"):
            weights = component.starts_from(weights)
        self.notes += [f"{path}: {note}" for note in weights.facts.notes]
        taken = tensors_to_take(start, weights.tensors)
        if twice := [part for part in self._parts if any(name.startswith(f"{part}.") for name in taken)]:
            raise ForgeError(
                f"start.weights and the weights of model.{twice[0]} both have its tensors; leave them out with "
                f"start.exclude = ['{twice[0]}.*'], or take a model.{twice[0]} without weights"
            )
        labels = getattr(component, "labels", ())
        if labels and HEAD in taken and not has_head(labels, weights):
            del taken[HEAD]
        left = check_start(taken, weights, model)
        drawn = [name for name in model.specs.tensors if name not in taken and name.partition(".")[0] not in self._parts]
        check_drawn(drawn, left, start, weights, len(model.specs.tensors))
        initialize(model, self._job.job.seed)
        copy_tensors(taken, weights, model)
        unused = sorted(set(weights.tensors) - set(taken.values()))
        self.notes.append(f"{path}: {len(taken)} of {len(model.specs.tensors)} tensors are those of step {weights.facts.step}")
        if drawn:
            self.notes.append(f"drawn from job.seed: {_some(drawn)}")
        if unused:
            self.notes.append(f"not taken from {path}: {_some(unused)}")

    @torch.no_grad()
    def _fill_parts(self, model: ParallelModel) -> None:
        """Loads the weights of parts that come with weights."""
        weights_of = {name: part.weights() for name, part in self._parts.items()}
        for name, weights in weights_of.items():
            self.notes += [f"model.{name}: {note}" for note in weights.facts.notes]
        for name, tensor in model.tensors():
            part, _, inner = name.partition(".")
            if part not in weights_of:
                continue
            weights, piece = weights_of[part], model.piece(name, tensor)
            stored = weights.tensors.get(inner)
            if stored is None or stored.shape != tuple(piece.shape):
                why = "does not have it" if stored is None else f"has the shape {stored.shape}, and not {tuple(piece.shape)}"
                raise ForgeError(f"model.{part}: {weights.facts.origin} does not fit: of {inner} it {why}")
            if piece.local.numel():
                piece.local.copy_(weights.box(inner, piece.offset, tuple(piece.local.shape)))


def weighted_parts(model: Any) -> dict[str, Any]:
    """Returns the parts of a model that come with weights, by the name of their field, which is also the name of their module:
    components with a method `weights()` that returns `forge_core.protocols.weights.Weights`."""
    fields = fields_of(type(model)) if dataclasses.is_dataclass(model) else ()
    return {info.name: part for info in fields if hasattr(part := getattr(model, info.name), "weights")}


def own_weights(model: Any) -> Weights | None:
    """Returns the weights that the component of a whole model comes with, by its method `weights()`; None without any."""
    given: Callable[[], Weights | None] | None = getattr(model, "weights", None)
    return None if given is None else given()


def _new_head(labels: Sequence[str]) -> str:
    return f"the head is new: {len(labels)} labels ({', '.join(labels)}), drawn from job.seed"


_SHOWN = 20


def tensors_to_take(start: Start, stored: Iterable[str]) -> dict[str, str]:
    """Returns the model's name -> the stored name of each tensor to take.

    Raises:
        ForgeError: a pattern or a renaming matches no tensor, two tensors get the same name, or no tensor is left.
    """
    renames = [_pair(text) for text in start.rename]
    if len(dict(renames)) < len(renames):
        raise ForgeError(f"start.rename has a name twice: {', '.join(start.rename)}")
    renames.sort(key=lambda pair: -len(pair[0]))
    idle = {*start.include, *start.exclude, *start.rename}
    names: dict[str, str] = {}
    for old in stored:
        rule = next((pair for pair in renames if old.startswith(pair[0])), None)
        new = old if rule is None else rule[1] + old.removeprefix(rule[0])
        idle -= {f"{rule[0]}={rule[1]}"} if rule is not None else set()
        hits = [pattern for pattern in start.include if fnmatchcase(new, pattern)]
        misses = [pattern for pattern in start.exclude if fnmatchcase(new, pattern)]
        idle -= {*hits, *misses}
        if not hits or misses:
            continue
        if new in names:
            raise ForgeError(f"start.rename gives {names[new]} and {old} one name, {new}")
        names[new] = old
    if idle:
        raise ForgeError(f"[start]: {', '.join(map(repr, sorted(idle)))} fits no tensor of {start.weights}; check the names")
    if not names:
        raise ForgeError(f"[start] takes no tensor of {start.weights}; start.exclude has all that start.include has")
    return names


def check_start(taken: dict[str, str], weights: Weights, model: ParallelModel) -> list[str]:
    """Compares the tensors to take with the model. Removes names that the model does not have from `taken`, and returns them.

    Raises:
        ForgeError: tensors have a different shape or kind of dtype, all of which the message lists; or the model has none of the
            tensors.
    """
    left = [name for name in taken if name not in model.specs.tensors]
    for name in left:
        del taken[name]
    if not taken:
        raise ForgeError(f"the model has no tensor of {weights.facts.origin} under its name; see start.rename")
    faults = []
    for name, tensor in model.tensors():
        if name not in taken:
            continue
        shape, entry = tuple(model.piece(name, tensor).shape), weights.tensors[taken[name]]
        if entry.shape != shape:
            faults.append(f"{name}: shape {shape}, in the weights {entry.shape}")
        if getattr(torch, entry.dtype).is_floating_point != tensor.dtype.is_floating_point:
            faults.append(f"{name}: dtype {str(tensor.dtype).removeprefix('torch.')}, in the weights {entry.dtype}")
    if faults:
        listed = "\n  ".join(faults)
        raise ForgeError(
            f"{weights.facts.origin} does not fit [model]; nothing was loaded. Leave these out with start.exclude, or change "
            f"[model]:\n  {listed}"
        )
    return left


def check_drawn(drawn: list[str], left: list[str], start: Start, weights: Weights, total: int) -> None:
    """Checks that no tensor is initialized from the seed although the weights have it under another name, as weights of another
    fusion or kind of layer do.

    Args:
        drawn: tensors of the model that are initialized from `job.seed`.
        left: names in the weights that were to be taken, but that the model does not have.
        start: the section; `start.draw` names tensors that may be initialized in any case.
        weights: the weights.
        total: number of tensors of the model.

    Raises:
        ForgeError: the weights have a tensor under another name; or a pattern of `start.draw` matches no tensor in `drawn`.
    """
    if idle := [pattern for pattern in start.draw if not any(fnmatchcase(name, pattern) for name in drawn)]:
        raise ForgeError(f"start.draw: {', '.join(map(repr, idle))} fits no tensor that is drawn; check the names")
    by_block: dict[tuple[str, ...], list[str]] = {}
    for name in left:
        by_block.setdefault(_parts(name)[:2], []).append(name)
    found = {}
    for name in drawn:
        other = next((other for other in by_block.get(_parts(name)[:2], ()) if _differ_by_parts(name, other)), None)
        if other is not None and not any(fnmatchcase(name, pattern) for pattern in start.draw):
            found[name] = other
    if found:
        name, other = next(iter(found.items()))
        raise ForgeError(
            f"start.weights: {len(drawn)} of {total} tensors would be drawn from job.seed, and {weights.facts.origin} has "
            f"{len(found)} of them under other names, as of another fusion or another kind of layer: {name} is {other} there. "
            "Take the model of the weights, give names with start.rename, or say by start.draw which tensors may be drawn, such "
            f"as start.draw = ['{name}'], with * and ?"
        )


def _parts(name: str) -> tuple[str, ...]:
    """Splits a name without the suffix `.weight`, which linear layers have but stacked experts do not."""
    return tuple(name.removesuffix(".weight").split("."))


def _differ_by_parts(one: str, other: str) -> bool:
    """Whether the longer of two names is the shorter one with additional parts, such as a modality."""
    few, many = sorted((_parts(one), _parts(other)), key=len)
    rest = iter(many)
    return all(part in rest for part in few)


@torch.no_grad()
def copy_tensors(taken: Mapping[str, str], weights: Weights, model: ParallelModel) -> None:
    """Fills this rank's boxes of the taken tensors; values are converted to the dtype of the model's state."""
    for name, tensor in model.tensors():
        piece = model.piece(name, tensor)
        if name in taken and piece.local.numel():
            piece.local.copy_(weights.box(taken[name], piece.offset, tuple(piece.local.shape)))


def _pair(text: str) -> tuple[str, str]:
    old, sign, new = text.partition("=")
    if not sign or not old:
        raise ForgeError(f"start.rename {text!r}: write OLD=NEW, such as encoder.=blocks.")
    return old, new


def _some(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


TOKENIZER_KEY = "tokenizer"
"""Key of a checkpoint's metadata with the fingerprint of the run's tokenizer."""
GENERATION_KEY, TEMPLATE_KEY = OF_THE_START
REFERENCE_KEY = "reference"
"""Key of a checkpoint's metadata with the name of the stored numbers of a frozen reference (`forge_train.run.reference`)."""
KEPT_KEYS = ("special_tokens", "ends", "family", GENERATION_KEY, TEMPLATE_KEY, REFERENCE_KEY)
"""Keys of a checkpoint's metadata that come from the weights the run started from."""
_PROBE = "The quick brown fox\n\n  def f(x):\treturn x[0] + 1234.5 # \u00e9\u00df \u732b \u0438 \U0001f642"


def facts_of_start(job: Job, registry: Registry, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Returns the facts that a new run's checkpoints keep about the weights whose token embeddings it takes; empty if none.

    Raises:
        ForgeError: these weights and the run's data have different tokenizers.
    """
    key, weights = _weights(job, registry)
    if weights is None:
        return {}
    if tokenizer is not None and (why := other_tokenizer(weights, tokenizer, registry)):
        raise ForgeError(
            f"{key}: the token ids of {weights.facts.origin} are of another tokenizer than those of the data: {why}; set "
            "[data.tokenizer] to the tokenizer of the weights, or leave these weights out"
        )
    return facts_to_keep(weights)


def facts_to_keep(weights: Weights) -> dict[str, Any]:
    """Returns the facts of weights that later exports need: token ids, generation settings, the chat template."""
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


def facts_of_checkpoint(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the facts in the metadata of the checkpoint that a run resumes from."""
    return {name: meta[name] for name in KEPT_KEYS if name in meta}


def _weights(job: Job, registry: Registry) -> tuple[str, Weights | None]:
    """Returns the weights whose token embeddings a run takes, or None, and the key that names them."""
    component: Any = job.model
    if (path := getattr(component, FROM_HF, None)) is not None:
        return f"model.{FROM_HF}", registry.load("forge.converters", "hf")(
            ignore=getattr(component, FROM_HF_IGNORE, ())
        ).build().read(Path(path))
    if job.start.weights is None:
        own = own_weights(component)
        return ("", None) if own is None else ("model.folder", own)
    weights = open_weights(job.start.weights, registry, job.start.section)
    started = component.starts_from(weights) if hasattr(component, "starts_from") else weights
    taken = any(name.endswith("embed.weight") for name in tensors_to_take(job.start, started.tensors))
    return "start.weights", weights if taken else None


def other_tokenizer(weights: Weights, tokenizer: Tokenizer, registry: Registry) -> str:
    """Returns how token ids differ; empty if no difference is known."""
    if isinstance(weights, ForgeWeights) and weights.facts.tokenizer is None:
        known = weights.meta.get(TOKENIZER_KEY)
        if known in (None, tokenizer.fingerprint):
            return ""
        return f"their run had the one with the fingerprint {known[:12]}, here it is {tokenizer.fingerprint[:12]}"
    if weights.facts.tokenizer is None:
        return ""
    try:
        theirs = tokenizer_for(weights, None, registry, lambda _: None)
    except DataError:
        return ""  # files that Forge does not read
    return tokenizer_difference(tokenizer, theirs)


def tokenizer_difference(ours: Tokenizer, theirs: Tokenizer) -> str:
    """Returns the first difference of two tokenizers: an id with different text, or a text with different ids; empty if none.

    Compares the ids that both have one by one, because files of the same tokenizer may be written differently.
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
    """Returns the chat template of a tokenizer's folder: one text, or several by name."""
    if (path := folder / "chat_template.jinja").is_file():
        return path.read_text(encoding="utf-8")
    if (path := folder / "chat_template.json").is_file():
        found = json.loads(path.read_text(encoding="utf-8"))
        return found.get("chat_template") if isinstance(found, dict) else None
    return settings_of(folder).get("chat_template")
