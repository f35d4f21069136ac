"""The recipe's `[data]` table."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Gt

from forge_core.component import DATA, FREE, IDENTITY, Component, Slot


@dataclass(frozen=True, kw_only=True)
class Phase:
    """What changes from a step on; what a phase does not name stays as it was before it."""

    key_class: ClassVar = DATA

    start: Annotated[int, Gt(0)]
    """First optimizer step of the phase, counted from 0; phases stand in the order of their starts."""
    weights: dict[str, Annotated[float, Ge(0)]] = field(default_factory=dict)
    """New weights by the label of the source; a source that is not named keeps the weight that it had."""
    ramp: Annotated[int, Ge(0)] = 0
    """Steps over which weights and `lr_scale` move linearly to their new values; 0 = at once."""
    lr_scale: Annotated[float, Ge(0), FREE] | None = None
    """Factor on the learning rate, on top of the schedule; 1 before the first phase that sets it."""
    sequence_length: Annotated[int, Gt(0)] | None = None
    """Tokens of one row; every length divides the longest one of the run."""
    global_batch: Annotated[int, Gt(0)] | None = None
    """Rows per optimizer step over all ranks."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """What is read, in which order, cut how."""

    key_class: ClassVar = DATA

    sequence_length: Annotated[int, Gt(0)] = 1024
    """Tokens of one sample."""
    packing: Literal["concatenate", "best_fit", "pad"] = "concatenate"
    """How documents become rows: `concatenate` cuts the stream of documents every `sequence_length` tokens; `best_fit`
    puts whole documents together so that they fill a row (only documents longer than a row are cut, unless the `too_long`
    of their source says otherwise); `pad` gives each document its own row."""
    items_per_row: Annotated[int, Gt(0)] | None = None
    """Images, or other items of documents, that `best_fit` puts into one row at most; no limit by default."""
    documents: Annotated[Literal["mask", "ignore"], IDENTITY] = "mask"
    """`mask`: attention and positions stop at document borders; `ignore`: each row is read as one document. Labels
    never cross a border, in either case."""
    sources: list[Annotated[Component, Slot("forge.sources")]] = field(default_factory=list)
    """Where documents come from, mixed by their weights."""
    temperature: Annotated[float, Gt(0)] = 1.0
    """T: sources are drawn in the ratio of weight ** (1 / T); above 1 evens them out, and weight 0 stays 0."""
    phases: list[Phase] = field(default_factory=list)
    """What changes during the run: weights, learning rate, lengths."""
    tokenizer: Annotated[Component | None, Slot("forge.tokenizers"), IDENTITY] = None
    """Text to token ids; needed by sources of text, checked against sources of tokens."""
    evaluation: dict[str, Annotated[Component, Slot("forge.sources"), FREE]] = field(default_factory=dict)
    """Held-out sets by name, read in order, each row once."""
    shuffle: Literal["permute", "block", "none"] = "permute"
    """`permute`: every epoch of a source in another random order; `block`: blocks of neighboring rows in random order
    and rows mixed within a window of blocks, for storage that is slow at random access; `none`: as stored."""
    shuffle_block: Annotated[int, Gt(0)] = 256
    """Neighboring rows that `shuffle = "block"` keeps together."""
    shuffle_window: Annotated[int, Gt(0)] = 16
    """Blocks whose rows `shuffle = "block"` mixes."""
    shuffle_buffer: Annotated[int, Gt(0)] = 1000
    """Documents of a streamed source that are shuffled together; a resume reads as many again."""
    readers: Annotated[int, Gt(0)] | None = None
    """Shards of a streamed source that are open at a time: they give one document each in turn, so that neighboring
    documents come from several. By default 16. Unused with `shuffle = "none"`."""
    seed: Annotated[int, Ge(0)] | None = None
    """Fixes the order of samples; by default the seed of the job."""
    changed: Annotated[tuple[str, ...], FREE] = ()
    """Settings in which the data may differ from those of the checkpoint that a run goes on from, by the names that its
    refusal gives, such as `sources.web.fingerprint`. The run then reads on from the same number of a sample, even
    where that repeats or skips samples."""
    epochs: Annotated[int, Gt(0), FREE] | None = None
    """The stream ends before any source would be read more often than this; by default it never ends."""
    verify: Annotated[bool, FREE] = True
    """Compares the files of token stores with their checksums, in the background, while the first epoch is read."""
    workers: Annotated[int, Gt(0), FREE] | None = None
    """Threads that tokenize text; by default one for each core that this process may use. The result does not depend on it."""
    loader_workers: Annotated[int, Ge(0), FREE] = 0
    """Processes per rank that make batches ahead of the step; 0 = in the training process. Samples do not depend on it.
    Where there is a streamed source, one is started at most."""
    prefetch: Annotated[int, Gt(0), FREE] = 2
    """Steps that loader workers are ahead; at least as many as there are workers."""
