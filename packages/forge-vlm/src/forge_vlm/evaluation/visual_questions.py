"""Questions about images in local files: how they are read and put to a model, and which answer is right.

A file has one question per line (JSON lines) or row (Parquet):

    {"image": "a.png", "question": "What is it?", "choices": ["a cat", "a dog"], "answer": "B"}
    {"image": "b.png", "question": "How many?", "answer": ["3", "three"]}

`image` is the name of a file, or a list of names; in Parquet also the content of a file, or a struct with `bytes`. `video` is the
name of a video file, or of a directory of frames. `<image>` in the question marks the place of an image; without it, images come
first. The answer of a question with choices is a letter, the number of a choice from 0 on, or the text of a choice.
"""

import re
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from forge_core.errors import DataError
from forge_data.chat.conversation import Turn
from forge_data.sources.jsonl import each_line
from forge_data.sources.records import text_of
from forge_data.storage.files import File, find_one
from forge_vlm.data.documents import MARKER
from forge_vlm.evaluation.metrics import FEWEST_VQA_ANSWERS, METRICS

LETTER, LIKELIHOOD = "letter", "likelihood"
WITH_CHOICES = (LETTER, LIKELIHOOD)
"""Metrics of questions with choices: whether the letter that the model writes is right, and whether the right letter is the
likeliest."""
INSTRUCTION = "Answer with the letter of the right choice only."
"""What follows the choices, by default."""
_LETTERS = string.ascii_uppercase
_OPENING = re.compile(r"^(?:the\s+)?(?:correct\s+|right\s+)?(?:answer|choice|option)(?:\s+is)?\s*:?\s*", re.IGNORECASE)


@dataclass(frozen=True)
class VisualQuestion:
    """A question and its answer.

    Attributes:
        place: file and line or row, for messages.
        text: the question, with `<image>` in place of images, or without any.
        images: names of image files, in order.
        contents: content of images that are not files of their own, by name.
        video: name of a video, or of a directory of frames.
        choices: texts to choose from; none for an open question.
        answers: the right answers; for a question with choices, the right letter.
    """

    place: str
    text: str
    images: tuple[str, ...]
    answers: tuple[str, ...]
    choices: tuple[str, ...] = ()
    video: str | None = None
    contents: Mapping[str, bytes] = field(default_factory=dict, repr=False)

    @property
    def letters(self) -> str:
        """The letters of the choices, in order: `ABC`."""
        return _LETTERS[: len(self.choices)]

    def turns(self, instruction: str, video: Sequence[Mapping[str, str]] = ()) -> list[Turn]:
        """Returns the user's turn: the images and the question, each choice with its letter on a line, and the instruction.

        Args:
            instruction: last line; empty: none.
            video: the frames of the clip as pieces, see `forge_vlm.data.question_prompts.Clips`.
        """
        lines = [f"{letter}. {choice}" for letter, choice in zip(self.letters, self.choices, strict=True)]
        after = "".join(f"\n{line}" for line in (*lines, instruction) if line)
        shown: list[dict[str, str]] = [{"type": "image", "path": name} for name in self.images]
        texts = self.text.split(MARKER)
        if not shown and not video:
            return [Turn("user", self.text + after)]
        if len(texts) == 1:
            return [Turn("user", [*video, *shown, {"type": "text", "text": self.text + after}])]
        pieces: list[dict[str, str]] = [*map(dict, video)]
        for text, image in zip(texts, [*shown, None], strict=True):
            pieces += [{"type": "text", "text": text}] if text else []
            pieces += [image] if image is not None else []
        return [Turn("user", [*pieces, {"type": "text", "text": after}] if after else pieces)]

    def letter_of(self, written: str) -> str | None:
        """Returns the letter that a written answer chooses; None if it chooses none.

        An answer is a letter alone or before punctuation (`B`, `(B)`, `b.`, `B: a dog`), also after `Answer:` or `The answer is`;
        or the text of exactly one choice.
        """
        text = _OPENING.sub("", written.strip()).strip()
        found = re.match(r"^[(\[]?([A-Za-z])(?:[)\].:,]|$|\n)", text)
        if found and found[1].upper() in self.letters:
            return found[1].upper()
        plain = text.rstrip(".").lower()
        equal = [letter for letter, choice in zip(self.letters, self.choices, strict=True) if choice.rstrip(".").lower() == plain]
        return equal[0] if len(equal) == 1 else None


def default_metrics(questions: Sequence[VisualQuestion]) -> tuple[str, ...]:
    """Returns the metrics for these questions if none are named."""
    return WITH_CHOICES if questions[0].choices else ("exact_match",)


def check_metrics(questions: Sequence[VisualQuestion], metrics: Sequence[str]) -> None:
    """Checks that the metrics exist and apply to every question.

    Raises:
        DataError: a metric is unknown, or does not apply to a question.
    """
    for name in metrics:
        if name not in (*WITH_CHOICES, *METRICS):
            raise DataError(f"metric {name!r} is unknown; choose from {', '.join((*WITH_CHOICES, *METRICS))}")
        for question in questions:
            if bool(question.choices) != (name in WITH_CHOICES):
                fault = "has choices, but" if question.choices else "has no choices, but"
                kind = "open questions" if question.choices else "questions with choices"
                other = WITH_CHOICES if question.choices else tuple(METRICS)
                raise DataError(
                    f"{question.place} {fault} metric {name!r} is for {kind}; use {' or '.join(other)}, or put the question into "
                    "another file"
                )
            if name == "vqa_accuracy" and len(question.answers) < FEWEST_VQA_ANSWERS:
                raise DataError(
                    f"{question.place} has {len(question.answers)} answers, but vqa_accuracy compares those of at least "
                    f"{FEWEST_VQA_ANSWERS} people; list the answer of each person, or use exact_match"
                )


def read_questions(path: Path, limit: int | None = None) -> list[VisualQuestion]:
    """Reads the questions of a file of JSON lines or of a Parquet file.

    Args:
        path: the file.
        limit: maximum number of questions, from the first one on.

    Raises:
        DataError: the file cannot be read, has no question, or a question is invalid; the error names its line or row.
    """
    questions = [_question(place, record) for place, record in islice(_records(path), limit)]
    if not questions:
        raise DataError(
            f"{path} has no question; write one JSON object per line, such as "
            '{"image": "a.png", "question": "What is it?", "answer": "a cat"}'
        )
    return questions


def _records(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    file: File | None = find_one(str(path))
    if file is None:
        raise DataError(f"the file of questions {path} does not exist; check --questions")
    if path.suffix == ".parquet":
        yield from _rows(path)
        return
    for _, place, record in each_line(file):
        if isinstance(record, str):
            raise DataError(f"{place} {record}")
        yield place, record


def _rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as parquet
    except ImportError as cause:
        raise DataError(f"{path} needs pyarrow; pip install 'forge-data[arrow]'") from cause
    try:
        with parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=64):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", row
    except (pa.ArrowException, OSError) as cause:
        raise DataError(f"{path} cannot be read as Parquet: {cause}") from cause


def _question(place: str, record: Mapping[str, Any]) -> VisualQuestion:
    text = record.get("question")
    if not isinstance(text, str) or not text.strip():
        raise DataError(f"{place} has no text in the field 'question'; write the question there")
    choices = _choices(place, record.get("choices"))
    images, contents = _images(place, record.get("image"))
    video = record.get("video")
    if video is not None and (not isinstance(video, str) or not video):
        raise DataError(f"{place} has the video {video!r}; expected the name of a video file, or of a directory of frames")
    if not images and video is None:
        raise DataError(f"{place} has neither an image nor a video; name one in the field 'image' or 'video'")
    if (markers := text.count(MARKER)) not in (0, len(images)):
        raise DataError(f"{place} has {markers} {MARKER} in its question, but {len(images)} images; write one for each, or none")
    answers = _letter(place, record.get("answer"), choices) if choices else _answers(place, record.get("answer"))
    texts = (text, *choices, *answers)
    if fault := next((fault for each in texts if (fault := text_of(each)[1])), ""):
        raise DataError(f"{place} has text that {fault}")
    return VisualQuestion(place, text, images, answers, choices, video, contents)


def _choices(place: str, value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(each, str) and each for each in value) or len(value) < 2:
        raise DataError(f"{place} has the choices {value!r}; expected a list of at least 2 texts")
    if len(value) > len(_LETTERS):
        raise DataError(f"{place} has {len(value)} choices, but there are {len(_LETTERS)} letters; leave the question out")
    return tuple(value)


def _images(place: str, value: Any) -> tuple[tuple[str, ...], dict[str, bytes]]:
    """Returns the names of images, and the contents of those that the record itself has."""
    values = [] if value is None else value if isinstance(value, list) else [value]
    names: list[str] = []
    contents: dict[str, bytes] = {}
    for number, each in enumerate(values):
        content = each.get("bytes") if isinstance(each, Mapping) else each
        name = each.get("path") if isinstance(each, Mapping) and content is None else each
        if isinstance(content, bytes) and content:
            names.append(f"image {number + 1} of {place}")
            contents[names[-1]] = content
        elif isinstance(name, str) and name and "\0" not in name and "://" not in name and not name.startswith("data:"):
            names.append(name)
        else:
            raise DataError(f"{place} has the image {str(each)[:60]!r}; expected the name of a local file, or a list of names")
    return tuple(names), contents


def _answers(place: str, value: Any) -> tuple[str, ...]:
    values = value if isinstance(value, list) else [value]
    if not values or not all(isinstance(each, str) and each.strip() for each in values):
        raise DataError(f"{place} has the answer {value!r}; expected a text, or a list of the right texts")
    return tuple(each.strip() for each in values)


def _letter(place: str, value: Any, choices: Sequence[str]) -> tuple[str]:
    letters = _LETTERS[: len(choices)]
    if isinstance(value, int) and not isinstance(value, bool):
        if not 0 <= value < len(choices):
            raise DataError(f"{place} has the answer {value}, but {len(choices)} choices; number them from 0 on")
        return (letters[value],)
    by_text = [letter for letter, choice in zip(letters, choices, strict=True) if choice == value]
    by_letter = [value] if isinstance(value, str) and len(value) == 1 and value in letters else []
    found = {*by_text, *by_letter}
    if len(found) > 1:
        raise DataError(f"{place} has the answer {value!r}, which means several of its choices; write the number of the choice")
    if not found:
        raise DataError(
            f"{place} has the answer {value!r}, which is not among its choices; write a letter of {letters}, the number of a "
            "choice, or its text"
        )
    return (found.pop(),)
