"""The recipe's `[data]` table."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Gt

from forge_core.component import DATA, FREE, IDENTITY, Component, Slot


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Settings that change at a step; settings that the phase does not set keep their previous values."""

    key_class: ClassVar = DATA

    start: Annotated[int, Gt(0)]
    """First optimizer step of the phase, counted from 0; phases are listed in ascending order of `start`."""
    weights: dict[str, Annotated[float, Ge(0)]] = field(default_factory=dict)
    """New weights by source label; other sources keep their weights."""
    ramp: Annotated[int, Ge(0)] = 0
    """Steps over which weights and `lr_scale` move linearly to their new values; 0 = at once."""
    lr_scale: Annotated[float, Ge(0), FREE] | None = None
    """Factor on the learning rate, on top of the schedule; 1 before the first phase that sets it."""
    sequence_length: Annotated[int, Gt(0)] | None = None
    """Tokens per row; every length divides the longest one of the run."""
    global_batch: Annotated[int, Gt(0)] | None = None
    """Rows per optimizer step over all ranks."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """Sources of the training data, their mixture and order, and how documents become rows."""

    key_class: ClassVar = DATA

    sequence_length: Annotated[int, Gt(0)] = 1024
    """Tokens per sample."""
    packing: Literal["concatenate", "best_fit", "pad"] = "concatenate"
    """How documents become rows: `concatenate` cuts the stream of documents every `sequence_length` tokens; `best_fit`
    puts whole documents together so that they fill a row (only documents longer than a row are cut, unless the `too_long`
    of their source says otherwise); `pad` gives each document its own row."""
    items_per_row: Annotated[int, Gt(0)] | None = None
    """Maximum number of images, or other items of documents, in a row of `best_fit`; no limit by default."""
    documents: Annotated[Literal["mask", "ignore"], IDENTITY] = "mask"
    """`mask`: attention and positions stop at document borders; `ignore`: each row is read as one document. Labels
    never cross a border, in either case."""
    sources: list[Annotated[Component, Slot("forge.sources")]] = field(default_factory=list)
    """Where documents come from, mixed by their weights."""
    temperature: Annotated[float, Gt(0)] = 1.0
    """T: sources are drawn in the ratio of weight ** (1 / T); above 1 evens them out, and weight 0 stays 0."""
    phases: list[Phase] = field(default_factory=list)
    """Changes during the run: source weights, learning rate, sequence length, batch size."""
    tokenizer: Annotated[Component | None, Slot("forge.tokenizers"), IDENTITY] = None
    """Converts text to token ids; required by text sources, compared with the tokenizer of token sources."""
    evaluation: dict[str, Annotated[Component, Slot("forge.sources"), FREE]] = field(default_factory=dict)
    """Held-out sets by name, read in order, each row once."""
    shuffle: Literal["permute", "block", "none"] = "permute"
    """`permute`: every epoch of a source in a new random order; `block`: blocks of neighboring rows in random order
    and rows shuffled within a window of blocks, for storage with slow random access; `none`: in stored order."""
    shuffle_block: Annotated[int, Gt(0)] = 256
    """Neighboring rows that `shuffle = "block"` keeps together."""
    shuffle_window: Annotated[int, Gt(0)] = 16
    """Number of blocks whose rows `shuffle = "block"` shuffles together."""
    shuffle_buffer: Annotated[int, Gt(0)] = 1000
    """Documents of a streamed source that are shuffled together; a resume reads this number of documents again."""
    readers: Annotated[int, Gt(0)] | None = None
    """Shards of a streamed source that are read at the same time. One document is taken from each in turn, so that
    neighboring documents come from different shards. By default 16. Unused with `shuffle = "none"`."""
    seed: Annotated[int, Ge(0)] | None = None
    """Seed of the sample order; by default the seed of the job."""
    changed: Annotated[tuple[str, ...], FREE] = ()
    """Data settings that may differ from those in the checkpoint of a resume. Use the names that the refused resume
    printed, such as `sources.web.fingerprint`. The run then continues at the same sample number, even if that repeats
    or skips samples."""
    epochs: Annotated[int, Gt(0), FREE] | None = None
    """Maximum number of epochs of any source; the stream ends before a source exceeds it. By default it never ends."""
    verify: Annotated[bool, FREE] = True
    """Verifies the checksums of token stores in the background during the first epoch."""
    workers: Annotated[int, Gt(0), FREE] | None = None
    """Threads that tokenize text; by default one per core available to this process. They do not change the result."""
    loader_workers: Annotated[int, Ge(0), FREE] = 0
    """Processes per rank that prepare batches in advance; 0 = the training process prepares them. Samples do not depend on
    it. With a streamed source, at most one process is started."""
    prefetch: Annotated[int, Gt(0), FREE] = 2
    """Steps that loader workers prepare in advance; at least `loader_workers`."""
