// Order of the results of the site's search: Sphinx's own scores, and more for pages that answer a question.
// `tests/repository/test_search.py` reads these numbers and asks the questions of `docs/questions.toml`.
var Scorer = {
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
  heading: 3,
  folders: {
    "howto/": 12,
    "tutorials/": 10,
    "concepts/": 9,
    "faq": 8,
    "exit-codes": 8,
    "getting-started": 8,
    "writing-a-plugin": 8,
    "glossary": 2,
    "reference/": 0,
    "index": -10,
    "api/": -10,
    "adr/": -20,
  },
  score: ([page, title, anchor, description, score, file, kind]) => {
    const folder = Object.keys(Scorer.folders).find((prefix) => page.startsWith(prefix));
    // a heading that contains the whole question answers it best
    return score + (folder ? Scorer.folders[folder] : 0) + (kind === "title" ? Scorer.heading : 0);
  },
};
