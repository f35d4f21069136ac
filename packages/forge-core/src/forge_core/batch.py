"""The batch that a loader passes to a step. Importing this module does not import torch."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

IGNORE = -100
"""Label of a position without loss, as in torch.nn.functional.cross_entropy."""

PADDING = -1
"""Document number of a position without a token. Unlike positions with label `IGNORE`, such as a prompt, the model ignores it."""


def _none() -> "Mapping[str, Tensor]":
    return MappingProxyType({})


@dataclass(frozen=True)
class Sources:
    """The data sources of the rows of a batch.

    Attributes:
        names: names of all sources of the run, the same on every rank and in every batch.
        rows: (B,) int64 index in `names` of the source of each row; a row never mixes sources.
    """

    names: tuple[str, ...]
    rows: "Tensor"


class MTPTargets(NamedTuple):
    """Tokens and labels of multi-token prediction (MTP) for depths 1 to n.

    This is a named tuple because torch's module hooks look for tensors inside tuples, not inside arbitrary objects.

    Attributes:
        tokens: (B, T, n) int64; [:, t, k - 1] is the token at t + k, or `IGNORE` after the end of the row or document.
        labels: (B, T, n) int64; [:, t, k - 1] is the label at t + k, which is the token at t + k + 1; `IGNORE` = no loss.
    """

    tokens: "Tensor"
    labels: "Tensor"


@dataclass(frozen=True)
class Batch:
    """Rows of one micro-batch on one rank.

    Attributes:
        tokens: (B, T) int64.
        labels: (B, T) int64, already shifted: the logits at t are scored against labels[:, t]; `IGNORE` = no loss. Models of
            transformers shift `labels` themselves: call them with `forge_data.for_transformers(batch)`.
        positions: (B, T) int32 position of each token in its document, or None if each row is one document.
        documents: (B, T) int32 number of the document in its row, `PADDING` for padding; or None if each row is one document.
        extras: further inputs that the model declares.
        targets: further inputs of the objective, which makes them (`forge_core.protocols.model.BatchObjective`); the first
            dimension of each is B.
        samples: global sample number of each row, for provenance.
        sources: data source of each row if a run mixes several; a step then also reports the loss by source. All ranks have
            them, or no rank.
        mtp_targets: for a model with multi-token prediction; a step adds them (`with_mtp_targets`).
        token_mask: (B, T) bool, False for padding; None if `documents` mark padding, or there is none: see `real`.
        document_starts: (n,) int32, ascending: positions in the flattened whole rows at which documents begin, including the
            first position of each row, followed by one or more entries B * T. Variable-length kernels use it as sequence
            borders (the last sequences are empty), without a synchronization between device and host. None if the loader did
            not compute it.
    """

    tokens: "Tensor"
    labels: "Tensor"
    positions: "Tensor | None" = None
    documents: "Tensor | None" = None
    extras: "Mapping[str, Tensor]" = field(default_factory=_none)
    targets: "Mapping[str, Tensor]" = field(default_factory=_none, kw_only=True)
    samples: tuple[int, ...] = ()
    sources: Sources | None = None
    mtp_targets: MTPTargets | None = None
    document_starts: "Tensor | None" = None
    token_mask: "Tensor | None" = None

    @property
    def real(self) -> "Tensor | None":
        """(B, T) bool: True for tokens, with or without a label, and False for padding; None if there is no padding."""
        if self.token_mask is not None:
            return self.token_mask
        return None if self.documents is None else self.documents != PADDING

    def __getstate__(self) -> "Mapping[str, object]":
        """Converts read-only mappings to dicts, so that DataLoader workers can pickle the batch."""
        return vars(self) | {"extras": dict(self.extras), "targets": dict(self.targets)}

    def inputs(self, needs: Iterable[str]) -> "dict[str, Any]":
        """Returns the arguments of a forward besides tokens, labels and objective; `needs` is `Specs.needs` of the model."""
        arguments: dict[str, Any] = {"positions": self.positions, "documents": self.documents, **self.extras}
        if self.document_starts is not None and "document_starts" in needs:
            arguments["document_starts"] = self.document_starts
        if self.token_mask is not None and "token_mask" in needs:
            arguments["token_mask"] = self.token_mask
        return arguments

    def with_document_starts(self) -> "Batch":
        """Returns the same batch with `document_starts`, computed from `documents`, which must be on the CPU and in whole rows.

        The length of `document_starts` is rounded up to a power of two of at least 64, so that kernels see few shapes.
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
        """Returns the same batch with `mtp_targets` of depth n. Rows must be whole, so call it before they are split.

        Nothing is read beyond the row. A position has a label at depth k only if the position and the next one have a label at
        depth k - 1. So every token up to the label is itself predicted, and no label crosses a document border, even if the
        batch has no `documents`.
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
        """Returns the same batch on `device`; copies from pinned memory to a device are asynchronous."""
        asynchronous = not str(device).startswith("cpu")  # a copy to the host could be read before it arrives

        def move(tensor: "Tensor") -> "Tensor":
            return tensor.to(device, non_blocking=asynchronous)

        return replace(
            self,
            tokens=move(self.tokens),
            labels=move(self.labels),
            positions=None if self.positions is None else move(self.positions),
            documents=None if self.documents is None else move(self.documents),
            extras={name: move(tensor) for name, tensor in self.extras.items()},
            targets={name: move(tensor) for name, tensor in self.targets.items()},
            sources=None if self.sources is None else replace(self.sources, rows=move(self.sources.rows)),
            mtp_targets=None if self.mtp_targets is None else MTPTargets(*map(move, self.mtp_targets)),
            document_starts=None if self.document_starts is None else move(self.document_starts),
            token_mask=None if self.token_mask is None else move(self.token_mask),
        )


def _moved(rows: "Tensor", places: int = 1) -> "Tensor":
    """Shifts rows to the left by `places`, filled with `IGNORE`."""
    moved = rows.new_full(tuple(rows.shape), IGNORE)
    moved[:, :-places] = rows[:, places:]
    return moved


def _stacked(rows: "list[Tensor]") -> "Tensor":
    stacked = rows[0].new_empty((*rows[0].shape, len(rows)))
    for index, row in enumerate(rows):
        stacked[..., index] = row
    return stacked
