"""Published configurations against transformers: parameters at full size, logits of tiny models with the same keys."""

import json
from copy import deepcopy
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_core.component import Component
from forge_core.errors import ForgeError
from forge_models.components.layers import RMSNormConfig
from forge_models.hf.families import FAMILIES
from forge_models.hf.family import decoder_of, meaning_of, misfits
from forge_models.hf.names import places_in
from forge_models.hf.reader import Folder, family_of
from models.hf.published import READ, REFUSED, folder_of, reference, spread, tiny, variants
from models.hf.zoo import exact_logits, tokens

VARIANTS = variants()
TOLERANCE = 1e-5
"""Of the largest logit. Both sides compute in fp64 but for norms, angles and softmax, which transformers computes in fp32."""


def in_memory(kind: str, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The shapes by the names that transformers has in memory, if they differ from those in files."""
    if kind == "gpt_neox":
        return {"lm_head.weight": shapes.pop("embed_out.weight"), **shapes}
    if kind == "olmo_hybrid":
        norms = {"attention_layer_norm": "input_layernorm", "feedforward_layer_norm": "post_attention_layernorm"}
        parts = [name for name in shapes if name.endswith("q_conv1d.weight")]
        for name in parts:
            rows = [shapes.pop(name.replace("q_conv1d", f"{letter}_conv1d")) for letter in "qkv"]
            shapes[name.replace("q_conv1d", "conv1d")] = (sum(count for count, *_ in rows), *rows[0][1:])
        return {".".join(norms.get(word, word) for word in name.split(".")): shape for name, shape in shapes.items()}
    return shapes


@pytest.mark.parametrize("name", READ)
def test_p1_p2_a_published_configuration_has_the_parameters_of_transformers(name: str) -> None:
    values = READ[name]["config"]
    family = family_of(values, name)
    places = places_in(family, decoder_of(family, values, name), fused=True)
    ours = {theirs: place.theirs for place in places.values() if not place.buffer for theirs in place.names}
    ours = in_memory(family.model_type, ours)
    with torch.device("meta"):
        model = reference(values)
    assert ours == {theirs: tuple(parameter.shape) for theirs, parameter in model.named_parameters()}
    assert sum(prod(shape) for shape in ours.values()) == READ[name]["parameters"]


@pytest.mark.parametrize("name", READ)
def test_p1_a_published_configuration_that_transformers_saved_again_means_the_same(name: str) -> None:
    """Every model that was trained further has such a file: keys are renamed, moved into tables, or there twice."""
    from transformers import AutoConfig

    values = READ[name]["config"]
    family = family_of(values, name)
    given = deepcopy({key: value for key, value in values.items() if key != "auto_map"})
    again = json.loads(AutoConfig.for_model(**given).to_json_string())
    assert meaning_of(decoder_of(family, again, name)) == meaning_of(decoder_of(family, values, name))


@pytest.mark.parametrize("name", REFUSED)
def test_p1_what_is_not_implemented_is_refused_by_name(name: str) -> None:
    values, key = REFUSED[name]["config"], REFUSED[name]["key"]
    with pytest.raises(ForgeError, match=key) as caught:
        decoder_of(family_of(values, name), values, name)
    if key == "quantization_config":
        assert "save the weights in bf16" in str(caught.value)
    if key == "model_type":
        assert "llama, mistral, qwen2" in str(caught.value)


def error(folder: Folder, theirs: torch.nn.Module) -> float:
    """Largest difference of logits from those of transformers in fp64 throughout, in units of the largest one."""
    ours: Any = folder.model.build().double()
    ours.load_state_dict(folder.read(list(folder.tensors)), strict=not folder.model.tied_embeddings)
    with torch.no_grad():
        expected, found = exact_logits(theirs, tokens()), ours.eval()(tokens())
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("name", VARIANTS)
def test_p1_tiny_models_of_published_configurations_have_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = spread(reference(VARIANTS[name]))
    assert error(Folder(folder_of(theirs, VARIANTS[name], tmp_path)), theirs) < TOLERANCE


def test_p3_norms_of_latents_have_their_own_eps(tmp_path: Path) -> None:
    """Moonlight's other norms have 1e-5; latents so small that it would show are compared."""
    values = tiny(READ["moonshotai/Moonlight-16B-A3B"]["config"]) | {"q_lora_rank": 12}
    theirs = spread(reference(values))
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if name.endswith(("q_a_proj.weight", "kv_a_proj_with_mqa.weight")):
                parameter.mul_(1e-3)
    folder = Folder(folder_of(theirs, values, tmp_path))
    assert error(folder, theirs) < TOLERANCE
    attention: Any = folder.model.attention
    folder.model = replace(folder.model, attention=replace(attention, norm_eps=None))
    assert error(folder, theirs) > 100 * TOLERANCE, "the case does not show an eps"


def test_p3_a_model_is_written_where_its_latents_have_the_eps_of_the_format() -> None:
    """However that was said: by the latents' own key or by the norm of the whole model."""
    family = FAMILIES["deepseek_v3"]
    decoder = decoder_of(family, tiny(READ["moonshotai/Moonlight-16B-A3B"]["config"]), "here")
    attention: Any = decoder.attention
    assert attention.norm_eps == 1e-6
    assert decoder.norm == RMSNormConfig(eps=1e-5)
    assert misfits(family, decoder) == []
    plain = replace(decoder, attention=replace(attention, norm_eps=None))
    assert any("norm_eps=1e-05" in fault for fault in misfits(family, plain))
    assert misfits(family, replace(plain, norm=RMSNormConfig(eps=1e-6))) == []
    with pytest.raises(ValueError, match="has no eps"):
        replace(decoder, norm=WithoutEps())


class WithoutEps(Component):
    """A norm of a plugin."""

    def build(self, dim: int) -> torch.nn.Module:
        return torch.nn.Identity()


FUSED = ["mistralai/Mixtral-8x7B-v0.1", "Qwen/Qwen3-30B-A3B", "moonshotai/Moonlight-16B-A3B"]


@pytest.mark.parametrize("name", FUSED)
def test_p4_experts_in_one_tensor_are_read(name: str, tmp_path: Path) -> None:
    """As transformers holds them in memory, and saves them when told not to return to the original format."""
    theirs = spread(reference(tiny(READ[name]["config"])))
    plain = Folder(folder_of(theirs, tiny(READ[name]["config"]), tmp_path / "plain"))
    fused = Folder(folder_of(theirs, tiny(READ[name]["config"]), tmp_path / "fused", save_original_format=False))
    assert any(".experts.gate_up_proj" in theirs for theirs in fused._files)
    assert plain.tensors == fused.tensors
    before, after = plain.read(list(plain.tensors)), fused.read(list(fused.tensors))
    assert all(torch.equal(before[name], after[name]) for name in before)
    for matrix, offset, extent in (("gate", (1, 2, 3), (2, 5, 7)), ("up", (0, 3, 1), (3, 9, 4)), ("down", (2, 1, 0), (1, 8, 5))):
        place = f"blocks.1.mlp.experts.{matrix}_proj"
        box = tuple(slice(start, start + size) for start, size in zip(offset, extent, strict=True))
        assert torch.equal(fused.box(place, offset, extent), before[place][box])
