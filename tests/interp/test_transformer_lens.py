"""An export to the format of transformers boots in TransformerLens, which has the same values under our aliases.

TransformerLens is not among the libraries of the workshop: `pip install transformer_lens` in an environment of that kind.
"""

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from forge_core.protocols.weights import StoredTensor, WeightsInfo
from forge_interp.captures import capture
from forge_interp.tap_names import taps
from forge_models.components.decoder import DecoderConfig
from forge_models.hf.converter import HfConverter

pytestmark = pytest.mark.slow

SMALL = DecoderConfig(dim=32, layers=2, heads=4, kv_heads=2, ffn_dim=48, vocab_size=97, max_length=64)


def booted(folder: Path) -> Any:
    """Their model of a folder."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformer_lens import model_bridge  # type: ignore[import-not-found]
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        return model_bridge.TransformerBridge.boot_transformers(str(folder), hf_model=model, device="cpu", dtype=torch.float32)


def exported(model: Any, component: DecoderConfig, folder: Path) -> None:
    tensors = {name: value.detach() for name, value in model.named_parameters()}
    stored = {name: StoredTensor(tuple(value.shape), "float32") for name, value in tensors.items()}
    weights = SimpleNamespace(
        model=component,
        tensors=stored,
        facts=WeightsInfo(),
        read=lambda names: {name: tensors[name] for name in names},
        box=lambda name, offset, extent: tensors[name][tuple(slice(o, o + e) for o, e in zip(offset, extent, strict=True))],
    )
    coder = Tokenizer(WordLevel({f"w{number}": number for number in range(component.vocab_size)}, unk_token="w0"))
    HfConverter(family="llama").build().write(folder, weights)  # type: ignore[arg-type]
    PreTrainedTokenizerFast(tokenizer_object=coder, eos_token="w1", bos_token="w2", pad_token="w1").save_pretrained(folder)


def test_values_at_the_aliases_are_equal(make: Any, tokens: Any, tmp_path: Path) -> None:
    pytest.importorskip("transformer_lens")
    model = make(spread=4.0)
    exported(model, SMALL, tmp_path / "export")
    theirs = booted(tmp_path / "export")
    ids = tokens(2, 12)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logits, cache = theirs.run_with_cache(ids)
    names = [name for name, one in taps(model).items() if one.alias]
    with torch.no_grad(), capture(model, names) as seen:
        torch.testing.assert_close(logits, model(ids), rtol=1e-4, atol=1e-4)
    for name, value in seen.items():
        other = cache[seen.infos[name].alias].reshape(value.shape)
        torch.testing.assert_close(other, value, rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")
    assert len(seen) > 25
