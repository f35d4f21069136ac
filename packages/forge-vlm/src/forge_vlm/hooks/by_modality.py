"""Loss and accuracy of each modality, as an objective for evaluations."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forge_core.batch import IGNORE
from forge_core.logits import chunk_rows
from forge_core.protocols.model import LossTerms
from forge_vlm.modality import Modalities


@dataclass(frozen=True)
class ModalityObjective:
    """The negative log-likelihood, and as metrics its sum over the labels of each modality (`loss/NAME`), their number
    (`tokens/NAME`), and how many have the largest logit (`correct/NAME`)."""

    modalities: Modalities

    @property
    def metrics(self) -> tuple[str, ...]:
        """Their names, the same on all ranks."""
        return tuple(f"{what}/{name}" for name in self.modalities.names for what in ("loss", "tokens", "correct"))

    def __call__(self, head: Any, hidden: Tensor, labels: Tensor) -> LossTerms:
        """`hidden` (B, T, embed), `labels` (B, T).

        Raises:
            ValueError: ranks have parts of sequences.
        """
        total, nll, _ = head.loss(hidden, labels)
        counted, correct = labels != IGNORE, largest(head, hidden) == labels
        place, found = self.modalities.of(labels), {}
        for number, name in enumerate(self.modalities.names):
            here = counted & (place == number)
            found[f"loss/{name}"] = nll.where(here, 0).sum()
            found[f"tokens/{name}"] = here.sum()
            found[f"correct/{name}"] = (correct & here).sum()
        return LossTerms(total, counted.sum(), found)


@torch.no_grad()
def largest(head: Any, hidden: Tensor) -> Tensor:
    """(B, T) int64: the id with the largest logit; logits of a few positions exist at a time."""
    rows, length, width = hidden.shape
    size = max(1, chunk_rows(head.weight.shape[0], width, hidden.element_size()) // max(1, rows))
    found = []
    for start in range(0, length, size):
        logits = head(hidden[:, start : start + size])
        if logits.shape[1] != min(size, length - start):
            raise ValueError(
                "hook 'modalities' needs whole sequences on every rank; set transforms.tensor.sequence_parallel = false, or "
                "hooks.batches = 0"
            )
        found.append(logits.argmax(-1))
    return torch.cat(found, 1)
