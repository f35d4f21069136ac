"""The report: self-contained, small, without secrets, and with numbers that can be checked by hand."""

import json
import math
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from forge_train.report.chart import Line, Reference, chart, thin, ticks
from hypothesis import given
from hypothesis import strategies as st

from forge_core.errors import CheckpointError, DataError
from forge_core.redact import redacted, redacted_text
from forge_core.registry import Registry
from forge_data.commands import recipe_data
from forge_train.inference.forge_weights import job_of
from forge_train.report.machine import machine, versions
from forge_train.report.write import rewrite_report, write_report
from forge_train.trackers.jsonl import JsonlTracker

SUMMARY = {
    "name": "small <demo>",
    "status": "finished",
    "seconds": 312.4,
    "unigram_entropy": 6.25,
    "bytes_per_token": {"held_out": 3.5},
    "config": [
        {"key": "model.dim", "value": 256, "origin": "demo.toml:9"},
        {"key": "trackers[0].api_key", "value": "sk-hidden-1", "origin": "--trackers"},
        {"key": "data.tokenizer.name", "value": "bpe", "origin": "demo.toml:20"},
    ],
    "machine": machine(),
    "versions": versions(),
    "model": {"parameters": 7_301_120},
    "samples": [{"prompt": "def add(", "text": "a, b):\n    return a < b", "temperature": 0.8}],
    "checkpoints": [{"step": 600, "path": "checkpoints/step-600", "bytes": 87_654_321}],
    "warnings": ["the corpus is <small>"],
}


@pytest.fixture
def run(tmp_path):
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    for step in range(1, 601):
        loss = 4.0 + 4.3 * math.exp(-step / 80)
        numbers = {"loss": loss, "lr": 1e-3, "grad_norm": 1.0, "tokens": step * 4096, "tokens_per_second": 21000.0}
        tracker.write(step, numbers)
        if step % 100 == 0:
            tracker.write(
                step, {"evaluation/held_out/loss": loss + 0.1, "evaluation/held_out/perplexity": 1.0, "tokens": step * 4096}
            )
    return tmp_path


class Page(HTMLParser):
    """Collects tags, attributes that fetch, and the table cells."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.rows: list[list[str]] = []
        self.inside = False
        self.feed(text)

    def handle_starttag(self, tag, attributes) -> None:
        self.tags.append(tag)
        self.addresses += [value for name, value in attributes if name in ("src", "href", "action", "data", "srcset")]
        if tag == "tr":
            self.rows.append([])
        self.inside = tag in ("td", "th")
        if self.inside:
            self.rows[-1].append("")

    def handle_endtag(self, tag) -> None:
        self.inside = False

    def handle_data(self, data) -> None:
        if self.inside:
            self.rows[-1][-1] += data


def test_the_page_is_small_and_fetches_nothing(run) -> None:
    path = write_report(run, SUMMARY)
    text = path.read_text()
    page = Page(text)
    assert path == run / "report.html"
    assert path.stat().st_size < 200_000
    assert page.addresses == []
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert not re.search(r"url\(|@import|https?://", text)
    assert "default-src 'none'" in text
    assert "prefers-color-scheme: dark" in text


def test_the_result_table_is_right(run) -> None:
    rows = Page(write_report(run, SUMMARY).read_text()).rows
    final = 4.0 + 4.3 * math.exp(-600 / 80)
    assert [
        "training, last logged step",
        "600",
        f"{final:.4f}",
        f"{math.exp(final):.2f}",
        "unknown",
        f"{6.25 - final:+.4f}",
    ] in rows
    held = final + 0.1
    bits = held / math.log(2) / 3.5
    assert ["held_out", "600", f"{held:.4f}", f"{math.exp(held):.2f}", f"{bits:.4f}", f"{6.25 - held:+.4f}"] in rows
    assert ["unigram entropy of the corpus", "", "6.2500", f"{math.exp(6.25):.2f}", "", ""] in rows


def test_five_charts_are_well_formed_and_show_the_entropy(run) -> None:
    text = write_report(run, SUMMARY).read_text()
    charts = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)]
    titles = [svg.attrib["aria-label"] for svg in charts]
    assert titles == [
        "Loss against step",
        "Loss against tokens seen",
        "Learning rate",
        "Gradient norm before clipping",
        "Throughput",
    ]
    assert [("unigram entropy 6.250" in "".join(svg.itertext())) for svg in charts] == [True, True, False, False, False]
    assert [len(svg.findall("polyline")) for svg in charts] == [2, 2, 1, 1, 1]


def test_markup_in_values_is_text(run) -> None:
    text = write_report(run, SUMMARY).read_text()
    assert "small &lt;demo&gt;" in text and "<small>" not in text
    assert "return a &lt; b" in text


def test_secrets_reach_neither_page_nor_summary(run) -> None:
    toml = 'hf_token = "sk-1"\nurl = "https://me:sk-2@host/x?api_key=sk-3&v=1"\n[data.tokenizer]\nname = "bpe"\n'
    for config in (SUMMARY["config"], toml):
        write_report(run, {**SUMMARY, "config": config, "warnings": ["no answer from https://me:sk-4@host"]})
        for name in ("report.html", "report.json"):
            text = (run / name).read_text()
            assert "sk-" not in text
            assert "bpe" in text


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


def test_rewriting_gives_the_same_page_and_needs_no_summary(run) -> None:
    first = write_report(run, SUMMARY).read_text()
    assert rewrite_report(run).read_text() == first
    (run / "report.json").unlink()
    assert "the run has not ended" in rewrite_report(run).read_text()


def test_a_directory_without_a_run_is_refused(tmp_path) -> None:
    with pytest.raises(DataError, match=r"metrics\.jsonl"):
        rewrite_report(tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "report.json").write_text("{")
    with pytest.raises(DataError, match="is not JSON"):
        rewrite_report(tmp_path)


def test_a_run_without_any_number_still_has_a_page(tmp_path) -> None:
    text = write_report(tmp_path, {"name": "empty"}).read_text()
    assert "<h1>empty</h1>" in text and "<svg" not in text


def test_the_command_answers_in_json(run, capsys) -> None:
    from forge_train.commands.report import report

    report(run, as_json=True)
    answer = json.loads(capsys.readouterr().out)
    assert answer == {"report": str(run / "report.html"), "bytes": (run / "report.html").stat().st_size}


def test_a_curve_is_drawn_where_its_values_are() -> None:
    svg = ElementTree.fromstring(
        chart("t", [Line("a", [(0, 0.0), (5, 10.0), (10, 5.0)])], x="x", y="y", references=[Reference("r", 5.0)])
    )
    points = [tuple(map(float, at.split(","))) for at in svg.find("polyline").attrib["points"].split()]
    (x0, y0), (x1, y1), (x2, y2) = points
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert y0 - y1 == pytest.approx(2 * (y0 - y2), abs=0.2) and y1 < y2 < y0  # SVG counts downward
    (reference,) = [line for line in svg.findall("line") if line.attrib["class"] == "reference"]
    assert float(reference.attrib["y1"]) == pytest.approx(y2, abs=0.1)


def test_gaps_stand_where_values_are_not_finite() -> None:
    nan = math.nan
    svg = ElementTree.fromstring(
        chart("t", [Line("a", [(0, 1.0), (1, 2.0), (2, nan), (3, 1.0), (4, 2.0), (5, math.inf)])], x="", y="")
    )
    assert [len(line.attrib["points"].split()) for line in svg.findall("polyline")] == [2, 2]
    assert chart("t", [Line("a", [(0, nan)])], x="", y="") == ""


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))
def test_ticks_enclose_and_are_few(low: float, size: float) -> None:
    found = ticks(low, low + size, 6)
    step = found[1] - found[0]
    assert found[0] <= low + step * 1e-6 and found[-1] >= low + size - step * 1e-6
    assert 2 <= len(found) <= 9
    leading = step / 10 ** math.floor(math.log10(step * 1.0001))
    assert min(abs(leading - nice) for nice in (1, 2, 5)) < 1e-3


def test_thinning_keeps_spikes_and_ends() -> None:
    points = [(float(i), 1.0) for i in range(10_000)]
    points[5_432], points[7_001] = (5_432.0, 99.0), (7_001.0, -99.0)
    kept = thin(points)
    assert len(kept) <= 402 and {(5_432.0, 99.0), (7_001.0, -99.0)} <= set(kept)
    assert kept[0] == points[0] and kept[-1] == points[-1]
    assert kept == sorted(kept)
