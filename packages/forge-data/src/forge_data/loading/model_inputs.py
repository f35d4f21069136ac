"""Batches for models that shift labels themselves, as those of the transformers library do."""

from typing import Any

from forge_core.batch import IGNORE, Batch


def for_transformers(batch: Batch) -> dict[str, Any]:
    """The keyword arguments of a causal language model of transformers whose loss is then that of the batch.

    A `Batch` has labels that are shifted already; such a model shifts `labels` again, and would learn to predict the token
    after the next one. `labels` here are not shifted: the label of a position stands one place to the right. The label of the
    last position of a row then has no place; `shift_labels`, which transformers takes as it is where a model passes it on to its
    loss, has it. So with both the loss is the mean over all labels of the batch; without `shift_labels` (drop it for a model
    that does not take it) it is the mean over all but those of the last positions.

    Positions begin anew in every document: from them transformers makes the mask that keeps documents apart, as long as no
    attention mask is given and no cache is used, which it otherwise begins by itself.

    Returns:
        `input_ids`, `labels`, `shift_labels` (B, T) int64; where the batch has positions, `position_ids` (B, T) int64 too; and
        `use_cache`, False.
    """
    labels = batch.labels.new_full(tuple(batch.labels.shape), IGNORE)
    labels[:, 1:] = batch.labels[:, :-1]
    found = {"input_ids": batch.tokens, "labels": labels, "shift_labels": batch.labels, "use_cache": False}
    return found if batch.positions is None else found | {"position_ids": batch.positions.long()}
