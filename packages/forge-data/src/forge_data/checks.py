"""Recipe checks about data: functions of (job, layout) that run before torch is imported and read almost no files."""

import glob
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from forge_core.errors import DataError, Fault, ForgeError, MissingFile, RecipeWarning
from forge_core.layout import Layout
from forge_core.protocols.data import SourceContext, TextComponent
from forge_core.protocols.run import Job
from forge_data import components
from forge_data.order.phases import batch_faults, faults_of, too_long_of, weight_of
from forge_data.section import Data

ENCODINGS = {"gpt2": 50257, "r50k_base": 50257, "p50k_base": 50281, "cl100k_base": 100277, "o200k_base": 200019}
"""Vocabulary sizes (largest id + 1) of tiktoken's own encodings."""

READABLE = 1 << 26
"""Size in bytes of the largest tokenizer file that a check reads."""
RECORDS = 64
"""Number of records of a source that a check encodes. Preparing the source checks all of them."""
HINT_STOP = (
    "set data.tokenizer.eos to the token with which the template ends an answer, so that generation stops there too, or list it "
    "in `stop`"
)


class DataJob(Job, Protocol):
    """A recipe whose `[data]` section is `forge_data.Data`."""

    @property
    def data(self) -> Data: ...


def files_exist(job: DataJob, layout: Layout) -> Iterator[Fault]:  # noqa: ARG001 (every check is given both)
    """Requires at least one source, and that all named files exist."""
    data = job.data
    if not data.sources:
        yield Fault("data.sources", "is empty: there is nothing to train on", hint='to try, add [[data.sources]] name = "stdlib"')
    named = {f"data.sources.{index}": source for index, source in enumerate(data.sources)}
    named |= {f"data.evaluation.{name}": source for name, source in data.evaluation.items()}
    for key, source in named.items():
        if why := _absent(source):
            yield MissingFile(f"{key}.path", why, hint="a relative path starts from the directory of the command")
    if data.tokenizer is not None and (why := _absent(data.tokenizer)):
        yield MissingFile("data.tokenizer.path", why, hint="a relative path starts from the directory of the command")
    for index, pattern in enumerate(getattr(data.tokenizer, "files", ())):
        if not _there(pattern):
            yield MissingFile(f"data.tokenizer.files.{index}", f"{pattern!r} matches no file")
    used = [(index, source) for index, source in enumerate(data.sources) if weight_of(source) > 0]
    learns = isinstance(data.tokenizer, components.Bpe) and data.tokenizer.path is None and not data.tokenizer.files
    if learns and not any(isinstance(source, TextComponent) for _, source in used):
        hint = "set it to a tokenizer.json, set data.tokenizer.files, or add a source of text"
        yield Fault("data.tokenizer.path", "is not set, and the sources have no text to train a tokenizer on", hint=hint)
    for index, source in used:
        if (
            isinstance(source, components.RandomTokens)
            and data.packing == "concatenate"
            and source.tokens <= data.sequence_length
        ):
            length = data.sequence_length
            sample = f"the {length + 1} tokens of one sample (sequence_length = {length}, plus the last label)"
            message = f"{source.tokens} tokens are fewer than {sample}"
            yield Fault(f"data.sources.{index}.tokens", message, hint="raise it, or lower data.sequence_length")


def packing_keeps_documents(job: DataJob, layout: Layout) -> Iterator[Fault]:  # noqa: ARG001 (every check is given both)
    """Requires a packing that keeps conversations and images whole, and one that cuts nothing where `too_long` is set."""
    data = job.data
    if data.packing != "concatenate":
        return
    named = {f"data.sources.{index}": source for index, source in enumerate(data.sources)}
    for key, source in (named | {f"data.evaluation.{name}": source for name, source in data.evaluation.items()}).items():
        if too_long_of(source) is not None and not getattr(source, "keeps_documents", False):
            message = "has no effect with data.packing = 'concatenate', which cuts documents at the end of every row"
            yield Fault(f"{key}.too_long", message, hint="remove it, or set data.packing = 'best_fit' or 'pad'")
    for index, source in enumerate(data.sources):
        if getattr(source, "keeps_documents", False):
            talks = isinstance(source, components.Conversations | components.Exercises)
            labeled = isinstance(source, components.Labeled)
            what = "are conversations" if talks else "have labels" if labeled else "contain images"
            message = f"cuts documents, but the documents of data.sources.{index} {what} and must stay whole"
            yield Fault("data.packing", message, hint="set data.packing = 'best_fit' or 'pad'")


def tokenizer_fits(job: DataJob, layout: Layout) -> Iterator[Fault]:  # noqa: ARG001 (every check is given both)
    """Requires that the model's vocabulary contains all token ids; warns about stores without the tokenizer's special tokens."""
    yield from _bare_stores(job.data)
    rows, tokenizer = getattr(job.model, "vocab_size", None), job.data.tokenizer
    if not isinstance(rows, int):
        return
    hint = f"raise model.vocab_size = {rows}, or use a smaller vocabulary"
    size = ids_of(tokenizer)
    if size is not None and size > rows:
        yield Fault("data.tokenizer.name", f"has {size} ids, more than the model's vocabulary of {rows}", hint=hint)
    elif isinstance(tokenizer, components.Bpe) and tokenizer.path is None and tokenizer.vocab_size > rows:
        message = f"allows the tokenizer to learn {tokenizer.vocab_size} ids, more than the model's vocabulary of {rows}"
        yield RecipeWarning("data.tokenizer.vocab_size", message, hint=hint)
    for index, source in enumerate(job.data.sources):
        known = getattr(source, "vocab_size", None)
        if isinstance(known, int) and known > rows:
            key = f"data.sources.{index}.vocab_size"
            yield Fault(key, f"{known} ids are more than the model's vocabulary of {rows}", hint=hint)


def phases_fit(job: DataJob, layout: Layout) -> list[Fault]:
    """Compares the phases with the sources, the run, the layout and the model."""
    data, train = job.data, job.train
    faults = faults_of(data, train.global_batch, train.max_steps)
    faults += batch_faults(data, train.global_batch, layout.data, train.micro_batch)
    longest = getattr(job.model, "max_length", None)
    for index, phase in enumerate(data.phases):
        if longest is not None and (phase.sequence_length or 0) > longest:
            what = f"{phase.sequence_length} tokens are more than model.max_length = {longest}"
            faults.append(Fault(f"data.phases.{index}.sequence_length", what, hint="raise model.max_length or lower this length"))
    return faults


def conversations_train(job: DataJob, layout: Layout) -> Iterator[Fault]:  # noqa: ARG001 (every check is given both)
    """Reports templates that do not show the assistant's words, answers without a stop token, rows without anything to train
    on, and stores whose mask leaves out every stop token."""
    data, pairs = job.data, bool(getattr(getattr(job, "objective", None), "pairs", False))
    named = {f"data.sources.{index}": source for index, source in enumerate(data.sources) if weight_of(source) > 0}
    named |= {f"data.evaluation.{name}": source for name, source in data.evaluation.items()}
    if pairs and data.documents != "mask":
        what = f"{data.documents!r} lets the answers of a preference pair see each other"
        yield Fault("data.documents", what, hint="set it to 'mask'")
    for key, source in named.items():
        if isinstance(source, components.Exercises) and source.pairs != pairs:
            yield _pairs(f"{key}.pairs", pairs)
    talks = {key: source for key, source in named.items() if isinstance(source, components.Conversations)}
    for key, source in named.items():
        if isinstance(source, components.TokenStore):
            yield from _of_store(key, source, data.packing, pairs)
    if not talks:
        return
    tokenizer, fault = _tokenizer_of(data.tokenizer, data.sequence_length)
    yield from [fault] if fault else []
    for key, source in talks.items():
        if (source.format == "preference") != pairs:
            yield _pairs(f"{key}.format", pairs)
        elif source.format == "preference" and source.too_long == "truncate":
            what = "'truncate' would cut one answer of a preference pair"
            yield Fault(f"{key}.too_long", what, hint="set it to 'error' or 'skip'")
        elif tokenizer is None:
            continue
        elif "://" not in source.path and not _absent(source):
            yield from _of_records(key, source, tokenizer, data.sequence_length)


def labels_fit(job: DataJob, layout: Layout) -> Iterator[Fault]:  # noqa: ARG001 (every check is given both)
    """Requires that sources have the labels of the model, all or none, and that labeled texts in a row do not see each other."""
    data, wanted = job.data, tuple(getattr(job.model, "labels", ()))
    named = {f"data.sources.{index}": source for index, source in enumerate(data.sources) if weight_of(source) > 0}
    named |= {f"data.evaluation.{name}": source for name, source in data.evaluation.items()}
    for key, source in named.items():
        labels = _labels_of(source)
        if labels is None or labels == wanted:
            continue
        if not labels:
            what = "has no labels, but the model is a classifier, because model.labels is set"
            yield Fault(f"{key}.name", what, hint="use a source 'labeled', or remove model.labels")
        elif not wanted:
            what = f"has the labels {', '.join(labels)}, but the model has none"
            yield Fault(f"{key}.name", what, hint=f"set model.labels = {list(labels)} and objective.name = 'classification'")
        else:
            field = "labels" if isinstance(source, components.Labeled) else "name"
            what = f"has the labels {', '.join(labels)}, but model.labels has {', '.join(wanted)}"
            yield Fault(f"{key}.{field}", what, hint="set both to the same names in the same order")
    if wanted and data.documents != "mask" and data.packing != "pad":
        what = f"{data.documents!r} lets the labeled texts of a row see each other"
        yield Fault("data.documents", what, hint="set it to 'mask', or data.packing to 'pad'")


def _labels_of(source: Any) -> tuple[str, ...] | None:
    """Returns the labels of a source; None if they are known only when it is opened."""
    if not isinstance(source, components.TokenStore):
        return tuple(getattr(source, "labels", ()))
    try:
        mask = json.loads((Path(source.path) / "manifest.json").read_text(encoding="utf-8")).get("mask") or {}
        return tuple(mask.get("labels", ()))
    except (OSError, ValueError, TypeError, AttributeError):  # reported when it is opened
        return None


def _tokenizer_of(component: Any, length: int) -> tuple[Any, Fault | None]:
    """Returns the tokenizer of the recipe, or its fault; neither if opening it reports the fault anyway, or takes long."""
    path = getattr(component, "path", None)
    if component is None or (isinstance(component, components.Bpe) and path is None):
        hint = "set it to the tokenizer.json of the model"
        return None, Fault("data.tokenizer.path", "is not set, but conversations need the tokenizer of their model", hint=hint)
    if isinstance(path, str) and not _small(Path(path)):
        return None, None
    try:
        return component.build(SourceContext(Path(), None, length, lambda _: None)), None
    except DataError:  # reported when it is opened
        return None, None


def _of_store(key: str, source: components.TokenStore, packing: str, pairs: bool) -> Iterator[Fault]:
    try:
        if "mask" not in json.loads((Path(source.path) / "manifest.json").read_text(encoding="utf-8")):
            yield from [_pairs(f"{key}.path", pairs)] if pairs else []
            return
        from forge_data.sources.store import read_manifest  # imports numpy

        mask = read_manifest(Path(source.path)).mask
    except (DataError, OSError, ValueError, TypeError):  # reported when it is opened
        return
    if mask is None:
        return
    if (mask.layout == "pairs") != pairs:
        yield _pairs(f"{key}.path", pairs)
    elif packing == "concatenate":
        what = f"cuts documents, but those of {source.path!r} are conversations and must stay whole"
        yield Fault("data.packing", what, hint="set data.packing = 'best_fit' or 'pad'")
    if why := mask.fault():
        yield Fault(f"{key}.path", why)


def _pairs(key: str, wanted: bool) -> Fault:
    if wanted:
        what = "has no preference pairs, which the objective compares"
        return Fault(key, what, hint="use a source of format = 'preference', or another objective")
    return Fault(
        key,
        "has preference pairs, and training on the next token would also train the rejected answers",
        hint="set objective.name = 'dpo', or train on the chosen ones in format = 'messages' or 'prompt_completion'",
    )


def _of_records(key: str, source: components.Conversations, tokenizer: Any, length: int) -> Iterator[Fault]:
    from forge_data.chat.records import encoded
    from forge_data.sources.records import Skips

    try:
        records = source.records(tokenizer)
    except DataError as error:
        yield Fault(f"{key}.template", str(error))
        return
    skips = Skips(source.skip)
    documents = (made for part in records.parts(1 << 20) for made in encoded(part, records.wanted, tokenizer, skips))
    try:
        sample = list(islice(documents, RECORDS))
    except DataError as error:
        yield Fault(f"{key}.path", str(error))
        return
    turns, ended = (sum(getattr(document, what) for _, own in sample for document in own) for what in ("turns", "ended"))
    if turns and not ended:
        listed = ", ".join(map(str, records.wanted.options["stops"]))
        what = f"none of the first {turns} trained turns ends with a stop token (id {listed}), so a model would not learn to stop"
        pad = records.wanted.options["pad"]
        what += f"; {pad} is also the pad token" if pad in records.wanted.options["stops"] else ""
        yield Fault(f"{key}.stop", what, hint=HINT_STOP)
    if source.format == "preference":
        size, name = max(((sum(len(document.ids) for document in own), name) for name, own in sample), default=(0, ""))
        if size > length and source.too_long == "error":
            what = f"the two answers of record {name} have {size} tokens with their prompts, but a row has {length}"
            yield Fault(f"{key}.too_long", what, hint="raise data.sequence_length, or set it to 'skip'")
        return
    for name, document in ((name, document) for name, own in sample for document in own):
        if len(document.ids) <= length:
            continue
        if source.too_long == "error":
            what = f"record {name} has {len(document.ids)} tokens, but a row has {length}"
            yield Fault(f"{key}.too_long", what, hint="raise data.sequence_length, or set it to 'skip' or 'truncate'")
            return
        if source.too_long == "truncate" and not document.learned[1:length].any():
            what = f"record {name} has nothing to train on in its first {length} tokens, to which 'truncate' cuts it"
            yield Fault(f"{key}.too_long", what, hint="raise data.sequence_length, or set it to 'skip'")
            return


def _bare_stores(data: Data) -> Iterator[RecipeWarning]:
    """Warns about stores of an older Forge, whose documents lack the special tokens that the recipe's tokenizer adds."""
    component: Any = data.tokenizer
    path = getattr(component, "path", None)
    if not getattr(component, "add_special_tokens", False) or not isinstance(path, str) or not _small(Path(path)):
        return
    named = {f"data.sources.{index}": source for index, source in enumerate(data.sources)}
    named |= {f"data.evaluation.{name}": source for name, source in data.evaluation.items()}
    bare = [
        (key, source.path) for key, source in named.items() if isinstance(source, components.TokenStore) and _is_bare(source.path)
    ]
    if not bare:
        return
    try:
        tokenizer = component.build(SourceContext(Path(), None, data.sequence_length, lambda _: None))
    except ForgeError:  # reported when it is opened
        return
    around = [*tokenizer.prefix, *tokenizer.suffix]
    for key, store in bare if around else ():
        message = (
            f"the documents of {store!r} lack the special tokens that this tokenizer adds to a text (ids {around}), so they "
            "differ from prompts and from documents of text sources"
        )
        hint = "prepare the store again, or set data.tokenizer.add_special_tokens = false"
        yield RecipeWarning(f"{key}.path", message, hint=hint)


def _is_bare(path: str) -> bool:
    from forge_data.sources.store import read_manifest  # imports numpy, which the tokenizer has loaded by now

    try:
        entry = read_manifest(Path(path)).tokenizer
    except DataError:  # reported when it is opened
        return False
    return entry is not None and not entry.add_special_tokens


def _small(file: Path) -> bool:
    """Whether a file is small enough for a check to read it."""
    try:
        return file.stat().st_size <= READABLE
    except OSError:
        return False


def ids_of(tokenizer: Any) -> int | None:
    """Returns the vocabulary size of a tokenizer, or None if it is known only after training or loading it."""
    if isinstance(tokenizer, components.Bytes):
        return 257
    if isinstance(tokenizer, components.Tiktoken) and tokenizer.path is None:
        return ENCODINGS.get(tokenizer.encoding)
    if isinstance(tokenizer, components.Bpe) and tokenizer.path is not None:
        return _ids_in(Path(tokenizer.path))
    return None


def _ids_in(file: Path) -> int | None:
    """Returns the largest id of a `tokenizer.json` plus one, or None if the file cannot be read."""
    if not _small(file):
        return None
    try:
        content = json.loads(file.read_bytes())
        ids = [*content["model"]["vocab"].values(), *(token["id"] for token in content.get("added_tokens", ()))]
        return max(ids) + 1
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # reported when it is loaded
        return None


def _absent(component: Any) -> str | None:
    """Returns why the files of a component are missing, or None if they exist or cannot be checked here."""
    path = getattr(component, "path", None)
    if not isinstance(path, str) or isinstance(component, components.HuggingFace):  # the path may be a hub name
        return None
    if isinstance(component, components.TokenStore):
        if not _there(path):
            return f"directory {path!r} does not exist"
        return None if "://" in path or _there(f"{glob.escape(path)}/manifest.json") else f"{path!r} has no manifest.json"
    if isinstance(component, components.Megatron) and (_there(f"{path}.idx") or _there(f"{path}.bin")):
        return None
    if _there(path):
        return None
    return f"{path!r} matches no file" if glob.has_magic(path) else f"{path!r} does not exist"


def _there(path: str) -> bool:
    if "://" in path:
        return True  # checked when it is opened
    expanded = str(Path(path).expanduser())
    if Path(expanded).exists():
        return True
    return glob.has_magic(expanded) and next(glob.iglob(expanded, recursive=True), None) is not None  # noqa: PTH207
