"""The built site in a browser, wide and as narrow as a phone: nothing overflows, nothing is fetched, and the search answers.

`nox -s docs` builds the pages and then runs this file; without them, or without a browser, it is skipped.
"""

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from harness.browser import Browser, browser, chromium
from repository.test_search import QUESTIONS, SITE

pytestmark = [
    pytest.mark.skipif(chromium() is None, reason="no chromium or google-chrome on the path"),
    pytest.mark.skipif(not (SITE / "searchindex.js").exists(), reason="`nox -s docs` builds the pages"),
]
OF_SPHINX = {"_static", "_modules", "genindex.html", "py-modindex.html", "search.html"}
PAGES = sorted(str(page.relative_to(SITE)) for page in SITE.rglob("*.html") if not OF_SPHINX & set(page.parts))
WIDE, PHONE = 1280, 390
"""Widths of a window in CSS pixels."""

WIDER = """(() => {
    const over = [...document.querySelectorAll('main *, article *, .content *')].filter(part => {
        if (part.getBoundingClientRect().right <= innerWidth + 1) return false;
        for (let outer = part; outer; outer = outer.parentElement)
            if (['auto', 'scroll', 'hidden'].includes(getComputedStyle(outer).overflowX)) return false;
        return true;
    });
    return over.map(part => part.tagName + ' ' + part.textContent.trim().slice(0, 60)).slice(0, 5);
})()"""
"""Parts of the text that are cut off at the right and cannot be scrolled to."""

IMAGES = """[...document.querySelectorAll('.content img, article img')]
    .filter(image => !image.alt.trim() || !image.complete || !image.naturalWidth).map(image => image.src)"""
"""Images without alternative text, or that are not there."""


@pytest.fixture(scope="module")
def tab() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


@pytest.mark.parametrize("width", [WIDE, PHONE])
def test_every_page_fits_and_fetches_nothing(tab: Browser, width: int) -> None:
    faults: dict[str, object] = {}
    for page in PAGES:
        tab.complaints.clear()
        tab.requests.clear()
        tab.open(SITE / page, width)
        found = {
            "errors": list(tab.complaints),
            "fetched": [address for address in tab.requests if not address.startswith(("file:", "data:"))],
            "cut off": tab.run(WIDER),
            "scrolls sideways": tab.run("document.documentElement.scrollWidth > innerWidth + 1"),
            "images": tab.run(IMAGES),
            "headings": tab.run("document.querySelectorAll('h1').length") != 1,
        }
        if wrong := {name: value for name, value in found.items() if value}:
            faults[page] = wrong
    assert len(PAGES) > 80 and faults == {}


def test_the_search_of_the_browser_has_the_page_first(tab: Browser) -> None:
    """What a reader sees, as `test_search.py` computes it from the index."""
    wrong = {}
    for question, page in QUESTIONS.items():
        tab.open(SITE / "index.html", WIDE)
        tab.ask("Page.navigate", url=f"{(SITE / 'search.html').resolve().as_uri()}?q={quote(question)}")
        tab.until("location.pathname.endsWith('search.html') && !!document.querySelector('#search-results ul.search li a')")
        first = str(tab.run("document.querySelector('#search-results ul.search li a').getAttribute('href')"))
        if Path(first.partition("?")[0].partition("#")[0]).with_suffix("") != Path(page):
            wrong[question] = first
    assert wrong == {}
