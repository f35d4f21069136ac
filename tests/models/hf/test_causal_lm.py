"""`[model] name = "transformers"`: a class's own forward with Forge's loss, weights, step and folders."""

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_core.batch import Batch
from forge_core.errors import ForgeError
from forge_models.components.transformers import TransformersConfig
from forge_models.generation import generate
from forge_models.hf import causal_lm, causal_lm_classes, causal_lm_weights
from forge_models.hf.causal_lm import CausalLM
from forge_models.hf.causal_lm import causal_lm as model_of
from forge_models.hf.causal_lm_anatomy import Anatomy
from forge_models.hf.config import Unsupported
from forge_models.hf.converter import HfConverter
from forge_parallel.model.realize import Blueprint
from forge_train.inference.stored import load_model
from harness.pool import World
from models.hf import causal_lm_walk as walk

FAST = ("LlamaForCausalLM", "Gemma2ForCausalLM", "CohereForCausalLM", "GPTJForCausalLM", "MixtralForCausalLM", "GPT2LMHeadModel")
"""Plain; soft caps and a scaled table; scaled logits; a head with a bias; experts; learned positions and transposed weights."""


def config_of(name: str, **changes: Any) -> str:
    return json.dumps({**walk.small(walk.classes()[name][0]), **changes})


@pytest.mark.parametrize("name", FAST)
def test_one_process_equals_the_class_itself(name: str) -> None:
    config = config_of(name)
    ours = walk.step_of(config, "dp1")
    assert walk.error(walk.step_of_transformers(config), ours) < walk.TOLERANCE
    packed = walk.step_of(config, "dp1", packed=True)
    assert walk.error(walk.step_of_transformers(config, packed=True), packed) < walk.TOLERANCE
    assert walk.error(ours, packed) > 1e-3, "documents change nothing"
    assert walk.influence_of_later_tokens(config) < walk.TOLERANCE


@pytest.mark.parametrize("name", ["MixtralForCausalLM", "GptOssForCausalLM", "NemotronHForCausalLM"])
def test_experts_of_a_class_run_in_one_grouped_product(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gated; transposed, with biases and a gate of their own; not gated. fp64 has no such product, so its experts are a loop."""
    config = config_of(name, num_experts_per_tok=1)  # some experts get no token
    exact = walk.step_of_transformers(config)
    groups: list[int] = []
    product = torch.nn.functional.grouped_mm

    def counted(rows: torch.Tensor, weight: torch.Tensor, **options: Any) -> torch.Tensor:
        groups.append(len(weight))
        return product(rows, weight, **options)

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", counted)
    assert walk.error(exact, walk.step_of(config, "dp1")) < walk.TOLERANCE
    assert not groups
    assert walk.error(exact, walk.step_of(config, "dp1", dtype="fp32")) < 1e-3
    assert groups


def test_rows_of_no_expert_change_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dispatcher may append rows of no expert; what a product leaves in them and in their gradients is undefined."""
    from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    experts: Any = GptOssExperts(GptOssConfig(hidden_size=8, intermediate_size=8, num_local_experts=3))
    experts._apply_gate = lambda x: torch.nn.functional.silu(x[:, ::2]) * x[:, 1::2]  # its own clamps what is undefined
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    rows, counts = torch.randn(6, 8, generator=generator), torch.tensor([2, 0, 3])
    own = causal_lm.grouped_products

    class Undefined(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, rows: torch.Tensor) -> torch.Tensor:
            return torch.cat([rows[:5], torch.full_like(rows[5:], torch.nan)])

        @staticmethod
        def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return Undefined.forward(_ctx, gradient)

    def undefined(*given: Any, **options: Any) -> Any:
        product = own(*given, **options)
        return lambda rows, weight: Undefined.apply(product(Undefined.apply(rows), weight))

    monkeypatch.setattr(causal_lm, "grouped_products", undefined)

    def gradients(rows: torch.Tensor) -> list[torch.Tensor]:
        out = causal_lm._feed_forward(experts, rows, counts)
        assert torch.isfinite(out[:5]).all()
        return list(torch.autograd.grad(out[:5].square().sum(), list(experts.parameters())))

    expected = gradients(rows[:5])
    assert all(torch.isfinite(gradient).all() for gradient in expected)
    for found, gradient in zip(gradients(rows), expected, strict=True):
        assert torch.equal(found, gradient)
    assert not expected[1][1].any()  # an expert without tokens has a gradient, of zeros


def test_outputs_of_experts_pass_the_norm_of_their_class() -> None:
    from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    experts: Any = GptOssExperts(GptOssConfig(hidden_size=8, intermediate_size=8, num_local_experts=2))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    rows, counts = torch.randn(5, 8, generator=generator), torch.tensor([2, 3])
    plain = causal_lm._feed_forward(experts, rows, counts)
    experts.has_post_expert_norm, experts.post_expert_norm = True, torch.nn.LayerNorm(8)
    assert torch.equal(causal_lm._feed_forward(experts, rows, counts), experts.post_expert_norm(plain))


def test_a_body_is_found_where_the_class_names_none() -> None:
    """Llama 4 has no attribute of the name that its class gives the body."""
    model: Any = model_of(config_of("Llama4ForCausalLM"), {})
    assert model.base_model is model
    assert model.anatomy.body == "model"
    assert model.anatomy.head == "lm_head"


def test_an_output_layer_with_a_forward_of_its_own_has_no_loss_in_parts() -> None:
    """Dory's is a linear layer that scales the logit of each token."""
    from transformers import LlamaConfig, LlamaForCausalLM

    class Scaled(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    with torch.device("meta"):
        model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4))
        head = Scaled(32, 64, bias=False)
    assert Anatomy.of(model).head == "lm_head"
    model.lm_head = head
    anatomy = Anatomy.of(model)
    assert anatomy.why_whole == "the output layer of LlamaForCausalLM is more than a linear layer"
    assert not anatomy.head and anatomy.rest == ("lm_head",)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "MixtralForCausalLM", "Gemma2ForCausalLM"])
def test_a_folder_is_what_from_pretrained_loads_and_reads_back(name: str) -> None:
    assert walk.error_of_a_folder(config_of(name)) < walk.TOLERANCE


def test_the_comparison_sees_what_is_wrong() -> None:
    config = config_of("LlamaForCausalLM")
    right = walk.step_of(config, "dp1")
    assert walk.error(right, (right[0] * (1 + 1e-5), right[1])) > walk.TOLERANCE
    name = next(iter(right[1]))
    assert walk.error(right, (right[0], {**right[1], name: right[1][name] * 0.999})) > walk.TOLERANCE
    assert walk.error(right, (right[0], {key: value for key, value in right[1].items() if key != name})) > walk.TOLERANCE
    assert not walk.error(right, (float("nan"), right[1])) <= walk.TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(causal_lm_classes.records()["classes"]))
def test_every_class_is_as_recorded(name: str) -> None:
    record = causal_lm_classes.records()["classes"][name]
    found = walk.record_of(walk.classes()[name][0])
    holds = {key: value is True for key, value in record.items() if key != "model_types"}
    assert {key: value is True for key, value in found.items()} == holds


def test_every_class_of_transformers_has_a_record() -> None:
    import transformers

    document = causal_lm_classes.records()
    assert f"\ntransformers=={document['transformers']}\n" in walk.CONSTRAINTS.read_text(), "run models.hf.causal_lm_walk"
    if transformers.__version__ != document["transformers"]:
        pytest.skip("the records are those of another version of transformers")
    assert set(document["classes"]) == set(walk.classes())
    for name, configs in walk.classes().items():
        assert set(document["classes"][name]["model_types"]) == {config.model_type for config in configs}  # type: ignore[attr-defined]


def test_a_record_keeps_the_version_that_it_ran_under(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    path = tmp_path / "records.json"
    monkeypatch.setattr(transformers, "__version__", "1")
    first = walk.Book(path, "classes", ["a", "b", "c"])
    for name in "cba":
        first.keep(name, {"alone": name})
    assert json.loads(path.read_text()) == {"classes": {name: {"alone": name} for name in "abc"}, "transformers": "1"}
    monkeypatch.setattr(transformers, "__version__", "2")
    walk.Book(path, "classes", ["a", "b", "d"]).keep("d", {"alone": True})  # which has no c
    assert list(json.loads(path.read_text())["classes"]) == ["a", "b", "d"]
    assert json.loads(path.read_text())["earlier"] == {"1": ["a", "b"]}
    monkeypatch.setattr(transformers, "__version__", "3")
    later = walk.Book(path, "classes", ["a", "b", "d"])
    later.keep("a", {"alone": True})
    assert json.loads(path.read_text())["earlier"] == {"1": ["b"], "2": ["d"]}
    for name in "bd":
        later.keep(name, {"alone": True})
    assert "earlier" not in json.loads(path.read_text())


def test_the_share_of_classes_is_what_the_page_promises() -> None:
    records = causal_lm_classes.records()["classes"].values()
    tried = [record for record in records if not any(why in str(record["alone"]) for why in NOT_BUILT)]
    trained = [record for record in tried if record["alone"] is True]
    assert sum(record["dp"] is True for record in trained) >= 0.9 * len(tried)
    assert sum(record["tp"] is True or record["pp"] is True for record in trained) >= 0.7 * len(tried)


NOT_BUILT = ("cannot be made small", "Class validation error", "requires the timm library")
"""What is said of classes that transformers does not build small from their default configuration."""


def test_initial_values_are_those_of_the_class() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=512, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, initializer_range=0.05)
    specs = model_of(json.dumps(config.to_dict()), {}).specs().tensors
    torch.manual_seed(0)
    for name, parameter in LlamaForCausalLM(config).named_parameters():
        init = specs[name].init
        if init.kind == "ones":
            assert torch.equal(parameter, torch.ones_like(parameter))
        else:
            assert init.kind == "normal" and float(parameter.detach().std()) == pytest.approx(init.std, rel=0.1)


def test_constants_are_those_that_the_class_computes() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    rope = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope["original_max_position_embeddings"] = 16  # type: ignore[assignment]
    config = LlamaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, rope_parameters=rope)
    theirs = LlamaForCausalLM(config).model.rotary_emb.inv_freq
    ours: Any = model_of(json.dumps(config.to_dict()), {})
    assert torch.equal(ours.model.rotary_emb.inv_freq, theirs)
    assert "inv_freq" not in dict(ours.named_buffers())


def test_parameters_are_on_the_meta_device_and_keep_their_names() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    blueprint = Blueprint.of(lambda: model_of(json.dumps(config.to_dict()), {}))
    assert all(tensor.is_meta for tensor in blueprint.module.parameters())
    assert [name for name, _ in blueprint.module.named_parameters()] == [
        n for n, _ in LlamaForCausalLM(config).named_parameters()
    ]


def test_settings_replace_keys() -> None:
    small = TransformersConfig(config=config_of("LlamaForCausalLM"), settings={"num_hidden_layers": 1}, weights_from="draw")
    assert len(small.build().specs().blocks) == 1
    with pytest.raises(Unsupported, match=r"model\.settings.layers is not a key"):
        TransformersConfig(config=small.config, settings={"layers": 1}, weights_from="draw").build()


LLAMA = {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 64}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "dropout": ({"attention_dropout": 0.1}, "set model.settings = { attention_dropout = 0.0 }"),
    "noise": ({"model_type": "mixtral", "router_jitter_noise": 0.1}, "set model.settings = { router_jitter_noise = 0.0 }"),
    "quantized": ({"quantization_config": {"quant_method": "fp8"}}, "convert them to bf16"),
    "unknown": ({"model_type": "unheard_of", "auto_map": {"AutoModel": "code.Model"}}, "code that auto_map names is never run"),
    "no_language_model": ({"model_type": "vit"}, "has no causal language model"),
    "dynamic_rope": (
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, "max_position_embeddings": 64},
        "depend on the longest row",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_proven_is_refused_by_name(case: str) -> None:
    changes, message = REFUSED[case]
    with pytest.raises(Unsupported, match=message):
        model_of(json.dumps({**LLAMA, **changes}), {})


def test_router_losses_are_refused() -> None:
    with pytest.raises(Unsupported, match="output_router_logits = false"):
        model_of(config_of("MixtralForCausalLM", output_router_logits=True), {})


def test_a_class_whose_weights_cannot_be_drawn_starts_from_a_folder_only() -> None:
    config = config_of("MambaForCausalLM")
    assert isinstance(model_of(config, {}), CausalLM)
    with pytest.raises(Unsupported, match=r"A_log .*start from weights: set model.folder"):
        model_of(config, {}, drawn=True)


def test_documents_of_a_class_that_mixes_them_are_refused() -> None:
    model = walk.realized(config_of("OPTForCausalLM"), "dp1")
    part: Any = model.part
    part.packs = False
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"OPTForCausalLM does not keep them apart; set data.packing = 'pad'"):
        part(tokens, documents=torch.tensor([[0, 0, 1, 1]], dtype=torch.int32))
    with torch.no_grad():
        padded = part(tokens, documents=torch.tensor([[0, 0, -1, -1]], dtype=torch.int32))
        assert torch.equal(padded, part(tokens))


def folder_of(path: Path, name: str = "LlamaForCausalLM") -> Path:
    weights = walk.Memory(config_of(name))
    causal_lm_weights.write(path / "folder", weights, tokenizer=None, max_shard_bytes=10_000)
    return path / "folder"


def test_labels_in_the_configuration_of_a_language_model_change_no_token(tmp_path: Path) -> None:
    """Every configuration that transformers makes has `id2label`. RoBERTa counts positions from `pad_token_id`."""
    config = config_of("RobertaForCausalLM", pad_token_id=1)
    assert "id2label" in json.loads(config)
    causal_lm_weights.write(tmp_path / "folder", walk.Memory(config), tokenizer=None, max_shard_bytes=10**9)
    assert json.loads((tmp_path / "folder" / "config.json").read_text())["pad_token_id"] == 1
    assert (tmp_path / "folder" / "generation_config.json").is_file()


def _broken(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    from safetensors.torch import load_file, save_file

    index = json.loads((folder / "model.safetensors.index.json").read_text())
    tensors = {}
    for file in sorted(set(index["weight_map"].values())):
        tensors |= load_file(folder / file)
        (folder / file).unlink()
    (folder / "model.safetensors.index.json").unlink()
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


BROKEN: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "missing": (lambda tensors: tensors.pop("model.norm.weight"), "model.norm.weight: missing"),
    "unexpected": (lambda tensors: tensors.update(extra=torch.zeros(1)), "extra: unexpected"),
    "shape": (lambda tensors: tensors.update({"model.norm.weight": torch.zeros(7)}), "shape \\(7,\\), but config.json requires"),
    "integers": (
        lambda tensors: tensors.update({"model.norm.weight": torch.zeros(32, dtype=torch.int32)}),
        "dtype int32 is not implemented",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_folder_that_does_not_fit_is_refused(case: str, tmp_path: Path) -> None:
    change, message = BROKEN[case]
    folder = folder_of(tmp_path)
    _broken(folder, change)
    with pytest.raises(Unsupported, match=message):
        causal_lm_weights.CausalLMFolder(
            folder, TransformersConfig(config=(folder / "config.json").read_text(), weights_from="draw")
        )


def test_a_folder_that_transformers_loads_as_another_model_is_neither_written_nor_read(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=r"YoutuForCausalLM does not give the same logits .*; keep the checkpoint of Forge"):
        HfConverter().write(tmp_path / "folder", walk.Memory(config_of("YoutuForCausalLM")))  # type: ignore[arg-type]
    assert not (tmp_path / "folder").exists()
    (tmp_path / "config.json").write_text(config_of("YoutuForCausalLM"))
    with pytest.raises(Unsupported, match=r"YoutuForCausalLM does not give the same logits .*; use another version"):
        HfConverter().read(tmp_path)


def test_a_missing_shard_and_pickled_weights_are_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    model = TransformersConfig(config=(folder / "config.json").read_text(), weights_from="draw")
    next(folder.glob("model-00002*")).unlink()
    with pytest.raises(Unsupported, match="is missing, but"):
        causal_lm_weights.CausalLMFolder(folder, model)
    for file in folder.glob("model*"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(Unsupported, match="pickled weights only"):
        causal_lm_weights.CausalLMFolder(folder, model)


def test_a_box_is_the_part_of_a_whole_tensor_and_only_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(tmp_path, "MixtralForCausalLM")
    weights = causal_lm_weights.CausalLMFolder(
        folder, TransformersConfig(config=(folder / "config.json").read_text(), weights_from="draw")
    )
    for name, stored in weights.tensors.items():
        offset = tuple(size // 2 for size in stored.shape)
        extent = tuple(size - start for size, start in zip(stored.shape, offset, strict=True))
        whole = weights.read([name])[name]
        assert torch.equal(weights.box(name, offset, extent), whole[tuple(slice(start, None) for start in offset)])
    monkeypatch.setattr(weights, "whole", lambda name: pytest.fail(f"{name} was read whole"))
    weights.box("model.embed_tokens.weight", (0, 0), (3, 32))


def test_generation_equals_transformers() -> None:
    from transformers import LlamaForCausalLM

    config = config_of("LlamaForCausalLM")
    model = walk.realized(config, "dp1")
    values: Any = model.part.config  # type: ignore[attr-defined]
    theirs = LlamaForCausalLM(values).double().eval()
    theirs.load_state_dict({name: tensor.detach() for name, tensor in model.tensors()})
    prompts = [[5, 6, 7, 8], [9, 10]]
    with model.inference():
        ours = generate(model.part, prompts, max_tokens=6)  # type: ignore[arg-type]
    for prompt, row in zip(prompts, ours, strict=True):
        tokens = torch.tensor([prompt])
        out = theirs.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=6, do_sample=False, eos_token_id=None
        )
        assert out[0, len(prompt) :].tolist() == row


def test_a_pipeline_splits_a_class_whose_output_layer_has_a_bias(world: World) -> None:
    config = config_of("GPTJForCausalLM")
    alone = walk.step_of(config, "dp1", packed=True)
    for found in world.run(walk.step_of, 2, config, "pp2", True):
        assert walk.error(alone, found) < walk.TOLERANCE


def test_a_pipeline_of_a_class_that_has_no_stages_says_why() -> None:
    from forge_parallel.pipeline.definition import Pipeline
    from forge_parallel.pipeline.schedules import OneForwardOneBackward
    from forge_parallel.pipeline.stages import StageSplit

    blueprint = Blueprint.of(lambda: model_of(config_of("BambaForCausalLM"), {}))
    with pytest.raises(ForgeError, match=r"computes with the hidden states between .*; set parallel.pp = 1"):
        StageSplit.of(blueprint.module, blueprint.specs, Pipeline(OneForwardOneBackward().build()), 2, 0)


def test_a_folder_of_a_kind_that_is_no_family_is_opened_with_its_class(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "GPTJForCausalLM")
    weights = HfConverter().read(folder)
    assert type(weights.model) is TransformersConfig
    tokens = torch.arange(5)[None]
    model = load_model(weights)
    theirs = HfConverter().reference(folder, tokens)
    with torch.no_grad():
        assert torch.allclose(model(tokens).float(), theirs, rtol=1e-4, atol=1e-5)  # type: ignore[arg-type]


def test_labels_without_a_loss_are_0() -> None:
    """Of a class whose loss needs whole logits."""
    model = walk.realized(config_of("GPTJForCausalLM"), "dp1")
    tokens = torch.zeros(2, 4, dtype=torch.int64)
    from forge_models.objectives import CrossEntropy

    for smoothing in (0.0, 0.1):
        terms = model.part(tokens, labels=torch.full_like(tokens, -100), objective=CrossEntropy(label_smoothing=smoothing))
        assert terms.sum.item() == 0 and int(terms.tokens) == 0


@pytest.mark.parametrize(("z_loss", "smoothing"), [(0.0, 0.0), (0.1, 0.0), (0.01, 0.2)])
def test_the_loss_of_whole_logits_is_that_of_the_loss_in_parts(z_loss: float, smoothing: float) -> None:
    from forge_models.blocks.head import Head

    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 5, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(11, (2, 5), generator=generator)
    labels[0, 2] = -100
    head = Head(8, 11, 0.1).double()
    with torch.no_grad():
        head.weight.copy_(torch.randn(11, 8, generator=generator))
    ours = causal_lm.WholeLogits().loss(head(hidden), labels, z_loss, smoothing)
    theirs = head.loss(hidden, labels, z_loss, smoothing)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-12)
    (mine,) = torch.autograd.grad(ours[0], hidden)
    (parts,) = torch.autograd.grad(theirs[0], hidden)
    assert torch.allclose(mine, parts, rtol=1e-10, atol=1e-12)


def test_batches_have_documents_only_where_rows_are_packed() -> None:
    assert all(isinstance(batch, Batch) and batch.documents is None for batch in walk.batches(False))
    assert all(int(batch.documents.max()) > 0 for batch in walk.batches(True) if batch.documents is not None)


def test_the_page_shows_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "docs" / "_ext"))
    table = import_module("transformers_table")
    assert table.PAGE.read_text() == table.page(), "run `python docs/_ext/transformers_table.py`"
