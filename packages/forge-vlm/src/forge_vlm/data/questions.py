"""Questions about clips, as conversations: open questions, and multiple choice with shuffled choices.

A row of a file has one question, or a list of them. Which of its fields is what, is declared in `QuestionFields`; nothing is
guessed from names or values.
"""

import json
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from itertools import groupby
from typing import Any, Literal, NamedTuple

from forge_core.errors import DataError
from forge_data.sources.jsonl import SUFFIXES
from forge_data.storage.checksums import digest_of
from forge_data.storage.files import find
from forge_vlm.data.clips import ClipFiles, choose_frames
from forge_vlm.data.documents import BrokenRecord, Clip, Frames, Record
from forge_vlm.data.frame_selection import FrameChooser
from forge_vlm.data.image_readers import ImageFiles
from forge_vlm.data.rows import columns_of, read_rows

AnswerKind = Literal["text", "index", "letter"]
ReplyKind = Literal["letter", "letter_text", "text"]
LETTERS = string.ascii_uppercase
INSTRUCTIONS: Mapping[ReplyKind, str] = {
    "letter": "Answer with the letter of the correct choice.",
    "letter_text": "Answer with the letter and the text of the correct choice.",
    "text": "Answer with the text of the correct choice.",
}
"""What a question with choices asks for, by the form of the answer."""


@dataclass(frozen=True)
class QuestionFields:
    """Which field of a row is what.

    Attributes:
        file: path of the clip, with names of fields in braces.
        question: field with the question.
        ask: the question of every row, in place of a field.
        choices: field with the list of choices (in CSV as JSON), or several fields with one choice each; none for open questions.
        answer: field with the answer.
        answer_is: what the answer is: its text, the number of a choice from 0 on, or the letter of a choice.
        questions: field with a list of questions of the same clip, whose fields precede those of the row.
        key_field: see `forge_vlm.data.rows.read_json`.
    """

    file: str = "{video}"
    question: str = "question"
    ask: str | None = None
    choices: tuple[str, ...] = ()
    answer: str = "answer"
    answer_is: AnswerKind = "text"
    questions: str | None = None
    key_field: str | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of all fields that a row needs."""
        in_file = tuple(name for _, name, _, _ in string.Formatter().parse(self.file) if name)
        return (*in_file, *(() if self.ask is not None else (self.question,)), *self.choices, self.answer)


@dataclass(frozen=True)
class AnswerStyle:
    """How a question with choices is written, and how its answer is.

    Attributes:
        reply: form of the answer.
        choice: a choice in the question, and an answer with letter and text; `{letter}` and `{text}` are replaced.
        instruction: last line of a question with choices; none if empty.
        shuffle: whether choices are shuffled.
        seed: changes the order of shuffled choices.
    """

    reply: ReplyKind = "letter"
    choice: str = "{letter}. {text}"
    instruction: str = INSTRUCTIONS["letter"]
    shuffle: bool = True
    seed: int = 0


class ClipQuestion(NamedTuple):
    """A question about a clip; `asked` and `answer` are what the user and the assistant say, `bare` the question alone."""

    clip: str
    row: Mapping[str, Any]
    place: str
    bare: str
    asked: str
    answer: str


def shuffled(count: int, key: str) -> list[int]:
    """Returns the numbers below `count` in an order that depends only on `key`; every order is equally likely."""
    return sorted(range(count), key=lambda number: blake2b(f"{number}\0{key}".encode("utf-8", "surrogatepass")).digest())


def asked_of(row: Mapping[str, Any], clip: str, fields: QuestionFields, style: AnswerStyle) -> tuple[str, str, str]:
    """Returns the question alone, as it is asked with its choices, and the answer.

    Choices are shuffled by clip and question, so their order does not depend on the position of the row.

    Raises:
        BrokenRecord: a field is missing, or the answer is not one of the choices.
    """
    question = fields.ask if fields.ask is not None else _text_in(row, fields.question)
    if not fields.choices:
        return question, question, _text_in(row, fields.answer)
    choices = _choices_of(row, fields)
    correct = _correct_of(row, choices, fields)
    order = shuffled(len(choices), f"{style.seed}\0{clip}\0{question}") if style.shuffle else list(range(len(choices)))
    lines = [style.choice.format(letter=LETTERS[place], text=choices[number]) for place, number in enumerate(order)]
    place = order.index(correct)
    answer = {"letter": LETTERS[place], "letter_text": lines[place], "text": choices[correct]}[style.reply]
    return question, "\n".join([question, *lines, *([style.instruction] if style.instruction else [])]), answer


def _text_in(row: Mapping[str, Any], field: str) -> str:
    """Returns a field's text without spaces at its ends; whole numbers become text."""
    value = row.get(field)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if value is None:
        raise BrokenRecord(f"has no {field!r}; fill it in, or set the key of the source that names this field")
    if not isinstance(value, str) or not value.strip():
        raise BrokenRecord(f"has {value!r} in {field!r}; expected text")
    return value.strip()


def _choices_of(row: Mapping[str, Any], fields: QuestionFields) -> list[str]:
    name, *others = fields.choices
    if others:
        values = [row.get(each) for each in fields.choices]
        while values and values[-1] in (None, ""):  # a table has as many columns as its longest question
            values.pop()
        listed = [_text_in(row, each) for each in fields.choices[: len(values)]]
    else:
        found = row.get(name)
        if isinstance(found, str):
            try:
                found = json.loads(found)
            except (ValueError, RecursionError):
                raise BrokenRecord(
                    f'has {row[name][:80]!r} in {name!r}; expected a list in JSON, such as ["yes", "no"]; if each choice has a '
                    "field of its own, name all of these fields in `choices`"
                ) from None
        if found in (None, []):
            raise BrokenRecord(f"has no choices in {name!r}; add them, or read open questions by a source without `choices`")
        if not isinstance(found, list):
            raise BrokenRecord(f"has {repr(found)[:80]} in {name!r}; expected a list of choices")
        listed = [_text_in({name: each}, name) for each in found]
    if not 2 <= len(listed) <= len(LETTERS):
        raise BrokenRecord(f"has {len(listed)} choices; give 2 to {len(LETTERS)}")
    if twice := next((each for each in listed if listed.count(each) > 1), None):
        raise BrokenRecord(f"has the choice {twice!r} twice; remove one")
    return listed


def _correct_of(row: Mapping[str, Any], choices: Sequence[str], fields: QuestionFields) -> int:
    """Returns the number of the correct choice."""
    answer = _text_in(row, fields.answer)
    if fields.answer_is == "text":
        if answer in choices:
            return choices.index(answer)
        shown = ", ".join(map(repr, choices))
        raise BrokenRecord(
            f"has the answer {answer!r}, which is not one of its choices {shown}; correct it, or set answer_is = 'index' or "
            "'letter'"
        )
    known = LETTERS[: len(choices)] if fields.answer_is == "letter" else [str(number) for number in range(len(choices))]
    if answer in known:
        return list(known).index(answer)
    raise BrokenRecord(
        f"has the answer {answer!r}, but answer_is = {fields.answer_is!r} needs one of {', '.join(known)}; correct it, or set "
        "answer_is to what the answers are"
    )


class QuestionExamples:
    """Questions about clips as conversations; all questions of a clip have its path as name, so they are in one split."""

    def __init__(
        self,
        path: str,
        folder: str | None,
        fields: QuestionFields,
        style: AnswerStyle,
        names: tuple[str, str],
        *,
        fps: float,
        count: int,
        told: bool,
        together: int = 1,
        chooser: FrameChooser | None = None,
    ) -> None:
        """
        Args:
            path: path of JSON lines, JSON or CSV files.
            folder: folder of the clips; by default that of the row's file.
            fields: which field of a row is what.
            style: how questions and answers are written.
            names: fields of a record that receive its turns and its clip.
            fps: frames per second of directories of frames whose row does not say it.
            count: maximum number of frames of a clip.
            told: writes times before frames.
            together: maximum number of neighboring questions of one clip in one conversation.
            chooser: chooses frames by the question, if `together` is 1; None: they are equally spaced in time.

        Raises:
            DataError: there is no file, or a table lacks a column.
        """
        self.what = path
        self._files = find(path, (*SUFFIXES, ".json", ".csv"), "question")
        self._folder = ImageFiles(self._files, folder)
        self._clips = ClipFiles(self._folder, "video_questions")
        self._fields, self._style, self._names = fields, style, names
        self._fps, self._count, self._told, self._together = fps, count, told, together
        self._chooser = chooser
        for file in (file for file in self._files if file.name.endswith(".csv")):
            head = columns_of(file)
            if missing := [name for name in fields.columns if name not in head]:
                raise DataError(
                    f"{file.where} has no column {missing[0]!r}; it has {', '.join(head)}; set file, question, choices and "
                    "answer of the source to names of columns"
                )

    @property
    def fingerprint(self) -> str:
        """Changes with the files, the folder, how they are read, and the selection of frames."""
        how = f"{self._fields} {self._style} {self._fps} {self._count} {self._told} {self._together}"
        how += "" if self._chooser is None else f" {self._chooser.identity}"
        return digest_of(self._files, f"questions {self._folder.identity} {how}")

    def __iter__(self) -> Iterator[tuple[str, Mapping[str, Any] | BrokenRecord]]:
        """Yields (path of the clip, conversation about it)."""
        for clip, found in groupby(self._questions(), key=lambda each: each.clip if isinstance(each, ClipQuestion) else None):
            waiting: list[ClipQuestion] = []
            for each in found:
                if isinstance(each, ClipQuestion):
                    waiting.append(each)
                    if len(waiting) == self._together:
                        yield each.clip, self._record(waiting)
                        waiting = []
                else:
                    yield each[0], each[1]
            if waiting and clip is not None:
                yield clip, self._record(waiting)

    def fetch(self, reference: str) -> bytes:
        """Returns a frame as an image file."""
        return self._clips.fetch(reference)

    def is_there(self, reference: str) -> bool:
        """Whether the file of a frame, or of its video, exists."""
        return self._clips.is_there(reference)

    def _record(self, questions: Sequence[ClipQuestion]) -> Record:
        """Returns the conversation: the first question follows the clip."""
        first = questions[0]
        turns: list[dict[str, Any]] = []
        for number, each in enumerate(questions):
            shown = [{"type": "image"}] if not number else []
            turns += [
                {"role": "user", "content": [*shown, {"type": "text", "text": each.asked}]},
                {"role": "assistant", "content": [{"type": "text", "text": each.answer}]},
            ]
        messages, images = self._names
        return Record({messages: turns, images: Clip(partial(self._frames, first), self._told)}, first.place)

    def _frames(self, question: ClipQuestion) -> Frames:
        footage = self._clips.open(question.clip, question.row.get("fps", self._fps), question.row.get("times"))
        if self._chooser is None:
            return footage.frames(choose_frames(footage.times, self._count))
        return footage.frames(self._chooser.choose(footage, self.fetch, question.bare, self._count))

    def _questions(self) -> Iterator[ClipQuestion | tuple[str, BrokenRecord]]:
        for file in self._files:
            for name, place, row in read_rows(file, self._fields.key_field):
                if isinstance(row, BrokenRecord):
                    yield name, row
                    continue
                for where, one in self._rows_in(row, place):
                    try:
                        if isinstance(one, BrokenRecord):
                            raise one
                        clip = self._folder.reference(file, self._clip_of(one))
                        yield ClipQuestion(clip, one, where, *asked_of(one, clip, self._fields, self._style))
                    except BrokenRecord as error:
                        yield name, BrokenRecord(f"{where}: {error}")

    def _rows_in(self, row: dict[str, Any], place: str) -> Iterator[tuple[str, dict[str, Any] | BrokenRecord]]:
        """Yields (place, fields) of each question of a row."""
        field = self._fields.questions
        if field is None:
            yield place, row
            return
        listed = row.get(field)
        if not isinstance(listed, list):
            yield (
                place,
                BrokenRecord(f"has no list of questions in {field!r}; add one, or set `questions` to the field that has it"),
            )
            return
        for number, each in enumerate(listed):
            where = f"{place}, question {number + 1}"
            yield where, row | each if isinstance(each, dict) else BrokenRecord(f"is {each!r}; expected a JSON object")

    def _clip_of(self, row: Mapping[str, Any]) -> str:
        """Returns the path of a row's clip, relative to the folder."""
        pieces: list[str] = []
        for text, name, _, _ in string.Formatter().parse(self._fields.file):
            pieces += [text, *([_text_in(row, name)] if name else [])]
        return "".join(pieces)
