"""The conclusion against what is known of the task: the fact starts at the first position, and only attention can move it."""

import importlib.util
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest


@pytest.fixture(scope="module")
def study():
    spec = importlib.util.spec_from_file_location("patching_study", Path(__file__).parents[1] / "study.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def findings(study):
    return study.study(study.trained())


def test_the_model_needs_attention_to_answer(study, findings) -> None:
    chance = 1 / study.FACTS
    assert findings.accuracy > 0.99
    assert findings.without_attention == pytest.approx(chance, abs=0.06)


def test_before_the_first_block_the_question_knows_nothing(study, findings) -> None:
    """It is the same token in every row, so a probe can only guess, and patching it in changes nothing."""
    assert findings.probes[0] < 1 / study.FACTS + 0.1
    assert findings.patched[0, -1] < 0.01 and findings.patched[0, 0] > 0.99
    assert (findings.patched[:, 1:-1] < 0.05).all(), "filler never has the fact"


def test_what_is_used_can_be_read_and_the_fact_is_used_in_one_place(study, findings) -> None:
    assert 0 < findings.readable <= findings.used <= study.LAYERS
    for layer in range(study.LAYERS):
        assert (findings.probes[layer] > 0.9) == (layer >= findings.readable)
        assert (findings.patched[layer, -1] > 0.5) == (layer >= findings.used)
        assert (findings.patched[layer, 0] > 0.5) == (layer < findings.used)


def test_figure_and_conclusion_say_so(study, findings) -> None:
    svg = ElementTree.fromstring(study.figure(findings))
    texts = ["".join(item.itertext()) for item in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert "before block 0" in texts and texts.count("filler") == study.LENGTH - 2
    said = study.conclusion(findings)
    assert f"block {findings.used}" in said and ("not yet used" in said) == (findings.readable < findings.used)
