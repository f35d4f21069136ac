"""What a folder may not hold or say, each refused by name; and what old and new configurations may look like."""

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from forge_core.component import Component
from forge_core.errors import ConfigError, ForgeError
from forge_core.protocols.weights import StoredTensor, WeightsInfo
from forge_models.components.attentions import MLA
from forge_models.components.decoder import DecoderConfig
from forge_models.components.layers import LayerNormConfig, ReLU2
from forge_models.hf.config import Unsupported
from forge_models.hf.families import FAMILIES
from forge_models.hf.family import decoder_of, meaning_of, misfits
from forge_models.hf.layers import windows_of
from forge_models.hf.names import TensorPlace, shapes_of
from forge_models.hf.reader import Folder, read_model
from forge_models.hf.streamed_forward import fixed_tokens
from forge_models.hf.writer import chosen, write_folder
from forge_models.shape import Rope
from models.hf.zoo import SIZES, random_model, saved

PATTERNS = ("sliding_window_pattern", "_sliding_window_pattern")
LLAMA: dict[str, Any] = SIZES | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(random_model("llama", {"num_hidden_layers": 1}), tmp_path_factory.mktemp("llama") / "model")


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "model"))


def configure(folder: Path, **keys: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention_dropout", 0.1),
        ("hidden_act", "relu"),
        ("rope_scaling", {"rope_type": "longrope", "factor": 2.0}),
        ("rope_scaling", {"rope_type": "linear", "factor": 2.0, "mrope_section": [1, 2]}),
        ("quantization_config", {"quant_method": "gptq"}),
        ("partial_rotary_factor", 0.5),
        ("num_local_experts", 8),
        ("something_new", None),
        ("hidden_size", "32"),
        ("hidden_size", -1),
        ("vocab_size", True),
        ("tie_word_embeddings", "yes"),
    ],
)
def test_a_key_that_is_not_implemented_is_refused_by_name(folder: Path, key: str, value: Any) -> None:
    configure(folder, **{key: value} | ({"rope_parameters": None} if key == "rope_scaling" else {}))
    with pytest.raises(ConfigError) as caught:
        Folder(folder)
    assert any(fault.key.split(".")[0] == key for fault in caught.value.faults)


def test_all_faults_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        decoder_of(FAMILIES["llama"], LLAMA | {"one": 1, "attention_dropout": 0.5, "hidden_act": "gelu"}, "here")
    assert {fault.key for fault in caught.value.faults} == {"one", "attention_dropout", "hidden_act"}
    missing = {key: value for key, value in LLAMA.items() if key != "num_hidden_layers"}
    with pytest.raises(ConfigError, match="num_hidden_layers"):
        decoder_of(FAMILIES["llama"], missing, "here")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model_type": "falcon"}, "falcon"),
        ({"model_type": "mine", "auto_map": {"AutoModel": "modeling.Mine"}}, "the code that auto_map names is never run"),
        ({"architectures": ["LlamaForTokenClassification"]}, "LlamaForTokenClassification"),
    ],
)
def test_fault_49_other_models_and_foreign_code_are_refused(folder: Path, keys: dict[str, Any], message: str) -> None:
    configure(folder, **keys)
    with pytest.raises(Unsupported, match=message):
        Folder(folder)


def test_fault_49_pickle_is_refused_and_not_opened(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(Unsupported, match=r"pytorch_model\.bin"):
        Folder(folder)


def rewrite(folder: Path, change: Any) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("lm_head.weight"), "lm_head.weight: missing"),
        (lambda t: t.update({"model.layers.0.extra": torch.zeros(3)}), "model.layers.0.extra"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(31)}), r"model.norm.weight: shape \(31,\)"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(32, dtype=torch.int64)}), "int64"),
    ],
)
def test_tensors_must_be_exactly_those_of_the_model(folder: Path, change: Any, message: str) -> None:
    rewrite(folder, change)
    with pytest.raises(Unsupported, match=message):
        Folder(folder)


def test_derived_buffers_and_an_equal_tied_head_are_read(folder: Path) -> None:
    rewrite(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    assert "head.weight" in Folder(folder).tensors
    configure(folder, tie_word_embeddings=True)
    with pytest.raises(Unsupported, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        Folder(folder)
    rewrite(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert "head.weight" not in Folder(folder).tensors


def test_damaged_files_and_indices_are_refused(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-100])
    with pytest.raises(Unsupported, match=r"model\.safetensors"):
        Folder(folder)
    (folder / "model.safetensors").unlink()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "../elsewhere.safetensors"}}))
    with pytest.raises(Unsupported, match="elsewhere"):
        Folder(folder)
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "gone.safetensors"}}))
    with pytest.raises(Unsupported, match=r"gone\.safetensors is missing"):
        Folder(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(Unsupported, match="not a JSON object"):
        Folder(folder)


WHOLE_HEADS: dict[str, dict[str, Any]] = {
    "glm4_moe": {"num_attention_heads": 32},
    "nemotron_h": {"layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"]},
}
"""Keys of families whose default sizes give no head of an even width, or whose default layers are refused."""


HEADS_OF_LAYERS = {
    "head_dim": ("sliding_attention", "head_dim"),
    "global_head_dim": ("full_attention", "head_dim"),
    "num_global_key_value_heads": ("full_attention", "num_key_value_heads"),
}
"""Keys of Gemma 4 -> layers for which they are, and the key of these layers."""


def test_defaults_are_those_of_transformers() -> None:
    """A key that is absent means what it means there."""
    from transformers import AutoConfig

    for family in FAMILIES.values():
        config = AutoConfig.for_model(family.model_type, **WHOLE_HEADS.get(family.model_type, {}))
        for key, value in family.defaults.items():
            heads = config.num_attention_heads
            resolved = {"head_dim": config.hidden_size // heads, "num_key_value_heads": heads}
            if family.model_type == "gemma4_text" and key in HEADS_OF_LAYERS:  # transformers has them layer by layer
                layer, name = HEADS_OF_LAYERS[key]
                own = getattr(config.per_layer_config[config.layer_types.index(layer)], name)
                assert own == (family.defaults["num_key_value_heads"] if value is None else value), key
                continue
            if family.model_type.startswith("qwen") and key == "sliding_window":
                continue  # transformers forgets it while windows are off
            if key in ("no_rope_layers", "moe_layers") or (key.startswith("linear_") and value is None):
                continue  # transformers computes it from an interval, or from the sizes of the model
            if family.model_type == "deepseek_v32" and key in ("rope_interleave", "num_nextn_predict_layers"):
                continue  # published files have them, transformers does not
            assert getattr(config, key, None) in (value, resolved.get(key, value)), (family.model_type, key)
        if not hasattr(config, "rope_parameters"):
            continue  # without rotary positions
        tables = config.rope_parameters
        theta = next((tables[name] for name in ("full_attention", "compress") if name in tables), tables)["rope_theta"]
        without = {key: value for key, value in json.loads(config.to_json_string()).items() if key != "rope_parameters"}
        assert decoder_of(family, without, family.model_type).rope.theta == theta


def test_every_default_configuration_is_understood_entirely() -> None:
    """No key of any family's own configuration class is unknown to us."""
    from transformers import AutoConfig

    for family in FAMILIES.values():
        config = AutoConfig.for_model(family.model_type, **WHOLE_HEADS.get(family.model_type, {}))
        values = json.loads(config.to_json_string())
        decoder = decoder_of(family, values, family.model_type)
        assert misfits(family, decoder) == []


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 5, "max_window_layers": 2}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 3, "head_dim": 8}),
        ("gemma2", {"sliding_window": 5}),
        ("gemma3_text", {"sliding_window": 5, "num_hidden_layers": 8}),
        ("gemma3_text", {"sliding_window": 5, "num_hidden_layers": 8, "sliding_window_pattern": 3}),
        (
            "gemma3_text",
            {"sliding_window": 5, "num_hidden_layers": 3, "layer_types": ["full_attention", "sliding_attention"] * 2},
        ),
    ],
)
def test_layers_without_a_list_of_types_are_those_of_transformers(kind: str, keys: dict[str, Any]) -> None:
    """Configurations of older versions say by other keys which layers are local."""
    from transformers import AutoConfig

    if len(keys.get("layer_types", ())) == 4:
        with pytest.raises(ConfigError, match="layer_types"):
            decoder_of(FAMILIES[kind], SIZES | keys, kind)
        return
    config = AutoConfig.for_model(kind, **(SIZES | keys))
    expected = tuple(5 if layer == "sliding_attention" else None for layer in config.layer_types)
    assert windows_of(decoder_of(FAMILIES[kind], SIZES | keys, kind)) == expected


def test_p1_two_spellings_of_a_pattern_of_layers_agree() -> None:
    """transformers saves both of a configuration that has the first."""
    keys = SIZES | {"sliding_window": 5, "num_hidden_layers": 8}
    for spellings in ({"sliding_window_pattern": 3}, {"_sliding_window_pattern": 3}, dict.fromkeys(PATTERNS, 3)):
        assert windows_of(decoder_of(FAMILIES["gemma3_text"], keys | spellings, "here")) == (5, 5, None, 5, 5, None, 5, 5)
    with pytest.raises(ConfigError, match="_sliding_window_pattern: 6"):
        decoder_of(FAMILIES["gemma3_text"], keys | {"sliding_window_pattern": 3, "_sliding_window_pattern": 6}, "here")


def test_a_published_configuration_of_gemma2_is_understood() -> None:
    values = {
        "architectures": ["Gemma2ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 2,
        "attn_logit_softcapping": 50.0,
        "cache_implementation": "hybrid",
        "eos_token_id": 1,
        "pad_token_id": 0,
        "final_logit_softcapping": 30.0,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "use_cache": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 3584,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-06,
        "intermediate_size": 14336,
        "max_position_embeddings": 8192,
        "model_type": "gemma2",
        "num_attention_heads": 16,
        "num_hidden_layers": 42,
        "num_key_value_heads": 8,
        "query_pre_attn_scalar": 256,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "sliding_window_size": 4096,
        "torch_dtype": "bfloat16",
        "vocab_size": 256000,
        "transformers_version": "4.42.0.dev0",
    }
    decoder = decoder_of(FAMILIES["gemma2"], values, "here")
    assert sum(prod(shape) for shape in shapes_of(decoder).values()) == 9_241_705_984  # as published
    assert windows_of(decoder)[:3] == (4096, None, 4096)
    with pytest.raises(ConfigError, match="sliding_window_size"):
        decoder_of(FAMILIES["gemma2"], values | {"sliding_window_size": 1024}, "here")


def test_old_and_new_spellings_of_rope_mean_the_same(folder: Path) -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    spellings = [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **scaling}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **scaling}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **scaling}},
    ]
    found = [meaning_of(decoder_of(FAMILIES["llama"], LLAMA | spelling, "here")) for spelling in spellings]
    assert found[0] == found[1] == found[2]
    assert found[0]["rope.factor"] == 8.0
    with pytest.raises(ConfigError, match="rope_scaling"):
        decoder_of(FAMILIES["llama"], LLAMA | spellings[0] | spellings[2], "here")
    del scaling["low_freq_factor"]
    with pytest.raises(ConfigError, match="low_freq_factor: is missing"):
        decoder_of(FAMILIES["llama"], LLAMA | {"rope_scaling": {"rope_type": "llama3", **scaling}}, "here")


def test_what_no_family_can_say_is_refused_by_field() -> None:
    small = {"dim": 32, "layers": 2, "heads": 4, "vocab_size": 97}
    assert chosen(DecoderConfig(**small), None).model_type == "llama"
    assert chosen(DecoderConfig(**small), None, "qwen3").model_type == "llama", "qwen3 has norms that this model has not"
    assert chosen(DecoderConfig(**small, residual_multiplier=0.5), None).model_type == "granite"
    for changed, word in (
        ({"mlp": ReLU2()}, "mlp"),
        ({"residual_multiplier": 0.5, "rope": Rope(partial=0.5)}, "residual_multiplier"),
        ({"rope": Rope(partial=0.5, scaling="linear", factor=2.0)}, "rope.partial"),
        ({"attention": MLA()}, "attention"),
        ({"soft_cap": 30.0}, "soft_cap"),
    ):
        with pytest.raises(Unsupported, match=f"llama: .*{word}"):
            chosen(DecoderConfig(**small, **changed), None)


STABLELM = {
    "model_type": "stablelm",
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
}


def test_partial_rotation_is_read_from_either_place() -> None:
    for keys, expected in (
        ({}, 0.25),
        ({"partial_rotary_factor": 0.5}, 0.5),
        ({"partial_rotary_factor": None}, 0.25),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}}, 0.5),
        ({"partial_rotary_factor": 1, "rope_scaling": {"type": "linear", "factor": 2.0, "partial_rotary_factor": 1.0}}, 1.0),
    ):
        assert decoder_of(FAMILIES["stablelm"], STABLELM | keys, "here").rope.partial == expected


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor: expected a number above 0, 1 at most, not 1.5"),
        ({"partial_rotary_factor": True}, "not True"),
        ({"rope_parameters": {"partial_rotary_factor": 0}}, "rope_parameters.partial_rotary_factor: expected a number"),
        (
            {"partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": 0.25}},
            "partial_rotary_factor = 0.5 and rope_parameters.partial_rotary_factor = 0.25",
        ),
        ({"use_parallel_residual": True}, "use_parallel_residual"),
        ({"qk_layernorm": True}, "qk_layernorm"),
        ({"hidden_dropout": 0.1}, "hidden_dropout"),
        ({"head_dim": 24}, "head_dim"),
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps"),
        ({"attention_bias": True}, "attention_bias"),
    ],
)
def test_what_a_stablelm_may_say_beyond_ours_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        decoder_of(FAMILIES["stablelm"], STABLELM | keys, "here")
    assert message in str(caught.value)


def test_a_partial_rotation_belongs_to_two_families() -> None:
    small = {"dim": 32, "layers": 2, "heads": 4, "vocab_size": 97}
    assert chosen(DecoderConfig(**small, norm=LayerNormConfig(), rope=Rope(partial=0.5)), None).model_type == "stablelm"
    assert chosen(DecoderConfig(**small, rope=Rope(partial=0.5)), None).model_type == "phi3"
    for changed in ({"norm": LayerNormConfig(bias=False)}, {"norm": LayerNormConfig(), "head_dim": 12}):
        with pytest.raises(Unsupported, match="stablelm"):
            chosen(DecoderConfig(**small, **changed), None, "stablelm")


def test_reading_the_model_alone_needs_config_json_only(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert read_model(folder).dim == 32
    with pytest.raises(ForgeError):
        Folder(folder)
    code = "import sys; from forge_models.hf.reader import read_model; import forge_train.recipe.load; "
    code += f"read_model(__import__('pathlib').Path({str(folder)!r})); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_folder_of_a_model_that_is_no_decoder(tmp_path: Path) -> None:
    """As a plugin writes it: the card has the keys of the component, and rows for a comparison need no maximum length."""

    @dataclass(frozen=True, kw_only=True)
    class Table(Component):
        """A table of logits."""

        vocab_size: int = 5
        """Number of tokens."""
        part: Component = field(default_factory=ReLU2)
        """A component, which is no row of the card."""

        def build(self) -> Any:
            return torch.nn.Embedding(self.vocab_size, self.vocab_size)

    class Held:
        model, facts, tensors = Table(), WeightsInfo(step=3), {"weight": StoredTensor((5, 5), "float32")}

        def read(self, names: Any) -> Any:
            return {"weight": torch.eye(5)}

    held: Any = Held()
    places = {name: TensorPlace(shape, (name,)) for name, shape in shapes_of(held.model).items()}
    config = {"architectures": ["Table"], "model_type": "table"}
    write_folder(tmp_path / "folder", held, places, config, tokenizer=None, max_shard_bytes=1000)
    assert torch.equal(load_file(tmp_path / "folder" / "model.safetensors")["weight"], torch.eye(5))
    card = (tmp_path / "folder" / "README.md").read_text()
    assert "| `vocab_size` | 5 |" in card and "| Parameters | 25 |" in card and "| Training steps | 3 |" in card
    assert "`part`" not in card and "pipeline_tag: text-generation" in card
    tokens = fixed_tokens(held.model)
    assert tokens.shape == (2, 32) and int(tokens.max()) < 5
