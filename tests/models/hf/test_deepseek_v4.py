"""DeepSeek-V4: spellings of keys and tensors, adapters, what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from forge_core.errors import ConfigError
from forge_models.components.lora import LoRAConfig
from forge_models.hf.config import Unsupported
from forge_models.hf.families import FAMILIES
from forge_models.hf.family import decoder_of, meaning_of, misfits
from forge_models.hf.names import places_in
from forge_models.hf.peft_places import every_place
from forge_models.hf.reader import Folder
from models.hf.zoo import CASES, random_model, saved, sizes_of

FAMILY = FAMILIES["deepseek_v4"]
KEYS: dict[str, Any] = sizes_of("deepseek_v4") | CASES["deepseek_v4"][1]
YARN = {"type": "yarn", "factor": 4, "original_max_position_embeddings": 16, "beta_fast": 20, "beta_slow": 2}
OLDER: dict[str, Any] = {
    key: value for key, value in KEYS.items() if key not in ("layer_types", "compress_rates", "rope_parameters")
}
OLDER |= {"partial_rotary_factor": None, "qk_rope_head_dim": 6, "compress_ratios": [128, 4, 0, 4, 0], "rope_scaling": YARN}


def read(keys: dict[str, Any]) -> Any:
    return decoder_of(FAMILY, keys, "here")


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"compress_rate_csa": 3, "compress_rate_hca": 6},
        {"compress_rates": {"compressed_sparse_attention": 5, "heavily_compressed_attention": 9}, "compress_rate_csa": 6},
        {"compress_ratios": None},
        {"num_hidden_layers": 7, "compress_ratios": None},
        {"compress_ratios": [4, 4, 128, 4]},
        {"rope_scaling": None},
        {"rope_scaling": YARN | {"attention_factor": 0.8}},
        {"rope_scaling": {"type": "linear", "factor": 3.0}},
        {"qk_rope_head_dim": None, "partial_rotary_factor": 0.34},
        {"head_dim": 32, "qk_rope_head_dim": None, "index_head_dim": 40},
        {"num_hash_layers": 0},
        {"num_hash_layers": None},
        {"num_hash_layers": 9, "num_hidden_layers": 3},
        {"num_nextn_predict_layers": 0, "swiglu_limit": 3.0, "scoring_func": "sigmoid"},
    ],
)
def test_older_keys_mean_what_transformers_makes_of_them(change: dict[str, Any]) -> None:
    from transformers import AutoConfig

    keys = {key: value for key, value in (OLDER | change).items() if value is not None}
    config = AutoConfig.for_model("deepseek_v4", **json.loads(json.dumps(keys)))
    newer = json.loads(config.to_json_string())
    assert {"layer_types", "compress_rates", "mlp_layer_types"} <= newer.keys() and set(newer["rope_parameters"]) == {
        "main",
        "compress",
    }
    assert meaning_of(read(keys)) == meaning_of(read(newer))
    assert misfits(FAMILY, read(keys)) == []


def test_tensors_have_three_spellings(tmp_path: Path) -> None:
    model = random_model("deepseek_v4", CASES["deepseek_v4"][1])
    before = Folder(saved(model, tmp_path / "saved"))
    tensors = before.read(list(before.tensors))
    memory = Folder(saved(model, tmp_path / "memory", save_original_format=False))
    assert any(name.endswith("gate_up_proj") for name in load_file(tmp_path / "memory" / "model.safetensors"))
    published = tmp_path / "published"
    published.mkdir()
    (published / "config.json").write_bytes((tmp_path / "saved" / "config.json").read_bytes())
    written = {
        name: tensor
        for place, tensor in zip(before.tensors, tensors.values(), strict=True)
        for name, tensor in places_in(FAMILY, before.model)[place].split(tensor).items()
    }
    assert {"layers.0.attn.kv_norm.weight", "hc_head_fn", "layers.1.ffn.experts.5.w2.weight", "embed.weight"} <= written.keys()
    more = {"mtp.0.attn.wq_a.weight": torch.ones(10, 32), "mtp.0.hc_head_fn": torch.ones(3, 96)}
    save_file(written | more, published / "model.safetensors", metadata={"format": "pt"})
    for folder in (memory, Folder(published)):
        found = folder.read(list(folder.tensors))
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert any("2 tensors of multi-token prediction were skipped" in note for note in Folder(published).facts.notes)
    table = {"layers.1.ffn.gate.tid2eid": written["layers.1.ffn.gate.tid2eid"].int()}
    with pytest.raises(Unsupported, match=r"layers\.1\.ffn\.gate\.tid2eid: dtype int32 is not implemented"):
        save_file(written | table, published / "model.safetensors", metadata={"format": "pt"})
        Folder(published)
    with pytest.raises(Unsupported, match="mpt"):
        save_file(written | {"mpt.0.enorm": torch.ones(3)}, published / "model.safetensors", metadata={"format": "pt"})
        Folder(published)


def test_adapters_have_the_names_of_modules_of_transformers() -> None:
    decoder, model = read(KEYS), random_model("deepseek_v4", CASES["deepseek_v4"][1])
    places = every_place(decoder, "deepseek_v4")
    assert len(places) == 4 * 4 + 3 * 2 + 2 * 4
    modules = dict(model.named_modules())
    for name, place in places.items():
        linear = modules[place.module]
        assert isinstance(linear, torch.nn.Linear) and linear.out_features == decoder.shape.matrices()[0][name].shape[0], name
    with pytest.raises(ValueError, match=r"'\*\.o_a_proj' matches no matrix"):
        LoRAConfig(targets=("*.o_a_proj",)).check([*decoder.shape.matrices()[0]])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_key_value_heads", 2),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("n_shared_experts", 2),
        ("norm_topk_prob", False),
        ("output_router_logits", True),
        ("scoring_func", "softmax"),
        ("topk_method", "greedy"),
        ("hidden_act", "gelu"),
        ("hc_mult", 1),
        ("intermediate_size", 21),
        ("expert_dtype", "fp4"),
        ("quantization_config", {"quant_method": "fp8"}),
        ("layer_types", ["sliding_attention"] * 3),
        ("layer_types", ["full_attention"] * 4),
        ("compress_ratios", [0, 0, 0, 0]),
        ("compress_rates", {"full_attention": 2}),
        ("qk_rope_head_dim", 5),
        ("mlp_layer_types", ["dense"] * 4),
        ("rope_scaling", {"type": "yarn", "factor": 4.0}),
        ("rope_parameters", {"main": {}, "compress": {}, "other": {}}),
        ("rope_parameters", {"main": {"rope_theta": 5.0}}),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(key: str, value: Any) -> None:
    given = {name: one for name, one in KEYS.items() if not (key == "mlp_layer_types" and name == "num_hash_layers")}
    with pytest.raises(ConfigError) as refusal:
        read(given | {key: value})
    assert [fault.key for fault in refusal.value.faults] == [key]


def test_other_refusals_name_their_key() -> None:
    nested = {"main": {"rope_type": "default", "rope_theta": 300.0}, "compress": {"rope_type": "default", "rope_theta": 700.0}}
    scaled = nested | {"main": {"rope_type": "linear", "factor": 2.0, "rope_theta": 300.0}}
    for table, key in (
        (scaled, "rope_parameters.main"),
        (nested | {"compress": {"rope_type": "dynamic", "factor": 2.0}}, "rope_parameters"),
        (nested | {"main": {"rope_theta": 300.0, "partial_rotary_factor": 0.25}}, "partial_rotary_factor"),
    ):
        with pytest.raises(ConfigError) as refusal:
            read(KEYS | {"rope_parameters": table})
        assert [fault.key for fault in refusal.value.faults] == [key]
    with pytest.raises(ConfigError, match="num_hash_layers: 2 differs from mlp_layer_types"):
        read(KEYS | {"mlp_layer_types": ["moe", "hash_moe", "hash_moe", "moe"]})
    with pytest.raises(ConfigError, match=r"expert_dtype.*save the weights in bf16"):
        read(KEYS | {"expert_dtype": "fp4"})
    with pytest.raises(Unsupported, match="top_k 30 exceeds max_length 64 / sparse_rate 3"):
        read(KEYS | {"index_topk": 30})
