"""Metrics of written answers, each of one answer against the right ones, between 0 and 1.

The sources define them in words and in scripts. Where the two differ, the scripts count here, because published numbers come
from them:

- ANLS: Biten et al., "Scene Text Visual Question Answering", 2019, and the script of the Robust Reading Competition.
- VQA accuracy: Antol et al., "VQA: Visual Question Answering", 2015; Goyal et al., 2017, and their script.
- Relaxed accuracy: Methani et al., "PlotQA", 2020; Masry et al., "ChartQA", 2022.
- Exact match after normalization: Rajpurkar et al., "SQuAD", 2016.
"""

import math
import re
import string
from collections.abc import Callable, Mapping, Sequence

ANLS_THRESHOLD = 0.5
RELAXED_ERROR = 0.05
FEWEST_VQA_ANSWERS = 4
"""Fewer answers of people cannot give an accuracy of 1, because one answer is left out and three others must agree."""

_ARTICLES = frozenset({"a", "an", "the"})
_NUMBER_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_NUMBERS = {word: str(number) for number, word in enumerate(_NUMBER_WORDS)} | {"none": "0"}
_CONTRACTIONS = """
ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't haven't he'd he'd've he's
how'd how'll how's i'd've i'm i've isn't it'd it'd've it'll ma'am mightn't mightn't've might've mustn't must've needn't
not've o'clock oughtn't 'ow's'at shan't she'd've should've shouldn't shouldn't've somebody'd somebody'd've somebody'll
somebody's someone'd someone'd've someone'll someone's something'd something'd've something'll that's there'd there'd've
there're there's they'd they'd've they'll they're they've 'twas wasn't we'd've we've weren't what'll what're what's
what've when's where'd where's where've who'd who'd've who'll who's who've why'll why're why's won't would've wouldn't
wouldn't've y'all y'all'll y'all'd've you'd you'd've you'll you're you've
"""
_PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'
_COMMA_IN_NUMBER = re.compile(r"\d,+\d")
_PERIOD = re.compile(r"\.(?!\d)")


def exact_match(written: str, right: Sequence[str]) -> float:
    """Returns 1 if the answer equals a right one without case, punctuation, articles and repeated white space."""
    return float(any(_plain(written) == _plain(each) for each in right))


def anls(written: str, right: Sequence[str]) -> float:
    """Returns the normalized Levenshtein similarity to the nearest right answer, or 0 below a similarity of 0.5.

    The similarity is 1 - distance / length of the longer text, without case and repeated white space.
    """
    similarity = 0.0
    for each in right:
        longer = max(len(written), len(each))
        similarity = max(similarity, 1 - (_distance(_lower(written), _lower(each)) / longer if longer else 0))
    return similarity if similarity >= ANLS_THRESHOLD else 0.0


def vqa_accuracy(written: str, right: Sequence[str]) -> float:
    """Returns the mean over people of min(1, n / 3), where n counts the other people who gave this answer.

    Args:
        written: the answer.
        right: the answers of people, 10 for a question of VQAv2.
    """
    mine = _vqa_form(written)
    same = [_vqa_form(each) == mine for each in right]
    return sum(min(1.0, (sum(same) - own) / 3) for own in same) / len(same)


def relaxed_accuracy(written: str, right: Sequence[str]) -> float:
    """Returns 1 if the answer is a number within 5 % of a right number other than 0, or equals a right answer without case.

    A number may end in a percent sign, which divides it by 100.
    """
    return float(any(_is_near(written, each) for each in right))


METRICS: Mapping[str, Callable[[str, Sequence[str]], float]] = {
    "exact_match": exact_match,
    "anls": anls,
    "vqa_accuracy": vqa_accuracy,
    "relaxed_accuracy": relaxed_accuracy,
}
"""Metrics of written answers by name: (written, right answers) -> value."""


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Returns the mean, and its standard error: the sample's standard deviation / sqrt(n); None for one value."""
    count, mean = len(values), math.fsum(values) / len(values)
    if count < 2:
        return mean, None
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1) / count)


def _plain(text: str) -> str:
    kept = text.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(word for word in kept.split() if word not in _ARTICLES)


def _lower(text: str) -> str:
    return " ".join(text.lower().split())


def _distance(one: str, other: str) -> int:
    """Returns the Levenshtein distance."""
    row = list(range(len(other) + 1))
    for number, letter in enumerate(one, 1):
        before, row[0] = row[0], number
        for place, against in enumerate(other, 1):
            before, row[place] = row[place], min(row[place] + 1, row[place - 1] + 1, before + (letter != against))
    return row[-1]


def _spellings() -> dict[str, str]:
    """Returns contractions by their spellings without one of the apostrophes, or without any."""
    found: dict[str, str] = {}
    for word in _CONTRACTIONS.split():
        places = [place for place, letter in enumerate(word) if letter == "'"]
        found |= {word[:place] + word[place + 1 :]: word for place in places}
        if len(places) == 1:
            found[word.replace("'", "")] = word
    return found


_SPELLINGS = _spellings()


def _vqa_form(text: str) -> str:
    """Returns a text as the script of VQA compares it: without punctuation and articles, numbers up to ten as digits."""
    text = " ".join(re.split(r"[\n\t]", text)).strip()
    with_comma = re.search(_COMMA_IN_NUMBER, text) is not None
    out = text
    for mark in _PUNCTUATION:
        beside_space = f"{mark} " in text or f" {mark}" in text
        out = out.replace(mark, "" if beside_space or with_comma else " ")
    words = (_NUMBERS.get(word, word) for word in _PERIOD.sub("", out).lower().split())
    return " ".join(_SPELLINGS.get(word, word) for word in words if word not in _ARTICLES)


def _is_near(written: str, right: str) -> bool:
    value, wanted = _number(written), _number(right)
    if value is not None and wanted:
        return abs(value - wanted) / abs(wanted) <= RELAXED_ERROR
    return written.lower() == right.lower()


def _number(text: str) -> float | None:
    try:
        return float(text.rstrip("%")) / 100 if text.endswith("%") else float(text)
    except ValueError:
        return None
