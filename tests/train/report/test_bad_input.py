"""Whatever lies in a directory: a page that says what is missing, or a refusal in words."""

import json

import pytest

from forge_core.errors import DataError
from forge_train.report.page import report
from train.report.test_page import Page


def test_a_place_without_a_run_is_refused(tmp_path) -> None:
    with pytest.raises(DataError, match=r"holds no run.*metrics\.jsonl"):
        report([tmp_path])
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    for absent in ("file", "absent"):
        with pytest.raises(DataError, match=f"{absent} is not a directory"):
            report([tmp_path / absent])


def test_one_bad_place_among_good_ones_is_refused(made, tmp_path) -> None:
    a = made("a", [1.0])
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="empty holds no run"):
        report([a, tmp_path / "empty"], tmp_path / "out.html")
    assert not (tmp_path / "out.html").exists()


@pytest.mark.parametrize(("text", "said"), [("{", "is not JSON"), ("[]", "but a list"), ("\xff", "is not JSON")])
def test_a_summary_that_is_none_is_refused(made, text, said) -> None:
    a = made("a", [1.0])
    (a / "report.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError, match=said) as refused:
        report([a])
    assert "remove it" in str(refused.value)


def test_an_empty_run_has_a_page_alone_and_among_others(made, tmp_path) -> None:
    empty = made("empty", [])
    assert "no step has been logged yet" in report([empty]).read_text()
    text = report([made("a", [1.0]), empty], tmp_path / "out.html").read_text()
    assert "empty: no step has been logged yet" in text
    assert [run["name"] for run in Page(text).data["runs"]] == ["a", "empty"]


def test_a_torn_last_line_is_left_out_and_said(made) -> None:
    a = made("a", [2.0, 1.0])
    with (a / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    text = report([a]).read_text()
    assert "1 line of metrics.jsonl left out: cut off, or damaged" in text
    assert Page(text).data["charts"][0]["curves"][0]["x"] == [1, 2]


def test_values_that_are_not_finite_are_gaps(made) -> None:
    a = made("a", [2.0, 0.0, 1.0])
    (a / "metrics.jsonl").write_text((a / "metrics.jsonl").read_text().replace('"loss": 0.0', '"loss": "nan"'))
    text = report([a]).read_text()
    assert Page(text).data["charts"][0]["curves"][0]["y"] == [2, None, 1]
    (a / "metrics.jsonl").write_text('{"step": 1, "loss": "nan", "time": "2026-03-01T08:00:00+00:00"}\n')
    text = report([a]).read_text()
    assert "<figure" not in text, "a curve without any number is none"
    (a / "metrics.jsonl").write_text('{"step": 1, "loss": 800.0}\n{"step": 2, "loss": "inf"}\n')
    assert ["training", "2", "inf", "inf", "-", "-", "800.0000 (1)"] in Page(report([a]).read_text()).rows


WRONG = {
    "name": 3,
    "status": ["finished"],
    "ended": 5,
    "unigram_entropy": "high",
    "bytes_per_token": {"held_out": None},
    "machine": "fast",
    "versions": [1],
    "model": 7,
    "samples": ["text"],
    "routing": {"layers": {"a": ["x"]}},
    "similarity": {"maps": [{"title": "a", "rows": ["x"], "columns": ["x"], "values": [[1.0, 2.0]]}]},
    "checkpoints": [{"bytes": "many"}],
    "warnings": [{}],
    "config": [1],
}


@pytest.mark.parametrize("key", WRONG)
def test_a_summary_with_something_else_under_a_key_is_shown_without_it(made, key) -> None:
    a = made("a", [1.0], **{key: WRONG[key]})
    text = report([a]).read_text()
    assert f"&#x27;{key}&#x27; of the run&#x27;s files is not what it should be" in text


def test_nothing_is_said_of_keys_that_are_null_or_unknown(made) -> None:
    text = report([made("a", [1.0], routing=None, later={"version": 2})]).read_text()
    assert "should be" not in text


@pytest.mark.parametrize("name", ["samples.json", "routing.json", "similarity.json", "config.toml"])
def test_files_that_cannot_be_read_are_left_out_and_said(made, name) -> None:
    a = made("a", [1.0])
    (a / name).write_text("{")
    assert f"{name} is not " in report([a]).read_text()


def test_text_that_is_no_unicode_is_written_all_the_same(made) -> None:
    a = made("a", [1.0], name="a")
    (a / "samples.json").write_text(json.dumps([{"prompt": "\ud800", "text": "end"}]))
    assert "end" in report([a]).read_text()
