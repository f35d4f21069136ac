"""Recipe checks of conversations: encodes the first records of each source as the run would, before torch is imported."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from forge_core.errors import DataError, Fault
from forge_core.layout import Layout
from forge_core.protocols.data import SourceContext
from forge_data import checks, components
from forge_data.checks import DataJob
from forge_data.order.phases import weight_of

RECORDS = 64
"""Number of records of a source that a check encodes. Preparing the source checks all of them."""
HINT_STOP = (
    "set data.tokenizer.eos to the token with which the template ends an answer, so that generation stops there too, or list it "
    "in `stop`"
)


def conversations_train(job: DataJob, layout: Layout) -> Iterator[Fault]:  # noqa: ARG001 (every check is given both)
    """Reports templates that do not show the assistant's words, answers without a stop token, rows without anything to train
    on, and stores whose mask leaves out every stop token."""
    data = job.data
    named = {f"data.sources.{index}": source for index, source in enumerate(data.sources) if weight_of(source) > 0}
    named |= {f"data.evaluation.{name}": source for name, source in data.evaluation.items()}
    talks = {key: source for key, source in named.items() if isinstance(source, components.Conversations)}
    for key, source in named.items():
        if isinstance(source, components.TokenStore):
            yield from _of_store(key, source, data.packing)
    if not talks:
        return
    tokenizer, fault = _tokenizer(data.tokenizer, data.sequence_length)
    yield from [fault] if fault else []
    for key, source in talks.items() if tokenizer is not None else ():
        if "://" not in source.path and not checks.absent(source):
            yield from _of_records(key, source, tokenizer, data.sequence_length)


def _tokenizer(component: Any, length: int) -> tuple[Any, Fault | None]:
    """Returns the tokenizer of the recipe, or its fault; neither if opening it reports the fault anyway, or takes long."""
    path = getattr(component, "path", None)
    if component is None or (isinstance(component, components.Bpe) and path is None):
        hint = "set it to the tokenizer.json of the model"
        return None, Fault("data.tokenizer.path", "is not set, but conversations need the tokenizer of their model", hint=hint)
    if isinstance(path, str) and not checks.small(Path(path)):
        return None, None
    try:
        return component.build(SourceContext(Path(), None, length, lambda _: None)), None
    except DataError:  # reported when it is opened
        return None, None


def _of_store(key: str, source: components.TokenStore, packing: str) -> Iterator[Fault]:
    from forge_data.sources.store import read_manifest  # imports numpy

    try:
        mask = read_manifest(Path(source.path)).mask
    except DataError:  # reported when it is opened
        return
    if mask is None:
        return
    if mask.layout == "pairs":
        yield _pairs(f"{key}.path")
    elif packing == "concatenate":
        what = f"cuts documents, but those of {source.path!r} are conversations and must stay whole"
        yield Fault("data.packing", what, hint="set data.packing = 'best_fit' or 'pad'")
    if why := mask.fault():
        yield Fault(f"{key}.path", why)


def _pairs(key: str) -> Fault:
    return Fault(
        key,
        "has preference pairs, and training on the next token would also train the rejected answers",
        hint="train on the chosen ones in format = 'messages' or 'prompt_completion'",
    )


def _of_records(key: str, source: components.Conversations, tokenizer: Any, length: int) -> Iterator[Fault]:
    from forge_data.chat.records import encoded
    from forge_data.sources.records import Skips

    if source.format == "preference":
        yield _pairs(f"{key}.format")
        return
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
