"""Secrets of a recipe reach neither the page of a run nor what is kept of its end."""

import contextlib
import io
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from forge_core.errors import CheckpointError
from forge_core.redaction import redacted, redacted_text
from forge_core.registry import Registry
from forge_data.commands.mix import recipe_of
from forge_data.storage.files import File, _cached_path
from forge_parallel.launch.environment import Launch
from forge_train.commands.run import run_recipe
from forge_train.formats.forge import job_of
from forge_train.process.logs import logging_of
from forge_train.report.page import report, write_report
from train.runs import TINY

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


PLUGIN = '''
import logging
from dataclasses import dataclass, field

from forge_core.component import Component
from forge_core.protocols.run import Hook


@dataclass(frozen=True, kw_only=True)
class Client:
    db_pwd: str = ""
    sig: str = ""


@dataclass(frozen=True, kw_only=True)
class Talks(Component):
    """Says what it should not."""

    webhook: str = ""
    client: Client = field(default_factory=Client)

    def build(self):
        return Talkative(self)


class Talkative(Hook):
    def __init__(self, options):
        self.options = options

    def after_step(self, run, result):
        logging.getLogger("a.library").warning("no answer from %s (dsn=%s)", self.options.webhook, self.options.client.db_pwd)
        try:
            raise ValueError(f"Authorization: Bearer {self.options.client.sig}")
        except ValueError:
            logging.getLogger("a.library").exception("refused")
'''


@pytest.fixture
def server() -> Iterator[str]:
    """Address of a server of lines of text, whatever the query is; anything but `/x.jsonl` is not found."""
    lines = b"".join(b'{"text": "to be or not to be, that is question %d"}\n' % number for number in range(60))

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = self.path.partition("?")[0] == "/x.jsonl"
            self.send_response(200 if found else 404)
            self.send_header("Content-Length", str(len(lines) if found else 0))
            self.end_headers()
            if found and self.command == "GET":
                self.wfile.write(lines)

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{served.server_port}"
        served.shutdown()


def test_trials_f5_no_file_of_a_run_no_file_name_and_no_word_has_a_secret(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Enumerates all that a run leaves. Only the recipe that can be run again is whole, and only its owner may read it."""
    monkeypatch.setenv("FORGE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "talks.py").write_text(PLUGIN)
    query = "token=HUSH1&X-Amz-Signature=HUSH2&sig=HUSH3#HUSH4"
    there = f"http://user:HUSH5@{server}/x.jsonl?{query}"
    recipe = (
        TINY.partition("[[data.sources]]")[0].replace("vocab_size = 61", "vocab_size = 257")
        + f'[data.tokenizer]\nname = "bytes"\n[[data.sources]]\nname = "jsonl"\npath = "{there}"\n'
        + f'[data.evaluation.held_out]\nname = "jsonl"\npath = "{there}"\n[train]'
        + TINY.partition("[train]")[2]
        + "".join(f'[[hooks]]\nname = "{name}"\n' for name in ("evaluate", "save", "log", "./talks.py:Talks"))
        + f'webhook = "http://user:HU/S@SH6@{server}/y"\nclient = {{db_pwd = "HUSH7", sig = "HUSH8abcdef"}}\n'
        + '[[trackers]]\nname = "tensorboard"\n'
    )
    (tmp_path / "r.toml").write_text(recipe)
    said = []
    for arguments in ([], [f"--data.sources.0.path=http://user:HUSH9@{server}/gone.jsonl?{query}"], ["--hooks.3.client.sig=1"]):
        out = io.StringIO()
        with (
            contextlib.chdir(tmp_path),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(out),
            logging_of(0, 1) as log,
        ):
            said.append((run_recipe("r.toml", arguments, False, Launch(), log), out.getvalue()))
    assert [code for code, _ in said] == [0, 2, 2], said
    for _, text in said:
        assert "HUSH" not in text and "SH6" not in text, text
    assert f"http://(hidden)@{server}/y" in said[0][1] and f"http://(hidden)@{server}/gone.jsonl?(hidden)" in said[1][1]
    files = [path for folder in ("runs", "cache") for path in (tmp_path / folder).rglob("*") if path.is_file()]
    assert {"report.html", "report.json", "manifest.json", "rank-00000.log", "metrics.jsonl"} <= {path.name for path in files}
    for path in (*files, _cached_path(File("x.jsonl", there, 1, "stamp"))):
        assert "HUSH" not in str(path)
    for path in files:
        if path.name == "config.toml":
            assert path.stat().st_mode & 0o077 == 0, "a recipe that can be run again is for its owner only"
        else:
            assert b"HUSH" not in path.read_bytes() and b"SH6" not in path.read_bytes(), path


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
        "a": {"AccessToken": "(hidden)", "deep": [{"passwords": {"one": "(hidden)", "n": "(hidden)"}}]},
        "tokenizer": "bpe",
        "tokens": 5,
    }


def test_what_a_checkpoint_hides_is_refused_where_it_is_needed() -> None:
    sources = [{"name": "text", "path": "corpus.txt"}, {"name": "text", "path": "s3://me:secret@bucket/more.txt"}]
    config = redacted({"model": {"name": "decoder"}, "data": {"sources": sources}})
    assert job_of({"config": config}, Registry(), "model").model is not None
    for needed in (
        lambda: job_of({"config": config}, Registry(), "data"),
        lambda: recipe_of(config, "checkpoint step-3"),
    ):
        with pytest.raises(CheckpointError, match=r"data\.sources\.1\.path is hidden"):
            needed()
    del config["data"]["sources"][1]
    assert recipe_of(config, "checkpoint step-3").data.sources == job_of({"config": config}, Registry(), "data").data.sources
