"""GGUF files of every architecture against transformers and the gguf package, both ways; what cannot be written is refused."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_core.errors import ForgeError
from forge_models.components.decoder import DecoderConfig
from forge_models.gguf import converter as converters
from forge_models.gguf.architectures import ARCHITECTURES
from forge_models.gguf.converter import GgufConverter, architecture_of
from forge_models.gguf.reader import GgufFile
from forge_models.hf.config import Unsupported
from forge_models.hf.families import FAMILIES
from forge_models.hf.family import decoder_of, meaning_of
from forge_models.hf.reader import Folder
from forge_models.hf.streamed_forward import logits_of
from forge_train.formats.forge import Cast
from models.hf.zoo import CASES, GEMMA, LLAMA3, QWEN3_MOE, SIZES, YARN, random_model, saved, tokens

gguf = pytest.importorskip("gguf")
pytest.importorskip("accelerate")  # transformers needs it for this format

LINEAR = {"rope_type": "linear", "factor": 4.0}
NATURAL = GEMMA | {"query_pre_attn_scalar": 16}
FILES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", *CASES["llama"]),
    "llama-biases": ("llama", *CASES["llama-biases"]),
    "llama-linear-tied": ("llama", "llama", {"rope_scaling": LINEAR, "tie_word_embeddings": True, "rms_norm_eps": 3e-5}),
    "llama-llama3": ("llama", *CASES["llama-llama3"]),
    "llama-yarn": ("llama", "llama", {"rope_scaling": YARN | {"beta_fast": 16.0, "beta_slow": 2.0}}),
    "mistral": ("llama", "mistral", {"sliding_window": None, "head_dim": 16, "rope_theta": 3000.0}),
    "qwen2": ("qwen2", "qwen2", {"tie_word_embeddings": True, "rope_scaling": YARN}),
    "qwen3": ("qwen3", "qwen3", {"head_dim": 16}),
    "qwen3_moe": ("qwen3moe", "qwen3_moe", QWEN3_MOE),
    "gemma2": ("gemma2", "gemma2", NATURAL | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0}),
    "gemma2-uncapped": (
        "gemma2",
        "gemma2",
        NATURAL | {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma3": (
        "gemma3",
        "gemma3_text",
        NATURAL | {"num_hidden_layers": 7, "rope_scaling": LINEAR, "rope_theta": 5000.0, "rope_local_base_freq": 900.0},
    ),
    "stablelm": ("stablelm", "stablelm", {"partial_rotary_factor": 0.5, "use_qkv_bias": True, "layer_norm_eps": 2e-5}),
    "phi3": ("phi3", "phi3", {"partial_rotary_factor": 0.5, "tie_word_embeddings": True}),
}
"""Name of a case -> (architecture, model_type, keys of the configuration)."""


def folder_of(case: str, path: Path, more: dict[str, Any] | None = None) -> tuple[Any, Folder]:
    _, kind, keys = FILES[case]
    reference = random_model(kind, keys | (more or {}))
    return reference, Folder(saved(reference, path / "theirs"))


@pytest.mark.parametrize("case", FILES)
def test_both_ways(case: str, tmp_path: Path) -> None:
    reference, folder = folder_of(case, tmp_path)
    with torch.no_grad():
        expected = reference(tokens()).logits
    converter, path = GgufConverter(), tmp_path / "model.gguf"
    converter.write(path, folder)
    assert gguf.GGUFReader(path).fields["general.architecture"].contents() == FILES[case][0]
    found = converter.reference(path, tokens())
    assert isinstance(found, torch.Tensor)
    if FILES[case][0].startswith("gemma"):  # readers subtract the 1 that the file adds to norms, which rounds
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    else:
        assert torch.equal(found, expected)
    again = converter.read(path)
    assert meaning_of(again.model) == meaning_of(folder.model)
    assert again.facts.special_tokens == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    stored = converter.stored(folder)
    before, after = stored.read(list(stored.tensors)), again.read(list(again.tensors))
    assert before.keys() == after.keys() == folder.tensors.keys()
    assert all(before[name].dtype == after[name].dtype and torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(logits_of(stored, tokens()), logits_of(again, tokens()))
    assert {name: entry.shape for name, entry in again.tensors.items()} == {
        name: entry.shape for name, entry in folder.tensors.items()
    }
    for name, entry in again.tensors.items():
        corner = tuple(size // 2 for size in entry.shape)
        box = again.box(name, corner, [size - start for size, start in zip(entry.shape, corner, strict=True)])
        assert torch.equal(box, after[name][tuple(slice(start, None) for start in corner)])


ALONE: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {"rope_scaling": None},
    "qwen3": {"head_dim": 128},
    "qwen3_moe": {"moe_intermediate_size": 768, "rope_theta": 7000.0},
    "gemma2": {
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3": {"head_dim": 256, "query_pre_attn_scalar": 256, "rope_scaling": None, "rope_local_base_freq": 10_000.0},
    "stablelm": {"partial_rotary_factor": 0.25, "layer_norm_eps": 3e-5},
    "phi3": {"partial_rotary_factor": 1.0, "pad_token_id": 0},
}
"""Cases that transformers reads without help: the other settings have its defaults."""


@pytest.mark.parametrize("case", ALONE)
def test_transformers_reads_a_file_alone(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForCausalLM

    reference, folder = folder_of(case, tmp_path, ALONE[case])
    GgufConverter().write(tmp_path / "model.gguf", folder)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(tokens()).logits, reference(tokens()).logits, rtol=0, atol=1e-5)


def test_metadata_is_complete(tmp_path: Path) -> None:
    _, folder = folder_of("llama-yarn", tmp_path, {"head_dim": 12, "rope_theta": 500.0, "rms_norm_eps": 3e-5})
    GgufConverter().write(tmp_path / "name.gguf", folder)
    fields = {key: field.contents() for key, field in gguf.GGUFReader(tmp_path / "name.gguf").fields.items()}
    assert fields.pop("llama.attention.layer_norm_rms_epsilon") == pytest.approx(3e-5)
    assert {key: value for key, value in fields.items() if not key.startswith("GGUF.")} == {
        "general.architecture": "llama",
        "general.type": "model",
        "general.name": "name",
        "general.file_type": 0,
        "llama.context_length": 64,
        "llama.embedding_length": 32,
        "llama.block_count": 4,
        "llama.feed_forward_length": 48,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.key_length": 12,
        "llama.attention.value_length": 12,
        "llama.rope.dimension_count": 12,
        "llama.rope.freq_base": 500.0,
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 16,
        "llama.rope.scaling.yarn_beta_fast": 16.0,
        "llama.rope.scaling.yarn_beta_slow": 2.0,
        "llama.vocab_size": 97,
        "tokenizer.ggml.model": "none",
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
    }


def test_rows_of_q_and_k_are_those_that_llama_rotates(tmp_path: Path) -> None:
    reference, folder = folder_of("llama", tmp_path)
    GgufConverter().write(tmp_path / "m.gguf", folder)
    stored = {tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    layer = reference.model.layers[1].self_attn
    for name, module, heads in (("attn_q", layer.q_proj, 4), ("attn_k", layer.k_proj, 2)):
        pairs = module.weight.reshape(heads, 2, 4, 32).transpose(1, 2).reshape(-1, 32)  # of heads with 8 dimensions
        assert torch.equal(stored[f"blk.1.{name}.weight"], pairs)
    assert torch.equal(stored["blk.1.attn_v.weight"], layer.v_proj.weight)


def test_the_scaling_of_llama3_is_a_table_of_divisors(tmp_path: Path) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    _, folder = folder_of("llama-llama3", tmp_path)
    GgufConverter().write(tmp_path / "m.gguf", folder)
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    stored = {tensor.name: tensor for tensor in reader.tensors}["rope_freqs.weight"]
    config = LlamaConfig(hidden_size=32, num_attention_heads=4, max_position_embeddings=64, rope_parameters={
        "rope_theta": 5000.0, "original_max_position_embeddings": 16, **LLAMA3})  # fmt: skip
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1 / 5000.0 ** (torch.arange(0, 8, 2) / 8)
    torch.testing.assert_close(torch.from_numpy(stored.data.copy()), plain / scaled)
    assert not any("scaling" in key for key in reader.fields)  # llama.cpp would divide by a factor once more


@pytest.mark.parametrize(("dtype", "kind", "number"), [("float32", "F32", 0), ("float16", "F16", 1), ("bfloat16", "BF16", 32)])
def test_dtypes(dtype: str, kind: str, number: int, tmp_path: Path) -> None:
    _, folder = folder_of("llama-biases", tmp_path)
    weights, converter = Cast(folder, dtype), GgufConverter()
    converter.write(tmp_path / "m.gguf", weights)
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    assert reader.fields["general.file_type"].contents() == number
    kinds = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert {name for name, each in kinds.items() if each == "F32"} >= {
        name for name in kinds if name.endswith(("norm.weight", ".bias"))
    }
    assert {each for name, each in kinds.items() if not name.endswith(("norm.weight", ".bias"))} == {kind}
    again = converter.read(tmp_path / "m.gguf")
    assert torch.equal(logits_of(again, tokens()), logits_of(weights, tokens()))  # nothing is rounded
    found = converter.reference(tmp_path / "m.gguf", tokens())
    assert isinstance(found, torch.Tensor)
    torch.testing.assert_close(found, logits_of(weights, tokens()), rtol=0, atol=2e-5)


def test_q8_0_rounds_as_the_gguf_package(tmp_path: Path) -> None:
    reference, folder = folder_of("qwen3_moe", tmp_path, {"moe_intermediate_size": 64, "intermediate_size": 64})
    converter = GgufConverter(quantization="q8_0")
    converter.write(tmp_path / "m.gguf", folder)
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    assert reader.fields["general.file_type"].contents() == 7
    assert reader.fields["general.quantization_version"].contents() == 2
    kinds = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert {name for name, kind in kinds.items() if kind != "Q8_0"} == {
        name for name in kinds if name.endswith(("norm.weight", "ffn_gate_inp.weight"))
    }
    again = converter.read(tmp_path / "m.gguf")
    matrix = reference.model.layers[2].self_attn.v_proj.weight.detach().numpy()
    rounded = gguf.dequantize(gguf.quantize(matrix, gguf.GGMLQuantizationType.Q8_0), gguf.GGMLQuantizationType.Q8_0)
    name = "blocks.2.attention.v_proj.weight"
    assert torch.equal(again.read([name])[name], torch.from_numpy(rounded))
    assert not torch.equal(torch.from_numpy(rounded), reference.model.layers[2].self_attn.v_proj.weight)
    assert torch.equal(logits_of(again, tokens()), logits_of(converter.stored(folder), tokens()))
    found = converter.reference(tmp_path / "m.gguf", tokens())
    assert isinstance(found, torch.Tensor)
    torch.testing.assert_close(found, logits_of(again, tokens()), rtol=0, atol=2e-5)


def test_parts_of_a_fused_matrix_are_quantized_too(tmp_path: Path) -> None:
    _, folder = folder_of("phi3", tmp_path, {"intermediate_size": 64})
    converter = GgufConverter(quantization="q8_0")
    converter.write(tmp_path / "m.gguf", folder)
    again = converter.read(tmp_path / "m.gguf")
    assert torch.equal(logits_of(again, tokens()), logits_of(converter.stored(folder), tokens()))


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "olmo2": (*CASES["olmo2"], "its family is olmo2"),
    "mixtral": (*CASES["mixtral"], "its family is mixtral"),
    "deepseek_v3": (*CASES["deepseek_v3"], "its family is deepseek_v3"),
    "dynamic": (*CASES["llama-dynamic"], "rope.scaling = 'dynamic'"),
    "windows": (*CASES["mistral"], r"attention.windows = \(6, 6, 6, 6\)"),
    "upper-windows": (*CASES["qwen2-windows"], "attention.windows"),
    "biases": (*CASES["qwen3-tied"], "output_bias=True"),
    "untied": ("gemma2", NATURAL | {"tie_word_embeddings": False}, "gemma2 has no tensor head.weight"),
    "scale": (*CASES["gemma2"], "attention.scale"),
    "ramp": (*CASES["qwen2-tied-yarn"], "rope.truncate = False"),
    "raw": (*CASES["qwen3_moe-raw"], r"qwen3moe has no tensor blocks\.0\.mlp\.up_proj"),
    "stablelm-yarn": (*CASES["stablelm-half-biases-tied-yarn"], "scaling 'yarn' is not implemented"),
    "phi3-windows": ("phi3", {"sliding_window": 6}, "attention.windows"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_no_architecture_describes_is_refused(case: str, tmp_path: Path) -> None:
    kind, keys, reason = REFUSED[case]
    folder = Folder(saved(random_model(kind, keys), tmp_path / "theirs"))
    with pytest.raises(Unsupported, match=reason) as refusal:
        GgufConverter().write(tmp_path / "m.gguf", folder)
    assert "--to hf" in str(refusal.value)
    assert not (tmp_path / "m.gguf").exists()


TINY = DecoderConfig(dim=32, layers=2, heads=4, kv_heads=2, vocab_size=97, max_length=64)


def test_the_architecture_is_chosen() -> None:
    assert architecture_of(TINY).name == "llama"
    assert architecture_of(TINY, "llama").name == "llama"
    assert architecture_of(replace(TINY, attention=replace(TINY.shape.attention, qk_norm="head"))).name == "qwen3"
    with pytest.raises(Unsupported, match=r"GGUF for 'olmo2' is not implemented; implemented are llama, .*--to hf"):
        architecture_of(TINY, "olmo2")
    with pytest.raises(Unsupported, match="qwen2: attention"):
        architecture_of(TINY, "qwen2")
    with pytest.raises(Unsupported, match=r"norm = .*1.23456789e-05.*it has .*1.2345679e-05"):  # more digits than 32 bits have
        architecture_of(replace(TINY, norm=replace(TINY.shape.norm, eps=1.23456789e-5)))


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    _, folder = folder_of("llama", tmp_path)
    (tmp_path / "there.gguf").write_text("mine")
    with pytest.raises(Unsupported, match=r"there\.gguf exists"):
        GgufConverter().write(tmp_path / "there.gguf", folder)
    assert (tmp_path / "there.gguf").read_text() == "mine"
    with pytest.raises(Unsupported, match="float64; choose one with --dtype"):
        GgufConverter().write(tmp_path / "m.gguf", Cast(folder, "float64"))
    with pytest.raises(Unsupported, match=r"blk\.0\.ffn_down\.weight has rows of 48 values, but q8_0 needs a multiple of 32"):
        GgufConverter(quantization="q8_0").write(tmp_path / "m.gguf", folder)
    with pytest.raises(Unsupported, match="contains no tokenizer"):
        GgufConverter(tokenizer=str(tmp_path / "nowhere")).write(tmp_path / "m.gguf", folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["theirs", "there.gguf"]


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, folder = folder_of("llama", tmp_path)
    count = iter(range(5))
    values = converters.values_of
    monkeypatch.setattr(converters, "values_of", lambda *arguments: next(count) >= 0 and values(*arguments))
    with pytest.raises(StopIteration):
        GgufConverter().write(tmp_path / "m.gguf", folder)
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_without_the_package_the_error_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, folder = folder_of("llama", tmp_path)
    monkeypatch.setitem(sys.modules, "gguf", None)
    for call in (lambda: GgufConverter().write(tmp_path / "m.gguf", folder), lambda: GgufFile(tmp_path / "m.gguf")):
        with pytest.raises(Unsupported, match=r"pip install 'forge-models\[gguf\]'"):
            call()


def rewritten(path: Path, **changes: Any) -> Path:
    """The file with other fields (None = without it), written by the gguf package."""
    reader = gguf.GGUFReader(path)
    name = changes.get("architecture", reader.fields["general.architecture"].contents())
    writer = gguf.GGUFWriter(path.with_name("changed.gguf"), name)
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture" or changes.get(key, 0) is None:
            continue
        writer.add_key_value(key, changes.get(key, field.contents()), field.types[0])
    for tensor in reader.tensors:
        if changes.get(tensor.name, 0) is None:
            continue
        writer.add_tensor(changes.get("rename", {}).get(tensor.name, tensor.name), tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.with_name("changed.gguf")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architecture": "mamba"}, "architecture 'mamba' is not implemented; implemented are llama"),
        ({"llama.embedding_length": None}, r"metadata without llama\.embedding_length"),
        ({"blk.1.ffn_up.weight": None}, r"blk\.1\.ffn_up\.weight: missing"),
        ({"rename": {"blk.1.ffn_up.weight": "blk.1.other"}}, r"blk\.1\.other: unexpected"),
        ({"llama.feed_forward_length": 47}, r"blk\.0\.ffn_gate\.weight: shape \(48, 32\), but the metadata requires \(47, 32\)"),
        ({"llama.rope.dimension_count": 4}, r"rope\.dimension_count 4 is not implemented"),
        ({"llama.forge.llama3.factor": 9.0}, r"rope_freqs\.weight differs from the scaling"),
        ({"llama.forge.llama3.factor": None}, "without the settings that Forge writes"),
    ],
)
def test_a_file_that_is_not_understood_is_refused(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    _, folder = folder_of("llama-llama3", tmp_path)
    GgufConverter().write(tmp_path / "m.gguf", folder)
    with pytest.raises(ForgeError, match=reason):
        GgufFile(rewritten(tmp_path / "m.gguf", **changes))


def test_a_parallel_residual_is_refused(tmp_path: Path) -> None:
    _, folder = folder_of("stablelm", tmp_path)
    GgufConverter().write(tmp_path / "m.gguf", folder)
    with pytest.raises(Unsupported, match=r"use_parallel_residual is not implemented"):
        GgufFile(rewritten(tmp_path / "m.gguf", **{"stablelm.use_parallel_residual": True}))


def test_the_largest_gemma_has_a_scale_of_its_own() -> None:
    """llama.cpp finds it by the number of layers: 46 for Gemma-2, 62 for Gemma-3."""
    for kind, layers in (("gemma2", 46), ("gemma3_text", 62)):
        keys = SIZES | NATURAL | {"num_hidden_layers": layers}
        of_width, of_heads = (
            decoder_of(FAMILIES[kind], keys | {"query_pre_attn_scalar": scalar}, "here") for scalar in (16, 32 // 4)
        )
        assert architecture_of(of_heads, kind).family == kind
        with pytest.raises(Unsupported, match=r"attention\.scale"):
            architecture_of(of_width, kind)


def test_tokens_that_end_generation_are_read(tmp_path: Path) -> None:
    _, folder = folder_of("llama", tmp_path)
    folder.facts = replace(folder.facts, ends=(2, 7))
    GgufConverter().write(tmp_path / "m.gguf", folder)
    assert GgufFile(tmp_path / "m.gguf").facts.ends == (2, 7)


@pytest.mark.parametrize("content", [b"", b"not a file of this kind", b"GGUF\x03\x00\x00\x00\x05"])
def test_a_damaged_file_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(Unsupported, match="cannot be read as a GGUF file"):
        GgufFile(tmp_path / "m.gguf")


def test_every_architecture_has_a_case() -> None:
    assert {name for name, *_ in FILES.values()} == set(ARCHITECTURES)
