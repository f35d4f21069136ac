"""Questions with images and their answers as token ids, equal to those of a training record with the same turns."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image

from forge_core.errors import DataError
from forge_core.protocols.data import Tokenizer
from forge_data.chat.conversation import ASSISTANT, Chat, Turn
from forge_vlm.data.clips import ClipFiles, choose_frames
from forge_vlm.data.documents import BrokenRecord, Fields, Picture, Words, chat_prompt_of, parts_of
from forge_vlm.data.image_readers import ImageFiles
from forge_vlm.data.inputs import ImageInputs
from forge_vlm.data.prepare import Encoded, encode
from forge_vlm.data.prompts import Prompt, pixels_of

if TYPE_CHECKING:
    from torch import Tensor

_PROBE = "a probe of an answer"


class AnsweredQuestion(NamedTuple):
    """A question with an answer.

    Attributes:
        ids: token ids of the question, and of the answer with the end of its turn.
        answer: number of ids at the end that training would learn.
        inputs: see `Prompt.inputs`.
    """

    ids: list[int]
    answer: int
    inputs: "Mapping[str, Tensor]"


class QuestionEncoder:
    """Encodes turns, whose contents are text or lists of pieces (see `Fields.messages`), with the chat template of a model."""

    def __init__(self, tokenizer: Tokenizer, chat: Chat, inputs: ImageInputs) -> None:
        """
        Args:
            tokenizer: the tokenizer of the model.
            chat: the chat template of the model.
            inputs: how an image becomes placeholders and pixels.
        """
        self._tokenizer, self._chat, self._inputs = tokenizer, chat, inputs

    def prompt(self, turns: Sequence[Turn], fetch: Callable[[str], bytes]) -> Prompt:
        """Returns the turns and the opening of the assistant's turn; `fetch` reads the images that the pieces name.

        Raises:
            BrokenRecord: a turn cannot be encoded, or an image cannot be decoded.
            DataError: the chat template refuses the turns, or an image is missing.
        """
        document = self._encoded(chat_prompt_of(turns, (), self._chat), fetch)
        ids = document.ids.tolist()
        text_ids = [index for index in ids if index != self._inputs.placeholder]
        return Prompt(ids, text_ids, self._pixels(document, fetch))

    def answered(self, turns: Sequence[Turn], answer: str, fetch: Callable[[str], bytes]) -> AnsweredQuestion:
        """Returns the turns with an answer. What is learned of the answer in training is its text and the end of its turn.

        Raises:
            BrokenRecord, DataError: see `prompt`.
        """
        document = self._encoded(self._with_answer(turns, answer), fetch)
        learned = np.flatnonzero(document.learned)
        if not len(learned):
            raise BrokenRecord("has an answer without tokens; write at least one character")
        stop = int(learned[-1]) + 1
        earlier = np.flatnonzero(~document.learned[:stop])  # the answers of earlier turns come before the last of these
        start = int(earlier[-1]) + 1 if len(earlier) else 0
        return AnsweredQuestion(document.ids[:stop].tolist(), stop - start, self._pixels(document, fetch))

    @cached_property
    def end_text(self) -> str:
        """Text that the chat template writes after an answer, without white space at its end unless there is nothing else."""
        parts = self._with_answer([Turn("user", "?")], _PROBE)
        learned = "".join(part.text for part in parts if isinstance(part, Words) and part.learned)
        end = learned.partition(_PROBE)[2]
        return end.rstrip() or end

    @cached_property
    def end_id(self) -> int | None:
        """Id of `end_text`; None if it is several tokens."""
        ids = self._tokenizer.encode_pieces([(self.end_text, True)])[0].tolist() if self.end_text else []
        return ids[0] if len(ids) == 1 else None

    def _with_answer(self, turns: Sequence[Turn], answer: str) -> list[Words | Picture]:
        messages = [turn.message() for turn in (*turns, Turn(ASSISTANT, answer))]
        fields = Fields()
        return parts_of({fields.messages: messages}, fields, self._chat)

    def _encoded(self, parts: list[Words | Picture], fetch: Callable[[str], bytes]) -> Encoded:
        return encode(parts, self._tokenizer, self._inputs, fetch, bare=False, closed=False)

    def _pixels(self, document: Encoded, fetch: Callable[[str], bytes]) -> "Mapping[str, Tensor]":
        return pixels_of(document.references, self._inputs, fetch, document.times)


class Clips:
    """Frames of video files, and of directories with a file for each frame, as pieces of a turn."""

    def __init__(self, folder: Path, count: int, told: bool) -> None:
        """
        Args:
            folder: directory to which names are relative.
            count: maximum number of frames of a clip, equally spaced in time.
            told: writes the time before each frame.
        """
        self._files, self._count, self._told = ClipFiles(ImageFiles([], str(folder)), "video"), count, told

    def pieces(self, name: str, fps: float = 1.0) -> list[dict[str, Any]]:
        """Returns the frames of a clip as pieces: for each its time, if it is told, and its image.

        Args:
            name: name of a video file, or of a directory of frames.
            fps: frames per second of a directory.

        Raises:
            BrokenRecord: there is no such clip, or it has no frames.
            DataError: PyAV is not installed.
        """
        footage = self._files.open(name, fps)
        pieces: list[dict[str, Any]] = []
        for seconds, reference in footage.frames(choose_frames(footage.times, self._count)):
            pieces += [{"type": "text", "text": f"{seconds:.1f}s"}] if self._told else []
            pieces.append({"type": "image", "path": reference, "seconds": seconds})
        return pieces

    def fetch(self, reference: str) -> bytes:
        """Returns the file of a frame of a directory, or a decoded frame of a video."""
        return self._files.fetch(reference)


def file_of(image: Any) -> bytes | None:
    """Returns a decoded image of Pillow as a file, without loss; None for anything else.

    Raises:
        DataError: no format without loss has the mode of the image.
    """
    if not isinstance(image, Image.Image):
        return None
    content = BytesIO()
    try:
        if image.mode in ("L", "RGB"):
            image.save(content, "PPM")
        else:
            (image.convert("RGB") if image.mode == "CMYK" else image).save(content, "PNG")
    except OSError as cause:
        raise DataError(f"an image of mode {image.mode} cannot be written: {cause}; convert it to RGB") from cause
    return content.getvalue()


def clip_settings(recipe: Mapping[str, Any]) -> tuple[int, bool]:
    """Returns the number of frames of a clip, and whether times are written, of the first source of clips in a run's recipe;
    else 8 and True, the defaults of such sources."""
    data = recipe.get("data")
    for source in (data.get("sources") or ()) if isinstance(data, Mapping) else ():
        if isinstance(source, Mapping) and "frames" in source and "timestamps" in source:
            return int(source["frames"]), bool(source["timestamps"])
    return 8, True
