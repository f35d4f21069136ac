"""Joint decoders as LLaVA: what is written opens in transformers with our logits, what transformers wrote is read."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from forge_core.errors import ConfigError, ForgeError
from forge_core.protocols.weights import WeightsInfo
from forge_models.components.attentions import GQA
from forge_models.components.layers import GeGLU, LayerNormConfig
from forge_models.hf.config import Unsupported
from forge_models.hf.converter import HfConverter
from forge_models.hf.streamed_forward import fixed_rows, logits_of
from forge_testing.modules import InMemory
from forge_vlm.components.adapters import AveragePoolConfig, LinearConfig, MLPConfig, PerceiverConfig
from forge_vlm.components.encoders import CLIP, Features, SigLIP2, ViT
from forge_vlm.components.fusions import CrossAttention, JointDecoder, MixtureOfTransformers
from forge_vlm.components.model import VLM
from forge_vlm.hf.llava import model_of
from forge_vlm.images.pixels import fit_square, pixels
from models.hf.zoo import CASES as ZOO
from models.hf.zoo import SIZES as ZOO_SIZES
from vlm.encoders.test_published import CASES as TOWERS
from vlm.encoders.test_published import stored
from vlm.tiny import PARTS, SIZES

transformers = pytest.importorskip("transformers")

LLAVA: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "clip": ("clip", {"feature_layers": (-2,)}, {}),
    "clip_last": ("clip", {}, {}),
    "clip_class": ("clip", {"feature_layers": (-2,), "class_feature": True}, {"adapter": MLPConfig(bias=False)}),
    "clip_many": ("clip", {"feature_layers": (0, -1)}, {}),
    "clip_larger": ("clip", {"feature_layers": (-2,), "size": 24}, {}),
    "siglip": ("siglip", {"feature_layers": (-1,)}, {"adapter": LinearConfig()}),
    "siglip_inner": ("siglip2_fixed", {"feature_layers": (-2,)}, {"adapter": LinearConfig(bias=False), "tied_embeddings": True}),
    "dinov2": ("dinov2", {"feature_layers": (-1,)}, {"attention": GQA(qk_norm="head")}),
    "dinov2_gated": ("dinov2_gated", {"feature_layers": (-2,), "class_feature": True}, {"attention": GQA(qkv_bias=True)}),
    "olmo2": ("clip", {}, {"norm_placement": "post", "attention": GQA(qk_norm="full")}),
    "image_token": ("clip", {}, {"image_token": 7}),
}


def model(folder: Path, tower: str, encoder: dict[str, Any], more: dict[str, Any]) -> VLM:
    kind, make = TOWERS[tower]
    stored(folder, make())
    fields = {**SIZES, **PARTS, "max_length": 96, "adapter": MLPConfig(), "fusion": JointDecoder()}
    return VLM(**{**fields, "encoder": kind(path=str(folder), **encoder), **more})


def theirs(folder: Path) -> Any:
    loaded, info = transformers.LlavaForConditionalGeneration.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager", dtype=torch.float32
    )
    assert not any(info.values()), info
    return loaded.eval()


@pytest.mark.parametrize("case", LLAVA)
def test_what_is_written_opens_in_transformers_with_our_logits(case: str, tmp_path: Path) -> None:
    weights = InMemory(model(tmp_path / "tower", *LLAVA[case]))
    converter = HfConverter(max_shard_bytes=20_000).build()
    converter.write(tmp_path / "out", weights)
    tokens, extras = fixed_rows(weights.model)
    ours = logits_of(weights, tokens, extras=extras)
    loaded = theirs(tmp_path / "out")
    rows = extras["image_rows"]
    with torch.no_grad():
        wanted = loaded(tokens, pixel_values=extras["images"][rows[rows >= 0]]).logits
    assert (rows >= 0).sum() == 4
    torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))
    found = converter.reference(tmp_path / "out", tokens, extras)
    assert isinstance(found, torch.Tensor)
    assert torch.equal(found, wanted)
    blind = logits_of(weights, tokens, extras={**extras, "images": extras["images"] + 1})
    assert (blind - ours).abs().max() > 1e-3  # images matter

    again = converter.read(tmp_path / "out")
    assert again.tensors.keys() == weights.tensors.keys()
    read = again.read(list(again.tensors))
    assert all(torch.equal(read[name], tensor) for name, tensor in weights.read(list(weights.tensors)).items())
    assert torch.equal(logits_of(again, tokens, extras=extras), ours)
    assert again.facts.family == "llava"
    for name in ("encoder.embed.proj.weight", "head.weight") if not weights.model.tied_embeddings else ():
        assert torch.equal(again.box(name, (1, 2), (3, 4)), read[name][1:4, 2:6])


def random_llava(tower: Any, **more: Any) -> Any:
    text = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, vocab_size=40, pad_token_id=None
    )
    config = transformers.LlavaConfig(vision_config=tower.config, text_config=text, image_token_index=39, **more)
    found = transformers.LlavaForConditionalGeneration(config).eval()
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.2 + (parameter.dim() < 2))
    return found


def saved(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    statistics = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 3}
    (folder / "preprocessor_config.json").write_text(json.dumps(statistics))
    return folder


READ = {
    "clip": {"vision_feature_layer": -2},
    "clip_many": {"vision_feature_layer": [1, -1], "vision_feature_select_strategy": "full", "multimodal_projector_bias": False},
    "siglip": {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
    "dinov2": {"vision_feature_layer": -2},
}


@pytest.mark.parametrize("case", READ)
def test_what_transformers_wrote_is_read_with_its_logits(case: str, tmp_path: Path) -> None:
    """Towers of it have blocks behind the feature, a head or a norm, which are left out and named."""
    reference = random_llava(TOWERS[case.partition("_")[0]][1](), **READ[case])
    folder = HfConverter().build().read(saved(reference, tmp_path / "theirs"))
    tokens, extras = fixed_rows(folder.model)
    rows = extras["image_rows"]
    with torch.no_grad():
        wanted = reference(tokens, pixel_values=extras["images"][rows[rows >= 0]]).logits
    found = logits_of(folder, tokens, extras=extras)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))
    assert "tensors of the vision tower were left out" in folder.facts.notes[0]
    HfConverter().build().write(tmp_path / "ours", folder)
    with torch.no_grad():
        back = theirs(tmp_path / "ours")(tokens, pixel_values=extras["images"][rows[rows >= 0]]).logits
    torch.testing.assert_close(back, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))


def of_family(case: str, **changes: Any) -> Any:
    """A random LLaVA around the text model of a case of `models.hf.zoo`, without what its own head would do."""
    kind, keys = ZOO[case]
    text = transformers.AutoConfig.for_model(kind, **deepcopy(ZOO_SIZES | keys | {"vocab_size": 40} | changes))
    tied = bool({**keys, **changes}.get("tie_word_embeddings", False))
    config = transformers.LlavaConfig(
        vision_config=TOWERS["clip"][1]().config, text_config=text, image_token_index=39, tie_word_embeddings=tied
    )
    config._attn_implementation = "eager"
    found = transformers.LlavaForConditionalGeneration(config).eval()
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.2)
    return found


NOT_INSIDE = ("deepseek_v4", "gemma4_text", "gpt2", "gpt_neox", "kimi_linear", "nemotron_h", "olmo_hybrid")
"""Families whose tensors have names of their own, which are not known inside of another model."""
SCALED = {"cohere": "logit_scale", "cohere2": "logit_scale", "granite": "logits_scaling"}
"""Family -> key of a factor on its logits."""


@pytest.mark.parametrize("case", {kind: case for case, (kind, _) in reversed(ZOO.items())}.values())
def test_trials_c6_every_text_family_in_a_folder_is_read_exactly_or_refused(case: str, tmp_path: Path) -> None:
    """What a family does to its logits behind the head, LLaVA does not: Gemma-2's cap is refused by name, with what to write."""
    if case == "gemma2":
        with pytest.raises(ConfigError, match=r"text_config\.final_logit_softcapping: 5\.0: .* Write null"):
            HfConverter().build().read(saved(of_family(case), tmp_path / "capped"))
    if case in NOT_INSIDE:
        untied = {"tie_word_embeddings": False} if case == "gpt2" else {}  # transformers does not build a tied one
        with pytest.raises(ForgeError, match=f"'{case}' inside of another model is not implemented"):
            HfConverter().build().read(saved(of_family(case, **untied), tmp_path / "nested"))
        return
    if case == "llama4_text":
        with pytest.raises(ForgeError, match=r"model\.name = 'vlm' does not support attention\.chunk"):
            HfConverter().build().read(saved(of_family(case), tmp_path / "chunks"))
        return
    if case in SCALED:
        with pytest.raises(ConfigError, match=rf"text_config\.{SCALED[case]}: the text model scales its logits") as refusal:
            HfConverter().build().read(saved(of_family(case), tmp_path / "scaled"))
        if case == "granite":
            assert [fault.key for fault in refusal.value.faults][-1] == "text_config.embedding_multiplier"
    changes = {"gemma2": {"final_logit_softcapping": None}, "granite": {"logits_scaling": 1.0, "embedding_multiplier": 1.0}}
    changes |= {case: {SCALED[case]: 1.0} for case in ("cohere", "cohere2")}
    reference = of_family(case, **changes.get(case, {}))
    folder = HfConverter().build().read(saved(reference, tmp_path / "theirs"))
    tokens, extras = fixed_rows(folder.model)
    with torch.no_grad():
        wanted = reference(tokens, pixel_values=extras["images"][extras["image_rows"][extras["image_rows"] >= 0]]).logits
    found = logits_of(folder, tokens, extras=extras)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))


@pytest.mark.parametrize("spelling", ["older", "newest"])
def test_folders_of_every_version_of_transformers_are_read(spelling: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = saved(random_llava(TOWERS["clip"][1]()), tmp_path / "theirs")
    wanted = HfConverter().build().read(folder)
    named = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if spelling == "older":
            named[name.replace("vision_tower.", "vision_tower.vision_model.")] = tensor
        else:
            head = name == "language_model.lm_head.weight"
            named["lm_head.weight" if head else f"model.{name.replace('language_model.model', 'language_model')}"] = tensor
    (tmp_path / "other").mkdir()
    for name in ("config.json", "preprocessor_config.json"):
        (tmp_path / "other" / name).write_text((folder / name).read_text())
    save_file(named, tmp_path / "other" / "model.safetensors", metadata={"format": "pt"})
    found = HfConverter().build().read(tmp_path / "other")
    before, after = wanted.read(list(wanted.tensors)), found.read(list(found.tensors))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    held = CLIP(path=str(tmp_path / "other"), feature_layers=(-2,)).weights()  # the folder may be an encoder's, too
    assert torch.equal(held.read(["embed.proj.weight"])["embed.proj.weight"], before["encoder.embed.proj.weight"])


def test_a_folder_with_the_keys_of_llava_1_5_says_its_sizes(tmp_path: Path) -> None:
    """As published: sizes of the decoder are those of Llama's configuration, and stand nowhere."""
    text = {"_name_or_path": "lmsys/vicuna-7b-v1.5", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 4096}
    text |= {"model_type": "llama", "rms_norm_eps": 1e-05, "torch_dtype": "float16", "vocab_size": 32064}
    vision = {"hidden_size": 1024, "image_size": 336, "intermediate_size": 4096, "model_type": "clip_vision_model"}
    vision |= {"num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14, "projection_dim": 768, "vocab_size": 32000}
    values = {"architectures": ["LlavaForConditionalGeneration"], "ignore_index": -100, "image_token_index": 32000}
    values |= {"model_type": "llava", "pad_token_id": 32001, "projector_hidden_act": "gelu", "text_config": text}
    values |= {"tie_word_embeddings": False, "torch_dtype": "float16", "vision_config": vision, "vision_feature_layer": -2}
    values |= {"vision_feature_select_strategy": "default", "vocab_size": 32064}
    statistics = {"crop_size": {"height": 336, "width": 336}, "do_center_crop": True, "size": {"shortest_edge": 336}}
    statistics |= {"image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28], "resample": 3}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(statistics))
    (tmp_path / "config.json").write_text(json.dumps(values))
    _, found = model_of(values, tmp_path, "config.json")
    assert (found.dim, found.layers, found.vocab_size, found.max_length) == (4096, 32, 32064, 4096)
    assert (found.per_image, found.placeholder) == (576, 32000)
    assert found.vision.shape.blocks == 23
    with torch.device("meta"):
        built = found.build()
    config = transformers.LlavaConfig(**{key: value for key, value in values.items() if key not in ("torch_dtype", "vocab_size")})
    with torch.device("meta"):
        theirs = transformers.LlavaForConditionalGeneration(config)
    block = sum(parameter.numel() for name, parameter in theirs.named_parameters() if ".layers.23." in name and "vision" in name)
    norm = sum(parameter.numel() for name, parameter in theirs.named_parameters() if "post_layernorm" in name)
    assert sum(map(torch.numel, built.parameters())) == sum(map(torch.numel, theirs.parameters())) - block - norm


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another fusion": ({"fusion": MixtureOfTransformers()}, "fusion = MixtureOfTransformers"),
    "cross attention": ({"fusion": CrossAttention(every=2)}, "fusion = CrossAttention"),
    "image mask": (
        {"fusion": JointDecoder(image_attention="bidirectional_image")},
        "fusion.image_attention = 'bidirectional_image'",
    ),
    "prefix mask": ({"fusion": JointDecoder(image_attention="prefix")}, "fusion.image_attention = 'prefix'"),
    "image ids": ({"images": "tokens", "modalities": {"image": (30, 40)}}, "images = 'tokens'"),
    "modalities": ({"modalities": {"sound": (20, 30)}}, "modalities = sound"),
    "native encoder": ({"encoder": ViT(size=8, patch=4, dim=8, layers=1, heads=2)}, "encoder = ViT"),
    "features": ({"encoder": Features(count=4, dim=8)}, "encoder = Features"),
    "pooled": ({"adapter": AveragePoolConfig()}, "adapter = AveragePool"),
    "perceiver": ({"adapter": PerceiverConfig(heads=2)}, "adapter = Perceiver"),
    "two hidden layers": ({"adapter": MLPConfig(hidden=2)}, "adapter.hidden = 2"),
    "another width": ({"adapter": MLPConfig(hidden_dim=12)}, "adapter.hidden_dim = 12"),
    "soft cap": ({"soft_cap": 3.0}, "soft_cap = 3.0"),
    "text": ({"norm": LayerNormConfig(bias=False), "mlp": GeGLU(exact=True)}, "no Hugging Face family can describe this model"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_llava_cannot_hold_is_refused_by_name(what: str, tmp_path: Path) -> None:
    changed, name = REFUSED[what]
    weights = InMemory(model(tmp_path / "tower", "clip", {}, changed))
    with pytest.raises(Unsupported) as caught:
        HfConverter(family="llava").build().write(tmp_path / "out", weights)
    assert f"\n    {name}" in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_all_that_does_not_fit_is_named_at_once(tmp_path: Path) -> None:
    changed = {"fusion": JointDecoder(image_attention="prefix"), "adapter": AveragePoolConfig(), "soft_cap": 3.0}
    weights = InMemory(model(tmp_path / "tower", "siglip", {}, changed))
    weights.facts = WeightsInfo(recipe={"data": {"sources": [{"tiling": {"name": "anyres"}}, {"tiling": {"name": "square"}}]}})
    with pytest.raises(Unsupported) as caught:
        HfConverter(family="llava").build().write(tmp_path / "out", weights)
    for name in (
        "image_attention = 'prefix'",
        "adapter = AveragePool",
        "soft_cap",
        "feature_layers is empty",
        "tiling = 'anyres'",
    ):
        assert name in str(caught.value)


def test_patches_with_a_mask_are_refused(tmp_path: Path) -> None:
    component = model(tmp_path / "tower", "siglip2", {"feature_layers": (-1,)}, {})
    assert isinstance(component.encoder, SigLIP2)
    with pytest.raises(Unsupported, match="siglip2_vision_model: its images are patches"):
        HfConverter(family="llava").build().write(tmp_path / "out", InMemory(component))


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key": ({"spatial_merge_size": 2}, "spatial_merge_size"),
    "strategy": ({"vision_feature_select_strategy": "cls"}, "vision_feature_select_strategy"),
    "layer": ({"vision_feature_layer": "last"}, "vision_feature_layer"),
    "no such layer": ({"vision_feature_layer": 9}, "feature_layers 9 does not exist"),
    "activation": ({"projector_hidden_act": "relu"}, "projector_hidden_act"),
    "linear": ({"projector_hidden_act": "linear"}, "multi_modal_projector.linear_2.weight"),
    "token": ({"image_token_index": 40}, "ids 40 to 41"),
    "tie": ({"tie_word_embeddings": True}, "tie_word_embeddings"),
    "tower": ({"vision_config": {"model_type": "pixtral"}}, "pixtral"),
    "no text": ({"text_config": None}, "text_config is not a table"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_folder_that_says_something_else_is_refused_by_name(what: str, tmp_path: Path) -> None:
    folder = saved(random_llava(TOWERS["clip"][1]()), tmp_path / "theirs")
    changed, name = WRONG[what]
    values = json.loads((folder / "config.json").read_text()) | changed
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises((ConfigError, Unsupported), match=name):
        HfConverter().build().read(folder)


def test_a_patch_is_not_dropped_as_if_it_were_the_class_token(tmp_path: Path) -> None:
    folder = saved(random_llava(TOWERS["siglip"][1]()), tmp_path / "theirs")  # transformers' default is to drop one
    with pytest.raises(ConfigError, match="would drop the first patch"):
        HfConverter().build().read(folder)


@pytest.mark.parametrize("statistics", [{}, {"size": {"shortest_edge": 20}, "crop_size": 16, "do_center_crop": True}])
def test_the_processor_makes_the_pixels_of_ours(statistics: dict[str, Any], tmp_path: Path) -> None:
    kind, make = TOWERS["clip"]
    stored(tmp_path / "tower", make(), **statistics)
    component = VLM(**SIZES, **PARTS, encoder=kind(path=str(tmp_path / "tower")), adapter=MLPConfig(), fusion=JointDecoder())
    HfConverter().build().write(tmp_path / "out", InMemory(component))
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    draw = torch.Generator().manual_seed(1)
    picture = Image.fromarray(torch.randint(0, 256, (30, 40, 3), generator=draw, dtype=torch.uint8).numpy())
    processor = CLIPImageProcessorPil.from_pretrained(tmp_path / "out")
    wanted = processor(picture, return_tensors="pt")["pixel_values"][0]
    found = torch.as_tensor(pixels(fit_square(picture, component.vision.processing), component.vision.processing))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


def tokenizer(folder: Path, image: str | None) -> Path:
    """A folder with a tokenizer of words; `image` is token 39."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({f"w{each}": each for each in range(39)}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if image is not None:
        made.add_special_tokens([AddedToken(image, special=True)])
        assert made.token_to_id(image) == 39
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return folder


@pytest.mark.parametrize("case", ["clip", "clip_class", "siglip", "dinov2", "dinov2_gated", "clip_larger"])
def test_transformers_opens_a_processor_that_fits_the_model(case: str, tmp_path: Path) -> None:
    """A picture and words become what the model takes: as many placeholders as it has vectors, and our pixels."""
    weights = InMemory(model(tmp_path / "tower", *LLAVA[case]))
    vlm = weights.model
    assert isinstance(vlm, VLM) and vlm.placeholder == 39
    HfConverter(tokenizer=str(tokenizer(tmp_path / "words", "<picture>"))).build().write(tmp_path / "out", weights)
    processor = transformers.AutoProcessor.from_pretrained(tmp_path / "out", backend="pil")
    assert type(processor).__name__ == "LlavaProcessor"
    draw = torch.Generator().manual_seed(1)
    picture = Image.fromarray(torch.randint(0, 256, (30, 40, 3), generator=draw, dtype=torch.uint8).numpy())
    inputs = processor(images=[picture], text="w3 <picture> w4", return_tensors="pt")
    wanted = torch.as_tensor(pixels(fit_square(picture, vlm.vision.processing), vlm.vision.processing))
    torch.testing.assert_close(inputs["pixel_values"][0], wanted, rtol=0, atol=1e-6)
    tokens = inputs["input_ids"]
    assert tokens[0].tolist() == [3, *[39] * vlm.per_image, 4]
    rows = torch.zeros((1, 1), dtype=torch.long)
    ours = logits_of(weights, tokens, extras={"images": wanted[None], "image_rows": rows})
    with torch.no_grad():
        found = theirs(tmp_path / "out")(**inputs).logits
    torch.testing.assert_close(found, ours, rtol=0, atol=1e-5 * float(ours.abs().max()))


@pytest.mark.parametrize("image", [None, "<picture>"])
def test_a_processor_is_only_written_where_the_tokenizer_has_the_placeholder(image: str | None, tmp_path: Path) -> None:
    weights = InMemory(model(tmp_path / "tower", *LLAVA["image_token"]))  # 7 is a word
    words = str(tokenizer(tmp_path / "words", image))
    for name, given in (("without", None), ("with", words)):
        HfConverter(tokenizer=given).build().write(tmp_path / name, weights)
        assert not (tmp_path / name / "processor_config.json").exists()


def test_images_are_those_of_their_numbers_in_any_order(tmp_path: Path) -> None:
    """A row may name any of the images, and an image may be of no row."""
    weights = InMemory(model(tmp_path / "tower", *LLAVA["clip"]))
    HfConverter().build().write(tmp_path / "out", weights)
    tokens, extras = fixed_rows(weights.model)
    images = torch.cat((extras["images"], extras["images"][:1] + 1))
    rows = torch.tensor([[4, 2], [1, 3], [-1, -1]])
    ours = logits_of(weights, tokens, extras={"images": images, "image_rows": rows})
    found = HfConverter().build().reference(tmp_path / "out", tokens, {"images": images, "image_rows": rows})
    torch.testing.assert_close(found, ours, rtol=0, atol=1e-5 * float(ours.abs().max()))


def test_a_tensor_under_both_of_its_names_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = saved(random_llava(TOWERS["clip"][1]()), tmp_path / "theirs")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["language_model.lm_head.weight"] + 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(Unsupported, match="has a tensor twice"):
        HfConverter().build().read(folder)


def test_special_tokens_reach_the_text_part(tmp_path: Path) -> None:
    """Without them it would have those of transformers' default: 1 and 2 of Llama."""
    weights = InMemory(model(tmp_path / "tower", *LLAVA["clip"]))
    weights.facts = WeightsInfo(special_tokens={"bos_token_id": 5, "eos_token_id": 6})
    HfConverter().build().write(tmp_path / "out", weights)
    text = transformers.LlavaConfig.from_pretrained(tmp_path / "out").text_config
    assert (text.bos_token_id, text.eos_token_id, text.pad_token_id) == (5, 6, None)
    again = HfConverter().build().read(tmp_path / "out").facts.special_tokens
    assert again == {"bos_token_id": 5, "eos_token_id": 6, "pad_token_id": None}


def test_trials_h_the_list_of_implemented_types_has_those_of_every_package(tmp_path: Path) -> None:
    for kind in ("reformer", ["llava"], None):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
        with pytest.raises(
            Unsupported, match=r"model_type .* is not implemented; implemented are llama, .*llava, .*mllama_text_model"
        ):
            HfConverter().build().read(tmp_path)
