"""Cross-attention in the layout of Mllama's text part: transformers has our logits where its rows begin with an image."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_core.errors import ConfigError
from forge_models.components.attentions import GQA
from forge_models.components.layers import GeGLU, LayerNormConfig, RMSNormConfig
from forge_models.hf.config import Unsupported
from forge_models.hf.converter import HfConverter
from forge_models.hf.streamed_forward import fixed_rows, logits_of
from forge_models.shape import Rope
from forge_testing.modules import InMemory
from forge_vlm.components.adapters import MLPConfig, PerceiverConfig
from forge_vlm.components.encoders import Features, SigLIP2
from forge_vlm.components.fusions import CrossAttention, JointDecoder
from forge_vlm.components.model import VLM
from forge_vlm.fusion.fusion import seen_images
from forge_vlm.hf import load_vision
from forge_vlm.hf.mllama import cross_layers
from vlm.encoders.test_published import CASES as TOWERS
from vlm.encoders.test_published import stored
from vlm.hf.earlier_folders import vision_of
from vlm.hf.modeling_forge import load
from vlm.tiny import MODELS

transformers = pytest.importorskip("transformers")

CROSS = MODELS["cross"]
HELD: dict[str, VLM] = {
    "every_2": CROSS,
    "every_1": replace(CROSS, fusion=CrossAttention(every=1)),
    "every_3": replace(CROSS, layers=8, fusion=CrossAttention(every=3), norm=RMSNormConfig(eps=1e-6)),
    "llama3": replace(CROSS, rope=Rope(theta=500000.0, scaling="llama3", factor=8.0, original_max_length=16)),
    "perceiver": replace(CROSS, adapter=PerceiverConfig(latents=3, layers=2, heads=2), image_token=7),
    "features": replace(CROSS, encoder=Features(count=5, dim=12), adapter=MLPConfig(hidden=2)),
}


def written(component: VLM, folder: Path) -> InMemory:
    weights = InMemory(component)
    HfConverter(max_shard_bytes=20_000).build().write(folder, weights)
    return weights


@pytest.mark.parametrize("name", HELD)
def test_transformers_has_our_logits(name: str, tmp_path: Path) -> None:
    weights = written(HELD[name], tmp_path / "out")
    tokens, extras = fixed_rows(weights.model)
    ours = logits_of(weights, tokens, extras=extras)
    _, info = transformers.MllamaForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    found = HfConverter().build().reference(tmp_path / "out", tokens, extras)
    assert isinstance(found, torch.Tensor)
    torch.testing.assert_close(found, ours, rtol=0, atol=1e-5 * float(ours.abs().max()))
    assert (extras["image_rows"] >= 0).sum(1).tolist() == [2, 2, 0]
    blind = logits_of(weights, tokens, extras={**extras, "images": extras["images"] + 1})
    assert (blind - ours).abs().max() > 1e-3

    again = HfConverter().build().read(tmp_path / "out")
    for part in ("shape", "chosen_fusion", "vision", "chosen_adapter", "placeholder"):
        assert getattr(again.model, part) == getattr(HELD[name], part)
    read, wanted = again.read(list(again.tensors)), weights.read(list(weights.tensors))
    assert read.keys() == wanted.keys()
    assert all(torch.equal(read[each], wanted[each]) for each in wanted)
    assert torch.equal(logits_of(again, tokens, extras=extras), ours)
    assert torch.equal(again.box("embed.weight", (3, 1), (4, 5)), wanted["embed.weight"][3:7, 1:6])


@pytest.mark.parametrize("name", ["every_2", "perceiver", "features"])
def test_encoder_and_adapter_open_in_folders_of_now_and_of_earlier_versions(name: str, tmp_path: Path) -> None:
    """As code that shares nothing with Forge computes them, which earlier versions wrote into `vision/`."""
    weights = written(HELD[name], tmp_path / "out")
    assert not list((tmp_path / "out").rglob("*.py")), "a folder brings no code"
    assert "from forge_vlm.hf import load_vision" in (tmp_path / "out" / "README.md").read_text()
    images = fixed_rows(weights.model)[1]["images"]
    with torch.no_grad():
        found = load_vision(tmp_path / "out", torch.float64)(images.double())
        config = tmp_path / "out" / "vision" / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"model": vision_of(HELD[name])}))
        (config.parent / "modeling_forge.py").write_text("raise AssertionError('code of a folder is never run')")
        exact = load(config.parent, torch.float64)(images.double())
        earlier = load_vision(tmp_path / "out", torch.float64)(images.double())
    assert found.shape == (len(images), *exact.shape[1:])
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-10)
    assert torch.equal(earlier, found)


def test_what_text_sees_is_what_the_processor_of_transformers_says() -> None:
    """Groups of images, and text between them; the comparison of an export relies on both rules being one."""
    from forge_vlm.hf.mllama import _seen

    for row in ([9, 1, 2, 3], [9, 9, 1, 9, 2], [9, 1, 9, 9, 9, 2, 9], [1, 2, 9, 3]):
        first, end = seen_images(torch.tensor([row]), 9, None)
        slots = torch.arange(row.count(9))
        ours = (first[0, :, None] <= slots) & (slots < end[0, :, None])
        assert torch.equal(_seen(row, 9, 1), ours), row


def test_a_published_tower_travels_along(tmp_path: Path) -> None:
    kind, make = TOWERS["siglip"]
    stored(tmp_path / "tower", make())
    component = replace(CROSS, encoder=kind(path=str(tmp_path / "tower"), feature_layers=(-2,)))
    weights = written(component, tmp_path / "out")
    tokens, extras = fixed_rows(component)
    again = HfConverter().build().read(tmp_path / "out")
    assert again.model.encoder.path == str(tmp_path / "out" / "vision")
    ours = logits_of(again, tokens, extras=extras)
    assert torch.equal(ours, logits_of(weights, tokens, extras=extras))
    found = HfConverter().build().reference(tmp_path / "out", tokens, extras)
    torch.testing.assert_close(found, ours, rtol=0, atol=1e-5 * float(ours.abs().max()))


def test_cross_layers_lie_where_those_of_llama_3_2_do() -> None:
    published = transformers.models.mllama.configuration_mllama.MllamaTextConfig()
    assert cross_layers(32, 4) == published.cross_attention_layers
    assert published.num_hidden_layers == 32 + len(published.cross_attention_layers)


REFUSED: dict[str, tuple[VLM, str]] = {
    "fusion": (replace(CROSS, fusion=JointDecoder()), "fusion = JointDecoder"),
    "modalities": (replace(CROSS, modalities={"sound": (20, 30)}), "modalities = sound"),
    "tied": (replace(CROSS, tied_embeddings=True), "tied_embeddings = True"),
    "soft cap": (replace(CROSS, soft_cap=3.0), "soft_cap = 3.0"),
    "norm": (replace(CROSS, norm=LayerNormConfig()), "norm = LayerNorm"),
    "mlp": (replace(CROSS, mlp=GeGLU()), "mlp = GeGLU"),
    "placement": (replace(CROSS, norm_placement="post"), "norm_placement = 'post'"),
    "bias": (replace(CROSS, attention=GQA(qkv_bias=True)), "attention = GQA(causal=True, qkv_bias=True"),
    "window": (replace(CROSS, attention=GQA(window=5)), "attention.windows"),
    "head": (replace(CROSS, head_dim=6), "head_dim = 6"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_the_layout_cannot_hold_is_refused_by_name(what: str, tmp_path: Path) -> None:
    component, name = REFUSED[what]
    with pytest.raises(Unsupported) as caught:
        HfConverter(family="mllama_text_model").build().write(tmp_path / "out", InMemory(component))
    assert f"\n    {name}" in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_patches_of_any_proportions_are_refused(tmp_path: Path) -> None:
    stored(tmp_path / "tower", TOWERS["siglip2"][1]())
    component = replace(CROSS, encoder=SigLIP2(path=str(tmp_path / "tower"), patches=8))
    with pytest.raises(Unsupported, match=r"encoder\.patches = 8"):
        HfConverter(family="mllama_text_model").build().write(tmp_path / "out", InMemory(component))


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"cross_attention_layers": [0, 3]}, "cross_attention_layers"),
        ({"cross_attention_layers": []}, "cross_attention_layers"),
        ({"image_token_index": None}, "encoder and adapter are in vision/"),
        ({"dropout": 0.1}, "dropout"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"hidden_act": "gelu"}, "hidden_act"),
    ],
)
def test_a_folder_that_says_something_else_is_refused(changed: dict[str, Any], why: str, tmp_path: Path) -> None:
    written(CROSS, tmp_path / "out")
    place = tmp_path / "out" / "config.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | changed))
    with pytest.raises((ConfigError, Unsupported), match=why):
        HfConverter().build().read(tmp_path / "out")


def test_every_file_is_flushed_before_the_folder_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from forge_models.hf import writer

    flushed: list[str] = []
    monkeypatch.setattr(writer, "sync_path", lambda path: flushed.append(path.name if path.is_dir() else path.parent.name))
    written(CROSS, tmp_path / "out")
    assert flushed.count("vision") == 1 + len(list((tmp_path / "out" / "vision").iterdir()))
