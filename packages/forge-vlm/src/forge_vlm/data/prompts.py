"""Prompts with images; their ids and pixels equal those of a training record with the same content."""

from collections.abc import Callable, Mapping, Sequence
from mimetypes import guess_type
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from forge_core.errors import DataError
from forge_core.protocols.data import Tokenizer
from forge_core.protocols.weights import Weights
from forge_data.chat.conversation import Chat, Turn
from forge_vlm.data.documents import MARKER, BrokenRecord, Picture, Words, chat_prompt_of, prompt_of
from forge_vlm.data.inputs import ImageInputs, SeesImages, inputs_of
from forge_vlm.data.prepare import encode
from forge_vlm.data.store import EXTRAS, TIMES
from forge_vlm.images.pixels import decode
from forge_vlm.images.tiling import Tiling

if TYPE_CHECKING:
    from torch import Tensor


class Prompt(NamedTuple):
    """The input from which a model generates.

    Attributes:
        ids: token ids of the text, with placeholders for images.
        text_ids: token ids of the text alone, which a tokenizer can decode.
        inputs: further inputs of the model: `images` (tiles, ...) float32 and `image_rows` (1, tiles) int64; empty without
            images.
    """

    ids: list[int]
    text_ids: list[int]
    inputs: "Mapping[str, Tensor]"


class Prompts:
    """Builds prompts that contain the same images.

    `<image>` in the text marks the place of an image; see `forge_vlm.data.documents.chat_prompt_of` for text without markers.
    """

    def __init__(
        self, tokenizer: Tokenizer, chat: Chat | None, images: Sequence[str] = (), inputs: ImageInputs | None = None
    ) -> None:
        """
        Args:
            tokenizer: the tokenizer of the model.
            chat: the chat template, for prompts that are turns of a conversation.
            images: paths of image files.
            inputs: how an image becomes placeholders and pixels; see `image_inputs`.

        Raises:
            DataError: a file cannot be read, or is not an image.
        """
        self._tokenizer, self._chat, self._inputs = tokenizer, chat, inputs
        self._files: dict[str, bytes] = {}
        self._images = tuple(images)
        if inputs is not None:
            for name in images:
                decode(self._content(name), inputs.channels, name)

    def text(self, text: str) -> Prompt:
        """Returns the prompt of a text that the model continues.

        Raises:
            DataError: the numbers of markers and images differ, or an image is not supported by the model.
        """
        return self._prompt(lambda: prompt_of(text, self._images), bare=True)

    def conversation(self, turns: Sequence[Turn]) -> Prompt:
        """Returns the prompt of turns and the opening of the assistant's turn.

        The images belong to the first turn; a content of pieces names its own images.

        Raises:
            DataError: see `text`; or the chat template refuses the turns.
        """
        chat = self._chat
        assert chat is not None, "turns need a chat template"
        return self._prompt(lambda: chat_prompt_of(turns, self._images, chat), bare=False)

    def _prompt(self, made: Callable[[], list[Words | Picture]], bare: bool) -> Prompt:
        inputs = self._inputs
        try:
            parts = made()
            if inputs is None:
                ids, _ = self._tokenizer.encode_pieces([(part.text, part.trusted) for part in parts if isinstance(part, Words)])
                found = [*(self._tokenizer.prefix if bare else ()), *ids.tolist()]
                return Prompt(found, found, {})
            document = encode(parts, self._tokenizer, inputs, self._content, bare, closed=False)
        except BrokenRecord as cause:
            action = f"; write {MARKER} once per --image, or remove all {MARKER}" if MARKER in str(cause) else ""
            raise DataError(f"the prompt {cause}{action}") from cause
        ids = document.ids.tolist()
        text_ids = [index for index in ids if index != inputs.placeholder]
        return Prompt(ids, text_ids, pixels_of(document.references, inputs, self._content))

    def _content(self, name: str) -> bytes:
        """Returns the content of an image file, which is read once."""
        if name not in self._files:
            self._files[name] = _content(name)
        return self._files[name]


def pixels_of(
    references: Sequence[str], inputs: ImageInputs, fetch: Callable[[str], bytes], times: Sequence[float] | None = None
) -> "Mapping[str, Tensor]":
    """Returns the images of one document as inputs of a model, see `Prompt.inputs`.

    Args:
        references: images of the document.
        inputs: how the model takes images.
        fetch: reads the file of a reference.
        times: seconds of each image, negative for an image that is no frame; None if no image is one.
    """
    from forge_data.loading.items import stacked

    pixels = [inputs.pixels(decode(fetch(name), inputs.channels, name)) for name in references]
    if not inputs.timed or times is None:
        return stacked(EXTRAS, [[(each, None) for each in pixels]])
    values = [np.full(len(each), time, dtype=np.float32) for each, time in zip(pixels, times, strict=True)]
    return stacked((*EXTRAS, TIMES), [list(zip(pixels, values, strict=True))])


def image_inputs(weights: Weights, option: str = "--image") -> ImageInputs:
    """Returns the image inputs of the model of stored weights; the run's sources determine the tiling.

    Args:
        weights: the weights.
        option: what needs images, for messages.

    Raises:
        DataError: the model has no image inputs, or its sources use different tilings.
    """
    model, origin = weights.model, weights.facts.origin
    if not isinstance(model, SeesImages):
        raise DataError(f"{option}: the model of {origin} supports text only; remove {option}, or choose a model with images")
    if model.placeholder is None:
        raise DataError(
            f"{option}: {origin} was trained on image tokens (images = 'tokens') and cannot read image files; remove {option}"
        )
    tilings = _tilings(weights)
    if len(tilings) > 1:
        names = ", ".join(sorted(f"{tiling.name!r}" for tiling in tilings))
        raise DataError(
            f"{option}: the sources of {origin} use different tilings ({names}), and Forge cannot tell which one applies to this "
            "image; use the hook `answers`, which uses the tiling of each source"
        )
    tiling = tilings[0] if tilings else Tiling()
    return inputs_of(model, option, tiling, placeholder=None, per_image=None, size=None)


def _tilings(weights: Weights) -> list[Tiling]:
    """Returns the distinct tilings of the sources of the run that wrote the weights."""
    data = weights.facts.recipe.get("data")
    sources = data.get("sources") or () if isinstance(data, Mapping) else ()
    found: list[Tiling] = []
    for source in sources:
        table = source.get("tiling") if isinstance(source, Mapping) else None
        if isinstance(table, Mapping):
            grids = table.get("grids")
            given: dict[str, Any] = {**table} | ({"grids": tuple(map(tuple, grids))} if grids else {})
            found += [tiling] if (tiling := Tiling(**given)) not in found else []
    return found


def _content(name: str) -> bytes:
    """Returns the content of an image file.

    Raises:
        DataError: the file cannot be read, or is a video.
    """
    if "://" in name:
        raise DataError(f"--image {name} is a URL; download the image and give the file")
    if (guess_type(name)[0] or "").startswith("video/"):
        raise DataError(f"--image {name} is a video; save frames as images and give each frame with --image")
    try:
        return Path(name).read_bytes()
    except (OSError, ValueError) as cause:
        raise DataError(f"--image {name} cannot be read: {getattr(cause, 'strerror', None) or cause}") from cause
