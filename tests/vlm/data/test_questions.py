"""Questions about clips become conversations: fields are those that are declared, and rows that do not fit are named."""

import csv
import json
from collections import Counter
from dataclasses import replace
from itertools import islice, permutations
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from forge_core.errors import DataError
from forge_data.chat.conversation import TEMPLATES
from forge_data.components import Bytes
from forge_data.loading.stream import open_stream
from forge_data.section import Data
from forge_vlm.components.sources import VideoQuestions
from forge_vlm.data.example_images import video
from forge_vlm.data.questions import LETTERS, shuffled
from vlm.data.test_stores import EOS, GIVEN, HOLE, documents, opened
from vlm.data.test_video_readers import grays

KEYS: dict[str, Any] = {"frames": 2, "timestamps": False, "shuffle": False, **GIVEN}
ROW = {"video": "a", "question": "What?", "options": ["cat", "dog", "cow"], "answer": "dog"}


@pytest.fixture
def clips(tmp_path: Path) -> Path:
    """Two directories of frames and a video file."""
    for name, values in {"a": [10, 20, 30], "b": [40, 50]}.items():
        (tmp_path / name).mkdir()
        for number, value in enumerate(values):
            Image.new("RGB", (8, 8), (value,) * 3).save(tmp_path / name / f"{number}.png")
    video(tmp_path / "c.mp4", [0, 80, 160])
    return tmp_path


def lines(folder: Path, *rows: Any) -> str:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "rows.jsonl")


def table(folder: Path, rows: list[dict[str, Any]]) -> str:
    with (folder / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return str(folder / "rows.csv")


def talks(source: Any) -> list[tuple[str, str]]:
    """(text without frames, learned text) of each document; `|` ends a learned part."""
    found = []
    for ids, learned, _ in documents(source):
        said = "".join(chr(token) if keep else "|" for token, keep in zip(ids, learned, strict=True) if token < 256 or keep)
        found.append((bytes(token for token in ids if token < 256).decode(), "|".join(filter(None, said.split("|")))))
    return found


def test_a_question_is_a_conversation_about_frames(clips: Path) -> None:
    path = lines(clips, ROW, {**ROW, "video": "b", "question": "Who?", "answer": "cow"})
    source = opened(VideoQuestions(path=path, choices=("options",), **KEYS), clips / "w")
    asked = "What?\nA. cat\nB. dog\nC. cow\nAnswer with the letter of the correct choice."
    assert documents(source)[0][0] == [
        *b"User: ",
        *[HOLE] * 4,
        *f"{asked}\nAssistant: B\n".encode(),
        EOS,
    ]
    assert [talk[1] for talk in talks(source)] == [f" B\n{chr(EOS)}", f" C\n{chr(EOS)}"]
    assert grays(source) == [10, 30, 40, 50]


@pytest.mark.parametrize(
    ("keys", "last", "answer"),
    [
        ({}, "Answer with the letter of the correct choice.", "B"),
        ({"reply": "letter"}, "Answer with the letter of the correct choice.", "B"),
        ({"reply": "letter_text"}, "Answer with the letter and the text of the correct choice.", "B. dog"),
        ({"reply": "text"}, "Answer with the text of the correct choice.", "dog"),
        (
            {"reply": "letter_text", "choice": "({letter}) {text}"},
            "Answer with the letter and the text of the correct choice.",
            "(B) dog",
        ),
        ({"instruction": "Letter?"}, "Letter?", "B"),
    ],
)
def test_answers_have_three_forms(clips: Path, keys: dict[str, Any], last: str, answer: str) -> None:
    source = opened(VideoQuestions(path=lines(clips, ROW), choices=("options",), **KEYS, **keys), clips / "w")
    ((text, learned),) = talks(source)
    assert text.split("\n")[-3] == last and text.split("\n")[-2] == f"Assistant: {answer}"
    assert learned == f" {answer}\n{chr(EOS)}"


def test_without_an_instruction_choices_are_the_last_line(clips: Path) -> None:
    source = opened(VideoQuestions(path=lines(clips, ROW), choices=("options",), instruction="", **KEYS), clips / "w")
    assert talks(source)[0][0].split("\n")[-3] == "C. cow"


def test_columns_of_choices_and_an_index(clips: Path) -> None:
    """NExT-QA's table: one column for each choice, and the number of the correct one."""
    rows = [
        {"video": "c", "frame_count": 3, "question": "why", "answer": 4, "qid": 6, "type": "CW"}
        | {f"a{number}": word for number, word in enumerate(("p", "q", "r", "s", "t"))},
        {"video": "c", "frame_count": 3, "question": "how", "answer": 0, "qid": 7, "type": "CH"}
        | {f"a{number}": word for number, word in enumerate(("u", "v", "", "", ""))},
    ]
    columns = tuple(f"a{number}" for number in range(5))
    component = VideoQuestions(
        path=table(clips, rows), file="{video}.mp4", choices=columns, answer_is="index", reply="text", **KEYS
    )
    said = [text for text, _ in talks(opened(component, clips / "w"))]
    assert "why\nA. p\nB. q\nC. r\nD. s\nE. t\n" in said[0] and said[0].endswith("Assistant: t\n")
    assert "how\nA. u\nB. v\nAnswer" in said[1] and said[1].endswith("Assistant: u\n")
    rows[1]["a1"] = ""
    with pytest.raises(DataError, match=r"rows\.csv, row 2 \(line 3\): has 1 choices; give 2 to 26"):
        opened(replace(component, path=table(clips, rows)), clips / "w")
    rows[1] |= {"a1": "v", "a3": "x"}
    with pytest.raises(DataError, match=r"row 2 \(line 3\): has '' in 'a2'; expected text"):
        opened(replace(component, path=table(clips, rows)), clips / "w")


def test_an_object_by_clip_with_lists_of_questions(clips: Path) -> None:
    """Perception Test's file: the key is the clip, which has several questions with options and the number of one."""
    document = {
        "a": {
            "metadata": {"split": "train"},
            "mc_question": [
                {"id": 0, "question": "one?", "options": ["x", "y", "z"], "answer_id": 2},
                {"id": 1, "question": "two?", "options": ["x", "y", "z"], "answer_id": 0},
                {"id": 2, "question": "three?", "options": ["x", "y", "z"], "answer_id": 1},
            ],
        },
        "c.mp4": {
            "video": "other",
            "mc_question": [{"question": "four?", "options": ["x", "y"], "answer_id": 1}],
        },
    }
    (clips / "all.json").write_text(json.dumps(document))
    keys = {
        "key_field": "video",
        "questions": "mc_question",
        "choices": ("options",),
        "answer": "answer_id",
        "answer_is": "index",
    }
    component = VideoQuestions(path=str(clips / "all.json"), **keys, **KEYS)
    source = opened(component, clips / "w")
    assert [text.split("\n")[0].removeprefix("User: ") for text, _ in talks(source)] == ["one?", "two?", "three?", "four?"]
    assert [learned[1] for _, learned in talks(source)] == ["C", "A", "B", "B"]
    assert len(grays(source)) == 8
    two = opened(replace(component, together=2), clips / "w")
    assert [learned.replace(chr(EOS), "") for _, learned in talks(two)] == [" C\n| A\n", " B\n", " B\n"]
    assert [images for _, _, images in documents(two)] == [2, 2, 2], "a conversation has its clip once"
    assert talks(two)[0][0].index("one?") < talks(two)[0][0].index("two?")
    document["a"]["mc_question"][1]["answer_id"] = 3  # type: ignore[index]
    (clips / "all.json").write_text(json.dumps(document))
    with pytest.raises(
        DataError, match=r"record 1, question 2: has the answer '3', but answer_is = 'index' needs one of 0, 1, 2"
    ):
        opened(component, clips / "w")
    with pytest.raises(DataError, match="neither JSON lines nor a JSON list"):
        opened(replace(component, key_field=None), clips / "w")


def test_open_questions_and_captions(clips: Path) -> None:
    path = lines(
        clips, {"video": "a", "question": " Who? ", "answer": 3}, {"video": "c.mp4", "question": "Where?", "answer": "here"}
    )
    said = talks(opened(VideoQuestions(path=path, **KEYS), clips / "w"))
    assert said[0] == ("User: Who?\nAssistant: 3\n", f" 3\n{chr(EOS)}") and said[1][0] == "User: Where?\nAssistant: here\n"
    path = table(clips, [{"clip": "b", "caption": "gray, then lighter"}])
    component = VideoQuestions(path=path, file="{clip}", ask="Describe the video.", answer="caption", **KEYS)
    assert talks(opened(component, clips / "w"))[0][0] == "User: Describe the video.\nAssistant: gray, then lighter\n"


def test_a_list_in_a_table_is_json(clips: Path) -> None:
    rows = [{"video": "a", "question": "What?", "options": json.dumps(["x, y", "z"]), "answer": "B"}]
    component = VideoQuestions(path=table(clips, rows), choices=("options",), answer_is="letter", reply="text", **KEYS)
    assert talks(opened(component, clips / "w"))[0][0].endswith("Assistant: z\n")
    rows[0]["options"] = "['x', 'z']"
    with pytest.raises(DataError, match=r"row 1 \(line 2\): has .* in 'options'; expected a list in JSON"):
        opened(replace(component, path=table(clips, rows)), clips / "w")


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"answer": "horse"}, r"has the answer 'horse', which is not one of its choices 'cat', 'dog', 'cow'; correct it"),
        ({"answer": "Dog"}, "which is not one of its choices"),
        ({"answer": None}, "has no 'answer'; fill it in"),
        ({"answer": " "}, "has ' ' in 'answer'; expected text"),
        ({"answer": True}, "has True in 'answer'; expected text"),
        ({"question": None}, "has no 'question'; fill it in"),
        ({"options": None}, r"has no choices in 'options'; add them, or read open questions by a source without `choices`"),
        ({"options": []}, "has no choices in 'options'"),
        ({"options": "dog"}, "expected a list in JSON"),
        ({"options": 7}, "has 7 in 'options'; expected a list of choices"),
        ({"options": ["dog"]}, "has 1 choices; give 2 to 26"),
        ({"options": ["dog", *map(str, range(26))]}, "has 27 choices; give 2 to 26"),
        ({"options": ["dog", "dog"]}, "has the choice 'dog' twice; remove one"),
        ({"options": ["dog", None]}, "has no 'options'; fill it in"),
        ({"options": ["dog", ["cat"]]}, r"has \['cat'\] in 'options'; expected text"),
        ({"video": None}, "has no 'video'; fill it in, or set the key of the source that names this field"),
        ({"video": "none"}, "none does not exist; restore it, or set `folder` and `file`"),
        ({"video": "a\0"}, "does not exist"),
        ({"video": "a", "fps": 0}, "fps 0 is not a positive number"),
    ],
)
def test_rows_that_do_not_fit_are_named_and_counted(clips: Path, change: dict[str, Any], fault: str) -> None:
    component = VideoQuestions(path=lines(clips, ROW, {**ROW, **change}), choices=("options",), **KEYS)
    with pytest.raises(DataError, match=rf"rows\.jsonl at byte \d+ \(line 2\): .*{fault}"):
        opened(component, clips / "w")
    assert len(documents(opened(replace(component, skip=1), clips / "w"))) == 1


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({"video": "a"}, "has no list of questions in 'all'"),
        ({"video": "a", "all": ["x"]}, "question 1: is 'x'; expected a JSON object"),
    ],
)
def test_lists_of_questions_that_are_none_are_named(clips: Path, row: dict[str, Any], fault: str) -> None:
    with pytest.raises(DataError, match=fault):
        opened(VideoQuestions(path=lines(clips, row), questions="all", **KEYS), clips / "w")


def test_columns_that_a_table_lacks_are_named_first(clips: Path) -> None:
    path = table(clips, [{"video": "none", "question": "What?", "answer": "x"}])
    with pytest.raises(DataError, match=r"has no column 'options'; it has video, question, answer; set file, question, choices"):
        opened(VideoQuestions(path=path, choices=("options",), **KEYS), clips / "w")


@pytest.mark.parametrize(
    ("keys", "fault"),
    [
        ({"answer_is": "index"}, "answer_is = 'index' needs choices"),
        ({"reply": "text"}, "reply = 'text' needs choices"),
        ({"choice": "{letter}"}, "must have {letter} and {text}"),
        ({"choice": "{letter} {text} {more}"}, "and no other name"),
        ({"choice": "{letter} {text} {"}, "choice = .*: "),
        ({"file": "{}.mp4"}, "braces must contain a name"),
        ({"file": "{video!r}"}, "braces must contain a name"),
        ({"file": "{video:3}"}, "braces must contain a name"),
    ],
)
def test_keys_that_do_not_fit_are_refused(keys: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        VideoQuestions(path="rows.jsonl", **keys)


def test_shuffled_choices_depend_on_clip_and_question_alone(clips: Path) -> None:
    rows = [{**ROW, "question": f"{number}?"} for number in range(12)]
    component = VideoQuestions(path=lines(clips, *rows), choices=("options",), **{**KEYS, "shuffle": True})
    said = [text for text, _ in talks(opened(component, clips / "w"))]
    for text in said:
        lines_of = dict(line.split(". ", 1) for line in text.split("\n") if line[1:3] == ". ")
        assert sorted(lines_of.values()) == ["cat", "cow", "dog"] and list(lines_of) == ["A", "B", "C"]
        assert lines_of[text[-2]] == "dog", "the letter is that of the answer where it now is"
    assert len({text[text.index("A.") : text.index("\nAnswer")] for text in said}) > 3
    back = opened(replace(component, path=lines(clips, *rows[::-1])), clips / "w")
    assert [text for text, _ in talks(back)] == said[::-1], "the order of rows changes no question"
    other = opened(replace(component, path=lines(clips, *rows), shuffle_seed=1), clips / "w")
    assert [text for text, _ in talks(other)] != said


def test_every_order_is_equally_likely() -> None:
    """Chi-squared over the 24 orders of four, 23 degrees of freedom: 49.7 is exceeded once in a thousand times."""
    counts = Counter(tuple(shuffled(4, f"key {number}")) for number in range(4800))
    assert set(counts) == set(permutations(range(4)))
    assert sum((count - 200) ** 2 / 200 for count in counts.values()) < 49.7
    assert shuffled(len(LETTERS), "x") == shuffled(len(LETTERS), "x")


def test_all_questions_of_a_clip_are_in_one_split(clips: Path) -> None:
    for number in range(20):
        (clips / f"v{number}").mkdir()
        Image.new("RGB", (8, 8), (number,) * 3).save(clips / f"v{number}" / "0.png")
    rows = [{"video": f"v{number}", "question": f"{each}?", "answer": str(number)} for each in range(3) for number in range(20)]
    component = VideoQuestions(path=lines(clips, *rows), held_out=0.3, **KEYS)
    parts = [
        Counter(text.split(": ")[-1] for text, _ in talks(opened(replace(component, split=split), clips / "w")))
        for split in ("train", "held_out")
    ]
    assert not parts[0].keys() & parts[1].keys() and len(parts[0] | parts[1]) == 20 and min(map(len, parts)) > 1
    assert set((parts[0] + parts[1]).values()) == {3}


def test_text_that_looks_like_a_marker_or_a_control_token_is_text(clips: Path) -> None:
    row = {"video": "a", "question": "Is <image> here?", "answer": "<image>"}
    for template in TEMPLATES:
        source = opened(VideoQuestions(path=lines(clips, row), template=template, **KEYS), clips / "w")
        ((ids, learned, images),) = documents(source)
        assert images == 2 and ids.count(HOLE) == 4
        assert bytes(token for token in ids if token < 256).decode().count("<image>") == 2
        assert b"<image>" in bytes(token for token, keep in zip(ids, learned, strict=True) if keep and token < 256)


def test_texts_for_a_tokenizer_need_no_clips(clips: Path) -> None:
    texts = list(VideoQuestions(path=lines(clips, ROW), choices=("options",), **KEYS).texts())
    assert texts == [("a", "User: What?\nA. cat\nB. dog\nC. cow\nAnswer with the letter of the correct choice.\nAssistant: B\n")]


def test_clips_that_are_gone_are_named_without_reading_them(clips: Path) -> None:
    path = lines(clips, {**ROW, "video": "b"}, {**ROW, "video": "c.mp4"})
    source = opened(VideoQuestions(path=path, choices=("options",), **KEYS), clips / "w")
    assert source.missing() == []
    (clips / "c.mp4").unlink()
    (clips / "b" / "1.png").unlink()
    assert source.missing() == ["b/1.png", "c.mp4#0,2@0", "c.mp4#0,2@2"]


def test_prepared_questions_are_found_again_unless_something_changes(clips: Path) -> None:
    component = VideoQuestions(path=lines(clips, ROW), choices=("options",), **KEYS)
    first = opened(component, clips / "w")
    assert opened(component, clips / "w").fingerprint == first.fingerprint
    changes = [{"reply": "text"}, {"shuffle": True}, {"shuffle_seed": 2}, {"choice": "{letter}) {text}"}, {"frames": 1}]
    changes += [{"timestamps": True}, {"together": 2}, {"instruction": "?"}, {"ask": "?"}, {"fps": 2.0}]
    prints = [opened(replace(component, **change), clips / "w").path for change in changes]
    assert len({first.path, *prints}) == len(changes) + 1


def test_corpora_are_mixed_by_weight_in_exact_shares(clips: Path) -> None:
    """Rows of one document each: of 40 samples 24, 10 and 6 come from sources with weights 12, 5 and 3, and every 20 from each
    period too."""
    paths = []
    for name, words in (("open", "o"), ("choice", "c"), ("caption", "d")):
        (clips / name).mkdir()
        rows = [{**ROW, "video": "../b", "question": f"{words}{number}"} for number in range(7)]
        paths.append(lines(clips / name, *rows))
    keys = {**KEYS, "frames": 1}
    sources = [
        VideoQuestions(path=paths[0], weight=12, **keys),
        VideoQuestions(path=paths[1], weight=5, choices=("options",), reply="letter_text", **keys),
        VideoQuestions(path=paths[2], weight=3, ask="Describe.", **keys),
    ]
    chosen = Data(sources=sources, sequence_length=128, packing="pad", tokenizer=Bytes())
    stream = open_stream(chosen, workspace=clips / "w", global_batch=20, micro_batch=20, seed=1)
    for (batch,), _ in islice(stream.from_cursor(stream.start()), 2):
        said = [bytes(token for token in row if token < 256).decode() for row in batch.tokens.tolist()]
        kinds = Counter("caption" if "Describe" in text else "choice" if "A. cat" in text else "open" for text in said)
        assert kinds == {"open": 12, "choice": 5, "caption": 3}
        assert batch.extras["images"].shape == (20, 3, 8, 8)
