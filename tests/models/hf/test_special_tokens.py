"""A special token that a model does not have stays absent in transformers, also where the family has a default for it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from forge_models.hf.converter import HfConverter
from forge_models.hf.reader import TOKENS, Folder
from forge_testing.modules import small
from models.hf.zoo import CASES, random_model, saved


def opened(folder: Path) -> Any:
    loader: Any = AutoModelForCausalLM
    return loader.from_pretrained(folder, local_files_only=True, dtype=torch.float32)


@pytest.mark.parametrize("case", [name for name, (kind, _) in CASES.items() if name == kind])
def test_null_stays_null(case: str, tmp_path: Path) -> None:
    """Left out, olmo2's padding would be token 1, whose embedding is then never trained; phi3's is beyond the vocabulary."""
    kind, keys = CASES[case]
    theirs = saved(random_model(kind, keys | {"pad_token_id": None, "bos_token_id": None}), tmp_path / "theirs")
    HfConverter().build().write(tmp_path / "ours", Folder(theirs))
    model = opened(tmp_path / "ours")
    assert model.config.pad_token_id is None and model.config.bos_token_id is None and model.config.eos_token_id == 2
    assert model.get_input_embeddings().padding_idx is None


def test_a_key_that_was_left_out_is_left_out_for_its_family_only(tmp_path: Path) -> None:
    """So the same folder means the same; another family has another default."""
    theirs = saved(random_model(*CASES["mistral"]), tmp_path / "theirs")
    config = json.loads((theirs / "config.json").read_text())
    del config["pad_token_id"]
    (theirs / "config.json").write_text(json.dumps(config))
    for family, there in (("mistral", False), ("phi3", True)):
        HfConverter(family=family).build().write(tmp_path / family, Folder(theirs))
        written = json.loads((tmp_path / family / "config.json").read_text())
        assert ("pad_token_id" in written) is there and written["eos_token_id"] == 2
        assert opened(tmp_path / family).config.pad_token_id is None


@pytest.mark.parametrize("family", ["llama", "mistral", "phi3"])
def test_a_model_without_a_tokenizer_has_none(family: str, tmp_path: Path) -> None:
    """Weights that Forge made; the vocabulary is smaller than phi3's default for padding."""
    HfConverter(family=family).build().write(tmp_path / "out", small())
    config = opened(tmp_path / "out").config
    assert [getattr(config, key) for key in TOKENS] == [None] * 3
