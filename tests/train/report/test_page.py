"""The page of a run: self-contained, small, and with numbers that can be checked by hand."""

import base64
import json
import math
import re
import tomllib
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from forge_core.terminal import size
from forge_train.report.curves import History
from forge_train.report.html import embedded, static, table
from forge_train.report.page import commit, machine, report, versions, write_report
from forge_train.report.record import RunRecord
from forge_train.report.results import results
from forge_train.trackers import JsonlTracker

SUMMARY = {
    "name": "small <demo>",
    "status": "finished",
    "unigram_entropy": 6.25,
    "bytes_per_token": {"held_out": 3.5},
    "config": [
        {"key": "model.dim", "value": 256, "origin": "demo.toml:9"},
        {"key": "data.tokenizer.name", "value": "bpe", "origin": "demo.toml:20"},
    ],
    "machine": machine(),
    "versions": versions(),
    "model": {"parameters": 7_301_120},
    "samples": [{"prompt": "def add(", "text": "a, b):\n    return a < b</script>", "temperature": 0.8}],
    "checkpoints": [{"step": 600, "path": "checkpoints/step-600", "bytes": 87_654_321}],
    "warnings": ["the corpus is <small>"],
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    for step in range(1, 601):
        loss = 4.0 + 4.3 * math.exp(-step / 80)
        tokens = {"tokens": step * 4096}
        tracker.write(step, {"loss": loss, "lr": 1e-3, "grad_norm": 1.0, "tokens_per_second": 21000.0, "odd": -loss, **tokens})
        if step % 100 == 0:
            tracker.write(step, {"evaluation/held_out/loss": loss + 0.1, "evaluation/held_out/perplexity": 1.0, **tokens})
    return tmp_path


class Page(HTMLParser):
    """Collects tags, attributes that fetch, texts of elements that have an id or a class, and the cells of tables."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str | None] = []
        self.rows: list[list[str]] = []
        self.headings: list[str] = []
        self.scripts: list[str] = []
        self.data: dict = {}
        self.inside = ""
        self.feed(text)

    def handle_starttag(self, tag, attributes) -> None:
        self.tags.append(tag)
        self.addresses += [value for name, value in attributes if name in ("src", "href", "action", "data", "srcset")]
        self.inside = tag if tag in ("td", "th", "h2", "script") else self.inside
        if tag == "script" and ("type", "application/json") in attributes:
            self.inside = "json"
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag) -> None:
        self.inside = ""

    def handle_data(self, data) -> None:
        if self.inside in ("td", "th"):
            self.rows[-1][-1] += data
        elif self.inside == "h2":
            self.headings.append(data)
        elif self.inside == "script":
            self.scripts.append(data)
        elif self.inside == "json":
            self.data = json.loads(data)


def test_the_page_is_small_and_fetches_nothing(run) -> None:
    path = write_report(run, SUMMARY)
    text = path.read_text()
    page = Page(text)
    assert path == run / "report.html"
    assert path.stat().st_size < 200_000
    assert page.addresses == []
    assert not {"link", "img", "iframe", "object"} & set(page.tags)
    assert not re.search(r"url\(|@import|fetch\(|XMLHttp|WebSocket|EventSource|sendBeacon|import\(", text)
    assert set(re.findall(r"https?://[^\s<]*", text)) == {"https://github.com/leeoniya/uPlot"}, "only the banner of the library"
    assert "default-src 'none'" in text
    assert "prefers-color-scheme: dark" in text


def test_only_the_scripts_of_the_page_may_run(run) -> None:
    text = write_report(run, SUMMARY).read_text()
    scripts = Page(text).scripts
    assert len(scripts) == 3
    hashes = [base64.b64encode(sha256(script.encode()).digest()).decode() for script in scripts]
    assert re.findall(r"'sha256-([^']*)'", text) == hashes
    assert "unsafe-eval" not in text and not re.search(r"script-src[^;\"]*unsafe", text)
    assert not re.search(r"<[^>]* on[a-z]+=", text.replace(scripts[0], "")), "a handler in an attribute would not run"


def test_the_license_of_the_library_is_on_the_page(run) -> None:
    text = write_report(run, SUMMARY).read_text()
    assert "Copyright (c) 2022 Leon Sorokin" in text and "Permission is hereby granted, free of charge" in text


def test_the_version_of_the_library_is_the_one_that_is_named() -> None:
    root = Path(__file__).parents[3]
    (version,) = re.findall(r"uPlot \(v([\d.]+)\)", static("uplot/uPlot.iife.min.js")[:200])
    assert f"uPlot {version}," in static("uplot/README.md")
    assert f"| {version} | MIT" in (root / "THIRD_PARTY.md").read_text()
    project = tomllib.loads((root / "apps/forge-train/pyproject.toml").read_text())["project"]
    licenses = {str(path.relative_to(root / "apps/forge-train")) for path in (root / "apps").rglob("static/*/LICENSE")}
    assert licenses and licenses <= set(project["license-files"]), "they come with the wheel as licenses too"


def test_the_result_table_is_right(run) -> None:
    rows = Page(write_report(run, SUMMARY).read_text()).rows
    final = 4.0 + 4.3 * math.exp(-600 / 80)
    lowest = f"{final:.4f} (600)"
    assert ["training", "600", f"{final:.4f}", f"{math.exp(final):.2f}", "-", f"{6.25 - final:+.4f}", lowest] in rows
    held = final + 0.1
    bits = held / math.log(2) / 3.5
    told = [f"{held:.4f}", f"{math.exp(held):.2f}", f"{bits:.4f}", f"{6.25 - held:+.4f}", f"{held:.4f} (600)"]
    assert ["held_out", "600", *told] in rows
    assert ["unigram entropy of the corpus", "", "6.2500", f"{math.exp(6.25):.2f}", "", "", ""] in rows
    assert ["checkpoints/step-600", "600", size(87_654_321)] in rows


def test_a_classifier_has_its_accuracy_and_no_perplexity(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    tracker.write(1, {"loss": 0.7, "tokens": 9, "evaluation/held/loss": 0.6, "evaluation/held/accuracy": 0.75})
    page = Page(write_report(tmp_path, {"metrics": ["accuracy"]}).read_text())
    assert ["training", "1", "0.7000", "-", "0.7000 (1)"] in page.rows
    assert ["held", "1", "0.6000", "0.7500", "0.6000 (1)"] in page.rows
    assert ["loss on", "step", "loss", "accuracy", "lowest (step)"] in page.rows


def test_beside_a_classifier_a_language_model_keeps_its_perplexity() -> None:
    history = History.of([{"step": 1, "loss": 2.0}])
    runs = [RunRecord("a", summary={"metrics": ["accuracy"]}, history=history), RunRecord("b", history=history)]
    found = Page(results(runs)).rows
    assert found[0] == [
        *("run", "loss on", "step", "loss", "perplexity", "bits per byte", "below the entropy by", "accuracy", "lowest (step)")
    ]
    assert [row[1:] for row in found[1:]] == [
        ["training", "1", "2.0000", "-", "-", "-", "-", "2.0000 (1)"],
        ["training", "1", "2.0000", f"{math.exp(2):.2f}", "-", "-", "-", "2.0000 (1)"],
    ]


def test_every_metric_has_its_chart_and_points(run) -> None:
    text = write_report(run, SUMMARY).read_text()
    titles = re.findall(r"<figcaption><b>(.*?)</b>", text)
    assert titles == ["Loss", "Gradient norm", "Learning rate", "Throughput", "odd"]
    charts = Page(text).data["charts"]
    assert [chart["labels"] for chart in charts] == [["training", "held_out"], ["norm"], ["rate"], ["all ranks"], ["odd"]]
    training, held_out = charts[0]["curves"]
    assert training["x"] == list(range(1, 601)) and held_out["x"] == list(range(100, 601, 100))
    assert training["y"] == pytest.approx([4.0 + 4.3 * math.exp(-step / 80) for step in range(1, 601)], rel=1e-5)
    assert charts[0]["references"] == [{"value": 6.25, "text": "unigram entropy 6.250"}]
    assert all(not chart["references"] for chart in charts[1:])
    assert Page(text).data["runs"][0]["clock"]["tokens"][-1] == 600 * 4096


def test_markup_in_values_is_text(run) -> None:
    text = write_report(run, SUMMARY).read_text()
    assert "small &lt;demo&gt;" in text and "<small>" not in text
    assert "return a &lt; b&lt;/script&gt;" in text
    assert Page(text).data["runs"][0]["name"] == "small <demo>"


def test_no_text_ends_the_data_of_the_page() -> None:
    name = "</script><!--<script>&amp;\u2028"
    made = embedded("data", {"name": name})
    assert "<" not in made.removeprefix('<script type="application/json" id="data">').removesuffix("</script>")
    assert Page(made).data == {"name": name}


def test_writing_again_gives_the_same_page_and_needs_no_summary(run) -> None:
    first = write_report(run, SUMMARY).read_text()
    assert report([run]).read_text() == first
    (run / "report.json").unlink()
    again = report([run]).read_text()
    assert "has recorded no end" in again and "finished" not in again


def test_a_run_that_went_on_after_its_end_says_so(run) -> None:
    write_report(run, {**SUMMARY, "ended": "2020-01-01T00:00:00.000+00:00"})
    (run / "config.toml").write_text("[model]\ndim = 512\n")
    text = report([run]).read_text()
    assert "has recorded no end" in text
    assert ["model.dim", "512", "config.toml"] in Page(text).rows, "the recipe of the newest start"
    write_report(run, {**SUMMARY, "ended": "2999-01-01T00:00:00.000+00:00"})
    text = report([run]).read_text()
    assert "finished" in text and ["model.dim", "256", "demo.toml:9"] in Page(text).rows


def test_what_a_run_that_goes_on_has_left_so_far_is_shown(run) -> None:
    (run / "samples.json").write_text('[{"prompt": "newest", "text": " text", "step": 400}]')
    (run / "routing.json").write_text('{"step": 400, "layers": {"blocks.1": [0.5, 1.5]}}')
    text = report([run]).read_text()
    assert "<b>newest</b> text" in text
    assert "Load of experts" in text and "blocks.1, expert 1: 1.50" in text


def test_likeness_of_layers_is_a_heat_map_with_a_cell_for_each_number(run) -> None:
    values = [[1.0, 0.5, None], [0.25, -0.5, 2.0]]
    maps = [{"title": "Likeness <of> layers", "rows": ["blocks.0", "blocks.1"], "columns": ["a", "b", "c"], "values": values}]
    (run / "similarity.json").write_text(json.dumps({"step": 400, "maps": maps}))
    text = report([run]).read_text()
    drawn = ElementTree.fromstring(text[text.index("<svg", text.index("heat-map")) : text.index("</svg>") + 6])
    assert "step 400; unbiased linear CKA" in text and drawn.get("aria-label") == "Likeness <of> layers"
    cells = list(drawn.iter("rect"))
    assert [cell.get("fill-opacity") for cell in cells] == ["1.00", "0.50", "0.25", "0.00", "1.00"]
    assert [cell[0].text for cell in cells][2:4] == ["blocks.1, a: 0.250", "blocks.1, b: -0.500"]
    assert [cell.get("x") for cell in cells] == ["90.0", "122.0", "90.0", "122.0", "154.0"]
    assert [cell.get("y") for cell in cells] == ["38.0", "38.0", "70.0", "70.0", "70.0"]


def test_a_heat_map_of_many_layers_fits_the_page_and_names_some() -> None:
    names = [f"blocks.{number}" for number in range(96)]
    drawn = ElementTree.fromstring(table("t", "", names, names, [[0.5] * 96] * 96))
    assert all(float(cell.get("x", "")) + float(cell.get("width", "")) <= 720 for cell in drawn.iter("rect"))
    named = [label.text for label in drawn.iter("text") if label.get("class") == "tick"]
    assert named[:3] == ["blocks.0", "blocks.3", "blocks.6"] and len(named) == 64
    assert not list(drawn.iter("title")), "thousands of texts would only make the page large"


def test_a_run_without_any_number_still_has_a_page(tmp_path) -> None:
    text = write_report(tmp_path, {"name": "empty"}).read_text()
    assert "<h1>empty</h1>" in text and "no step has been logged yet" in text
    assert "<script" not in text and "<figure" not in text


def test_the_command_answers_in_json(run, capsys) -> None:
    from forge_train.commands.reports import report as command

    command([run], as_json=True)
    answer = json.loads(capsys.readouterr().out)
    assert answer == {"report": str(run / "report.html"), "bytes": (run / "report.html").stat().st_size}


def test_a_working_directory_has_a_commit_where_git_knows_one(tmp_path) -> None:
    assert commit(tmp_path) == {}
    assert commit(tmp_path / "absent") == {}
    if (Path(__file__).parents[3] / ".git").exists():
        assert re.fullmatch(r"\S*[0-9a-f]{12}(-dirty)?|v\S+", commit(Path(__file__).parent)["Commit of the working directory"])
