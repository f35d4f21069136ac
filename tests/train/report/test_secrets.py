"""Secrets of a recipe reach neither the page of a run nor what is kept of its end."""

import re

import pytest

from forge_core.errors import CheckpointError
from forge_core.redact import redacted, redacted_text
from forge_core.registry import Registry
from forge_data.commands import recipe_data
from forge_train.inference.forge_weights import job_of
from forge_train.report.write import report, write_report

ROWS = [
    {"key": "trackers.0.api_key", "value": "sk-hidden-1", "origin": "--trackers"},
    {"key": "data.tokenizer.name", "value": "bpe", "origin": "demo.toml:20"},
]


def test_fault_48_secrets_reach_neither_page_nor_summary(tmp_path) -> None:
    toml = 'hf_token = "sk-1"\nurl = "https://me:sk-2@host/x?api_key=sk-3&v=1"\n[data.tokenizer]\nname = "bpe"\n'
    for config in (ROWS, toml):
        write_report(tmp_path, {"config": config, "warnings": ["no answer from https://me:sk-4@host"]})
        for name in ("report.html", "report.json"):
            text = (tmp_path / name).read_text()
            assert "sk-" not in text
            assert "bpe" in text


def test_fault_48_secrets_of_a_run_that_goes_on_stay_in_its_files(tmp_path) -> None:
    """Its recipe is whole, its log and samples say what they like."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    (tmp_path / "config.toml").write_text(
        '[trackers]\napi_key = "sk-1"\nurl = "https://me:sk-2@host"\n[model]\nname = "decoder"\n'
    )
    (tmp_path / "logs").mkdir()
    line = "2026-03-01T08:00:01.000Z rank 0/1 WARNING forge_train.trackers: no answer from https://me:sk-3@host"
    (tmp_path / "logs" / "rank-00000.log").write_text(line + "\n")
    (tmp_path / "samples.json").write_text('[{"prompt": "https://me:sk-4@host", "text": "b"}]')
    text = report([tmp_path]).read_text()
    assert "sk-" not in text and "decoder" in text and "no answer from https://" in text


def test_redaction_of_text() -> None:
    text = (
        'vocab_size = 4096\nmax_tokens = 12\napi_key = "s1"\nauth = { password = \'s2\', user = "u" }\n'
        'secret_list = [\n  "s3",\n  "s4",\n]\nname = "kept"\n[store.credentials]\na = "s5"\n[data.tokenizer]\nname = "bpe"\n'
        'tokenizer = { name = "bytes" }\nkeys = ["s6", "s7"]\nlast = "kept"\n'
    )
    shown = redacted_text(text)
    assert not re.search(r"s[1-7]", shown)
    for kept in (
        "vocab_size = 4096",
        "max_tokens = 12",
        'user = "u"',
        'name = "kept"',
        'name = "bpe"',
        'name = "bytes"',
        'last = "kept"',
    ):
        assert kept in shown
    assert shown.count("\n") == text.count("\n")


def test_redaction_of_plain_data() -> None:
    plain = {"a": {"AccessToken": "x", "deep": [{"passwords": {"one": "x", "n": 3}}]}, "tokenizer": "bpe", "tokens": 5}
    assert redacted(plain) == {
        "a": {"AccessToken": "(hidden)", "deep": [{"passwords": {"one": "(hidden)", "n": 3}}]},
        "tokenizer": "bpe",
        "tokens": 5,
    }


def test_what_a_checkpoint_hides_is_refused_where_it_is_needed() -> None:
    sources = [{"name": "text", "path": "corpus.txt"}, {"name": "text", "path": "s3://me:secret@bucket/more.txt"}]
    config = redacted({"model": {"name": "decoder"}, "data": {"sources": sources}})
    assert job_of({"config": config}, Registry(), "model").model is not None
    for needed in (lambda: job_of({"config": config}, Registry(), "data"), lambda: recipe_data.of(config, "checkpoint step-3")):
        with pytest.raises(CheckpointError, match=r"data\.sources\.1\.path is hidden"):
            needed()
    del config["data"]["sources"][1]
    assert recipe_data.of(config, "checkpoint step-3").data.sources == job_of({"config": config}, Registry(), "data").data.sources
