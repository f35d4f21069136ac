"""Metrics of written answers against values computed by hand from their definitions, and against lmms-eval."""

import random
from math import sqrt

import pytest

from forge_vlm.evaluation.metrics import METRICS, anls, exact_match, mean_and_error, relaxed_accuracy, vqa_accuracy

TEN = ["2"] * 2 + ["two"] * 2 + ["three"] * 6


@pytest.mark.parametrize(
    ("written", "right", "value"),
    [
        ("The  cat!", ["a cat"], 1),
        ("cats", ["cat"], 0),
        ("dog", ["cat", "Dog."], 1),
        ("the", ["an"], 1),
    ],
)
def test_exact_match_is_without_case_articles_and_punctuation(written: str, right: list[str], value: float) -> None:
    assert exact_match(written, right) == value


@pytest.mark.parametrize(
    ("written", "right", "value"),
    [
        ("kitten", ["sitting"], 1 - 3 / 7),
        ("KITTEN", ["mitten", "sitting"], 1 - 1 / 6),
        ("ab", ["ac"], 0.5),  # the script keeps a similarity of exactly one half
        ("abc", ["axy"], 0),
        ("", ["cat"], 0),
        ("cat", ["cat"], 1),
    ],
)
def test_anls_is_a_similarity_by_edit_distance(written: str, right: list[str], value: float) -> None:
    assert anls(written, right) == pytest.approx(value)


@pytest.mark.parametrize(
    ("written", "right", "value"),
    [
        # Four people say 2: without one of them 3 others agree (1), as 4 do without one of the six (1).
        ("two", TEN, 1),
        ("2", ["2"] * 2 + ["3"] * 8, (2 * 1 / 3 + 8 * 2 / 3) / 10),
        ("2", ["2"] + ["3"] * 9, 9 / 3 / 10),
        ("2", ["2"] * 3 + ["3"] * 7, (3 * 2 / 3 + 7) / 10),
        ("Dont", ["don't"] * 4, 1),
        ("a yes.", ["yes"] * 4, 1),
        ("1,000", ["1000"] * 4, 1),
        ("3.5", ["35"] * 4, 0),
        ("red-blue", ["red blue"] * 4, 1),
        ("no", ["yes"] * 10, 0),
    ],
)
def test_vqa_accuracy_leaves_out_each_person_in_turn(written: str, right: list[str], value: float) -> None:
    assert vqa_accuracy(written, right) == pytest.approx(value)


@pytest.mark.parametrize(
    ("written", "right", "value"),
    [
        ("105", ["100"], 1),
        ("95", ["100"], 1),
        ("105.1", ["100"], 0),
        ("-95", ["-100"], 1),
        ("5%", ["0.05"], 1),
        ("5%", ["5"], 0),
        ("0.001", ["0"], 0),
        ("0", ["0"], 1),
        ("Cat", ["dog", "cat"], 1),
        ("nan", ["100"], 0),
    ],
)
def test_relaxed_accuracy_allows_five_percent(written: str, right: list[str], value: float) -> None:
    assert relaxed_accuracy(written, right) == value


def test_a_mean_has_the_standard_error_of_its_sample() -> None:
    assert mean_and_error([1.0, 0.0, 0.0, 1.0, 1.0]) == (0.6, pytest.approx(sqrt((3 * 0.16 + 2 * 0.36) / 4 / 5)))
    assert mean_and_error([0.25]) == (0.25, None)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_values_are_those_of_lmms_eval() -> None:
    """On answers of contractions, numbers, punctuation and white space."""
    theirs = pytest.importorskip("lmms_eval.api.metrics")
    from lmms_eval.tasks._task_utils.vqa_eval_metric import EvalAIAnswerProcessor  # type: ignore[import-not-found]
    from lmms_eval.tasks.chartqa.utils import relaxed_correctness  # type: ignore[import-not-found]
    from lmms_eval.tasks.vqav2.utils import vqav2_process_results  # type: ignore[import-not-found]

    draw = random.Random(5)
    words = [*EvalAIAnswerProcessor.CONTRACTIONS, *EvalAIAnswerProcessor.CONTRACTIONS.values(), *EvalAIAnswerProcessor.NUMBER_MAP]
    words += [
        "a",
        "An",
        "cat",
        "Dog",
        "1,000",
        "3.5",
        "e.g.",
        "what?",
        "red-blue",
        "5%",
        "x.y",
        "10.",
        "(b)",
        "\tq",
        "_k",
        "1,2 ,",
    ]
    numbers = ["5", "5%", "0", "0.05", "4.75", "4.7", "abc", "ABC", "-3", "-3.1", "nan", "inf", "", "1e3", "1000", "950", "%"]

    def text() -> str:
        return "".join(draw.choice(words) + draw.choice([" ", "", ",", "  "]) for _ in range(draw.randint(0, 3))).strip()

    for _ in range(2000):
        few = [text() for _ in range(3)]
        right, written = [draw.choice(few) for _ in range(10)], draw.choice([*few, text()])
        document = {"answers": [{"answer": each, "id": number} for number, each in enumerate(right)], "question_id": 0}
        assert vqa_accuracy(written, right) == pytest.approx(vqav2_process_results(document, [written])["exact_match"])
        assert anls(written, right) == pytest.approx(theirs.anls(right, [written])["anls"])
        one, other = draw.choice(numbers), draw.choice(numbers)
        assert relaxed_accuracy(one, [other]) == relaxed_correctness(one, other)
        options = {"ignore_case": True, "ignore_punctuation": True}
        plain = [each for each in words if each.lower() not in ("a", "an") and each == each.strip() and " " not in each]
        one, other = draw.choice(plain), draw.choice(plain)
        assert exact_match(one, [other]) == theirs.exact_match_hf_evaluate([one], [other], **options)["exact_match"]
    values = [draw.random() for _ in range(20)]
    assert mean_and_error(values) == (pytest.approx(theirs.mean(values)), pytest.approx(theirs.mean_stderr(values)))
    assert METRICS.keys() == {"exact_match", "anls", "vqa_accuracy", "relaxed_accuracy"}
