"""Puts the questions of local files to a vision-language model and scores its answers; needs no library of tasks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from forge_core.errors import DataError
from forge_data.chat.conversation import Turn
from forge_models.generation import Sampling
from forge_train.inference.answers import GenerationSettings
from forge_train.inference.visual_answers import VisualAnswerModel, VisualRequest
from forge_vlm.data.image_readers import ImageFiles
from forge_vlm.data.question_prompts import Clips
from forge_vlm.evaluation.metrics import METRICS, mean_and_error
from forge_vlm.evaluation.visual_questions import (
    INSTRUCTION,
    LETTER,
    LIKELIHOOD,
    VisualQuestion,
    check_metrics,
    default_metrics,
    read_questions,
)

NEW_TOKENS = 32
"""Maximum number of tokens of an answer, by default."""


@dataclass(frozen=True)
class QuestionFile:
    """A file of questions.

    Attributes:
        name: name of the file without its suffix.
        questions: its questions.
        folder: directory to which the names of images and videos are relative.
        metrics: names of the metrics.
    """

    name: str
    questions: Sequence[VisualQuestion]
    folder: Path
    metrics: Sequence[str]


def open_questions(path: Path, folder: Path | None = None, metrics: Sequence[str] = (), limit: int | None = None) -> QuestionFile:
    """Reads a file of questions and checks it, and that its images exist.

    Args:
        path: JSON lines or Parquet, see `forge_vlm.evaluation.visual_questions`.
        folder: directory of the images; None: that of the file.
        metrics: names of metrics; by default those of `default_metrics`.
        limit: maximum number of questions.

    Raises:
        DataError: a question is invalid, an image is missing, or a metric is unknown or does not apply.
    """
    questions = read_questions(path, limit)
    chosen = tuple(dict.fromkeys(metrics)) or default_metrics(questions)
    check_metrics(questions, chosen)
    directory = path.parent if folder is None else folder
    files = ImageFiles([], str(directory))
    for question in questions:
        for name in question.images:
            if name not in question.contents and not files.is_there(name):
                raise DataError(
                    f"{question.place} names the image {files.path(name)}, which does not exist; restore it, or set --folder to "
                    "the directory of the images"
                )
        if question.video is not None and not files.path(question.video).exists():
            raise DataError(
                f"{question.place} names the video {files.path(question.video)}, which does not exist; restore it, or set "
                "--folder to the directory of the videos"
            )
    return QuestionFile(path.stem, questions, directory, chosen)


@dataclass(frozen=True)
class QuestionResults:
    """Results of a file.

    Attributes:
        metrics: `n`, and for each metric its mean and `NAME_stderr` (None for one question); with metric `letter` also
            `unreadable`, the number of written answers that choose no letter.
        rows: for each question what the model answered, and its value of each metric.
    """

    metrics: Mapping[str, float | None]
    rows: Sequence[Mapping[str, Any]]


def evaluate_questions(
    model: VisualAnswerModel, file: QuestionFile, instruction: str | None = None, tokens: int = NEW_TOKENS
) -> QuestionResults:
    """Collective: puts every question of a file to the model; every rank gets the same results.

    Choices keep their order. Answers are generated greedily.

    Args:
        model: the model.
        file: the questions.
        instruction: last line of each question; None: what to do with the choices, for questions with choices.
        tokens: maximum number of tokens of a generated answer.

    Raises:
        DataError: an image cannot be decoded, or a question is too long for the model; the error names its place.
    """
    questions = file.questions
    given = instruction if instruction is not None else INSTRUCTION if questions[0].choices else ""
    clips = Clips(file.folder, model.frames, model.told)

    def request(question: VisualQuestion, answer: str = "") -> VisualRequest:
        return VisualRequest(question.place, partial(_turns, question, given, clips), answer)

    rows: list[dict[str, Any]] = [
        {"place": question.place, "question": question.text, "answers": list(question.answers)} for question in questions
    ]
    if LIKELIHOOD in file.metrics:
        asked = [(row, letter) for row, question in enumerate(questions) for letter in question.letters]
        scores = model.likelihoods([request(questions[row], letter) for row, letter in asked])
        for (row, letter), (score, _) in zip(asked, scores, strict=True):
            rows[row].setdefault("likelihoods", {})[letter] = score
        for row, question in zip(rows, questions, strict=True):
            likeliest = max(question.letters, key=row["likelihoods"].__getitem__)
            row[LIKELIHOOD] = float((likeliest,) == question.answers)
    if any(name != LIKELIHOOD for name in file.metrics):
        settings = GenerationSettings((), tokens, Sampling())
        texts = model.texts([request(question) for question in questions], settings)
        for row, question, text in zip(rows, questions, texts, strict=True):
            row |= {"written": text} | _values(question, text.strip(), file.metrics)
    return QuestionResults(_summary(rows, file.metrics), rows)


def _turns(question: VisualQuestion, instruction: str, clips: Clips) -> tuple[list[Turn], Callable[[str], bytes]]:
    video = () if question.video is None else clips.pieces(question.video)

    def fetch(name: str) -> bytes:
        return question.contents[name] if name in question.contents else clips.fetch(name)

    return question.turns(instruction, video), fetch


def _values(question: VisualQuestion, text: str, metrics: Sequence[str]) -> dict[str, Any]:
    values: dict[str, Any] = {name: METRICS[name](text, question.answers) for name in metrics if name in METRICS}
    if LETTER in metrics:
        chosen = question.letter_of(text)
        values |= {"chosen": chosen, LETTER: float((chosen,) == question.answers)}
    return values


def _summary(rows: Sequence[Mapping[str, Any]], metrics: Sequence[str]) -> dict[str, float | None]:
    found: dict[str, float | None] = {"n": len(rows)}
    for name in metrics:
        found[name], found[f"{name}_stderr"] = mean_and_error([row[name] for row in rows])
    if LETTER in metrics:
        found["unreadable"] = sum(row["chosen"] is None for row in rows)
    return found
