"""The charts of the documentation are drawn where their values are."""

import importlib
import math
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st


@pytest.fixture(scope="module")
def drawing() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "docs" / "_ext"))
        return importlib.import_module("line_chart")


def test_a_curve_is_drawn_where_its_values_are(drawing) -> None:
    lines = [drawing.Line("a <b>", [(0, 0.0), (5, 10.0), (10, 5.0)]), drawing.Line("c", [(0, 5.0), (10, 5.0)])]
    svg = ElementTree.fromstring(drawing.chart("t", lines, x="x"))
    curve, level = (
        [tuple(map(float, at.split(","))) for at in line.attrib["points"].split()] for line in svg.findall("polyline")
    )
    (x0, y0), (x1, y1), (x2, y2) = curve
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert y0 - y1 == pytest.approx(2 * (y0 - y2), abs=0.2) and y1 < y2 < y0  # SVG counts downward
    assert level[0][1] == level[1][1] == pytest.approx(y2, abs=0.1)
    assert "a <b>" in "".join(svg.itertext())


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))
def test_ticks_enclose_and_are_few(drawing, low: float, size: float) -> None:
    found = drawing.ticks(low, low + size, 6)
    step = found[1] - found[0]
    assert found[0] <= low + step * 1e-6 and found[-1] >= low + size - step * 1e-6
    assert 2 <= len(found) <= 9
    leading = step / 10 ** math.floor(math.log10(step * 1.0001))
    assert min(abs(leading - nice) for nice in (1, 2, 5)) < 1e-3
