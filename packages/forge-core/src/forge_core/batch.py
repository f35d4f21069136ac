"""What a loader hands to a step. Plain data: importing it needs no torch."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

IGNORE = -100
"""Label of a position without loss, as in torch.nn.functional.cross_entropy."""

PADDING = -1
"""Document of a position that holds no token. Not the same as `IGNORE`: a prompt without loss is read all the same."""


def _none() -> "Mapping[str, Tensor]":
    return MappingProxyType({})


@dataclass(frozen=True)
class Sources:
    """Where the rows of a batch come from.

    Attributes:
        names: of all sources of the run, the same on every rank and in every batch.
        rows: (B,) int64 number of each row's source in `names`; no row holds documents of two.
    """

    names: tuple[str, ...]
    rows: "Tensor"


class MTPTargets(NamedTuple):
    """Tokens and labels of multi-token prediction (MTP): those up to n places beyond the next token.

    A named tuple because torch's module hooks look for tensors inside tuples, not inside arbitrary objects.

    Attributes:
        tokens: (B, T, n) int64; [..., k - 1] is the token k places on, `IGNORE` where the row or the document has ended.
        labels: (B, T, n) int64; [..., k - 1] is the label k places on, so the token k + 1 places on; `IGNORE` = no loss.
    """

    tokens: "Tensor"
    labels: "Tensor"


@dataclass(frozen=True)
class Batch:
    """Rows of one micro-batch on one rank.

    Attributes:
        tokens: (B, T) int64.
        labels: (B, T) int64, already shifted: the logits at t are scored against labels[:, t]; `IGNORE` = no loss. Models of
            transformers shift `labels` themselves: give them `forge_data.for_transformers(batch)`.
        positions: (B, T) int32 position of each token inside its document, or None when each row is one document.
        documents: (B, T) int32 number of the document inside its row, `PADDING` where there is none; or None when each
            row is one document.
        extras: further inputs that a model declares it needs.
        samples: global sample number of each row, for provenance.
        sources: of each row, where a run mixes several; a step then counts its loss by source. On all ranks or on none.
        mtp_targets: for a model with multi-token prediction; a step adds them (`with_mtp_targets`).
        token_mask: (B, T) bool, False where a place is padding; None where `documents` tell it, or no place is: see `real`.
        document_starts: (n,) int32, ascending: where documents begin in the flattened whole rows, each row's first place among
            them, then B * T until the end, at least once. So a kernel of variable length knows its sequences, some of them
            empty, and no host has to ask a device how many there are. None where the loader did not count.
    """

    tokens: "Tensor"
    labels: "Tensor"
    positions: "Tensor | None" = None
    documents: "Tensor | None" = None
    extras: "Mapping[str, Tensor]" = field(default_factory=_none)
    samples: tuple[int, ...] = ()
    sources: Sources | None = None
    mtp_targets: MTPTargets | None = None
    document_starts: "Tensor | None" = None
    token_mask: "Tensor | None" = None

    @property
    def real(self) -> "Tensor | None":
        """(B, T) bool: whether a place holds a token, with or without a label, and is not padding. None: all do."""
        if self.token_mask is not None:
            return self.token_mask
        return None if self.documents is None else self.documents != PADDING

    def __getstate__(self) -> "Mapping[str, object]":
        """For pickle and copies, so that a DataLoader's worker can send it: a read-only view of a mapping cannot be pickled."""
        return vars(self) | {"extras": dict(self.extras)}

    def inputs(self, needs: Iterable[str]) -> "dict[str, Any]":
        """What a forward is given besides tokens, labels and an objective. `needs` are those of the model's `Specs`."""
        given: dict[str, Any] = {"positions": self.positions, "documents": self.documents, **self.extras}
        if self.document_starts is not None and "document_starts" in needs:
            given["document_starts"] = self.document_starts
        if self.token_mask is not None and "token_mask" in needs:
            given["token_mask"] = self.token_mask
        return given

    def with_document_starts(self) -> "Batch":
        """The same batch with `document_starts`, counted from `documents`, which lie on the host, in whole rows.

        Their number is rounded up to a power of two of at least 64, so that kernels meet few lengths.
        """
        documents = self.documents
        if documents is None:
            return replace(self, document_starts=None)
        begins = documents.isfinite()  # all true, without importing torch
        begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
        places = begins.flatten().nonzero().squeeze(1)
        starts = documents.new_full((max(64, 1 << len(places).bit_length()),), documents.numel())
        starts[: len(places)] = places
        return replace(self, document_starts=starts)

    def with_mtp_targets(self, n: int) -> "Batch":
        """The same batch with `mtp_targets` of depth n; whole rows are needed, so before anything cuts them.

        Nothing is read beyond the row. A position has a label at depth k where it has one at depth k - 1, and so has the
        position after it: then all tokens up to that label are tokens that something predicts, and no label crosses the border
        of a document, whether or not rows tell theirs.
        """
        if n == 0:
            return self
        tokens, labels = [], []
        token, label = self.tokens, self.labels
        for k in range(1, n + 1):
            token = _moved(token)
            if self.documents is not None:
                token = token.where(_moved(self.documents, k) == self.documents, IGNORE)
            elif self.token_mask is not None:
                token = token.where(_moved(self.token_mask.int(), k) == 1, IGNORE)
            label = _moved(label).where((label != IGNORE) & (token != IGNORE), IGNORE)
            tokens.append(token)
            labels.append(label)
        return replace(self, mtp_targets=MTPTargets(_stacked(tokens), _stacked(labels)))

    def to(self, device: str) -> "Batch":
        """The same batch on `device`; copies are asynchronous where the memory is pinned."""

        def move(tensor: "Tensor") -> "Tensor":
            return tensor.to(device, non_blocking=True)

        return replace(
            self,
            tokens=move(self.tokens),
            labels=move(self.labels),
            positions=None if self.positions is None else move(self.positions),
            documents=None if self.documents is None else move(self.documents),
            extras={name: move(tensor) for name, tensor in self.extras.items()},
            sources=None if self.sources is None else replace(self.sources, rows=move(self.sources.rows)),
            mtp_targets=None if self.mtp_targets is None else MTPTargets(*map(move, self.mtp_targets)),
            document_starts=None if self.document_starts is None else move(self.document_starts),
            token_mask=None if self.token_mask is None else move(self.token_mask),
        )


def _moved(rows: "Tensor", places: int = 1) -> "Tensor":
    """Each place gets what lies `places` to its right, `IGNORE` at the end."""
    moved = rows.new_full(tuple(rows.shape), IGNORE)
    moved[:, :-places] = rows[:, places:]
    return moved


def _stacked(rows: "list[Tensor]") -> "Tensor":
    stacked = rows[0].new_empty((*rows[0].shape, len(rows)))
    for index, row in enumerate(rows):
        stacked[..., index] = row
    return stacked
