"""Batches of text with images of random numbers, for checks: each is a function of the tokens of its row."""

from dataclasses import replace

import torch

from forge_core.batch import IGNORE, PADDING, Batch
from forge_vlm.context import FusionContext


def with_images(batch: Batch, context: FusionContext, shape: tuple[int, ...]) -> Batch:
    """The batch with 0, 1 or 2 images in each row, in the places of other tokens, which lose their labels; without an image it
    has no extras.

    Args:
        batch: tokens and labels on the host; tokens that are the placeholder become 1.
        context: of the model, which has an encoder.
        shape: of one image.
    """
    image_token = context.image_token
    assert image_token is not None
    tokens, labels = batch.tokens.clone(), batch.labels.clone()
    tokens[tokens == image_token] = 1
    images: list[torch.Tensor] = []
    rows: list[list[int]] = []
    for row, ids in enumerate(batch.tokens.tolist()):
        seed = sum(place * token for place, token in enumerate(ids))
        documents = [0] * len(ids) if batch.documents is None else batch.documents[row].tolist()
        found: list[int] = []
        place = seed % 3
        while len(found) < seed % 3:
            draw = torch.Generator().manual_seed(seed + len(found) + 1)
            image, per_image = _image(context, shape, draw, seed + len(found))
            if place + per_image >= len(ids):
                break
            run = documents[place : place + per_image]
            if len({*run}) > 1 or run[0] == PADDING:  # an image lies in one document
                place += 1
                continue
            tokens[row, place : place + per_image] = image_token
            found.append(len(images))
            images.append(image)
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


def _image(context: FusionContext, shape: tuple[int, ...], draw: torch.Generator, seed: int) -> tuple[torch.Tensor, int]:
    """An image and its placeholders; where images keep their proportions, of a few patches in one or two rows."""
    image = torch.randn(shape, generator=draw)
    if not context.native:
        return image, context.per_image
    most = shape[0] - 1
    rows = 1 + seed % 2 if most > 1 else 1
    columns = 1 + seed % min(3, most // rows)
    image[rows * columns :] = 0
    image[-1, :2] = torch.tensor([rows, columns])
    return image, rows * columns if context.varies else context.per_image


def fixed_rows(
    vocab_size: int, max_length: int, image_token: int, per_image: int, shape: tuple[int, ...], in_stream: bool
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Three rows that are always the same: one that begins with an image, one with text before and between images, one of text.

    Where images stay out of the stream, text never comes before the first image of a row: libraries differ about such text.

    Args:
        vocab_size: number of ids.
        max_length: of a row.
        image_token: id of the placeholder.
        per_image: placeholders of an image.
        shape: of one image.
        in_stream: whether vectors of images take the places of their placeholders.

    Returns:
        tokens (3, T), and `images` and `image_rows` as a model takes them.
    """
    length = min(max_length, 2 * per_image + 24)
    draw = torch.Generator().manual_seed(20)
    tokens = torch.randint(0, vocab_size - 1, (3, length), generator=draw)
    tokens += tokens >= image_token
    begins = ((0, per_image + 5), (3, per_image + 5) if in_stream else (0, per_image), ())
    numbers, count = torch.full((3, 2), -1), 0
    for row, places in enumerate(begins):
        for which, place in enumerate(places):
            if place + per_image < length:
                tokens[row, place : place + per_image] = image_token
                numbers[row, which] = count
                count += 1
    images = torch.randn((max(1, count), *shape), generator=draw)
    return tokens, {"images": images, "image_rows": numbers}
