"""The page in a browser: what is under the pointer, zoom, runs that are switched off, axes, smoothing, dark and narrow."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forge_train.report.write import report
from harness.browser import Browser, browser, chromium
from train.report.conftest import metrics, time_of

pytestmark = pytest.mark.skipif(chromium() is None, reason="no chromium or google-chrome on the path")

STEPS = range(1, 401)


def loss(run: int, step: int) -> float:
    """Of run 0 and 1: growing apart, and never equal."""
    return 2.0 + run + (3 + run) * math.exp(-step / 100)


def of(run: int, steps: range) -> dict[int, dict[str, float]]:
    lines = {step: {"loss": loss(run, step), "tokens": 1000 * step, "peak_memory": 3 * 2**30} for step in steps}
    for step in (100, 200):
        lines[step]["evaluation/held_out/loss"] = 1.0
    return lines


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, of which the second is half as long, twice as slow, and was started again after step 150."""
    folder = tmp_path_factory.mktemp("runs")
    metrics(folder / "first", of(0, STEPS))
    other = metrics(folder / "second", of(1, range(1, 201)), seconds=72.0)
    with (other / "metrics.jsonl").open("a") as file:
        file.write(f'{{"rewind": 150, "time": "{time_of(20_000)}"}}\n')
        file.write(f'{{"step": 160, "time": "{time_of(20_720)}", "loss": "nan", "tokens": 160000}}\n')
        file.write(f'{{"step": 200, "time": "{time_of(23_600)}", "loss": {loss(1, 200)}, "tokens": 200000}}\n')
    return report([folder])


@pytest.fixture(scope="module")
def tab() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


@pytest.fixture
def view(tab: Browser, page: Path) -> Iterator[Browser]:
    """The page, freshly loaded; nothing of a test may make the browser complain or ask for another file."""
    tab.complaints.clear()
    tab.requests.clear()
    tab.open(page)
    yield tab
    assert tab.complaints == []
    assert tab.requests == [page.resolve().as_uri()]


def plot(view: Browser, chart: int = 0) -> tuple[float, float, float, float]:
    """Left, top, width and height of a chart's area in the window, after it was scrolled to."""
    over = f"document.querySelectorAll('figure .u-over')[{chart}]"
    view.run(f"{over}.scrollIntoView({{block: 'center'}})")
    return tuple(
        view.run(f"(() => {{ const r = {over}.getBoundingClientRect(); return [r.left, r.top, r.width, r.height]; }})()")
    )


def hover(view: Browser, part: float, chart: int = 0, height: float = 0.5) -> list[str]:
    """What is told at a part of the x axis: a title, then a line for each curve."""
    left, top, wide, high = plot(view, chart)
    view.move(left + wide * part, top + high * height)
    return told(view, chart)


def told(view: Browser, chart: int = 0) -> list[str]:
    tip = f"document.querySelectorAll('figure .tip')[{chart}]"
    return view.run(f"{tip}.hidden ? [] : [...{tip}.children].map((line) => line.textContent)")


def click(view: Browser, selector: str) -> None:
    view.run(f"document.querySelector(`{selector}`).click()")


def ticks(view: Browser) -> str:
    return view.run("document.getElementById('range').textContent")


def at(step: int, low: int = 1, high: int = 400) -> float:
    return (step - low) / (high - low)


def test_the_pointer_tells_the_values_of_a_step(view: Browser) -> None:
    title, *lines = hover(view, at(120))
    assert title == "step 120"
    assert lines == [f"second, training{loss(1, 120):.5g}", f"first, training{loss(0, 120):.5g}"]
    left, top, *_ = plot(view)
    view.move(left - 200, top)
    assert told(view) == []


def test_evaluations_are_told_near_their_points_with_their_step(view: Browser) -> None:
    assert "first, held_out1" in hover(view, at(100))
    assert "first, held_out (step 100)1" in hover(view, at(104))
    assert not [line for line in hover(view, at(150)) if "held_out" in line]


def test_dragging_zooms_into_all_charts_and_back(view: Browser) -> None:
    assert ticks(view) == "drag over a curve to zoom"
    left, top, wide, high = plot(view)
    view.drag(left + wide * at(100), top + high / 2, left + wide * at(200))
    view.until("!document.getElementById('all').hidden")
    low, high_step = (int(word) for word in ticks(view).replace("step ", "").split(" to "))
    assert abs(low - 100) <= 1 and abs(high_step - 200) <= 1
    for chart in (0, 1):
        title, *_ = hover(view, 0.5, chart)
        assert abs(int(title.removeprefix("step ")) - 150) <= 1
    view.run("document.querySelector('figure .u-over').dispatchEvent(new MouseEvent('dblclick', {bubbles: true}))")
    assert ticks(view) == "drag over a curve to zoom"
    assert hover(view, at(301))[0] == "step 301"
    view.drag(left + wide * 0.2, plot(view)[1] + high / 2, left + wide * 0.3)
    click(view, "#all")
    assert ticks(view) == "drag over a curve to zoom"


def test_the_vertical_axis_follows_the_zoom(view: Browser) -> None:
    """The last part of a curve is flat; alone, it fills the height."""
    spots = (
        "[...document.querySelectorAll('figure:first-child .u-cursor-pt:not(.u-off)')].map((s) => s.getBoundingClientRect().top)"
    )

    def fall(begin: float, end: float) -> float:
        tops = []
        for part in (begin, end):
            hover(view, part)
            tops.append(next(top for top in view.run(spots) if top > 0))
        return tops[1] - tops[0]

    click(view, "[data-run='1']")
    left, top, wide, high = plot(view)
    assert 0 < fall(at(300), at(390)) < 0.1 * high
    view.drag(left + wide * at(300), top + high / 2, left + wide * at(390))
    view.until("!document.getElementById('all').hidden")
    assert fall(0.01, 0.99) > 0.7 * high


def test_the_cursor_is_in_all_charts_and_the_values_in_one(view: Browser) -> None:
    hover(view, at(120))
    lines = "[...document.querySelectorAll('figure .u-cursor-x')].map((line) => line.style.transform)"
    first, second = view.run(lines)
    assert first == second and first not in ("", "translate(-10px)")
    assert told(view, 1) == []


def test_a_run_and_a_curve_can_be_switched_off(view: Browser) -> None:
    click(view, "[data-run='1']")
    assert hover(view, at(120))[1:] == [f"first, training{loss(0, 120):.5g}"]
    assert view.run("document.querySelector('[data-run=\"1\"]').getAttribute('aria-pressed')") == "false"
    assert hover(view, at(120), 1)[1:] == ["first3 GiB"]
    click(view, "[data-run='1']")
    click(view, "figure .legend button")
    assert hover(view, at(102)) == ["step 100", "first, held_out1", "second, held_out1"]


def test_the_axis_shrinks_to_the_runs_that_are_shown(view: Browser) -> None:
    click(view, "[data-run='0']")
    assert hover(view, at(120, high=200))[0] == "step 120"


def test_tokens_and_hours_are_axes(view: Browser) -> None:
    """The second run took 72 s a step up to 150, then 720 s to step 160, and stood still between its starts."""
    click(view, "[data-axis='tokens']")
    title, *lines = hover(view, at(120))
    assert title == "120k tokens" and f"second, training{loss(1, 120):.5g}" in lines
    click(view, "[data-axis='hours']")
    click(view, "[data-run='0']")
    hours = (149 * 72 + 23_600 - 20_000) / 3600
    assert hover(view, 0.999) == [f"{hours:.5g} hours", f"second, training{loss(1, 200):.5g}"]


def test_smoothing_is_told_and_leaves_what_has_no_noise(view: Browser) -> None:
    slide = "(() => { const s = document.getElementById('smooth'); s.value = 4; s.dispatchEvent(new Event('input')); })()"
    view.run(slide)
    assert view.run("document.getElementById('width').textContent") == "8 steps"
    title, *lines = hover(view, at(120))
    assert title == "step 120, smoothed" and len(lines) == 2
    assert hover(view, at(120), 1)[0] == "step 120"


def test_smoothed_values_are_weighted_means(view: Browser) -> None:
    xs, ys, width = [1.0, 2.0, 4.0, 5.0, 50.0], [3.0, None, 1.0, 8.0, 2.0], 3.0
    found = view.run(f"series.smoothed({xs}, [3, null, 1, 8, 2], {width})")
    for x, y, value in zip(xs, ys, found, strict=True):
        if y is None:
            assert value is None
            continue
        weights = {other: math.exp(-abs(x - xs[other]) / width) for other, there in enumerate(ys) if there is not None}
        assert value == pytest.approx(sum(ys[o] * w for o, w in weights.items()) / sum(weights.values()))  # type: ignore[operator]


def test_a_place_on_another_axis_lies_on_a_straight_line(view: Browser) -> None:
    clock = "{step: [10, 20, 30], tokens: [100, null, 500], hours: [null, null, null]}"
    places = view.run(f"[5, 10, 15, 30, 40].map(series.along({clock}, 'tokens'))")
    assert places == [100, 100, 200, 500, 500]
    assert view.run(f"[15].map(series.along({clock}, 'hours'))") == [None]
    assert view.run("series.along({step: [10], tokens: [7]}, 'tokens')(99)") == 7
    assert view.run(f"series.along({clock}, 'step')(17)") == 17


def test_gaps_and_the_points_between_them(view: Browser) -> None:
    assert view.run("series.lonely([1, null, 2, undefined, null, 3, 4, null, 5])") == [0, 2, 8]
    assert view.run("series.lonely([undefined, 7, undefined])") == [1]
    assert view.run("series.table((x) => x, [1, 2, 3], [1, -1, 0], true)") == [[1, 2, 3], [1, None, None]]
    assert view.run("series.table((x) => (x > 2 ? null : x), [1, 2, 3], [1, -1, 0], false)") == [[1, 2], [1, -1]]


def test_numbers_read_well(view: Browser) -> None:
    said = view.run("[0, 2.3456789, 1e-7, 54321, 1234567, -2.5e9].map(series.text)")
    assert said == ["0", "2.3457", "1e-7", "54321", "1.235M", "-2.5G"]
    assert view.run("[0, 1000, 1536, 41e9].map(series.bytes)") == ["0 B", "1000 B", "1.5 KiB", "38.18 GiB"]


def picture_of(view: Browser) -> Any:
    return view.run("document.querySelector('figure canvas').toDataURL()")


def test_a_logarithmic_axis_changes_the_picture_and_keeps_the_values(view: Browser) -> None:
    before = picture_of(view)
    click(view, "#log")
    view.until("document.getElementById('log').getAttribute('aria-pressed') === 'true'")
    assert hover(view, at(120))[1:] == [f"second, training{loss(1, 120):.5g}", f"first, training{loss(0, 120):.5g}"]
    assert picture_of(view) != before
    click(view, "#log")
    view.move(0, 0)
    assert picture_of(view) == before


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (700, True), (360, False)])
def test_nothing_is_wider_than_the_window(view: Browser, page: Path, width: int, dark: bool) -> None:
    view.requests.clear()
    view.open(page, width, dark=dark)
    assert view.run("document.documentElement.scrollWidth") <= width
    assert view.run("Math.max(...[...document.querySelectorAll('canvas')].map((c) => c.getBoundingClientRect().right))") <= width
    background = view.run("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(20, 23, 29)" if dark else "rgb(255, 255, 255)")


def test_a_script_that_got_into_the_page_does_not_run(tab: Browser, page: Path, tmp_path: Path) -> None:
    spoiled = tmp_path / "spoiled.html"
    spoiled.write_text(page.read_text().replace("</body>", "<script>document.title = 'mine'</script></body>"))
    tab.open(spoiled)
    assert tab.run("document.title") == "2 runs"
    assert [text for text in tab.complaints if "Content Security Policy" in text]
