"""Families that came after the first: folders both ways, every tensor bit by bit, logits against transformers in fp64."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_core.errors import ConfigError, ForgeError
from forge_models.components.decoder import DecoderConfig
from forge_models.components.lora import LoRAConfig
from forge_models.hf.config import Unsupported
from forge_models.hf.converter import HfConverter
from forge_models.hf.families import FAMILIES
from forge_models.hf.family import decoder_of, meaning_of, misfits
from forge_models.hf.peft import places_of
from forge_models.hf.reader import Folder
from forge_models.shape import Rope
from models.hf.published import folder_of, reference, spread
from models.hf.test_published import TOLERANCE, error
from models.hf.zoo import SIZES

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
CASES: dict[str, dict[str, Any]] = {
    "phi3": {"sliding_window": 6},
    "phi3-half": {"model_type": "phi3", "partial_rotary_factor": 0.5, "tie_word_embeddings": True, "rope_theta": 250.0},
    "olmo3": {"rope_scaling": YARN, "rope_theta": 500000, "num_hidden_layers": 5, "sliding_window": 6},
    "olmo3-other": {"model_type": "olmo3", "rope_theta": 500000, "layer_types": ["full_attention", "sliding_attention"] * 2},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 3, "attention_bias": True},
}


@pytest.mark.parametrize("case", CASES)
def test_both_ways(case: str, tmp_path: Path) -> None:
    values = SIZES | {"model_type": case} | CASES[case]
    theirs = spread(reference(values))
    folder = Folder(folder_of(theirs, values, tmp_path / "theirs"))
    assert error(folder, theirs) < TOLERANCE
    HfConverter(max_shard_bytes=40_000).build().write(tmp_path / "ours", folder)
    again = Folder(tmp_path / "ours")
    assert again.family.model_type == values["model_type"]
    assert meaning_of(again.model) == meaning_of(folder.model)
    before, after = folder.read(list(folder.tensors)), again.read(list(again.tensors))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    written = {name: again.whole(name) for name in again._files}
    expected = {name: folder.whole(name) for name in folder._files}
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], expected[name]) for name in expected)
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager", dtype=torch.float32)
    loaded.config._experts_implementation = "eager"  # the other one has no fp64
    assert error(folder, loaded.double().eval()) < TOLERANCE


def test_boxes_of_fused_matrices_equal_thewhole(tmp_path: Path) -> None:
    values = SIZES | {"model_type": "phi3"}
    folder = Folder(folder_of(spread(reference(values)), values, tmp_path))
    for part in ("attention.q_proj", "attention.k_proj", "attention.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        name = f"blocks.1.{part}.weight"
        assert torch.equal(folder.box(name, (3, 2), (9, 11)), folder.read([name])[name][3:12, 2:13])


def test_what_these_families_cannot_say_is_refused() -> None:
    small: dict[str, Any] = {"dim": 32, "layers": 2, "heads": 4, "vocab_size": 97}
    assert any(
        "rope" in fault for fault in misfits(FAMILIES["phi3"], DecoderConfig(**small, rope=Rope(scaling="linear", factor=2.0)))
    )
    olmo3 = decoder_of(FAMILIES["olmo3"], SIZES | {"sliding_window": 6}, "here")
    assert misfits(FAMILIES["olmo3"], olmo3) == []
    other = DecoderConfig(**{**vars(olmo3), "rope": Rope(theta=500000.0, local_theta=10000.0)})
    assert any("rope.local_theta" in fault for fault in misfits(FAMILIES["olmo3"], other))


def test_parts_of_a_fused_matrix_have_one_dtype(tmp_path: Path) -> None:
    values = SIZES | {"model_type": "phi3", "num_hidden_layers": 1}
    folder = Folder(folder_of(spread(reference(values)), values, tmp_path / "source"))

    class Mixed:
        model, tensors, facts = folder.model, folder.tensors, folder.facts

        def read(self, names: list[str]) -> dict[str, torch.Tensor]:
            return {name: value.float() if "k_proj" in name else value for name, value in folder.read(names).items()}

    with pytest.raises(Unsupported, match=r"qkv_proj\.weight is fused from tensors of torch\.float64 and torch\.float32"):
        HfConverter().build().write(tmp_path / "target", Mixed())  # type: ignore[arg-type]
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("used", [True, False])
def test_windows_of_smollm3_are_in_the_layers_without_rope(used: bool) -> None:
    """Without `layer_types`, as transformers derives them."""
    from transformers import AutoConfig

    keys = SIZES | {"no_rope_layers": [0, 1, 0, 1], "use_sliding_window": used, "sliding_window": 6}
    types = AutoConfig.for_model("smollm3", **keys).layer_types
    decoder = decoder_of(FAMILIES["smollm3"], keys, "here")
    assert [window is not None for window in decoder.shape.windows()] == [kind == "sliding_attention" for kind in types]
    assert types.count("sliding_attention") == (2 if used else 0)
    assert misfits(FAMILIES["smollm3"], decoder) == []
    listed = decoder_of(FAMILIES["smollm3"], SIZES | {"no_rope_layers": [0, 1, 1, 1]}, "here").shape.attention
    assert [listed.rotates_at(layer) for layer in range(4)] == [False, True, True, True]


@pytest.mark.parametrize("value", [[1, 0, 1], "all", [1, 2, 0, 1]])
def test_layers_without_rope_are_a_list_of_0_and_1(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"no_rope_layers: expected 0 or 1 for each of 4 layers"):
        decoder_of(FAMILIES["smollm3"], SIZES | {"no_rope_layers": value}, "here")


def test_the_divisor_of_logits_is_written_as_it_was_read() -> None:
    """1 / (1 / 49) is not 49."""
    decoder = decoder_of(FAMILIES["granite"], SIZES | {"logits_scaling": 49.0}, "here")
    assert 1 / decoder.logit_multiplier != 49 and FAMILIES["granite"].write(decoder)["logits_scaling"] == 49.0
    assert misfits(FAMILIES["granite"], decoder) == []
    assert any("logit_multiplier" in fault for fault in misfits(FAMILIES["llama"], decoder))
    nope = decoder_of(FAMILIES["smollm3"], SIZES, "here")
    assert any("attention.nope" in fault for fault in misfits(FAMILIES["llama"], nope))


def test_boxes_of_alternating_and_turned_matrices_equal_the_whole(tmp_path: Path) -> None:
    """Of gpt-oss, whose experts have gate and up in turns and inputs before outputs; a rank reads its own part."""
    from models.hf.zoo import GPT_OSS

    values = SIZES | {"model_type": "gpt_oss"} | GPT_OSS
    folder = Folder(folder_of(spread(reference(values)), values, tmp_path))
    for part in ("gate_proj", "up_proj", "down_proj", "gate_bias", "up_bias", "down_bias"):
        name = f"blocks.1.mlp.experts.{part}"
        whole = folder.read([name])[name]
        offset, extent = (1, 2, 3)[: whole.dim()], (3, 9, 11)[: whole.dim()]
        box = tuple(slice(start, start + size) for start, size in zip(offset, extent, strict=True))
        assert torch.equal(folder.box(name, offset, extent), whole[box]), part
        assert folder.box(name, offset, (0, *extent[1:])).shape == (0, *extent[1:])
        assert folder.box(name, offset, (3, 0, *extent[2:])).shape == (3, 0, *extent[2:])


def test_gpt_oss_without_a_table_of_angles_has_those_of_the_reference() -> None:
    from transformers import AutoConfig

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_local_experts": 8, "vocab_size": 97}
    written = json.loads(AutoConfig.for_model("gpt_oss", **sizes).to_json_string())
    family, table = FAMILIES["gpt_oss"], written.pop("rope_parameters")
    without = decoder_of(family, written, "here")
    assert table["factor"] == 32.0
    assert without.rope == decoder_of(family, written | {"rope_parameters": table}, "here").rope


def test_adapters_between_the_rows_of_others_are_refused() -> None:
    """Of gpt_neox: the matrix of a checkpoint has q, k and v of each head in turn."""
    model = DecoderConfig(dim=64, layers=1, heads=4, vocab_size=97, lora=LoRAConfig(rank=2, targets=("*.q_proj",)))
    with pytest.raises(ForgeError, match=r"query_key_value\.weight has the rows of .*q_proj between those of others"):
        places_of(model, "gpt_neox")


def test_published_files_of_gpt2_have_shorter_names_and_masks(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    from models.hf.zoo import GPT2_SIZES

    values = GPT2_SIZES | {"model_type": "gpt2"}
    plain = Folder(folder_of(spread(reference(values)), values, tmp_path / "plain"))
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    short = {name.removeprefix("transformer."): value for name, value in tensors.items()}
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 64, 64).tril() for layer in range(4)}
    masks |= {f"h.{layer}.attn.masked_bias": torch.tensor(-1e4) for layer in range(4)}
    (tmp_path / "published").mkdir()
    (tmp_path / "published" / "config.json").write_text(json.dumps(values | {"architectures": ["GPT2LMHeadModel"]}))
    save_file(short | masks, tmp_path / "published" / "model.safetensors")
    published = Folder(tmp_path / "published")
    before, after = plain.read(list(plain.tensors)), published.read(list(published.tensors))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    save_file(short | {"h.0.attn.other": torch.ones(1)}, tmp_path / "published" / "model.safetensors")
    with pytest.raises(Unsupported, match=r"transformer\.h\.0\.attn\.other: unexpected"):
        Folder(tmp_path / "published")


def test_boxes_of_the_matrices_of_gpt2_equal_the_whole(tmp_path: Path) -> None:
    """q, k and v are columns of one matrix with inputs before outputs; a rank reads its own part."""
    from models.hf.zoo import GPT2_SIZES

    values = GPT2_SIZES | {"model_type": "gpt2"}
    folder = Folder(folder_of(spread(reference(values)), values, tmp_path))
    for part in ("attention.q_proj", "attention.k_proj", "attention.v_proj", "attention.o_proj", "mlp.up_proj", "mlp.down_proj"):
        for slot, offset, extent in (("weight", (3, 2), (9, 11)), ("bias", (5,), (8,))):
            name = f"blocks.1.{part}.{slot}"
            box = tuple(slice(start, start + size) for start, size in zip(offset, extent, strict=True))
            assert torch.equal(folder.box(name, offset, extent), folder.read([name])[name][box]), name


OLMO_HYBRID: dict[str, Any] = SIZES | {"model_type": "olmo_hybrid", "rope_theta": None}


def test_olmo_hybrid_has_other_names_of_norms_in_memory(tmp_path: Path) -> None:
    """transformers reads both, and so does Forge; in files of its own, norms of both kinds of layers have one name."""
    from safetensors.torch import load_file, save_file

    theirs = spread(reference(OLMO_HYBRID))
    plain = Folder(folder_of(theirs, OLMO_HYBRID, tmp_path / "plain"))
    folder_of(theirs, OLMO_HYBRID, tmp_path / "other")
    file, names = tmp_path / "other" / "model.safetensors", {"attention_layer_norm": "input_layernorm"}
    names["feedforward_layer_norm"] = "post_attention_layernorm"
    tensors = {".".join(names.get(word, word) for word in name.split(".")): value for name, value in load_file(file).items()}
    assert tensors.keys() != load_file(file).keys()
    save_file(tensors, file)
    other = Folder(tmp_path / "other")
    before, after = plain.read(list(plain.tensors)), other.read(list(other.tensors))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    HfConverter().build().write(tmp_path / "ours", other)
    written = set(load_file(tmp_path / "ours" / "model.safetensors"))
    layer = "model.layers.{}.{}.weight"
    assert {layer.format(0, "attention_layer_norm"), layer.format(0, "feedforward_layer_norm")} <= written
    assert {layer.format(3, "post_attention_layernorm"), layer.format(3, "post_feedforward_layernorm")} <= written
    tensors |= {name: value for name, value in load_file(tmp_path / "plain" / "model.safetensors").items() if "layers.0" in name}
    save_file(tensors, file)
    with pytest.raises(Unsupported, match="a tensor twice"):
        Folder(tmp_path / "other")


@pytest.mark.parametrize(
    ("keys", "rotates"),
    [
        ({"rope_theta": None}, False),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": None}}, False),
        ({"rope_parameters": None, "rope_theta": None}, False),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 700.0}}, True),
        ({"rope_theta": 700.0}, True),
        ({}, True),
    ],
)
def test_olmo_hybrid_without_a_base_of_angles_has_no_positions(keys: dict[str, Any], rotates: bool) -> None:
    """As transformers decides it, from the base in a table or beside it."""
    values = {key: value for key, value in OLMO_HYBRID.items() if key != "rope_theta"} | keys
    assert (reference(values).model.rotary_emb is not None) == rotates  # type: ignore[union-attr]
    decoder = decoder_of(FAMILIES["olmo_hybrid"], values, "here")
    assert decoder.shape.attention.rotates_at(3) == rotates  # type: ignore[attr-defined]
    assert misfits(FAMILIES["olmo_hybrid"], decoder) == []


def test_olmo_hybrid_with_a_null_table_is_refused() -> None:
    """Its authors mean no positions by it, and transformers a base of 10000."""
    values = {key: value for key, value in OLMO_HYBRID.items() if key != "rope_theta"} | {"rope_parameters": None}
    with pytest.raises(ConfigError, match="rope_parameters: null means no rotary positions to its authors"):
        decoder_of(FAMILIES["olmo_hybrid"], values, "here")


@pytest.mark.parametrize(
    ("entry", "value"),
    [("llama_4_scaling_beta", None), ("llama_4_scaling_beta", -0.1), ("llama_4_scaling_beta", "0.1")]
    + [("original_max_position_embeddings", None), ("original_max_position_embeddings", 16.0), ("unknown", 1)],
)
def test_entries_of_the_table_of_ministral3_are_checked(entry: str, value: Any) -> None:
    table = YARN | {"llama_4_scaling_beta": 0.1, "rope_theta": 700.0, entry: value}
    with pytest.raises(ConfigError, match=f"rope_parameters.{entry}"):
        decoder_of(FAMILIES["ministral3"], SIZES | {"rope_parameters": table}, "here")


def test_ministral3_without_a_table_of_angles_has_that_of_the_reference() -> None:
    from transformers import AutoConfig

    table = AutoConfig.for_model("ministral3", **SIZES).rope_parameters
    family = FAMILIES["ministral3"]
    without, given = (decoder_of(family, SIZES | more, "here") for more in ({}, {"rope_parameters": table}))
    assert meaning_of(without) == meaning_of(given)
    assert without.shape.attention.temperature == 0.1  # type: ignore[attr-defined]
    assert any("attention" in fault for fault in misfits(FAMILIES["mistral"], without))
