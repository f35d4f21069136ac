"""Loss by source: what each source of the data adds to the loss of a step.

The objective knows what each row adds, and a row comes from one source; so these are a few small sums on the device, which
travel with the step's other numbers in the one all-reduce after the backward.
"""

from collections.abc import Sequence

import torch

from forge_core.batch import IGNORE, Batch
from forge_core.errors import ForgeError
from forge_core.protocols.model import LossTerms


def sources_of(batches: Sequence[Batch]) -> tuple[str, ...]:
    """Names of the sources of the data; none where the batches do not say.

    Raises:
        ForgeError: micro-batches of one step disagree.
    """
    found = {() if batch.sources is None else batch.sources.names for batch in batches}
    if len(found) > 1:
        raise ForgeError(f"micro-batches of one step name different sources: {sorted(found)}; give all of them the same names")
    return found.pop() if found else ()


def sums_by_source(batches: Sequence[Batch], terms: Sequence[LossTerms], device: torch.device) -> torch.Tensor:
    """(2, sources) fp64: loss and valid tokens of each source in this rank's micro-batches; zeros where no row is counted.

    Raises:
        ForgeError: the objective's rows are not those of the batch.
    """
    total = torch.zeros(2, len(sources_of(batches)), dtype=torch.float64, device=device)
    if any(term.rows is None for term in terms):
        return total
    for batch, term in zip(batches, terms, strict=True):
        if batch.sources is None or term.rows is None:
            continue
        if term.rows.shape != batch.sources.rows.shape:
            raise ForgeError(
                f"the objective's `rows` have shape {tuple(term.rows.shape)}, but the batch has {len(batch.sources.rows)} rows; "
                "they are what each row adds to the sum"
            )
        counts = (batch.labels != IGNORE).flatten(1).sum(1)
        # By index, not by a product with zeros: a loss that is not finite stays with its source.
        total.index_add_(1, batch.sources.rows, torch.stack((term.rows.double(), counts.double())))
    return total


def shares(names: Sequence[str], losses: Sequence[float], counts: Sequence[float], tokens: float) -> dict[str, float]:
    """`source/NAME/loss`, the mean over its valid tokens in nats, and `source/NAME/tokens` of each source that has any.

    Nothing where the sources do not account for every token: then some rank's objective did not count rows.
    """
    if sum(counts) != tokens:
        return {}
    return {
        f"source/{name}/{what}": value
        for name, loss, count in zip(names, losses, counts, strict=True)
        if count
        for what, value in (("loss", loss / count), ("tokens", count))
    }
