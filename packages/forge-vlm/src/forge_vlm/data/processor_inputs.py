"""Images and their placeholders as the processor of a folder makes them, for a class of transformers.

A processor turns an image into pixels, and its token in the text into a longer text with placeholders. Both come from the
processor itself, one image at a time; the text around is encoded together with that text, as the processor does.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from forge_core.errors import DataError
from forge_core.protocols.data import Tokenizer
from forge_vlm.data.documents import BrokenRecord, Picture, Words
from forge_vlm.hf.image_arguments import CROPS, CUT, GRID, IN_ROWS, PATCHES, SIZED, ImageArguments
from forge_vlm.images.tiling import Tiling

KNOWN = frozenset({"pixel_values", "image_grid_thw", "image_merge_sizes", "image_position_ids", "image_sizes"})
KNOWN |= {"pixel_attention_mask", "spatial_shapes"}
"""Tensors of a processor that reach a class."""
TEXT = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "text_replacement_offsets", "num_crops"})
TEXT |= {"num_soft_tokens_per_image", "image_rows", "image_cols", "batch_num_images", "labels"}
"""What a processor returns besides."""


@dataclass(frozen=True)
class Made:
    """An image as a processor makes it.

    Attributes:
        text: replaces the token of the image.
        items: (n, *shape) float32, as a batch has them.
        counts: number of placeholders of each item.
    """

    text: str
    items: NDArray[np.float32]
    counts: list[int]


class ProcessorInputs:
    """How the images of a document are prepared by a processor; in the place of `forge_vlm.data.inputs.ImageInputs`.

    Attributes:
        placeholder: id of the token that represents a part of an image.
        shape: shape of one item.
    """

    channels = 3
    timed = False
    varies = True
    fewest = 1

    def __init__(self, arguments: ImageArguments, processor: Any) -> None:
        """
        Args:
            arguments: form of the images of the class.
            processor: processor of transformers.

        Raises:
            DataError: the processor does not say what it writes for an image.
        """
        self.arguments, self.processor = arguments, processor
        self.placeholder: int = arguments.token
        self.shape = arguments.shape
        self.token: str = getattr(processor, "image_token", None) or ""
        if not self.token:
            raise DataError(f"{type(processor).__name__} has no image_token, so Forge cannot place images; use another model")

    @cached_property
    def identity(self) -> str:
        """Text that is equal if tokens and items are equal."""
        settings = json.loads(self.processor.to_json_string())
        settings.pop("name_or_path", None)
        made = json.dumps(settings, sort_keys=True, default=str)
        return f"{type(self.processor).__name__}/{self.arguments}/{sha256(made.encode()).hexdigest()}"

    def made(self, image: Image.Image) -> Made:
        """Returns an image as the processor makes it.

        Raises:
            BrokenRecord: the image has more patches than a batch has room for, or the processor refuses it.
            DataError: the processor makes inputs that Forge does not pass on, or that do not fit the model.
        """
        try:
            found = dict(
                self.processor(images=[image], text=[self.token], return_tensors="np", return_text_replacement_offsets=True)
            )
        except ValueError as error:
            raise BrokenRecord(f"has an image that {type(self.processor).__name__} refuses: {error}") from error
        name = type(self.processor).__name__
        if unknown := sorted(found.keys() - KNOWN - TEXT):
            raise DataError(f"{name} makes {', '.join(unknown)}, which Forge does not pass to the model; use another model")
        spans = found.get("text_replacement_offsets") or [[]]
        if len(spans[0]) != 1:
            raise DataError(f"{name} does not say what it writes for an image; use a newer transformers, or another model")
        mask = found.get("pixel_attention_mask")
        if mask is not None and self.arguments.kind not in IN_ROWS and not np.asarray(mask).all():
            raise DataError(
                f"{name} pads tiles, which Forge does not pass to the model; set its max_image_size to a divisor of size"
            )
        text = spans[0][0]["replacement"]
        items = self._items(np.asarray(found["pixel_values"], dtype=np.float32), found, text.count(self.token))
        return Made(text, items, self._counts(items))

    def _items(self, pixels: NDArray[np.float32], found: Mapping[str, Any], placeholders: int) -> NDArray[np.float32]:
        if self.arguments.kind in IN_ROWS:
            return np.stack([self._item(rows, grid) for rows, grid in self._rows(pixels, found)])
        pixels = pixels.reshape(-1, *pixels.shape[-3:])
        channels, height, width = self.shape
        if self.arguments.kind != CROPS:
            self._check(pixels.shape[1:], self.shape)
            return pixels
        self._check(pixels.shape[1:], (channels, height - 1, width))
        items = np.zeros((len(pixels), *self.shape), dtype=np.float32)
        items[:, :, :-1] = pixels
        items[0, 0, -1, :CUT] = [*np.asarray(found["image_sizes"])[0], placeholders, len(pixels)]
        return items

    def _rows(self, pixels: NDArray[np.float32], found: Mapping[str, Any]) -> Iterator[tuple[NDArray[np.float32], Sequence[int]]]:
        """Yields the patches of each item, and their frames, rows and columns."""
        kind = self.arguments.kind
        if kind == PATCHES:
            if (sides := np.asarray(found.get("image_merge_sizes", ()))).size and (sides**2 != self.arguments.merged).any():
                raise DataError(
                    f"the processor in model.folder merges {int(sides[0])} patches in each direction, but the model "
                    f"{round(self.arguments.merged**0.5)}; use the processor of the model"
                )
            yield pixels, np.asarray(found["image_grid_thw"])[0]
        elif kind == SIZED:
            channels, side, _ = self.arguments.patch
            (height, width), whole = np.asarray(found["image_sizes"])[0], pixels[0]
            rows, columns = height // side, width // side
            cut = whole[:, : rows * side, : columns * side].reshape(channels, rows, side, columns, side)
            yield cut.transpose(1, 3, 0, 2, 4).reshape(rows * columns, channels, side, side), (1, rows, columns)
        elif "spatial_shapes" in found:
            for patches, (rows, columns) in zip(pixels, np.asarray(found["spatial_shapes"]).tolist(), strict=True):
                yield patches[: rows * columns], (1, rows, columns)
        else:
            for patches, places in zip(pixels, np.asarray(found["image_position_ids"]), strict=True):
                columns, rows = (places.max(0) + 1).tolist()
                yield patches[: rows * columns], (1, rows, columns)

    def _item(self, rows: NDArray[np.float32], grid: Sequence[int]) -> NDArray[np.float32]:
        """Returns an item of the patches (n, *patch) of an image with a grid of frames, rows and columns.

        Raises:
            BrokenRecord: a batch has no room for them.
        """
        most = self.shape[0] - 1
        if len(rows) > most:
            raise BrokenRecord(
                f"has an image of {len(rows)} patches, but a batch has room for {most}; raise model.patches, or lower the "
                "largest size of the processor in model.folder"
            )
        self._check(rows.shape[1:], self.arguments.patch)
        item = np.zeros(self.shape, dtype=np.float32)
        item[: len(rows)] = rows.reshape(len(rows), -1)
        item[-1, :GRID] = grid
        return item

    def _check(self, found: Sequence[int], wanted: Sequence[int]) -> None:
        if tuple(found) != tuple(wanted):
            raise DataError(
                f"the processor in model.folder makes images of shape {tuple(found)}, but the model takes {tuple(wanted)}; use "
                "the processor of the model"
            )

    def _counts(self, items: NDArray[np.float32]) -> list[int]:
        return self.arguments.counts(torch.from_numpy(items)).tolist()

    def pixels(self, image: Image.Image) -> NDArray[np.float32]:
        """Returns the items (n, *shape) of a decoded image."""
        return self.made(image).items

    def pictures(self, image: Image.Image) -> list[Image.Image]:
        """Returns the image once for each item, for viewing."""
        return [image] * len(self.made(image).items)

    def encode(
        self, parts: "Sequence[Words | Picture]", tokenizer: Tokenizer, made_of: "Callable[[Picture], Made] | None"
    ) -> tuple[np.ndarray, np.ndarray, list[list[int]]]:
        """Returns the ids of a document, which ids are learned, and the token at which each item of each image begins.

        Args:
            parts: parts of the document; a template writes the token of an image itself, or has left a `Picture` in its place.
            tokenizer: encodes the text.
            made_of: prepares an image; None: every image counts as one placeholder.

        Raises:
            BrokenRecord: the numbers of images and of tokens differ, or the tokenizer is another one than the processor's.
        """
        pieces = list(self._placed(parts))
        if self.arguments.lone and sum(isinstance(piece, Picture) for piece in pieces) > 1:
            raise BrokenRecord(
                f"has several images, which {type(self.processor).__name__} prepares in another way than a single one; give a "
                "record one image"
            )
        made = [None if made_of is None or isinstance(each, Words) else made_of(each) for each in pieces]
        texts: list[tuple[str, bool]] = []
        for piece, image in zip(pieces, made, strict=True):
            if isinstance(piece, Words):
                texts.append((piece.text, piece.trusted))
            else:
                texts.append((self.token if image is None else image.text, True))
        ids, places = tokenizer.encode_pieces(texts, ())
        kinds = np.cumsum([0, *(isinstance(piece, Words) and piece.learned for piece in pieces)])
        learned = kinds[places[:, 1] + 1] > kinds[places[:, 0]]
        starts = []
        held = np.flatnonzero(ids == self.placeholder)
        for number, (piece, image) in enumerate(zip(pieces, made, strict=True)):
            if isinstance(piece, Words):
                continue
            own = held[places[held, 0] == number]
            counts = [1] if image is None else image.counts
            if image is not None and len(own) != sum(counts):
                raise BrokenRecord(
                    f"has an image for which the processor writes {len(own)} tokens {self.placeholder}, but the model makes "
                    f"{sum(counts)} vectors; set [data.tokenizer] to the tokenizer of model.folder, and use its own processor"
                )
            firsts = np.cumsum([0, *counts[:-1]])
            last = len(own) - 1  # where crops begin that have no placeholders of their own
            starts.append(
                [int(own[min(first, last)]) for first in firsts] if len(own) else [int(np.searchsorted(places[:, 0], number))]
            )
        inside = sum(map(sum, (image.counts for image in made if image is not None)))
        if made_of is not None and len(held) != inside:
            raise BrokenRecord(f"has text that the tokenizer encodes as id {self.placeholder}, the placeholder of images")
        return ids, learned, starts

    def _placed(self, parts: "Sequence[Words | Picture]") -> "Iterator[Words | Picture]":
        """Yields text and images in their order: images whose token the template wrote take its place.

        Raises:
            BrokenRecord: the template writes the token more or less often than there are images.
        """
        waiting = [part for part in parts if isinstance(part, Picture) and part.token]
        written = [part for part in parts if isinstance(part, Words) and part.trusted] if waiting else []
        count = sum(part.text.count(self.token) for part in written)
        if waiting and count != len(waiting):
            raise BrokenRecord(
                f"has {len(waiting)} images, but the chat template writes {self.token!r} {count} times; give every turn as many "
                "images as places for them, and take the template of model.folder"
            )
        left = iter(waiting)
        for part in parts:
            if isinstance(part, Picture):
                if not part.token:
                    yield part
                continue
            if not (waiting and part.trusted):
                yield part
                continue
            for place, text in enumerate(part.text.split(self.token)):
                if place:
                    yield next(left)
                if text:
                    yield Words(text, part.learned, part.trusted)


def processor_inputs(model: Any, name: str, tiling: Tiling, given: Mapping[str, Any]) -> ProcessorInputs:
    """Returns the image inputs of a class of transformers.

    Args:
        model: the component, which names the folder.
        name: name of the source for messages.
        tiling: tiling of the source.
        given: keys of the source that describe images.

    Raises:
        DataError: the source says how images are prepared, or the folder has no processor, or one with code of its own.
    """
    if tiling.name != "square" or any(value is not None for value in given.values()):
        raise DataError(
            f"source {name!r} says how images are prepared, but the processor of model.folder does; remove tiling, placeholder, "
            "per_image and size from the source"
        )
    if model.folder is None:
        raise DataError(f"source {name!r} needs the processor of the model; set model.folder to a folder that has it")
    import transformers

    folder = Path(model.folder)
    if not any((folder / file).is_file() for file in ("processor_config.json", "preprocessor_config.json")):
        raise DataError(
            f"{folder} has no processor (processor_config.json or preprocessor_config.json), so source {name!r} cannot prepare "
            "images; copy the processor of the model there"
        )
    try:
        processor = transformers.AutoProcessor.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except ImportError as error:
        raise DataError(f"the processor in {folder} needs a library: {str(error).strip()}") from error
    except Exception as error:
        missing = "; it may need torchvision: pip install torchvision" if not _has_torchvision() else ""
        raise DataError(f"the processor in {folder} cannot be opened: {type(error).__name__}: {error}{missing}") from error
    return ProcessorInputs(model.image_arguments(), processor)


def _has_torchvision() -> bool:
    from importlib.util import find_spec

    return find_spec("torchvision") is not None
