"""Batches for a cursor: what the training loop reads.

Step s consumes samples [s G, (s + 1) G) of one global sequence, G being the global batch. Rank r of n takes the r-th
n-th of them, cut into micro-batches. So ranks and micro-batch change who reads a sample, never which samples a step has.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from forge_core.batch import Batch
from forge_core.errors import DataError
from forge_core.protocols.data import Cursor
from forge_data.assembling import Assembler
from forge_data.components.section import Data
from forge_data.cursor import cursor_at, fingerprint_of, sample_at
from forge_data.entropy import token_counts, unigram_entropy
from forge_data.held_out import HeldOut
from forge_data.mixture import Mixture
from forge_data.opening import Opened, build, context_of, open_sources
from forge_data.packing import Concatenated, refuse_short
from forge_data.samples import Samples

Report = Callable[[str], None]


def _silent(message: str) -> None:
    """Says nothing."""


class MixedStream:
    """The `Stream` of a recipe's sources.

    Attributes:
        tokenizer: of the recipe, or the copy that a store carries.
        fingerprint: of everything that fixes the order of samples.
        tokens: in all sources together, each counted once.
        steps: until the stream ends, or None. Samples of the last epoch that fill no global batch are left out.
    """

    def __init__(
        self,
        data: Data,
        opened: Opened,
        *,
        seed: int,
        global_batch: int,
        micro_batch: int,
        rank: int,
        ranks: int,
        vocab: int | None,
    ) -> None:
        self.data = data
        self.tokenizer = opened.tokenizer
        self.labels = tuple(opened.sources)
        self.sources = tuple(opened.sources.values())
        self.tokens = sum(source.tokens for source in self.sources)
        self.global_batch, self.micro_batch = global_batch, micro_batch
        self.rank, self.ranks = rank, ranks
        length = data.sequence_length
        for label, source in opened.sources.items():
            refuse_short(source, label, length)
        packings = [Concatenated(source, length) for source in self.sources]
        self.mixture = Mixture(opened.weights)
        rows = [packing.rows for packing in packings]
        self.samples = Samples(self.mixture, self.labels, rows, seed, data.shuffle == "permute")
        self._assembler = Assembler(packings, length, data.documents == "mask", vocab)
        self.identity = self._identity(seed)
        self.fingerprint = fingerprint_of(self.identity)
        self.steps = None if data.epochs is None else self.samples.end(data.epochs) // global_batch
        if self.steps == 0:
            raise DataError(
                f"data.epochs = {data.epochs} gives {self.samples.end(data.epochs or 1)} samples, fewer than one global batch of "
                f"{global_batch}; lower train.global_batch or data.sequence_length, or raise data.epochs"
            )

    def start(self) -> Cursor:
        """The cursor of step 0."""
        return self._cursor(0)

    def from_cursor(self, cursor: Cursor) -> Iterator[tuple[list[Batch], Cursor]]:
        """Per optimizer step: this rank's micro-batches and the cursor after them.

        Raises:
            DataError: at once, when the cursor belongs to other data; names the difference.
        """
        return self._steps_from(sample_at(cursor, self.identity))

    def describe(self, steps: int | None = None) -> Mapping[str, Any]:
        """What is read, JSON as it stands; with `steps` also samples, tokens and epochs of each source in that time."""
        draws = self.mixture.draws(steps * self.global_batch) if steps is not None else None
        sources = []
        for index, (label, source) in enumerate(zip(self.labels, self.sources, strict=True)):
            rows = self.samples.rows[index]
            entry: dict[str, Any] = {
                "label": label,
                "source": source.name,
                "fingerprint": source.fingerprint,
                "tokens": source.tokens,
                "rows": rows,
                "share": self.mixture.shares[index] / self.mixture.period,
            }
            if draws is not None:
                read = {"samples": draws[index], "tokens_read": draws[index] * self.data.sequence_length}
                entry |= read | {"epochs": draws[index] / rows}
            sources.append(entry)
        return {
            "fingerprint": self.fingerprint,
            "sequence_length": self.data.sequence_length,
            "tokens": self.tokens,
            "steps": self.steps,
            "sources": sources,
        }

    def entropy(self) -> float:
        """Unigram entropy of the mixture in nats per token, ends of documents included."""
        shares = [share / self.mixture.period for share in self.mixture.shares]
        return unigram_entropy([token_counts(source) for source in self.sources], shares)

    def _steps_from(self, sample: int) -> Iterator[tuple[list[Batch], Cursor]]:
        own = self.global_batch // self.ranks
        end = None if self.steps is None else self.steps * self.global_batch
        while end is None or sample + self.global_batch <= end:
            first = sample + self.rank * own
            rows = self._assembler.rows(*self.samples.locate(first, own))
            batches = [
                rows.batch(start, start + self.micro_batch, tuple(range(first + start, first + start + self.micro_batch)))
                for start in range(0, own, self.micro_batch)
            ]
            del rows  # else its memory would count as held while the next step looks for free memory
            sample += self.global_batch
            yield batches, self._cursor(sample)
            del batches

    def _cursor(self, sample: int) -> Cursor:
        return cursor_at(sample, self.labels, self.mixture.draws(sample), self.identity)

    def _identity(self, seed: int) -> dict[str, Any]:
        return {
            "seed": seed,
            "global_batch": self.global_batch,
            "sequence_length": self.data.sequence_length,
            "packing": self.data.packing,
            "shuffle": self.data.shuffle,
            "sources": {
                label: {"fingerprint": source.fingerprint[:32], "share": f"{share}/{self.mixture.period}"}
                for label, source, share in zip(self.labels, self.sources, self.mixture.shares, strict=True)
            },
        }


def open_stream(
    data: Data,
    *,
    workspace: Path,
    seed: int,
    global_batch: int,
    micro_batch: int,
    rank: int = 0,
    ranks: int = 1,
    report: Report = _silent,
    vocab_size: int | None = None,
) -> MixedStream:
    """Opens the training data of a recipe; text is tokenised into `workspace` the first time.

    Args:
        data: the recipe's `[data]` table.
        workspace: where prepared data is kept; safe to share between processes.
        seed: of the job; `data.seed` goes before it.
        global_batch: rows per optimizer step over all ranks.
        micro_batch: rows of one `Batch`.
        rank, ranks: of the data axis.
        report: called with progress messages.
        vocab_size: of the model; a source with a larger id is refused.

    Raises:
        DataError: something cannot be read as what it claims to be, or the sizes do not fit each other.
    """
    if not 0 <= rank < ranks or micro_batch < 1 or global_batch < 1:
        raise DataError(f"rank {rank} of {ranks} with micro_batch {micro_batch} and global_batch {global_batch} makes no sense")
    if global_batch % (ranks * micro_batch):
        portion = f"{ranks * micro_batch} = {ranks} data ranks x micro_batch {micro_batch}"
        raise DataError(
            f"global_batch {global_batch} is no multiple of {portion}; change train.micro_batch or the number of ranks"
        )
    opened = open_sources(data, context_of(data, workspace, report), vocab_size)
    return MixedStream(
        data,
        opened,
        seed=seed if data.seed is None else data.seed,
        global_batch=global_batch,
        micro_batch=micro_batch,
        rank=rank,
        ranks=ranks,
        vocab=vocab_size,
    )


def evaluation(data: Data, *, workspace: Path, report: Report = _silent, vocab_size: int | None = None) -> dict[str, HeldOut]:
    """Opens the held-out sets of `[data.evaluation]`, by name.

    Raises:
        DataError: as `open_stream`.
    """
    if not data.evaluation:
        return {}
    context = context_of(data, workspace, report)
    masked = data.documents == "mask"
    return {
        name: HeldOut(name, build(component, name, context, vocab_size), data.sequence_length, masked, vocab_size)
        for name, component in data.evaluation.items()
    }
