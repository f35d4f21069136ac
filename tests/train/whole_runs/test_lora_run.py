"""Runs with an adapter: equal to the peft library, resumed to the bit from checkpoints of the adapter alone, exported."""

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from forge_ckpt.checkpoint.locate import locate
from forge_core.batch import Batch
from forge_core.errors import ForgeError
from forge_core.registry import Registry
from forge_models.hf.streamed_forward import logits_of
from forge_models.lora_weights import MergedWeights, set_adapter
from forge_parallel.model.parallel_model import full
from forge_train.formats.forge import Cast
from forge_train.inference.stored import load_model, open_weights
from forge_train.recipe.load import load_recipe
from forge_train.run.loop import fit
from harness.closeness import wide
from harness.pool import World
from models.hf.command_line import run as command
from models.hf.zoo import CASES, random_model, saved, tokens
from train.runs import prepared, train

RECIPE = """
[model]
from_hf = "{base}"

[model.lora]
rank = 4
alpha = 12

[data]
sequence_length = 16
documents = "ignore"

[[data.sources]]
name = "random"
vocab_size = 97
tokens = 4000

[train]
max_steps = 4
threads = 1
global_batch = 4
micro_batch = 2
grad_clip = "none"

[precision]
compute = "fp64"
state = "fp64"

[optimizer]
name = "adamw"
lr = 1e-2
weight_decay = 0.0

[schedule]
name = "constant"

[checkpoint]
every = 2

[[hooks]]
name = "save"
"""
BETAS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(random_model("llama", {}), tmp_path_factory.mktemp("base") / "hf")


@pytest.fixture
def recipe(base: Path, tmp_path: Path) -> Path:
    path = tmp_path / "lora.toml"
    path.write_text(RECIPE.format(base=base))
    return path


def in_fp64(folder: Path) -> Any:
    """The base in transformers, in fp64 throughout."""
    import transformers

    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    with wide():  # rotary positions would be rounded to fp32
        model = type(loaded)._from_config(loaded.config, dtype=torch.float64)
    model.load_state_dict(loaded.state_dict())
    return model


def of_peft(folder: Path, **keys: Any) -> Any:
    """The base in fp64 with an adapter of the peft library for every linear layer in its blocks."""
    settings = {"r": 4, "lora_alpha": 12, "target_modules": "all-linear", "task_type": "CAUSAL_LM"} | keys
    with warnings.catch_warnings():  # of versions of transformers
        warnings.simplefilter("ignore")
        return peft.get_peft_model(in_fp64(folder), peft.LoraConfig(**settings))


class Watched:
    """A step that keeps its batches."""

    def __init__(self, step: Any, batches: list[list[Batch]]) -> None:
        self.step, self.batches = step, batches

    def __call__(self, batches: Any, **more: Any) -> Any:
        assert all(batch.documents is None for batch in batches)
        self.batches.append(list(batches))
        return self.step(batches, **more)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.step, name)


def exactly(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward in which rotations are computed in fp64."""

    def run(*inputs: Any, **named: Any) -> Any:
        with wide():
            return forward(*inputs, **named)

    return run


def theirs(name: str) -> str:
    """Our name of an adapter's parameter -> that of the peft library, for llama."""
    path, _, slot = name.rpartition(".")
    path = path.replace("blocks.", "base_model.model.model.layers.").replace(".attention.", ".self_attn.")
    slot = {"lora_a": "lora_A", "lora_b": "lora_B", "lora_magnitude": "lora_magnitude_vector"}[slot]
    return f"{path}.{slot}.default.weight"


@pytest.mark.parametrize(
    ("ours", "keys"),
    [
        ([], {}),
        (["--model.lora.rank_stabilized=true", '--model.lora.targets=["*.q_proj", "*.down_proj"]'],
         {"use_rslora": True, "target_modules": ["q_proj", "down_proj"]}),
        pytest.param(["--model.lora.dora=true"], {"use_dora": True}, marks=pytest.mark.slow),
    ],
    ids=["lora", "rslora", "dora"],
)  # fmt: skip
def test_twenty_steps_equal_those_of_peft(
    recipe: Path, base: Path, tmp_path: Path, ours: list[str], keys: dict[str, Any]
) -> None:
    run, recorder = prepared(recipe, [f"--job.dir={tmp_path / 'run'}", "--train.max_steps=20", *ours])
    batches: list[list[Batch]] = []
    run.training.step = Watched(run.step, batches)  # type: ignore[assignment]
    run.model.part.forward = exactly(run.model.part.forward)
    model = of_peft(base, **keys)
    parameters = dict(model.named_parameters())
    trained = {theirs(name) for name, _, _ in run.model.trainable()}
    assert trained == {name for name, parameter in parameters.items() if parameter.requires_grad}
    bound = 0.0
    with torch.no_grad():
        for name, tensor, _ in run.model.trainable():
            if name.endswith("magnitude"):  # peft has computed it from the base
                assert torch.allclose(parameters[theirs(name)], full(tensor), rtol=1e-12, atol=0)
            elif name.endswith("lora_b"):
                assert not tensor.any() and not parameters[theirs(name)].any()
            else:
                bound = tensor.shape[1] ** -0.5
                assert 0.8 * bound < float(tensor.abs().max()) <= bound
                assert abs(float(parameters[theirs(name)].abs().max()) - bound) < 0.2 * bound
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
        assert loss.item() == pytest.approx(recorder.losses[step], rel=1e-10)
    assert len(batches) == 20 and abs(recorder.losses[-1] - recorder.losses[0]) > 1e-3
    for name, tensor, _ in run.model.trainable():
        assert torch.allclose(full(tensor), parameters[theirs(name)], rtol=1e-8, atol=1e-10), name


def weights_of(run: Any) -> dict[str, torch.Tensor]:
    return {name: full(tensor) for name, tensor in run.model.tensors()}


def trained(recipe: Path, folder: Path, *overrides: str) -> Any:
    """A run to its end, and its weights."""
    run, _ = prepared(recipe, [f"--job.dir={folder}", *overrides])
    before = weights_of(run)
    fit(run)
    return run, before


def test_only_the_adapter_changes_and_only_it_is_saved(recipe: Path, base: Path, tmp_path: Path) -> None:
    run, before = trained(recipe, tmp_path / "run")
    after = weights_of(run)
    adapter = {name for name in after if "lora_" in name}
    assert {name for name in after if not torch.equal(after[name], before[name])} == adapter
    held = run.optimizer.state()
    assert {name for tensors in held.values() for name in tensors} == adapter
    manifest = locate(tmp_path / "run").manifest()
    assert {info.name.partition("/")[2] for info in manifest.tensors if info.name.startswith("model/")} == adapter
    # In fp64: the adapter, two moments of it, and a count of 4 bytes for each of its tensors.
    assert manifest.bytes == sum(3 * 8 * after[name].numel() + 4 for name in adapter)
    stored = load_file(base / "model.safetensors")
    assert manifest.meta["base"]["tensors"] == len(stored)
    assert len(manifest.meta["base"]["sha256"]) == 64


def test_a_run_resumes_to_the_bit_and_evaluates_as_it_was(recipe: Path, tmp_path: Path) -> None:
    whole = train(recipe, [f"--job.dir={tmp_path / 'whole'}"])
    train(recipe, [f"--job.dir={tmp_path / 'cut'}", "--train.stop_at=2"])
    pieces = train(recipe, [f"--job.dir={tmp_path / 'cut'}"])
    assert pieces["weights"] == whole["weights"]
    assert pieces["losses"] == whole["losses"][2:]
    run, _ = prepared(recipe, [f"--job.dir={tmp_path / 'whole'}"])
    ids = tokens()
    opened = load_model(open_weights(tmp_path / "whole", Registry()))
    run.model.part.eval()
    with torch.no_grad():
        assert torch.equal(opened(ids), run.model.part(ids))


def _edited(base: Path, folder: Path) -> Path:
    """The base with one changed number."""
    shutil.copytree(base, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] += 1e-3
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder


def test_another_base_is_refused_with_what_to_do(recipe: Path, base: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run, _ = trained(recipe, folder, "--train.max_steps=2")
    other, moved = _edited(base, tmp_path / "other"), shutil.copytree(base, tmp_path / "moved")
    with pytest.raises(ForgeError, match=r"adapter of another base.*Restore the files"):
        prepared(recipe, [f"--job.dir={folder}", f"--model.from_hf={other}"])
    again, _ = prepared(recipe, [f"--job.dir={folder}", f"--model.from_hf={moved}"])  # a copy of it is fine
    assert all(torch.equal(tensor, weights_of(run)[name]) for name, tensor in weights_of(again).items())
    with pytest.raises(ForgeError, match=r"adapter of another base"):
        prepared(recipe, [f"--job.dir={tmp_path / 'b'}", f"--model.from_hf={other}", f"--model.lora.from_adapter={folder}"])
    ids = tokens()
    known = load_model(open_weights(folder, Registry()))(ids)
    shutil.move(str(base), str(tmp_path / "away"))
    try:
        with pytest.raises(ForgeError, match=r"base of the adapter cannot be opened.*--base"):
            open_weights(folder, Registry())
        converter = Registry().load("forge.converters", "forge")
        assert torch.equal(load_model(converter(base=str(moved)).build().read(folder))(ids), known)
        with pytest.raises(ForgeError, match="another base"):
            converter(base=str(other)).build().read(folder)
    finally:
        shutil.move(str(tmp_path / "away"), str(base))


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        (["--model.lora.rank=0"], "rank"),
        (["--model.lora.targets=[]"], "targets"),
        (['--model.lora.targets=["*.qproj"]'], r"'\*\.qproj' matches no matrix.*did you mean '\*\.q_proj'"),
        (['--model.lora.targets=["head"]'], "'head' matches no matrix in the blocks"),
        (["--model.from_hf=none", "--model.dim=32", "--model.vocab_size=97"], "names none: set model.from_hf"),
        (["--start.weights={base}"], "two"),
        (["--model.dim=64"], "not the base of this"),
        (["--model.mtp.depth=1"], "mtp"),
        (["--transforms.float8.recipe=tensorwise"], "float8"),
        (["--model.lora.from_adapter={base}"], "neither a folder of the peft library nor a run"),
    ],
)
def test_bad_recipes_are_refused(recipe: Path, base: Path, tmp_path: Path, overrides: list[str], match: str) -> None:
    given = [override.format(base=base) for override in overrides]
    with pytest.raises(ForgeError, match=match):
        prepared(recipe, [f"--job.dir={tmp_path / 'run'}", *given])
    assert not (tmp_path / "run").exists()


def test_an_adapter_starts_from_another_one_of_its_kind_only(recipe: Path, tmp_path: Path) -> None:
    first, _ = trained(recipe, tmp_path / "first", "--train.max_steps=2")
    begun, _ = prepared(recipe, [f"--job.dir={tmp_path / 'next'}", f"--model.lora.from_adapter={tmp_path / 'first'}"])
    assert all(torch.equal(tensor, weights_of(first)[name]) for name, tensor in weights_of(begun).items())
    for override, match in (
        ("--model.lora.rank=2", "set model.lora.rank"),
        ("--model.lora.alpha=5", "set model.lora.alpha to 12"),
        ('--model.lora.targets=["*.q_proj"]', "adapter of other matrices"),
        ("--model.lora.dora=true", "adapter of other matrices"),
    ):
        given = [f"--job.dir={tmp_path / 'x'}", f"--model.lora.from_adapter={tmp_path / 'first'}", override]
        with pytest.raises(ForgeError, match=match):
            prepared(recipe, given)
    with pytest.raises(ForgeError, match=r"model\.lora\.rank was 4, is 2"):
        prepared(recipe, [f"--job.dir={tmp_path / 'first'}", "--model.lora.rank=2"])


@pytest.mark.parametrize("overrides", [[], ["--model.lora.dora=true"]], ids=["lora", "dora"])
def test_merged_equals_unmerged(recipe: Path, tmp_path: Path, overrides: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Apart from the rounding of a base in fp32, of which a base in fp64 has none."""
    trained(recipe, tmp_path / "run", *overrides)
    weights, ids = open_weights(tmp_path / "run", Registry()), tokens()
    exact = logits_of(weights, ids, torch.float64)
    merged = logits_of(MergedWeights(Cast(weights, "float64")), ids, torch.float64)
    assert float((exact - merged).abs().max()) < 1e-10
    rounded = logits_of(MergedWeights(weights), ids, torch.float64)
    assert 0 < float((exact - rounded).abs().max() / exact.abs().max()) < 1e-6
    assert command("card", tmp_path / "run") == 0
    assert "| Steps | 4 |" in (tmp_path / "run" / "README.md").read_text()
    assert "wrote" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [[], ["--model.lora.dora=true", "--model.lora.rank_stabilized=true"]], ids=["lora", "dora"])
def test_exports_compute_the_same_merged_and_not(
    recipe: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], overrides: list[str]
) -> None:
    """In fp64 all of them agree; the peft library and transformers open what is written."""
    folder = tmp_path / "run"
    trained(recipe, folder, *overrides)
    weights, ids = open_weights(folder, Registry()), tokens()
    exact = logits_of(weights, ids, torch.float64)
    assert float((exact - logits_of(MergedWeights(weights), ids, torch.float64)).abs().max()) < 1e-5  # of weights in fp32
    assert float((exact - logits_of(open_weights(base, Registry()), ids, torch.float64)).abs().max()) > 1e-3
    assert command("convert", folder, tmp_path / "merged", "--to", "hf") == 0
    assert "merged into its base" in capsys.readouterr().out
    assert not any("lora" in name for name in load_file(tmp_path / "merged" / "model.safetensors"))
    assert command("convert", folder, tmp_path / "adapter", "--to", "peft") == 0
    assert "adapter: largest difference from the format's own library" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    size = sum(
        tensor.numel() * tensor.element_size() for tensor in load_file(tmp_path / "adapter/adapter_model.safetensors").values()
    )
    assert size == sum(8 * p.numel() for p in of_peft(base, use_dora=bool(overrides)).parameters() if p.requires_grad)
    with wide(), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        plain = peft.PeftModel.from_pretrained(in_fp64(base), str(tmp_path / "adapter")).eval()
        theirs_logits = plain(input_ids=ids).logits
    assert float((theirs_logits - exact).abs().max()) < 2e-6  # our rotations are in fp32
    again = open_weights(tmp_path / "adapter", Registry())
    assert torch.equal(logits_of(again, ids, torch.float64), exact)


KINDS = CASES | {"phi3": ("phi3", {})}
FAMILIES = {
    "phi3": '["*.q_proj", "*.v_proj", "*.gate_proj", "*.down_proj"]',  # fuses q, k and v; and gate and up
    "deepseek_v3": '["*.attention.*"]',  # latent attention, whose rows have another order there
    "llama-biases": '["blocks.*"]',
}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_of_other_families_are_written_for_peft(recipe: Path, tmp_path: Path, family: str) -> None:
    folder = saved(random_model(*KINDS[family]), tmp_path / "hf")
    overrides = [f"--model.from_hf={folder}", f"--model.lora.targets={FAMILIES[family]}", "--train.max_steps=2"]
    trained(recipe, tmp_path / "run", *overrides)
    assert command("convert", tmp_path / "run", tmp_path / "adapter", "--to", "peft") == 0  # compares with peft
    ids = tokens()
    exact = logits_of(open_weights(tmp_path / "run", Registry()), ids, torch.float64)
    assert torch.equal(logits_of(open_weights(tmp_path / "adapter", Registry()), ids, torch.float64), exact)
    begun, _ = prepared(recipe, [f"--job.dir={tmp_path / 'b'}", *overrides, f"--model.lora.from_adapter={tmp_path / 'adapter'}"])
    run, _ = prepared(recipe, [f"--job.dir={tmp_path / 'run'}", *overrides])
    assert all(torch.equal(tensor, weights_of(run)[name]) for name, tensor in weights_of(begun).items())


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_adapters_of_experts_are_merged(recipe: Path, tmp_path: Path, family: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = saved(random_model(*CASES[family]), tmp_path / "hf")
    run, before = trained(recipe, tmp_path / "run", f"--model.from_hf={folder}")
    changed = {name for name, tensor in weights_of(run).items() if not torch.equal(tensor, before[name])}
    assert any("experts.up_proj_lora_b" in name for name in changed) and all("lora_" in name for name in changed)
    assert command("convert", tmp_path / "run", tmp_path / "merged", "--to", "hf") == 0
    ids, weights = tokens(), open_weights(tmp_path / "run", Registry())
    found = logits_of(open_weights(tmp_path / "merged", Registry()), ids, torch.float64)
    assert float((found - logits_of(weights, ids, torch.float64)).abs().max()) < 1e-4  # merged weights are in fp32
    assert command("convert", tmp_path / "run", tmp_path / "adapter", "--to", "peft") != 0
    assert "--to hf" in capsys.readouterr().err


@pytest.mark.slow
def test_one_base_serves_several_adapters(recipe: Path, tmp_path: Path) -> None:
    ids, found = tokens(), {}
    for seed in (1, 2):
        trained(recipe, tmp_path / str(seed), f"--job.seed={seed}")
        found[seed] = open_weights(tmp_path / str(seed), Registry())
    model = load_model(found[1])
    first = model(ids)
    set_adapter(model, found[2])
    second = model(ids)
    assert torch.equal(second, load_model(found[2])(ids)) and not torch.equal(first, second)
    set_adapter(model, found[1])
    assert torch.equal(model(ids), first)
    trained(recipe, tmp_path / "other", "--model.lora.rank=2")
    with pytest.raises(ForgeError, match="another rank"):
        set_adapter(model, open_weights(tmp_path / "other", Registry()))


def on_ranks(recipe: Path, overrides: list[str]) -> dict[str, Any]:
    run, recorder = prepared(recipe, overrides)
    fit(run)
    return {"losses": recorder.losses, "weights": weights_of(run) if not run.model.cut else {}}


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp_shard", "tp", "pp"])
def test_it_goes_on_in_another_layout(world: World, recipe: Path, tmp_path: Path, layout: str) -> None:
    """Two steps on two ranks and two on one are four on one; the file of the adapter is the same."""
    whole = on_ranks(recipe, [f"--job.dir={tmp_path / 'whole'}", "--train.micro_batch=1"])
    cut = [f"--job.dir={tmp_path / 'cut'}", "--train.micro_batch=1"]
    world.run(on_ranks, 2, recipe, [*cut, "--train.stop_at=2", f"--parallel.{layout}=2"])
    found = on_ranks(recipe, cut)
    assert found["losses"] == pytest.approx(whole["losses"][2:], rel=1e-6)
    for name, tensor in whole["weights"].items():
        assert torch.allclose(found["weights"][name], tensor, rtol=1e-8, atol=1e-10), name
    assert locate(tmp_path / "cut").manifest().bytes == locate(tmp_path / "whole").manifest().bytes


@pytest.mark.parametrize(
    "keys", [{}, {"use_dora": True, "use_rslora": True, "target_modules": ["q_proj", "up_proj"]}], ids=["lora", "dora"]
)
def test_an_adapter_of_peft_is_opened_and_trained_on(recipe: Path, base: Path, tmp_path: Path, keys: dict[str, Any]) -> None:
    model, ids = of_peft(base, **keys), tokens()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad(), wide():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
        expected = model(input_ids=ids).logits
    model.peft_config["default"].base_model_name_or_path = str(base)
    model.save_pretrained(tmp_path / "theirs")
    weights = open_weights(tmp_path / "theirs", Registry())
    with wide():
        assert float((logits_of(weights, ids, torch.float64) - expected).abs().max()) < 1e-11
    targets = '["*.q_proj", "*.up_proj"]' if keys else '["blocks.*"]'
    flags = [f"--model.lora.{key}={str(bool(keys)).lower()}" for key in ("dora", "rank_stabilized")]
    start = [f"--model.lora.from_adapter={tmp_path / 'theirs'}", f"--model.lora.targets={targets}", *flags]
    run, _ = prepared(recipe, [f"--job.dir={tmp_path / 'run'}", *start])
    run.model.part.eval()
    run.model.part.forward = exactly(run.model.part.forward)
    with torch.no_grad():
        assert float((run.model.part(ids) - expected).abs().max()) < 1e-11


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ({"bias": "all"}, "bias"),
        ({"modules_to_save": ["input_layernorm"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 2}}, "rank 2, but others have 4"),
        ({"alpha_pattern": {"q_proj": 5}}, "alpha_pattern"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "embed_tokens"),
    ],
)
def test_adapters_of_peft_that_forge_lacks_are_refused(base: Path, tmp_path: Path, keys: dict[str, Any], match: str) -> None:
    model = of_peft(base, **keys)
    model.peft_config["default"].base_model_name_or_path = str(base)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(tmp_path / "theirs")
    with pytest.raises(ForgeError, match=match):
        open_weights(tmp_path / "theirs", Registry())


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        (["--parallel.tp=2", "--model.lora.dora=true"], r"model\.lora\.dora: = true with parallel\.tp = 2"),
        (["--parallel.tp=2", "--parallel.etp=2", "--model.moe.experts=4"], r"parallel\.etp = 2 splits"),
        (
            ["--transforms.compile={}", "--model.moe.experts=4", "--precision.compute=bf16"],
            "4 must be a multiple of 8 for compiled",
        ),
        (["--parameters.width_base={dim = 16}"], r"parameters\.width_base"),
        (["--transforms.float8={}"], r"transforms\.float8"),
    ],
)
def test_refused_layouts_say_what_to_change(recipe: Path, overrides: list[str], match: str) -> None:
    with pytest.raises(ForgeError, match=match):
        load_recipe(recipe, ["--precision.state=fp32", *overrides], 2, Registry())


def test_a_recipe_without_a_base_is_warned_of() -> None:
    found = load_recipe("debug", ["--model.lora.rank=4"], 1, Registry())
    assert any("has no base" in warning for warning in found.warnings)
