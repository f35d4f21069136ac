"""Folders that Auto classes of forge-vlm open: their logits are those of the model, and of code that has nothing of Forge."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from forge_models.components.attentions import GQA, MLA
from forge_models.components.experts import SigmoidTopKConfig, SoftmaxTopKConfig
from forge_models.components.layers import GELU, GeGLU, LayerNormConfig, ReLU2, RMSNormConfig
from forge_models.hf.config import Unsupported
from forge_models.hf.converter import HfConverter
from forge_models.hf.streamed_forward import fixed_rows, logits_of
from forge_models.shape import Rope
from forge_testing.modules import InMemory
from forge_vlm.components.adapters import (
    AttentionPoolConfig,
    AveragePoolConfig,
    LinearConfig,
    MLPConfig,
    PerceiverConfig,
    PixelShuffleConfig,
)
from forge_vlm.components.encoders import Features, SigLIP2, ViT
from forge_vlm.components.fusions import MixtureOfTransformers
from forge_vlm.components.model import VLM
from harness.siblings import fast
from vlm.encoders.test_published import CASES as TOWERS
from vlm.encoders.test_published import stored
from vlm.hf.earlier_folders import write_earlier
from vlm.hf.modeling_forge import load
from vlm.tiny import ENCODER, EXPERTS, MODELS

MOT = MODELS["mot"]
SQUARE = ViT(size=16, patch=4, dim=8, layers=2, heads=2)
TOKENS = {"images": "tokens", "encoder": None, "adapter": None, "modalities": {"image": (30, 36), "sound": (36, 40)}}

HELD: dict[str, VLM] = {
    **{name: MODELS[name] for name in MODELS if name not in ("cross", "moma-choice", "moma-threshold")},
    "mot-bidirectional": replace(MOT, fusion=MixtureOfTransformers(image_attention="bidirectional_image")),
    "mot-prefix": replace(MOT, fusion=MixtureOfTransformers(image_attention="prefix")),
    "tokens": replace(MOT, **TOKENS),
    "moma-tokens": replace(MODELS["moma-token"], **TOKENS, moe=replace(EXPERTS, router=SoftmaxTopKConfig(normalize=False))),
    "moma-layers": replace(MODELS["moma-token"], moe=replace(EXPERTS, every=2, ffn_dim=None)),
    "attention": replace(MOT, attention=GQA(qkv_bias=True, output_bias=True, qk_norm="full", scale=0.3, soft_cap=2.0)),
    "windows": replace(MOT, attention=GQA(window=5, global_every=2), rope=Rope(theta=500.0, local_theta=90.0, partial=0.5)),
    "yarn": replace(MOT, rope=Rope(scaling="yarn", factor=4.0, original_max_length=16)),
    "llama3": replace(MOT, rope=Rope(scaling="llama3", factor=4.0, original_max_length=16), head_dim=6),
    "layernorm": replace(MOT, norm=LayerNormConfig(), mlp=GELU(bias=True), norm_placement="sandwich"),
    "gemma": replace(MOT, norm=RMSNormConfig(offset=1), mlp=GeGLU(), embed_multiplier=4.0, soft_cap=3.0, tied_embeddings=True),
    "residual": replace(MOT, norm=LayerNormConfig(bias=False), mlp=ReLU2(), residual_multiplier=0.5),
    "sincos": replace(MOT, encoder=replace(ENCODER, positions="sincos", class_token=True)),
    "features": replace(MOT, encoder=Features(count=4, dim=12), adapter=LinearConfig(bias=False)),
    "mlp": replace(MOT, adapter=MLPConfig(hidden=2, hidden_dim=12, bias=False)),
    "average": replace(MOT, encoder=SQUARE, adapter=AveragePoolConfig(window=3, hidden=1)),
    "shuffle": replace(MOT, encoder=SQUARE, adapter=PixelShuffleConfig(factor=2)),
    "attention_pool": replace(MOT, encoder=SQUARE, adapter=AttentionPoolConfig(window=2, heads=2)),
    "perceiver": replace(MOT, encoder=SQUARE, adapter=PerceiverConfig(latents=3, layers=2, heads=2)),
}


def written(component: VLM, folder: Path) -> InMemory:
    weights = InMemory(component)
    HfConverter(family="forge_standalone", max_shard_bytes=20_000).build().write(folder, weights)
    return weights


def compare(weights: Any, folder: Path) -> None:
    """With the Auto class, and in fp64 with code that shares nothing with Forge; and what is read again."""
    tokens, extras = fixed_rows(weights.model)
    found = HfConverter().build().reference(folder, tokens, extras)
    assert isinstance(found, torch.Tensor)
    ours = logits_of(weights, tokens, extras=extras)
    torch.testing.assert_close(found, ours, rtol=0, atol=3e-5 * float(ours.abs().max()))
    earlier = folder.with_name(f"earlier-{folder.name}")
    write_earlier(earlier, weights)
    with torch.no_grad():
        exact = logits_of(weights, tokens, torch.float64, extras)
        torch.testing.assert_close(load(earlier, torch.float64)(tokens, **extras), exact, rtol=0, atol=1e-8)
    for place in (folder, earlier):
        again = HfConverter().build().read(place)
        read, wanted = again.read(list(again.tensors)), weights.read(list(weights.tensors))
        assert read.keys() == wanted.keys()
        assert all(torch.equal(read[name], wanted[name]) for name in wanted)
        assert torch.equal(logits_of(again, tokens, extras=extras), ours)


@pytest.mark.parametrize("name", HELD)
def test_a_folder_has_our_logits(name: str, tmp_path: Path) -> None:
    weights = written(HELD[name], tmp_path / "out")
    compare(weights, tmp_path / "out")
    assert HfConverter().build().read(tmp_path / "out").model == HELD[name]


@pytest.mark.parametrize("tower", ["clip", "siglip", "siglip2", "dinov2_gated"])
def test_published_towers_are_held(tower: str, tmp_path: Path) -> None:
    kind, make = TOWERS[tower]
    stored(tmp_path / "tower", make())
    for number, layers in enumerate([(), (-2, -1)]):
        component = replace(MOT, max_length=96, encoder=kind(path=str(tmp_path / "tower"), feature_layers=layers))
        compare(written(component, tmp_path / f"out{number}"), tmp_path / f"out{number}")


OPENING = """
import sys

from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from forge_vlm.hf import register

register()
register()
folder, given, out = sys.argv[1:4]
model, info = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
assert not any(info.values()), info
assert not model.training and type(AutoConfig.from_pretrained(folder)) is model.config_class
assert type(AutoModelForCausalLM.from_pretrained(folder)) is type(model)
given = load_file(given)
save_file({"logits": model(given.pop("tokens"), **given).logits.detach()}, out)
model.save_pretrained(f"{folder}-saved")
"""


def in_fresh_process(program: str, folder: Path, weights: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """What a program stores that is told a folder, the fixed rows and a place; and the logits of `weights`."""
    tokens, extras = fixed_rows(weights.model)
    given, found = folder.with_name("given.safetensors"), folder.with_name("found.safetensors")
    save_file({"tokens": tokens, **extras}, given)
    folder.with_name("program.py").write_text(program)
    words = [folder.with_name("program.py"), folder, given, found]
    subprocess.run([sys.executable, *map(str, words)], check=True, cwd=folder.parent)
    return logits_of(weights, tokens, extras=extras), load_file(found)


@pytest.mark.parametrize("name", fast("mot-experts", of=["mot", "gemma", "mot-experts"]))
def test_transformers_opens_the_folder_where_the_wheel_is_installed(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    weights = written(HELD[name], tmp_path / "out")
    ours, found = in_fresh_process(OPENING, tmp_path / "out", weights)
    torch.testing.assert_close(found["logits"], ours, rtol=0, atol=1e-5 * float(ours.abs().max()))
    assert not list((tmp_path / "out").glob("*.py")), "a folder brings no code"
    card = (tmp_path / "out" / "README.md").read_text()
    assert "from forge_vlm.hf import register" in card and "AutoModelForImageTextToText.from_pretrained" in card
    again = HfConverter().build().read(tmp_path / "out-saved")
    read, wanted = again.read(list(again.tensors)), weights.read(list(weights.tensors))
    assert read.keys() == wanted.keys() and all(torch.equal(read[name], wanted[name]) for name in wanted)


def test_folders_of_earlier_versions_open_and_their_code_is_not_run(tmp_path: Path) -> None:
    weights = InMemory(MOT)
    write_earlier(tmp_path / "out", weights)
    with (tmp_path / "out" / "modeling_forge.py").open("a") as file:
        file.write(f"\nPath({str(tmp_path / 'ran')!r}).touch()\n")
    assert HfConverter().build().read(tmp_path / "out").model == MOT
    ours, found = in_fresh_process(OPENING, tmp_path / "out", weights)
    torch.testing.assert_close(found["logits"], ours, rtol=0, atol=1e-5 * float(ours.abs().max()))
    assert not (tmp_path / "ran").exists()


WRITING = """
import sys

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from forge_vlm.hf import register

register()
folder, given, out = sys.argv[1:4]
model = AutoModelForImageTextToText.from_pretrained(folder)
given = load_file(given)
tokens = given.pop("tokens")
found = {"greedy": model.generate(tokens, **given, max_new_tokens=6, do_sample=False)}
found["copies"] = model.generate(tokens, **given, max_new_tokens=6, do_sample=True, top_k=1, num_return_sequences=2)
mask = torch.ones_like(tokens)
found["masked"] = model.generate(tokens, **given, attention_mask=mask, max_new_tokens=1, do_sample=False)
mask[0, 0] = 0
model(tokens, **given, labels=None, use_cache=False, return_dict=True)
for wrong in ({"attention_mask": mask}, {"labels": tokens}, {"use_cache": True}, {"return_dict": False}, {"lables": 0}):
    try:
        model(tokens, **given, **wrong)
    except (TypeError, ValueError) as error:
        assert str(error).startswith(next(iter(wrong))), error
    else:
        raise AssertionError(f"{wrong} was taken")
save_file(found, out)
"""


@pytest.mark.slow
def test_transformers_generates_what_the_largest_logits_of_ours_say(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    weights = written(MOT, tmp_path / "out")
    tokens, extras = fixed_rows(weights.model)
    extras = {**extras, "images": 20 * torch.randn(extras["images"].shape, generator=torch.Generator().manual_seed(2))}
    save_file({"tokens": tokens, **extras}, tmp_path / "given.safetensors")
    (tmp_path / "program.py").write_text(WRITING)
    words = ["program.py", "out", "given.safetensors", "found.safetensors"]
    subprocess.run([sys.executable, *(str(tmp_path / word) for word in words)], check=True, cwd=tmp_path)
    found = load_file(tmp_path / "found.safetensors")

    def continued(images: torch.Tensor) -> torch.Tensor:
        rows = tokens
        for _ in range(6):
            logits = logits_of(weights, rows, extras={**extras, "images": images})[:, -1]
            logits[:, weights.model.placeholder] = -torch.inf
            rows = torch.cat((rows, logits.argmax(-1, keepdim=True)), dim=1)
        return rows

    rows = continued(extras["images"])
    assert not torch.equal(rows, continued(extras["images"].flip(0)))  # it matters which image a row names
    assert torch.equal(found["greedy"], rows)
    assert torch.equal(found["copies"], rows.repeat_interleave(2, dim=0))
    assert torch.equal(found["masked"], rows[:, : tokens.shape[1] + 1])
    assert len({tuple(row[tokens.shape[1] :]) for row in rows.tolist()}) > 1  # rows say different things


def test_tokens_that_were_never_chosen_before_still_are_not(tmp_path: Path) -> None:
    words = tmp_path / "words"
    words.mkdir()
    (words / "tokenizer.json").write_text("{}")
    (words / "generation_config.json").write_text('{"suppress_tokens": [50, 3], "temperature": 0.5}')
    weights = InMemory(MOT)
    HfConverter(family="forge_standalone", tokenizer=str(words)).build().write(tmp_path / "out", weights)
    settings = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert settings == {"suppress_tokens": sorted({3, 50, MOT.placeholder}), "temperature": 0.5}


def test_placeholders_have_to_fit_their_images(tmp_path: Path) -> None:
    weights = written(MOT, tmp_path / "out")
    tokens, extras = fixed_rows(weights.model)
    tokens[1, 3] = 5
    with pytest.raises(ValueError, match="placeholder"):
        HfConverter().build().reference(tmp_path / "out", tokens, extras)


REFUSED: dict[str, tuple[VLM, str]] = {
    "cross": (MODELS["cross"], "fusion = CrossAttention"),
    "choice": (MODELS["moma-choice"], "fusion.routing = 'expert_choice'"),
    "threshold": (MODELS["moma-threshold"], "fusion.routing = 'threshold'"),
    "router": (replace(MODELS["moma-token"], moe=replace(EXPERTS, router=SigmoidTopKConfig())), "moe.router = SigmoidTopK"),
    "capacity": (replace(MODELS["moma-token"], moe=replace(EXPERTS, capacity=1.0)), "moe.capacity = 1.0"),
    "joint experts": (replace(MODELS["joint"], moe=EXPERTS), "moe: forge_standalone holds experts of each modality"),
    "latent": (replace(MODELS["joint"], kv_heads=None, attention=MLA(kv_lora_rank=8)), "attention = MLA"),
    "dynamic": (replace(MOT, rope=Rope(scaling="dynamic", factor=2.0, original_max_length=16)), "rope.scaling = 'dynamic'"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_folder_does_not_hold_is_refused_by_name(what: str, tmp_path: Path) -> None:
    component, name = REFUSED[what]
    with pytest.raises(Unsupported) as caught:
        written(component, tmp_path / "out")
    assert f"\n    {name}" in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_patches_of_any_proportions_are_refused(tmp_path: Path) -> None:
    stored(tmp_path / "tower", TOWERS["siglip2"][1]())
    component = replace(MOT, max_length=96, encoder=SigLIP2(path=str(tmp_path / "tower"), patches=8))
    with pytest.raises(Unsupported, match=r"encoder\.patches = 8"):
        written(component, tmp_path / "out")


def test_it_is_written_only_where_it_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(Unsupported) as caught:
        HfConverter().build().write(tmp_path / "out", InMemory(MOT))
    assert "fusion = MixtureOfTransformers: LLaVA is a JointDecoder" in str(caught.value)
    assert "--family forge_standalone can" in str(caught.value)
    with pytest.raises(Unsupported, match="only ernie4_5_vl_moe has experts by modality"):
        HfConverter().build().write(tmp_path / "out", InMemory(MODELS["moma-token"]))
    with pytest.raises(Unsupported, match=r"'llama' is for decoders of text alone; for a VLM there are: .*forge_standalone, "):
        HfConverter(family="llama").build().write(tmp_path / "out", InMemory(MOT))


def test_what_came_from_such_a_folder_may_go_to_one_unasked(tmp_path: Path) -> None:
    written(MOT, tmp_path / "out")
    HfConverter().build().write(tmp_path / "again", HfConverter().build().read(tmp_path / "out"))
    assert (tmp_path / "again" / "model.safetensors.index.json").exists() or (tmp_path / "again" / "model.safetensors").exists()
    assert json.loads((tmp_path / "again" / "config.json").read_text())["model_type"] == "forge_standalone"


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"forge": {"kind": "Popen"}}, "'Popen' is not a part"),
        ({"forge": {"kind": "ViT"}}, "does not say which model"),
        ({"forge": {"kind": "VLM", "dim": -1}}, "VLM"),
    ],
)
def test_a_folder_that_says_something_else_is_refused(changed: dict[str, Any], why: str, tmp_path: Path) -> None:
    written(MOT, tmp_path / "out")
    place = tmp_path / "out" / "config.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | changed))
    with pytest.raises(Unsupported, match=why):
        HfConverter().build().read(tmp_path / "out")
