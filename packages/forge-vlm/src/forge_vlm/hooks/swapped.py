"""Batches whose rows have the images of other rows: what a model loses by that is what their own images are worth to it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from forge_core.batch import IGNORE, Batch
from forge_vlm.images.native import taken_apart

OF_ROWS = ("image_rows", "prefix")
"""Extras with one entry for each row; the others have one for each image."""


class _Image(NamedTuple):
    batch: int
    row: int
    number: int


def swapped(batches: Sequence[Batch], varies: bool = False) -> tuple[list[Batch], int]:
    """The batches with images moved between rows, within and across batches, and how many labels the rows have whose images are
    others now.

    Images of one shape, and where it `varies` (`FusionContext`) of as many patches, move along their order by as many places as a
    row has at most, so that no row keeps one of its images. Where they are too few for that they stay.
    """
    groups: dict[tuple[int, ...], list[_Image]] = {}
    for number, batch in enumerate(batches):
        if "images" not in batch.extras:
            continue
        items = batch.extras["images"]
        sizes = taken_apart(items)[1].prod(1).tolist() if varies else [0] * len(items)
        for row, images in enumerate(batch.extras["image_rows"].tolist()):
            for image in (each for each in images if each >= 0):
                groups.setdefault((*items.shape[1:], sizes[image]), []).append(_Image(number, row, image))
    sources: list[dict[int, _Image]] = [{} for _ in batches]
    rows: set[tuple[int, int]] = set()
    for images in groups.values():
        most = max(Counter((one.batch, one.row) for one in images).values(), default=0)
        if len(images) < 2 * most:
            continue
        for place, one in enumerate(images):
            sources[one.batch][one.number] = images[(place + most) % len(images)]
            rows.add((one.batch, one.row))
    labels = sum(int((batches[number].labels[row] != IGNORE).sum()) for number, row in rows)
    return [_with(batch, found, batches) for batch, found in zip(batches, sources, strict=True)], labels


def _with(batch: Batch, sources: Mapping[int, _Image], batches: Sequence[Batch]) -> Batch:
    if not sources:
        return batch
    moved: dict[str, Tensor] = {}
    for name, own in batch.extras.items():
        if name not in OF_ROWS:
            every = [sources.get(number) for number in range(len(own))]
            moved[name] = torch.stack(
                [own[number] if one is None else batches[one.batch].extras[name][one.number] for number, one in enumerate(every)]
            )
    return replace(batch, extras={**batch.extras, **moved})
