"""Published towers: features equal transformers' on small random models, of weights that transformers wrote."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_core.errors import ConfigError, ForgeError
from forge_models.hf.config import Unsupported
from forge_testing import modules
from forge_vlm.components.encoders import CLIP, DINOv2, Published, SigLIP, SigLIP2
from forge_vlm.encoders.towers import FAMILIES

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2, "patch_size": 4}
CLOSE = {"atol": 1e-5, "rtol": 1e-5}
TEXT = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 16}


def siglip(**more: Any) -> Any:
    config = transformers.SiglipVisionConfig(**{**SIZES, "intermediate_size": 40, "image_size": 16, **more})
    return transformers.SiglipVisionModel(config)


def siglip2() -> Any:
    return transformers.Siglip2VisionModel(transformers.Siglip2VisionConfig(**SIZES, intermediate_size=40, num_patches=16))


def clip(**more: Any) -> Any:
    return transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**SIZES, intermediate_size=40, image_size=16, **more))


def dinov2(**more: Any) -> Any:
    return transformers.Dinov2Model(
        transformers.Dinov2Config(**{**SIZES, **more}, mlp_ratio=2, image_size=16, layerscale_value=0.3)
    )


def whole_siglip() -> Any:
    text = transformers.SiglipTextConfig(**TEXT)
    vision = transformers.SiglipVisionConfig(**SIZES, intermediate_size=40, image_size=16)
    return transformers.SiglipModel(transformers.SiglipConfig(text_config=text.to_dict(), vision_config=vision.to_dict()))


def whole_clip() -> Any:
    text = transformers.CLIPTextConfig(**TEXT)
    vision = transformers.CLIPVisionConfig(**SIZES, intermediate_size=40, image_size=16)
    return transformers.CLIPModel(transformers.CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict()))


CASES = {
    "siglip": (SigLIP, siglip),
    "siglip2_fixed": (SigLIP2, siglip),
    "siglip2": (SigLIP2, siglip2),
    "clip": (CLIP, clip),
    "clip_gelu": (CLIP, lambda: clip(hidden_act="gelu")),
    "dinov2": (DINOv2, dinov2),
    "dinov2_gated": (DINOv2, lambda: dinov2(use_swiglu_ffn=True)),
    "dinov2_gated_rounded": (DINOv2, lambda: dinov2(use_swiglu_ffn=True, hidden_size=20)),
    "dinov2_no_bias": (DINOv2, lambda: dinov2(qkv_bias=False)),
    "whole_siglip": (SigLIP, whole_siglip),
    "whole_clip": (CLIP, whole_clip),
}


def stored(folder: Path, theirs: Any, seed: int = 0, **preprocessor: Any) -> Any:
    """Writes a tower of transformers with random parameters into a folder, with a preprocessor_config.json."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.2 + (parameter.dim() < 2))
    theirs.eval().save_pretrained(folder)
    statistics = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6], "resample": 3}
    (folder / "preprocessor_config.json").write_text(json.dumps({**statistics, **preprocessor}))
    return theirs


def ours(component: Published) -> torch.nn.Module:
    """Built on the meta device, filled with the weights of the folder."""
    module = modules.on_meta(component.build).to_empty(device="cpu").eval()
    module.load_state_dict(component.weights().read(list(component.weights().tensors)))
    return module


def run(theirs: Any, x: torch.Tensor, **more: Any) -> Any:
    """Outputs of the vision tower."""
    tower = getattr(theirs, "vision_model", theirs)
    with torch.no_grad():
        if "Siglip2" not in type(tower).__name__:
            return tower(pixel_values=x, output_hidden_states=True, **more)
        grid = x.shape[-1] // 4
        flat = x.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 4, 5, 1).reshape(len(x), grid * grid, 48)
        mask, shapes = torch.ones(len(x), grid * grid, dtype=torch.int32), torch.tensor([[grid, grid]] * len(x))
        return tower(pixel_values=flat, pixel_attention_mask=mask, spatial_shapes=shapes, output_hidden_states=True)


@pytest.mark.parametrize("case", CASES)
def test_features_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    kind, make = CASES[case]
    theirs = stored(tmp_path, make())
    x = modules.drawn(2, 3, 16, 16).float()
    wanted = run(theirs, x)
    first = 1 if kind in (CLIP, DINOv2) else 0
    for layers in ((), (-1,), (-2,), (0, 2, -1)):
        for keeps in (False, True) if first else (False,):
            component = kind(path=str(tmp_path), feature_layers=layers, class_feature=keeps)
            states = [wanted.hidden_states[at] for at in layers] if layers else [wanted.last_hidden_state]
            features = torch.cat(states, -1)[:, 0 if keeps else first :]
            with torch.no_grad():
                torch.testing.assert_close(ours(component)(x), features, **CLOSE)
            assert (component.tokens, component.width) == tuple(features.shape[1:])
    assert (component.image_size, component.channels) == (16, 3)
    assert (component.mean, component.std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))


@pytest.mark.parametrize("case", ["siglip", "siglip2", "clip", "dinov2"])
def test_positions_are_resized_as_transformers_does(case: str, tmp_path: Path) -> None:
    kind, make = CASES[case]
    theirs = stored(tmp_path, make())
    x = modules.drawn(2, 3, 24, 24).float()
    more = {"interpolate_pos_encoding": True} if case in ("siglip", "clip") else {}
    component = kind(path=str(tmp_path), size=24, class_feature=case in ("clip", "dinov2"))
    with torch.no_grad():
        torch.testing.assert_close(ours(component)(x), run(theirs, x, **more).last_hidden_state, **CLOSE)
    assert "positions of 4 x 4 patches were resized to 6 x 6" in component.weights().facts.notes


def test_pixels_that_make_no_patch_are_not_seen(tmp_path: Path) -> None:
    """SigLIP so400m has patches of 14 pixels in images of 384: 27 of them, and 6 pixels are left."""
    theirs = stored(tmp_path, siglip(image_size=18), size={"height": 18, "width": 18})
    component = SigLIP(path=str(tmp_path))
    x = modules.drawn(2, 3, 18, 18).float()
    with torch.no_grad():
        torch.testing.assert_close(ours(component)(x), run(theirs, x).last_hidden_state, **CLOSE)
    assert (component.image_size, component.tokens) == (18, 16)
    with pytest.raises(ValueError, match="an image of 3 pixels has no patch of 4"):
        _ = SigLIP(path=str(tmp_path), size=3).tokens


def test_the_size_is_that_of_the_preprocessor(tmp_path: Path) -> None:
    """DINOv2 has positions for 518 pixels, and a preprocessor for 224."""
    stored(tmp_path, dinov2(), size={"shortest_edge": 10}, crop_size={"height": 8, "width": 8}, do_center_crop=True)
    component = DINOv2(path=str(tmp_path))
    assert (component.image_size, component.tokens) == (8, 4)
    assert (component.processing.shortest, component.processing.size) == (10, 8)
    assert ours(component)(modules.drawn(1, 3, 8, 8).float()).shape == (1, 4, 24)
    assert DINOv2(path=str(tmp_path), size=16).processing.shortest == 20


def test_what_is_left_out_is_told(tmp_path: Path) -> None:
    stored(tmp_path, whole_clip())
    notes = CLIP(path=str(tmp_path), feature_layers=(1,)).weights().facts.notes
    assert any("tensors outside of the vision tower were left out" in note for note in notes)
    assert any("blocks 1 to 2 of the vision tower were left out" in note for note in notes)


def test_boxes_are_parts_of_the_whole(tmp_path: Path) -> None:
    stored(tmp_path, dinov2(use_swiglu_ffn=True))
    weights = DINOv2(path=str(tmp_path)).weights()
    for name, entry in weights.tensors.items():
        whole = weights.read([name])[name]
        assert tuple(whole.shape) == entry.shape
        at, size = whole.shape[0] // 3, whole.shape[0] // 2
        extent = (size, *whole.shape[1:])
        assert torch.equal(weights.box(name, (at, *[0] * (whole.dim() - 1)), extent), whole[at : at + size])


def changed(folder: Path, file: str, **values: Any) -> None:
    path = folder / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_keys_that_are_not_understood_are_refused_by_name(tmp_path: Path) -> None:
    stored(tmp_path, siglip())
    changed(tmp_path, "config.json", rotary=True)
    with pytest.raises(ConfigError, match=r"rotary: true is not known for this family; .*name it in ignore of the encoder"):
        _ = SigLIP(path=str(tmp_path)).tokens
    assert SigLIP(path=str(tmp_path), ignore=("rotary",)).tokens == 16
    changed(tmp_path, "config.json", attention_dropout=0.1)
    with pytest.raises(ConfigError, match=r"attention_dropout: 0\.1 is not implemented"):
        _ = SigLIP(path=str(tmp_path), ignore=("rotary",)).tokens


def test_dropout_is_refused(tmp_path: Path) -> None:
    stored(tmp_path, dinov2())
    for key in ("hidden_dropout_prob", "attention_probs_dropout_prob", "drop_path_rate"):
        changed(tmp_path, "config.json", **{key: 0.1})
        with pytest.raises(ConfigError, match=rf"{key}: 0\.1 is not implemented"):
            _ = DINOv2(path=str(tmp_path)).tokens
        changed(tmp_path, "config.json", **{key: 0.0})
    assert DINOv2(path=str(tmp_path)).tokens == 16


@pytest.mark.parametrize("name", FAMILIES)
def test_keys_that_are_absent_have_the_defaults_of_transformers(name: str) -> None:
    kinds = {
        "siglip": "SiglipVisionConfig",
        "siglip2": "Siglip2VisionConfig",
        "clip": "CLIPVisionConfig",
        "dinov2": "Dinov2Config",
    }
    config = getattr(transformers, kinds[name])()
    known = {key: value for key, value in FAMILIES[name].defaults.items() if hasattr(config, key)}
    assert known == {key: getattr(config, key) for key in known}
    assert set(FAMILIES[name].defaults) - set(known) <= {"image_size"}, "NaFlex has no size"


def test_keys_of_older_files_change_nothing(tmp_path: Path) -> None:
    """Settings of generation and bookkeeping, which older versions wrote into the table of the tower."""
    stored(tmp_path, whole_clip())
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    old = {"tie_word_embeddings": True, "top_k": 50, "bad_words_ids": None, "is_decoder": False, "pruned_heads": {}}
    old |= {"projection_dim": 8, "initializer_factor": 1.0, "dropout": 0.0, "torchscript": False, "return_dict": True}
    values["vision_config"] |= old
    path.write_text(json.dumps(values))
    assert CLIP(path=str(tmp_path)).tokens == 16


def test_another_family_is_refused(tmp_path: Path) -> None:
    stored(tmp_path, clip())
    with pytest.raises(
        Unsupported, match="model_type 'clip_vision_model' is not one of this encoder; it reads siglip2, siglip2_"
    ):
        _ = SigLIP2(path=str(tmp_path)).width


def test_tensors_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    stored(tmp_path, siglip())
    changed(tmp_path, "config.json", intermediate_size=44)
    with pytest.raises(Unsupported, match=r"mlp\.fc1\.weight: shape \(40, 24\), config\.json means \(44, 24\)"):
        SigLIP(path=str(tmp_path)).weights()
    changed(tmp_path, "config.json", intermediate_size=40, image_size=20)
    with pytest.raises(Unsupported, match=r"position_embedding\.weight: shape \(16, 24\), config\.json means \(25, 24\)"):
        SigLIP(path=str(tmp_path)).weights()
    changed(tmp_path, "config.json", image_size=16, num_hidden_layers=4)
    with pytest.raises(Unsupported, match=r"encoder\.layers\.3\..* is missing"):
        SigLIP(path=str(tmp_path)).weights()
    changed(tmp_path, "config.json", num_hidden_layers=2)
    with pytest.raises(Unsupported, match=r"encoder\.layers\.2\..*: unexpected for the tower"):
        SigLIP(path=str(tmp_path)).weights()


def test_feature_layers_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    stored(tmp_path, siglip())
    with pytest.raises(ValueError, match="feature_layers -5 does not exist; the encoder has 3 blocks"):
        _ = SigLIP(path=str(tmp_path), feature_layers=(-5,)).width


def test_without_a_preprocessor_statistics_are_not_guessed(tmp_path: Path) -> None:
    stored(tmp_path, siglip())
    (tmp_path / "preprocessor_config.json").unlink()
    with pytest.raises(ForgeError, match="without it mean and std of the encoder are not known"):
        _ = SigLIP(path=str(tmp_path)).mean
