"""The page in a browser: what is under the pointer, zoom, runs that are switched off, axes, smoothing, dark and narrow."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forge_train.report.page import report
from harness.browser import Browser, browser, chromium
from train.report.conftest import metrics, time_of

pytestmark = pytest.mark.skipif(chromium() is None, reason="no chromium or google-chrome on the path")

STEPS = range(1, 401)
GRADIENT, RATE, MEMORY, LAYERS = 1, 2, 3, 4
"""Numbers of charts on the page; the one of losses is 0."""


def loss(run: int, step: int) -> float:
    """Of run 0 and 1: growing apart, and never equal."""
    return 2.0 + run + (3 + run) * math.exp(-step / 100)


def of(run: int, steps: range) -> dict[int, dict[str, float]]:
    lines = {step: {"loss": loss(run, step), "tokens": 1000 * step, "peak_memory": 3 * 2**30} for step in steps}
    if run == 0:
        for step in steps:
            lines[step] |= {"grad_norm": 1.0 + step % 2, "lr": 1.0 if step < 200 else 0.5}
            lines[step] |= {f"grads/layer.{number}/norm": 1.0 + number for number in range(14)}
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
    title, *lines = hover(view, at(150))
    assert title == "step 150"
    assert lines == [f"second, training{loss(1, 150):.5g}", f"first, training{loss(0, 150):.5g}"]
    left, top, *_ = plot(view)
    view.move(left - 200, top)
    assert told(view) == []


def test_evaluations_are_told_near_their_points_with_their_step(view: Browser) -> None:
    assert "first, held_out1" in hover(view, at(100))
    assert "first, held_out (step 100)1" in hover(view, at(110))
    assert not [line for line in hover(view, at(150)) if "held_out" in line]


def test_dragging_zooms_into_all_charts_and_back(view: Browser) -> None:
    assert ticks(view) == "drag over a curve to zoom"
    left, top, wide, high = plot(view)
    view.drag(left + wide * at(100), top + high / 2, left + wide * at(200))
    view.until("!document.getElementById('all').hidden")
    low, high_step = (int(word) for word in ticks(view).replace("step ", "").split(" to "))
    assert abs(low - 100) <= 1 and abs(high_step - 200) <= 1
    for chart in (0, MEMORY):
        title, *_ = hover(view, 0.5, chart)
        assert abs(int(title.removeprefix("step ")) - 150) <= 1
    view.run("document.querySelector('figure .u-over').dispatchEvent(new MouseEvent('dblclick', {bubbles: true}))")
    assert ticks(view) == "drag over a curve to zoom"
    assert hover(view, at(301))[0] in ("step 300", "step 301", "step 302"), "a pixel is more than a step"
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
    hover(view, at(150))
    lines = "[...document.querySelectorAll('figure .u-cursor-x')].map((line) => line.style.transform)"
    places = view.run(lines)
    assert len(places) == 5 and len(set(places[:3])) == 1, "charts of one width"
    assert not {"", "translate(-10px, 0px)"} & set(places)
    assert [told(view, chart) for chart in (GRADIENT, MEMORY)] == [[], []]


def test_a_run_and_a_curve_can_be_switched_off(view: Browser) -> None:
    click(view, "[data-run='1']")
    assert hover(view, at(150))[1:] == [f"first, training{loss(0, 150):.5g}"]
    assert view.run("document.querySelector('[data-run=\"1\"]').getAttribute('aria-pressed')") == "false"
    assert hover(view, at(150), MEMORY)[1:] == ["first3 GiB"]
    click(view, "[data-run='1']")
    click(view, "figure .legend button")
    assert hover(view, at(102)) == ["step 100", "first, held_out1", "second, held_out1"]


def test_the_axis_shrinks_to_the_runs_that_are_shown(view: Browser) -> None:
    click(view, "[data-run='0']")
    assert hover(view, at(120, high=200))[0] == "step 120"


def test_tokens_and_hours_are_axes(view: Browser) -> None:
    """The second run took 72 s a step up to 150, then 720 s to step 160, and stood still between its starts."""
    click(view, "[data-axis='tokens']")
    title, *lines = hover(view, at(150))
    assert title == "150k tokens" and f"second, training{loss(1, 150):.5g}" in lines
    click(view, "[data-axis='hours']")
    click(view, "[data-run='0']")
    hours = (149 * 72 + 23_600 - 20_000) / 3600
    assert hover(view, 0.999) == [f"{hours:.5g} hours", f"second, training{loss(1, 200):.5g}"]


def test_another_axis_shows_all_of_it(view: Browser) -> None:
    left, top, wide, high = plot(view)
    view.drag(left + wide * 0.2, top + high / 2, left + wide * 0.3)
    view.until("!document.getElementById('all').hidden")
    click(view, "[data-axis='tokens']")
    assert ticks(view) == "drag over a curve to zoom" and hover(view, at(301))[0] in ("300k tokens", "301k tokens", "302k tokens")


def smooth(view: Browser, value: int) -> None:
    slider = "document.getElementById('smooth')"
    view.run(f"{slider}.value = {value}; {slider}.dispatchEvent(new Event('input'))")


def test_smoothing_is_told_and_leaves_what_has_no_noise(view: Browser) -> None:
    smooth(view, 4)
    assert view.run("document.getElementById('width').textContent") == "8 steps"
    title, *lines = hover(view, at(150))
    assert title == "step 150, smoothed" and len(lines) == 2
    assert hover(view, at(197), RATE)[1:] == ["first1"] and hover(view, at(203), RATE)[1:] == ["first0.5"]


INK = """((figure, name, part) => {
    const canvas = figure.querySelector("canvas"), over = figure.querySelector(".u-over").getBoundingClientRect();
    const x = Math.round(over.left - canvas.getBoundingClientRect().left + over.width * part);
    const one = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    one.fillStyle = getComputedStyle(document.documentElement).getPropertyValue(name);
    one.fillRect(0, 0, 1, 1);
    const wanted = one.getImageData(0, 0, 1, 1).data;
    const copy = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    [copy.canvas.width, copy.canvas.height] = [canvas.width, canvas.height];
    copy.drawImage(canvas, 0, 0);
    const there = copy.getImageData(x - 3, 0, 7, canvas.height).data;
    let count = 0;
    for (let at = 0; at < there.length; at += 4)
        count += [0, 1, 2, 3].every((channel) => Math.abs(there[at + channel] - wanted[channel]) < 120);
    return count;
})"""


def ink(view: Browser, color: str, part: float, chart: int = 0) -> int:
    """Pixels of a color of the style sheet, in seven columns of a chart around a part of its x axis."""
    view.move(0, 0)
    return view.run(f"{INK}(document.querySelectorAll('figure')[{chart}], '{color}', {part})")


def test_what_was_smoothed_stays_visible_and_pale(view: Browser) -> None:
    before = ink(view, "--c0", 0.5, GRADIENT)
    smooth(view, 5)
    assert 0 < ink(view, "--c0", 0.5, GRADIENT) < before / 3


def test_a_restart_is_marked_while_its_run_is_shown(view: Browser) -> None:
    assert ink(view, "--c1", at(150), GRADIENT) > 20
    assert ink(view, "--c1", at(180), GRADIENT) == 0
    click(view, "[data-run='1']")
    assert ink(view, "--c1", at(150), GRADIENT) == 0


def test_a_point_between_gaps_is_a_dot(view: Browser) -> None:
    """Of the second run, step 200 follows a value that is not finite, and nothing comes after it."""
    assert ink(view, "--c1", at(200)) > 5
    assert ink(view, "--c1", at(180)) == 0


def test_at_most_a_dozen_values_are_told_those_nearest_to_the_pointer(view: Browser) -> None:
    low, high = (hover(view, at(150), LAYERS, height)[1:] for height in (0.95, 0.05))
    assert len(low) == len(high) == 12
    assert low[-1] == "first, layer.01" and high[0] == "first, layer.1314"


def test_with_nothing_left_to_show_the_page_goes_on(view: Browser) -> None:
    click(view, "[data-run='0']")
    for selector in ("[data-run='1']", "#log", "[data-axis='hours']"):
        click(view, selector)
        assert hover(view, 0.5)[1:] == []
    for selector in ("[data-run='0']", "[data-axis='step']"):
        click(view, selector)
    assert hover(view, at(150))[1:] == [f"first, training{loss(0, 150):.5g}"]


def test_colors_and_widths_follow_the_window(view: Browser) -> None:
    light = ink(view, "--c0", 0.5, RATE)
    view.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    view.until("getComputedStyle(document.body).backgroundColor === 'rgb(20, 23, 29)'")
    assert light > 0 and ink(view, "--c0", 0.5, RATE) > 0, "in the color of the dark page"
    view.ask("Emulation.setDeviceMetricsOverride", width=500, height=900, deviceScaleFactor=1, mobile=False)
    view.until("Math.max(...[...document.querySelectorAll('canvas')].map((c) => c.getBoundingClientRect().right)) <= 500")


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
    assert hover(view, at(150))[1:] == [f"second, training{loss(1, 150):.5g}", f"first, training{loss(0, 150):.5g}"]
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
