"""Adapters of classes of transformers: equal to the peft library on the same class, resumed from the adapter alone, exported."""

import json
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from forge_ckpt.checkpoint.locate import locate
from forge_core.batch import Batch
from forge_core.errors import ForgeError
from forge_core.registry import Registry
from forge_models.components.lora import LoRAConfig
from forge_models.components.transformers import TransformersConfig
from forge_models.hf.streamed_forward import logits_of
from forge_models.lora_weights import MergedWeights
from forge_parallel.model.parallel_model import full
from forge_train.formats.forge import Cast
from forge_train.inference.stored import open_weights
from forge_train.run.loop import fit
from harness.closeness import wide
from harness.pool import World
from models.hf.command_line import run as command
from models.hf.zoo import tokens
from train.runs import prepared
from train.whole_runs.test_lora_run import BETAS, RECIPE, Watched, exactly, in_fp64, of_peft, on_ranks, trained, weights_of

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
GROUPED = {"num_key_value_heads": 2}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {**GROUPED, "attention_bias": True},
    "gpt_neox": {"classifier_dropout": 0.0},  # fuses q, k and v, and has biases
    "gemma2": {**GROUPED, "head_dim": 8, "tie_word_embeddings": True},
    "gpt2": {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "summary_first_dropout": 0.0},
    "mixtral": {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
}


def folder_of(kind: str, path: Path) -> Path:
    import transformers

    torch.manual_seed(5)
    config = transformers.CONFIG_MAPPING[kind].from_dict({**SIZES, **KINDS[kind]})
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.05)  # also where a class starts at zero or one
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in made:
            made[kind] = folder_of(kind, tmp_path_factory.mktemp("base") / kind)
        return made[kind]

    return get


def recipe_of(folder: Path, path: Path) -> Path:
    path.write_text(RECIPE.replace('from_hf = "{base}"', f'name = "transformers"\nfolder = "{folder}"'))
    return path


def theirs(name: str) -> str:
    """Our name of an adapter's parameter -> that of the peft library."""
    path, _, slot = name.rpartition(".")
    return f"base_model.model.{path}.{ {'lora_a': 'lora_A', 'lora_b': 'lora_B'}[slot] }.default.weight"


def with_constants_of(exact: Any, part: Any) -> None:
    """Gives `part` the constants of `exact`, such as rotary frequencies, which are in fp64 there."""
    for path, module in part.named_modules():
        for name in [name for name, value in vars(module).items() if isinstance(value, torch.Tensor)]:
            module.__dict__[name] = getattr(exact.get_submodule(path), name)


CASES = [
    pytest.param("llama", [], {}, id="llama"),
    pytest.param(
        "llama", ['--model.lora.targets=["q_proj", "mlp.down_proj"]', "--model.lora.rank_stabilized=true"],
        {"target_modules": ["q_proj", "down_proj"], "use_rslora": True}, id="names of peft", marks=pytest.mark.slow,
    ),
    pytest.param("gpt_neox", ['--model.lora.targets=["all-linear"]'], {}, id="gpt_neox", marks=pytest.mark.slow),
    pytest.param("gemma2", [], {}, id="gemma2", marks=pytest.mark.slow),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "ours", "keys"), CASES)
def test_twenty_steps_equal_those_of_peft(folders: Any, tmp_path: Path, kind: str, ours: list[str], keys: dict[str, Any]) -> None:
    folder = folders(kind)
    recipe = recipe_of(folder, tmp_path / "lora.toml")
    run, recorder = prepared(recipe, [f"--job.dir={tmp_path / 'run'}", "--train.max_steps=20", *ours])
    batches: list[list[Batch]] = []
    run.training.step = Watched(run.step, batches)  # type: ignore[assignment]
    run.model.part.forward = exactly(run.model.part.forward)
    model = of_peft(folder, **keys)
    with_constants_of(model.base_model.model, run.model.part)
    parameters = dict(model.named_parameters())
    assert {theirs(name) for name, _, _ in run.model.trainable()} == {n for n, p in parameters.items() if p.requires_grad}
    with torch.no_grad():
        for name, tensor, _ in run.model.trainable():
            parameters[theirs(name)].copy_(full(tensor))
    fit(run)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **BETAS)
    for step, parts in enumerate(batches):
        rows, labels = (torch.cat([getattr(part, key) for part in parts]) for key in ("tokens", "labels"))
        with wide():
            logits = model(input_ids=rows).logits
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        assert loss.item() == pytest.approx(recorder.losses[step], rel=1e-9)
    assert len(batches) == 20 and abs(recorder.losses[-1] - recorder.losses[0]) > 1e-3
    for name, tensor, _ in run.model.trainable():
        assert torch.allclose(full(tensor), parameters[theirs(name)], rtol=1e-7, atol=1e-9), name


def test_a_checkpoint_has_the_adapter_alone_and_a_resume_takes_it_up(folders: Any, tmp_path: Path) -> None:
    folder = folders("llama")
    recipe = recipe_of(folder, tmp_path / "lora.toml")
    run, before = trained(recipe, tmp_path / "run", "--train.max_steps=2")
    after = weights_of(run)
    adapter = {name for name in after if "lora_" in name}
    assert {name for name in after if not torch.equal(after[name], before[name])} == adapter
    stored = load_file(folder / "model.safetensors")
    assert all(torch.equal(before[name].float(), stored[name]) for name in before.keys() - adapter)
    manifest = locate(tmp_path / "run").manifest()
    assert {info.name.partition("/")[2] for info in manifest.tensors if info.name.startswith("model/")} == adapter
    assert manifest.meta["base"]["tensors"] == len(stored)
    resumed, _ = trained(recipe, tmp_path / "run")
    whole, _ = trained(recipe, tmp_path / "whole")
    assert all(torch.equal(tensor, weights_of(whole)[name]) for name, tensor in weights_of(resumed).items())
    begun, _ = prepared(recipe, [f"--job.dir={tmp_path / 'next'}", f"--model.lora.from_adapter={tmp_path / 'whole'}"])
    assert all(torch.equal(tensor, weights_of(whole)[name]) for name, tensor in weights_of(begun).items())


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp_shard", "tp", "pp", "ep"])
def test_it_goes_on_in_another_layout(world: World, folders: Any, tmp_path: Path, layout: str) -> None:
    """Two steps on two ranks and two on one are four on one."""
    recipe = recipe_of(folders("mixtral" if layout == "ep" else "llama"), tmp_path / "lora.toml")
    whole = on_ranks(recipe, [f"--job.dir={tmp_path / 'whole'}", "--train.micro_batch=1"])
    cut = [f"--job.dir={tmp_path / 'cut'}", "--train.micro_batch=1"]
    sequences = ["--transforms.tensor.sequence_parallel=false"] if layout == "tp" else []
    world.run(on_ranks, 2, recipe, [*cut, *sequences, "--train.stop_at=2", f"--parallel.{layout}=2"])
    found = on_ranks(recipe, cut)
    assert found["losses"] == pytest.approx(whole["losses"][2:], rel=1e-6)
    for name, tensor in whole["weights"].items():
        assert torch.allclose(found["weights"][name], tensor, rtol=1e-4, atol=1e-5), name


@pytest.mark.slow
def test_exports_compute_the_same(folders: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import transformers

    folder = folders("gpt_neox")
    trained(recipe_of(folder, tmp_path / "lora.toml"), tmp_path / "run")
    weights, ids = open_weights(tmp_path / "run", Registry()), tokens()
    exact = logits_of(weights, ids, torch.float64)
    merged = logits_of(MergedWeights(Cast(weights, "float64")), ids, torch.float64)
    assert float((exact - merged).abs().max()) < 1e-5  # norms of the class are in fp32
    assert command("convert", tmp_path / "run", tmp_path / "merged", "--to", "hf") == 0
    assert "merged into its base" in capsys.readouterr().out
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float64)
    with torch.no_grad():
        assert float((loaded(ids).logits - exact).abs().max()) < 1e-4
    assert command("convert", tmp_path / "run", tmp_path / "adapter", "--to", "peft") == 0
    assert "adapter: largest difference from the format's own library" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        theirs_model = peft.PeftModel.from_pretrained(in_fp64(folder), str(tmp_path / "adapter")).eval()
        assert float((theirs_model(input_ids=ids).logits - exact).abs().max()) < 1e-4
    recipe = recipe_of(folder, tmp_path / "again.toml")
    run, _ = prepared(recipe, [f"--job.dir={tmp_path / 'next'}", f"--model.lora.from_adapter={tmp_path / 'adapter'}"])
    found = {name: tensor.float() for name, tensor in weights_of(run).items() if "lora_" in name}
    assert all(torch.equal(tensor, weights.read([name])[name].float()) for name, tensor in found.items())


@pytest.mark.slow
def test_experts_are_adapted_merged_and_not_written_for_peft(
    folders: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, before = trained(recipe_of(folders("mixtral"), tmp_path / "lora.toml"), tmp_path / "run")
    changed = {name for name, tensor in weights_of(run).items() if not torch.equal(tensor, before[name])}
    assert any("experts.gate_up_proj_lora_b" in name for name in changed) and all("lora_" in name for name in changed)
    assert command("convert", tmp_path / "run", tmp_path / "merged", "--to", "hf") == 0
    weights, ids = open_weights(tmp_path / "run", Registry()), tokens()
    model = TransformersConfig(folder=str(tmp_path / "merged"), config=weights.model.config)  # type: ignore[attr-defined]
    found = logits_of(model.reopened(tmp_path / "merged"), ids, torch.float64)
    assert float((found - logits_of(weights, ids, torch.float64)).abs().max()) < 1e-4
    assert command("convert", tmp_path / "run", tmp_path / "adapter", "--to", "peft") != 0
    assert "no adapters of stacked experts" in capsys.readouterr().err


def small(kind: str, **lora: Any) -> TransformersConfig:
    config = json.dumps({"model_type": kind, **SIZES, **KINDS.get(kind, {})})
    return TransformersConfig(config=config, weights_from="draw", lora=LoRAConfig(**lora))


def test_each_expert_has_an_adapter_of_its_own() -> None:
    """Against the formula, with every matrix W + s B A of every expert made by hand."""
    adapted = small("mixtral", rank=2, alpha=3, targets=("*.experts.*",)).build()
    adapted.to_empty(device="cpu").double()
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in adapted.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64) * 0.3)
    experts: Any = adapted.get_submodule("model.layers.0.mlp.experts")
    rows, index = torch.randn(5, 32, dtype=torch.float64), torch.tensor([[0, 1], [3, 0], [1, 2], [2, 3], [0, 2]])
    weights = torch.rand(5, 2, dtype=torch.float64)
    whole = {
        name: getattr(experts, name) + 1.5 * getattr(experts, f"{name}_lora_b") @ getattr(experts, f"{name}_lora_a")
        for name in ("gate_up_proj", "down_proj")
    }
    expected = torch.zeros_like(rows)
    for row in range(5):
        for slot in range(2):
            number = int(index[row, slot])
            gate, up = (whole["gate_up_proj"][number] @ rows[row]).chunk(2)
            expected[row] += weights[row, slot] * (whole["down_proj"][number] @ (F.silu(gate) * up))
    assert torch.allclose(experts(rows, index, weights), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("targets", "found"),
    [
        (["q_proj"], ["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"]),
        (["blocks.1.self_attn.k*"], ["model.layers.1.self_attn.k_proj"]),
        (
            ["model.layers.0.mlp.up_proj", "layers.0.mlp.down_proj"],
            ["model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"],
        ),
    ],
)
def test_targets_are_names_of_the_class_of_peft_and_of_blocks(targets: list[str], found: list[str]) -> None:
    model = small("llama", targets=tuple(targets)).build()
    assert [name.removesuffix(".lora_a") for name, _ in model.named_parameters() if name.endswith("lora_a")] == found


@pytest.mark.parametrize(
    ("kind", "lora", "match"),
    [
        ("llama", {"targets": ("*.w1",)}, r"'\*\.w1' matches no matrix .*are \*\.q_proj"),
        ("llama", {"targets": ("lm_head",)}, "'lm_head' matches no matrix"),
        ("gpt2", {}, "GPT2LMHeadModel has no layer that can have an adapter"),
        ("mixtral", {"dora": True}, "dora does not support experts"),
    ],
)
def test_adapters_that_cannot_be_are_refused(kind: str, lora: dict[str, Any], match: str) -> None:
    with pytest.raises(ForgeError, match=match):
        small(kind, **lora).build()


def test_a_layer_whose_weight_is_read_without_a_call_gets_none() -> None:
    """A block of Mamba multiplies by `dt_proj.weight` itself."""
    config = json.dumps({"model_type": "mamba", "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4})
    model = TransformersConfig(config=config, folder="base", lora=LoRAConfig()).build()
    layers = {name.split(".")[-2] for name, _ in model.named_parameters() if "lora_" in name}
    assert layers == {"in_proj", "x_proj", "out_proj"}
    with pytest.raises(ForgeError, match="'dt_proj' matches no matrix"):
        TransformersConfig(config=config, folder="base", lora=LoRAConfig(targets=("dt_proj",))).build()


def test_a_run_without_a_base_and_dora_under_tp_are_refused(folders: Any, tmp_path: Path) -> None:
    recipe = recipe_of(folders("llama"), tmp_path / "lora.toml")
    with pytest.raises(ForgeError, match=r"names none: set model\.folder"):
        prepared(recipe, [f"--job.dir={tmp_path / 'run'}", "--model.weights_from=draw"])
    with pytest.raises(ForgeError, match="two bases"):
        prepared(recipe, [f"--job.dir={tmp_path / 'run'}", f"--start.weights={folders('llama')}"])


def test_a_head_with_a_bias_is_no_layer_of_all_linear() -> None:
    """Forge computes whole logits of GPT-J, whose head stays one of torch's layers."""
    sizes = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4}
    config = json.dumps({"model_type": "gptj", **sizes, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0})
    lora = LoRAConfig(targets=("all-linear",))
    settings = {"summary_first_dropout": 0.0}
    model = TransformersConfig(config=json.dumps(json.loads(config) | settings), folder="base", lora=lora).build()
    layers = {name.split(".")[-2] for name, _ in model.named_parameters() if "lora_" in name}
    assert layers == {"q_proj", "k_proj", "v_proj", "out_proj", "fc_in", "fc_out"}
