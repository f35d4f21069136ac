"""Classifiers in the Hugging Face format: folders of transformers, and what transformers makes of ours."""

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from forge_core.errors import ForgeError
from forge_models.gguf.converter import GgufConverter
from forge_models.hf.converter import HfConverter
from forge_models.hf.families import FAMILIES
from forge_models.hf.family import config_of, misfits
from forge_models.hf.labels import WITHOUT, classifier_of, labels_in
from forge_models.hf.reader import read_model
from forge_train.inference.stored import load_model
from harness.closeness import wide
from models.hf.published import READ, spread, tiny
from models.hf.zoo import CASES, sizes_of

LABELS = ("no", "yes", "perhaps")
NAMES = dict(enumerate(LABELS))
PUBLISHED = {each["config"]["model_type"]: each["config"] for each in READ.values()}
TESTED = ("llama", "qwen2", "gemma2", "gemma3_text", "gpt_neox", "mixtral")
"""Plain; with biases and a tied table; twice with soft caps or factors; with names of its own; with experts."""
PAD = 0


def classifier(kind: str):
    """A tiny classifier as transformers makes it, in fp64, its parameters spread."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    values = {key: value for key, value in tiny(PUBLISHED[kind]).items() if key != "auto_map"}
    config = AutoConfig.for_model(**deepcopy(values))
    config.id2label, config.label2id, config.pad_token_id = NAMES, {name: number for number, name in NAMES.items()}, PAD
    config._attn_implementation = config._experts_implementation = "eager"
    return spread(AutoModelForSequenceClassification.from_config(config, dtype=torch.float32))


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids with padding at the end, and the number of tokens of each row."""
    sizes = torch.tensor([7, 3, 9, 1])
    ids = torch.randint(3, 97, (4, 9), generator=torch.Generator().manual_seed(2))
    return ids.where(torch.arange(9) < sizes[:, None], PAD), sizes


@pytest.mark.parametrize("kind", TESTED)
@wide()
def test_a_folder_of_transformers_is_read_and_written_with_equal_logits(kind: str, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    twin = classifier(kind)
    twin.save_pretrained(tmp_path / "theirs")
    values = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert values["architectures"] == [classifier_of(kind, FAMILIES[kind].architecture)]
    weights = HfConverter().read(tmp_path / "theirs")
    assert weights.model.labels == LABELS and read_model(tmp_path / "theirs").labels == LABELS
    ids, sizes = rows()
    mask = torch.arange(ids.shape[1]) < sizes[:, None]
    with torch.no_grad():
        expected = twin(ids, attention_mask=mask.long()).logits
        ours = load_model(weights, torch.device("cpu"))(ids)
    assert ours.shape == (*ids.shape, len(LABELS))
    limit = 1e-5 * float(expected.abs().max())
    torch.testing.assert_close(ours[torch.arange(4), sizes - 1].double(), expected, rtol=0, atol=limit)
    HfConverter().write(tmp_path / "ours", weights)
    written = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert written["architectures"] == values["architectures"] and written["pad_token_id"] == PAD
    assert written["id2label"] == {str(number): name for number, name in NAMES.items()}
    assert written["label2id"] == {name: number for number, name in NAMES.items()}
    assert not (tmp_path / "ours" / "generation_config.json").exists()
    again, report = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "ours", dtype=torch.float64, attn_implementation="eager", output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert again.config.num_labels == 3 and again.config.id2label == NAMES
    again.config._experts_implementation = "eager"
    with torch.no_grad():
        torch.testing.assert_close(again(ids, attention_mask=mask.long()).logits, expected, rtol=0, atol=limit)
    card = (tmp_path / "ours" / "README.md").read_text()
    assert "AutoModelForSequenceClassification" in card and "pipeline_tag: text-classification" in card
    for name, tensor in HfConverter().read(tmp_path / "ours").read(list(weights.tensors)).items():
        assert torch.equal(tensor, weights.read([name])[name]), name


def test_the_check_of_an_export_compares_all_positions(tmp_path: Path) -> None:
    twin = classifier("llama").float()
    twin.save_pretrained(tmp_path / "theirs")
    ids, _ = rows()
    found = HfConverter().reference(tmp_path / "theirs", ids)
    with torch.no_grad():
        ours = load_model(HfConverter().read(tmp_path / "theirs"), torch.device("cpu"))(ids)
    torch.testing.assert_close(found, ours, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_family_is_a_classifier_where_transformers_has_one(kind: str) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as CLASSES

    family = FAMILIES[kind]
    assert classifier_of(kind, family.architecture) == CLASSES.get(kind), "each family is as in transformers"
    from forge_models.hf.family import decoder_of

    values = tiny(PUBLISHED[kind]) if kind in PUBLISHED else sizes_of(kind) | CASES[kind][1]
    decoder = replace(decoder_of(family, values, kind), labels=LABELS)
    if kind in WITHOUT:
        assert misfits(family, decoder) == ["transformers has no classifier of this family"]
    else:
        assert not misfits(family, decoder) and config_of(family, decoder)["architectures"] == [CLASSES[kind]]


def test_without_a_pad_token_the_end_of_a_document_is_one(tmp_path: Path) -> None:
    twin = classifier("llama")
    twin.config.pad_token_id, twin.config.eos_token_id = None, 2
    twin.save_pretrained(tmp_path / "theirs")
    HfConverter().write(tmp_path / "ours", HfConverter().read(tmp_path / "theirs"))
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["pad_token_id"] == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"problem_type": "multi_label_classification"}, "problem_type 'multi_label_classification' is not implemented"),
        ({"problem_type": "regression"}, "problem_type 'regression' is not implemented"),
        ({"id2label": {"0": "one"}}, "at least two labels different names"),
        ({"id2label": {"0": "a", "1": "a"}}, "at least two labels different names"),
        ({"id2label": {"1": "a", "2": "b"}}, "by their numbers from 0 on"),
        ({"id2label": ["a", "b"]}, "id2label must give"),
        ({"num_labels": 1}, "at least two labels"),
    ],
)
def test_labels_that_forge_has_not_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ForgeError, match=message):
        labels_in(change, "config.json")


def test_labels_without_names_have_those_of_transformers() -> None:
    assert labels_in({}, "config.json") == ("LABEL_0", "LABEL_1")
    assert labels_in({"num_labels": 3, "problem_type": None}, "config.json") == ("LABEL_0", "LABEL_1", "LABEL_2")


def test_formats_without_classifiers_refuse_them(tmp_path: Path) -> None:
    classifier("llama").save_pretrained(tmp_path / "theirs")
    weights = HfConverter().read(tmp_path / "theirs")
    with pytest.raises(ForgeError, match=r"a GGUF file has no classifier; .*--to hf"):
        GgufConverter().write(tmp_path / "model.gguf", weights)
    with pytest.raises(ForgeError, match=r"granite: transformers has no classifier of this family"):
        HfConverter(family="granite").write(tmp_path / "ours", weights)


def test_a_head_of_another_size_than_the_labels_is_refused(tmp_path: Path) -> None:
    classifier("llama").save_pretrained(tmp_path / "theirs")
    path = tmp_path / "theirs" / "config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | {"id2label": {"0": "a", "1": "b"}, "label2id": {"a": 0, "b": 1}}))
    with pytest.raises(ForgeError, match=r"score.weight: shape \(3, 32\), but config.json requires \(2, 32\)"):
        HfConverter().read(tmp_path / "theirs")
