"""Gemma 4: heads of global layers in two spellings, tables of rotary positions, what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from forge_core.errors import ConfigError, ForgeError
from forge_models.components.attentions import GQA
from forge_models.hf.families import FAMILIES
from forge_models.hf.family import config_of, decoder_of, meaning_of, misfits
from forge_models.hf.reader import Folder
from forge_models.shape import Rope
from models.hf.zoo import CASES, random_model, sizes_of
from models.hf.zoo import saved as saved_folder

FAMILY = FAMILIES["gemma4_text"]
VALUES = sizes_of("gemma4_text") | CASES["gemma4_text"][1]
PLAIN = {key: value for key, value in VALUES.items() if key not in ("global_head_dim", "num_global_key_value_heads")}
"""Without the keys of global layers as they are published; transformers saves `per_layer_config` instead."""
GLOBAL = ("5", "6")
"""Global layers of seven."""


def saved(keys: dict[str, Any]) -> dict[str, Any]:
    """The configuration as transformers saves it."""
    from transformers import AutoConfig

    return AutoConfig.for_model("gemma4_text", **keys).to_dict()


def table(**heads: int) -> dict[str, Any]:
    return dict.fromkeys(GLOBAL, heads)


@pytest.mark.parametrize("equal", [True, False])
def test_heads_of_global_layers_are_read_in_both_spellings(equal: bool) -> None:
    keys = VALUES | {"attention_k_eq_v": equal}
    decoder = decoder_of(FAMILY, keys, "here")
    assert meaning_of(decoder_of(FAMILY, saved(keys), "here")) == meaning_of(decoder)
    attention: Any = decoder.attention
    sizes = [attention.of_layer(decoder.shape.context(layer)) for layer in range(7)]
    expected = [(12, 2)] * 5 + [(16, 1 if equal else 2)] * 2  # the reference uses the number of heads with equal values only
    assert [(size.head_dim, size.kv_heads) for size in sizes] == expected
    assert attention.keys_as_values == ("global" if equal else "none")


def test_what_a_table_of_layers_does_not_name_is_as_in_other_layers() -> None:
    attention: Any = decoder_of(FAMILY, PLAIN | {"per_layer_config": table(num_key_value_heads=4)}, "here").attention
    assert (attention.global_head_dim, attention.global_kv_heads) == (None, 4)
    for none in ({}, None):
        attention = decoder_of(FAMILY, PLAIN | {"per_layer_config": none}, "here").attention
        assert (attention.global_head_dim, attention.global_kv_heads) == (None, None)
    plain = decoder_of(FAMILY, PLAIN, "here").attention
    assert isinstance(plain, GQA) and plain.global_head_dim == 512  # the default of the reference
    assert misfits(FAMILY, decoder_of(FAMILY, PLAIN, "here")) == []


@pytest.mark.parametrize(
    "value",
    [
        {"0": {"head_dim": 16}},
        {"5": {"head_dim": 16}},
        {"5": {"head_dim": 16}, "6": {"head_dim": 20}},
        {"9": {"head_dim": 16}},
        {"-1": {"head_dim": 16}},
        table(sliding_window=16),
        table(head_dim=True),
        table(head_dim=0),
        {"5": 16, "6": 16},
        [16],
    ],
)
def test_other_tables_of_layers_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError) as refusal:
        decoder_of(FAMILY, PLAIN | {"per_layer_config": value}, "here")
    assert [fault.key for fault in refusal.value.faults] == ["per_layer_config"]


@pytest.mark.parametrize(("key", "value"), [("global_head_dim", 20), ("num_global_key_value_heads", 2)])
def test_spellings_that_differ_are_refused(key: str, value: int) -> None:
    given = PLAIN | {"per_layer_config": table(head_dim=16, num_key_value_heads=1)}
    assert decoder_of(FAMILY, given | {"global_head_dim": 16, "num_global_key_value_heads": 1}, "here")
    with pytest.raises(ConfigError) as refusal:
        decoder_of(FAMILY, given | {key: value}, "here")
    assert [fault.key for fault in refusal.value.faults] == [key]


FULL, SLIDING = {"full_attention": {"rope_type": "default", "rope_theta": 10.0}}, {"sliding_attention": {"rope_theta": 20.0}}


@pytest.mark.parametrize(
    ("tables", "key"),
    [
        (FULL, "rope_parameters.sliding_attention"),
        (SLIDING, "rope_parameters.full_attention"),
        (FULL | {"sliding_attention": {}}, "rope_parameters.sliding_attention"),
        (FULL | {"sliding_attention": {"rope_theta": 1.0, "partial_rotary_factor": 0.5}}, "rope_parameters.sliding_attention"),
        (SLIDING | {"full_attention": {"rope_theta": 1.0, "partial_rotary_factor": 0.5}}, "rope_parameters.full_attention"),
        (SLIDING | {"full_attention": {"rope_type": "proportional", "rope_theta": 1.0, "partial_rotary_factor": 0}}, "partial"),
        (SLIDING | {"full_attention": {"rope_type": "proportional", "rope_theta": 1.0, "factor": -1}}, "full_attention.factor"),
        (SLIDING | {"full_attention": {"rope_type": "proportional", "rope_theta": 1.0, "beta_fast": 2}}, "full_attention.beta"),
        (FULL | {"sliding_attention": {"rope_type": "proportional", "rope_theta": 1.0}}, "sliding_attention.rope_type"),
        ({"rope_type": "default", "rope_theta": 10.0}, "rope_parameters"),
        ({}, "rope_parameters"),
        ("default", "rope_parameters"),
    ],
)
def test_tables_of_rotary_positions_that_are_not_understood_are_refused(tables: Any, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        decoder_of(FAMILY, VALUES | {"rope_parameters": tables}, "here")


def test_without_tables_there_are_those_of_the_reference() -> None:
    keys = {key: value for key, value in VALUES.items() if key != "rope_parameters"}
    rope = decoder_of(FAMILY, keys, "here").rope
    assert rope == decoder_of(FAMILY, saved(keys), "here").rope
    assert (rope.theta, rope.local_theta, rope.proportion, rope.scaling) == (1e6, 1e4, 0.25, "none")
    assert config_of(FAMILY, decoder_of(FAMILY, keys, "here"))["rope_parameters"] == saved(keys)["rope_parameters"]


@pytest.mark.parametrize(("key", "value"), [("num_global_key_value_heads", 3), ("global_head_dim", 7)])
def test_heads_that_do_not_fit_are_refused(key: str, value: int) -> None:
    with pytest.raises(ForgeError, match=key.replace("num_", "").replace("key_value", "kv")):
        decoder_of(FAMILY, VALUES | {key: value}, "here")


def test_keys_and_values_that_no_layer_uses_are_skipped(tmp_path: Path) -> None:
    """Published files have them for layers that take those of others."""
    kind, keys = CASES["gemma4_text-inputs-shared-wider"]
    path = saved_folder(random_model(kind, keys), tmp_path / "published")
    tensors = load_file(path / "model.safetensors")
    plain = Folder(path)
    unused = {f"model.layers.{layer}.self_attn.{name}.weight" for layer in (4, 6) for name in ("k_proj", "v_proj", "k_norm")}
    assert unused.isdisjoint(tensors)
    more = dict.fromkeys(sorted(unused), torch.zeros(3))
    save_file(tensors | {name: value.clone() for name, value in more.items()}, path / "model.safetensors")
    assert Folder(path).tensors == plain.tensors
    save_file(tensors | {"model.layers.3.self_attn.k_proj.bias2": torch.zeros(3)}, path / "model.safetensors")
    with pytest.raises(ForgeError, match=r"layers\.3\.self_attn\.k_proj\.bias2: unexpected"):
        Folder(path)


def test_no_other_family_has_proportional_tables() -> None:
    for kind in ("llama", "gemma3_text"):
        tables = {"rope_type": "proportional", "rope_theta": 10.0, "partial_rotary_factor": 0.5}
        given = {"full_attention": tables} if kind == "gemma3_text" else tables
        with pytest.raises(ConfigError, match="rope_parameters"):
            decoder_of(FAMILIES[kind], sizes_of(kind) | {"rope_parameters": given}, "here")
    llama = decoder_of(FAMILIES["llama"], sizes_of("llama"), "here")
    faults = misfits(FAMILIES["llama"], replace(llama, rope=Rope(proportion=0.5)))
    assert faults == ["rope.proportion = 0.5, it has 1.0"]
