"""Questions about images in files: what is read, what the model is asked, which letter an answer is, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from forge_core.errors import DataError
from forge_data.chat.conversation import Turn
from forge_train.inference.questions import open_questions
from forge_vlm.evaluation.visual_questions import VisualQuestion, read_questions

GOOD: dict[str, Any] = {"image": "a.png", "question": "What is it?", "answer": "a cat"}
CHOICES = ["a cat", "a dog", "an owl"]


def written(folder: Path, *records: Any) -> Path:
    """A file of these questions beside an image file."""
    (folder / "a.png").write_bytes(b"pixels")
    path = folder / "asked.jsonl"
    path.write_text("".join(record if isinstance(record, str) else json.dumps(record) + "\n" for record in records))
    return path


def image(name: str = "a.png") -> dict[str, str]:
    return {"type": "image", "path": name}


def text(content: str) -> dict[str, str]:
    return {"type": "text", "text": content}


def test_choices_keep_their_order_and_an_instruction_ends_the_question(tmp_path: Path) -> None:
    (question,) = read_questions(written(tmp_path, GOOD | {"choices": CHOICES, "answer": 2}))
    asked = "What is it?\nA. a cat\nB. a dog\nC. an owl\nA letter, please."
    assert question.turns("A letter, please.") == [Turn("user", [image(), text(asked)])]
    assert (question.letters, question.answers) == ("ABC", ("C",))


def test_a_marker_is_the_place_of_an_image(tmp_path: Path) -> None:
    first, second = read_questions(
        written(
            tmp_path,
            GOOD | {"image": ["a.png", "b.png"], "question": "Is <image> like <image>?"},
            GOOD | {"image": ["a.png", "b.png"], "question": "Alike?"},
        )
    )
    pieces = [text("Is "), image(), text(" like "), image("b.png"), text("?")]
    assert first.turns("") == [Turn("user", pieces)]
    assert first.turns("Say.") == [Turn("user", [*pieces, text("\nSay.")])]
    assert second.turns("") == [Turn("user", [image(), image("b.png"), text("Alike?")])]


def test_the_frames_of_a_video_come_first(tmp_path: Path) -> None:
    (question,) = read_questions(written(tmp_path, {"video": "clip", "question": "What?", "answer": "a cat"}))
    frames = [text("0.0s"), image("clip/1.png")]
    assert question.turns("", frames) == [Turn("user", [*frames, text("What?")])]


@pytest.mark.parametrize(("answer", "letter"), [("B", "B"), (1, "B"), ("a dog", "B"), (0, "A")])
def test_an_answer_is_a_letter_a_number_or_the_text_of_a_choice(tmp_path: Path, answer: Any, letter: str) -> None:
    (question,) = read_questions(written(tmp_path, GOOD | {"choices": CHOICES, "answer": answer}))
    assert question.answers == (letter,)


@pytest.mark.parametrize(
    ("said", "letter"),
    [
        ("B", "B"),
        (" b.", "B"),
        ("(C)", "C"),
        ("B: a dog", "B"),
        ("B) it barks", "B"),
        ("Answer: A", "A"),
        ("The correct answer is C.", "C"),
        ("a dog", "B"),
        ("A dog.", "B"),
        ("B\nbecause it barks", "B"),
        ("D", None),
        ("A dog or a cat", None),
        ("Because", None),
        ("", None),
    ],
)
def test_the_letter_of_what_a_model_says(said: str, letter: str | None) -> None:
    question = VisualQuestion("here", "What?", ("a.png",), ("A",), tuple(CHOICES))
    assert question.letter_of(said) == letter


def test_parquet_has_names_or_contents(tmp_path: Path) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    records: list[dict[str, Any]] = [GOOD | {"image": {"bytes": b"content", "path": "x.png"}}]
    records += [GOOD | {"image": {"bytes": None, "path": "a.png"}, "answer": "a dog"}]
    parquet.write_table(pa.Table.from_pylist(records), tmp_path / "q.parquet")
    first, second = read_questions(tmp_path / "q.parquet")
    (name,) = first.images
    assert first.contents[name] == b"content" and (second.images, second.contents) == (("a.png",), {})
    assert [first.answers, second.answers] == [("a cat",), ("a dog",)] and second.place.endswith("q.parquet, row 2")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match=r"broken\.parquet cannot be read as Parquet"):
        read_questions(tmp_path / "broken.parquet")


def test_a_limit_takes_the_first_questions_and_reads_no_more(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD, GOOD | {"answer": "a dog"}, "{broken\n")
    assert [question.answers for question in read_questions(path, 2)] == [("a cat",), ("a dog",)]


@pytest.mark.parametrize(
    ("record", "why"),
    [
        ("{broken\n", r"line 2.* is not valid JSON"),
        (GOOD | {"question": " "}, "line 2.* has no text in the field 'question'"),
        (
            GOOD | {"image": "absent.png"},
            r"line 2.* names the image .*absent.png, which does not exist; restore it, or set --folder",
        ),
        (GOOD | {"image": None}, "line 2.* has neither an image nor a video"),
        (GOOD | {"image": 3}, "line 2.* has the image '3'; expected the name of a local file"),
        (GOOD | {"image": "https://x.org/a.png"}, "expected the name of a local file"),
        (GOOD | {"image": None, "video": "absent"}, "line 2.* names the video .*absent, which does not exist"),
        (GOOD | {"question": "<image> or <image>?"}, "line 2.* has 2 <image> in its question, but 1 images"),
        (GOOD | {"answer": []}, r"line 2.* has the answer \[\]; expected a text, or a list"),
        (GOOD | {"answer": 3}, "line 2.* has the answer 3; expected a text"),
        (GOOD | {"question": "\ud83d"}, "line 2.* has text that"),
        (GOOD | {"choices": CHOICES, "answer": "D"}, "line 2.* 'D', which is not among its choices; write a letter of ABC"),
        (GOOD | {"choices": CHOICES, "answer": 3}, "line 2.* has the answer 3, but 3 choices; number them from 0 on"),
        (GOOD | {"choices": CHOICES, "answer": True}, "which is not among its choices"),
        (GOOD | {"choices": ["B", "A"], "answer": "A"}, "'A', which means several of its choices; write the number"),
        (GOOD | {"choices": ["x", "x"], "answer": "x"}, "'x', which means several of its choices"),
        (GOOD | {"choices": ["one"], "answer": 0}, "expected a list of at least 2 texts"),
        (GOOD | {"choices": "abc", "answer": 0}, "expected a list of at least 2 texts"),
        (GOOD | {"choices": [str(n) for n in range(27)], "answer": 0}, "has 27 choices, but there are 26 letters"),
        (GOOD | {"choices": CHOICES, "answer": 0}, "line 2.* has choices, but metric 'exact_match' is for open questions"),
    ],
)
def test_a_question_that_cannot_be_asked_is_refused_with_its_line(tmp_path: Path, record: Any, why: str) -> None:
    with pytest.raises(DataError, match=why):
        open_questions(written(tmp_path, GOOD, record))


@pytest.mark.parametrize(
    ("records", "metrics", "why"),
    [
        ([], [], "has no question; write one JSON object per line"),
        ([GOOD], ["rouge"], "metric 'rouge' is unknown; choose from letter, likelihood, exact_match"),
        ([GOOD], ["letter"], "line 1.* has no choices, but metric 'letter' is for questions with choices; use exact_match"),
        ([GOOD | {"answer": ["a"] * 3}], ["vqa_accuracy"], "has 3 answers, but vqa_accuracy compares those of at least 4"),
    ],
)
def test_a_file_or_metric_that_does_not_fit_is_refused(tmp_path: Path, records: list[Any], metrics: list[str], why: str) -> None:
    with pytest.raises(DataError, match=why):
        open_questions(written(tmp_path, *records), metrics=metrics)
    with pytest.raises(DataError, match=r"absent\.jsonl does not exist; check --questions"):
        open_questions(tmp_path / "absent.jsonl")
