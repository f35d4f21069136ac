"""Where the tokens of images stand in a row, from the ids of its tokens: integers on the device, so that no host waits."""

import torch
from torch import Tensor

from forge_core.errors import DataError
from forge_models.torch_private import assert_async


def feature_places(tokens: Tensor, image_token: int, image_rows: Tensor, per_image: int, counts: Tensor | None = None) -> Tensor:
    """(B, T) int64: which of the (images * per_image) feature vectors stands at each place; -1 where there is none.

    Args:
        tokens: (B, T) ids; the k-th placeholder of a row is token k % per_image of its image k // per_image.
        image_token: id of the placeholder.
        image_rows: (B, M) int64 number of each image of a row, -1 where a row has fewer.
        per_image: feature vectors of an image.
        counts: (images,) how many of them have a placeholder, the first ones of an image; None: all.
    """
    here = tokens == image_token
    order = (here.cumsum(1) - 1).clamp(min=0)
    if counts is not None:
        each = _of_rows(counts, image_rows)
        ends = each.cumsum(1)
        slot = torch.searchsorted(ends, order, right=True).clamp(max=image_rows.shape[1] - 1)
        image = image_rows.gather(1, slot)
        within = order - (ends - each).gather(1, slot)
        return (image * per_image + within).masked_fill(~here | (image < 0), -1)
    slot = (order // per_image).clamp(max=image_rows.shape[1] - 1)
    image = image_rows.gather(1, slot)
    return (image * per_image + order % per_image).masked_fill(~here | (image < 0), -1)


def _of_rows(counts: Tensor, image_rows: Tensor) -> Tensor:
    """(B, M): of (images,) numbers those of each row's images, 0 where a row has fewer."""
    if not len(counts):
        return torch.zeros_like(image_rows)
    return counts[image_rows.clamp(min=0)].masked_fill(image_rows < 0, 0)


def image_blocks(tokens: Tensor, image_token: int, per_image: int) -> Tensor:
    """(B, T) int64 number of the image inside its row that each placeholder belongs to, -1 elsewhere."""
    here = tokens == image_token
    return ((here.cumsum(1) - 1) // per_image).masked_fill(~here, -1)


def seen_images(tokens: Tensor, image_token: int, documents: Tensor | None) -> tuple[Tensor, Tensor]:
    """(first, end), each (B, T) int64: a token sees images first .. end - 1 of its row, by their order in the row.

    It sees the images of the last group of placeholders before it, from each one's place on and never before it; neighboring
    placeholders are one group. A document sees its images only.
    """
    here = tokens == image_token
    end = here.cumsum(1)
    starts = here.clone()
    starts[:, 1:] &= ~here[:, :-1]
    begins = torch.zeros_like(here)
    begins[:, 0] = True
    if documents is not None:
        begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    before = end - here.long()
    first = before.masked_fill(~(starts | begins), -1).cummax(1).values
    return first, end


class Misplaced(DataError, ValueError):
    """A batch whose placeholders are not as many as its images need, or with labels that its model would see."""


def on_host(x: Tensor) -> bool:
    """Whether a look at the values waits for nothing."""
    return x.device.type == "cpu"


def agree(tokens: Tensor, image_token: int, image_rows: Tensor, per_image: int, counts: Tensor | None = None) -> None:
    """Refuses a batch whose placeholders are not as many as its images need.

    On the host it says which row; on a device, for which the host does not wait, the kernel that looks ends the process.

    Raises:
        Misplaced: on the host.
    """
    if on_host(tokens):
        if fault := misplaced(tokens, image_token, image_rows, per_image, counts):
            raise Misplaced(fault)
        return
    equal = (tokens == image_token).sum(1) == _needed(image_rows, per_image, counts)
    assert_async(equal.all(), f"placeholders (id {image_token}) are not as many as the images of a row need")


def _needed(image_rows: Tensor, per_image: int, counts: Tensor | None) -> Tensor:
    """(B,) placeholders of each row."""
    return (image_rows >= 0).sum(1) * per_image if counts is None else _of_rows(counts, image_rows).sum(1)


def misplaced(tokens: Tensor, image_token: int, image_rows: Tensor, per_image: int, counts: Tensor | None = None) -> str:
    """How the numbers of placeholders and images disagree, naming the row; empty when they do not. It waits for the device."""
    found = (tokens == image_token).sum(1)
    images, needed = (image_rows >= 0).sum(1), _needed(image_rows, per_image, counts)
    wrong = (found != needed).nonzero().flatten().tolist()
    if not wrong:
        return ""
    row = wrong[0]
    each = f"{per_image} tokens each" if counts is None else "a token for each patch"
    return (
        f"row {row} has {int(found[row])} placeholders (id {image_token}) and {int(images[row])} images of {each}, "
        f"which need {int(needed[row])}; text may not hold that id: set model.image_token to "
        "one that it never has"
    )
