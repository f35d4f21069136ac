"""Every family against transformers: logits both ways, round trips, greedy text."""

import json
from pathlib import Path

import pytest
import torch

from forge_core.protocols.weights import Weights
from forge_models.generation import generate
from forge_models.hf.converter import HfConverter
from forge_models.hf.family import meaning_of
from forge_models.hf.reader import Folder
from forge_models.hf.streamed_forward import logits_of
from harness.closeness import assert_no_farther, wide
from models.hf.zoo import CASES, exact_logits, random_model, saved, tokens


def module_of(weights: Weights) -> torch.nn.Module:
    """Our module with the weights of a folder."""
    model = weights.model.build()
    model.load_state_dict(weights.read(list(weights.tensors)), strict=not model.shape.tied_embeddings)
    return model.eval()


@pytest.mark.parametrize("case", CASES)
def test_both_ways(case: str, tmp_path: Path) -> None:
    kind, keys = CASES[case]
    reference = random_model(kind, keys)
    folder = Folder(saved(reference, tmp_path / "theirs"))
    with torch.no_grad():
        expected = reference(tokens()).logits
    ours = module_of(folder)
    exact = exact_logits(reference, tokens())
    with wide():
        torch.testing.assert_close(logits_of(folder, tokens(), torch.float64), exact, rtol=0, atol=1e-11)
    with torch.no_grad():
        assert_no_farther(ours(tokens()), expected, exact, "the module")
    assert_no_farther(logits_of(folder, tokens()), expected, exact, "block by block")

    converter = HfConverter(max_shard_bytes=30_000).build()
    converter.write(tmp_path / "ours", folder)
    again = converter.read(tmp_path / "ours")
    assert meaning_of(again.model) == meaning_of(folder.model)
    assert again.facts.special_tokens == folder.facts.special_tokens == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    before, after = folder.read(list(folder.tensors)), again.read(list(again.tensors))
    assert before.keys() == after.keys()
    assert all(before[name].dtype == after[name].dtype and torch.equal(before[name], after[name]) for name in before)
    found = converter.reference(tmp_path / "ours", tokens())
    assert isinstance(found, torch.Tensor)
    assert torch.equal(found, expected)  # transformers makes the very same model of what we wrote
    written = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert written["model_type"] == kind
    assert (tmp_path / "ours" / "model.safetensors.index.json").exists()

    if keys.get("rope_scaling", {}).get("rope_type") == "dynamic":
        return  # greedy text below stays within its original length
    prompt = tokens(1, 9)
    text = reference.generate(prompt, max_new_tokens=32, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert generate(ours, prompt.tolist(), max_tokens=32)[0] == text[0, 9:].tolist()
