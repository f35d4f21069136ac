"""Batches of text with images of random numbers, for checks: each is a function of the tokens of its row."""

from dataclasses import replace

import torch

from forge_core.batch import IGNORE, PADDING, Batch


def with_images(batch: Batch, image_token: int, per_image: int, shape: tuple[int, ...]) -> Batch:
    """The batch with 0, 1 or 2 images in each row, in the places of other tokens, which lose their labels; without an image it
    has no extras.

    Args:
        batch: tokens and labels on the host.
        image_token: id of the placeholder; other tokens that have it become 1.
        per_image: placeholders of an image.
        shape: of one image.
    """
    tokens, labels = batch.tokens.clone(), batch.labels.clone()
    tokens[tokens == image_token] = 1
    images: list[torch.Tensor] = []
    rows: list[list[int]] = []
    for row, ids in enumerate(batch.tokens.tolist()):
        seed = sum(place * token for place, token in enumerate(ids))
        documents = [0] * len(ids) if batch.documents is None else batch.documents[row].tolist()
        found: list[int] = []
        place = seed % 3
        while len(found) < seed % 3 and place + per_image < len(ids):
            run = documents[place : place + per_image]
            if len({*run}) > 1 or run[0] == PADDING:  # an image lies in one document
                place += 1
                continue
            tokens[row, place : place + per_image] = image_token
            found.append(len(images))
            draw = torch.Generator().manual_seed(seed + len(found))
            images.append(torch.randn(shape, generator=draw))
            place += per_image + 1 + seed % 2
        rows.append(found)
    before = torch.zeros_like(tokens, dtype=torch.bool)
    before[:, :-1] = tokens[:, 1:] == image_token
    labels[(tokens == image_token) | before] = IGNORE
    if not images:  # as a loader gives it
        return replace(batch, tokens=tokens, labels=labels)
    numbers = torch.full((len(rows), max(map(len, rows))), -1)
    for row, found in enumerate(rows):
        numbers[row, : len(found)] = torch.tensor(found, dtype=torch.int64)
    return replace(batch, tokens=tokens, labels=labels, extras={"images": torch.stack(images), "image_rows": numbers})
