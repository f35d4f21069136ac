"""The search of the built site answers questions of users with the right page first.

`nox -s docs` builds the pages and then runs this file; without them it is skipped. The search is that of Sphinx's
`searchtools.js`, which scores results in the browser; this module computes the same from the same index.
"""

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SITE = ROOT / "docs" / "_build" / "html"
SCORER = ROOT / "docs" / "_ext" / "search_scorer.js"
QUESTIONS: Mapping[str, str] = tomllib.loads((ROOT / "docs/questions.toml").read_text())["questions"]

Result = tuple[str, str, int]
"""(page, title, score)."""


class Search:
    """Search of a built site; questions about Sphinx's objects (names of functions) are left out, a question has several words.

    Args:
        site: folder of the built pages.
    """

    def __init__(self, site: Path) -> None:
        from snowballstemmer import stemmer  # Sphinx requires it

        self.index: dict[str, Any] = json.loads(
            (site / "searchindex.js").read_text().removeprefix("Search.setIndex(").removesuffix(")")
        )
        language = (site / "_static/language_data.js").read_text()
        (words,) = re.findall(r"const stopwords = new Set\((\[.*?\])\)", language, re.DOTALL)
        self.stopwords = set(json.loads(words))
        self.scores, self.folders = scorer()
        assert SCORER.read_text() in language, "the pages were built with other scores"
        self.stem = stemmer("english").stemWord

    def results(self, query: str) -> list[Result]:
        """Results, best first and each once; those with equal scores by title."""
        found = [*self._titles(query.lower().strip()), *self._texts(self._words(query))]
        scored = [(page, title, score + self._boost(page)) for page, title, score in found]
        scored.sort(key=lambda result: (-result[2], result[1].lower()))
        best: dict[tuple[str, str], Result] = {}
        for result in scored:
            best.setdefault(result[:2], result)
        return list(best.values())

    def _words(self, query: str) -> list[str]:
        split = [word for word in re.split(r"\W+", query.strip()) if word]
        kept = [word.lower() for word in split if word.lower() not in self.stopwords and not word.isdigit()]
        return list(dict.fromkeys(map(self.stem, kept)))

    def _boost(self, page: str) -> int:
        return next((boost for folder, boost in self.folders.items() if page.startswith(folder)), 0)

    def _titles(self, query: str) -> list[Result]:
        """Headings that contain the whole query."""
        found = []
        for title, places in self.index["alltitles"].items():
            if query in title.lower().strip() and len(query) >= len(title) / 2:
                for file, _ in places:
                    own = self.index["titles"][file]
                    score = int(self.scores["title"] * len(query) / len(title) + 0.5) + (own == title) + self.scores["heading"]
                    found.append((self.index["docnames"][file], title if own == title else f"{own} > {title}", score))
        return found

    def _texts(self, words: list[str]) -> list[Result]:
        """Pages that have every word; the score is that of the best word."""
        best: dict[int, dict[str, int]] = {}
        for word in words:
            for files, score in self._files(word):
                for file in [files] if isinstance(files, int) else files:
                    best.setdefault(file, {})[word] = score
        enough = {len(words), sum(len(word) > 2 for word in words)}
        return [
            (self.index["docnames"][file], self.index["titles"][file], max(scores.values()))
            for file, scores in best.items()
            if len(scores) in enough
        ]

    def _files(self, word: str) -> list[tuple[int | list[int], int]]:
        """(files, score) of a word in texts and titles, or of words that contain it; a later score replaces an earlier one."""
        terms, titles = self.index["terms"], self.index["titleterms"]
        found = [
            *((kind[word], self.scores[name]) for kind, name in ((terms, "term"), (titles, "title")) if word in kind),
        ]
        for kind, name in ((terms, "partialTerm"), (titles, "partialTitle")):
            if len(word) > 2 and word not in kind:
                found += [(files, self.scores[name]) for term, files in kind.items() if word in term]
        return found


def scorer() -> tuple[dict[str, int], dict[str, int]]:
    """Sphinx's scores by name, and ours by the beginning of a page's name, from the file that the site uses."""
    text = SCORER.read_text()
    folders = re.findall(r'"([\w/-]+)": (-?\d+)', text)
    return {name: int(value) for name, value in re.findall(r"^  (\w+): (\d+),", text, re.MULTILINE)}, {
        name: int(value) for name, value in folders
    }


@pytest.fixture(scope="module")
def search() -> Search:
    if not (SITE / "searchindex.js").exists():
        pytest.skip("`nox -s docs` builds the pages")
    return Search(SITE)


def test_questions_name_pages() -> None:
    assert len(QUESTIONS) >= 20
    assert [page for page in QUESTIONS.values() if not (ROOT / f"docs/{page}.md").exists()] == []


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_first_result_answers(search: Search, question: str) -> None:
    results = search.results(question)
    assert results and results[0][0] == QUESTIONS[question], results[:5]
