"""Runs with an adapter of a base in 8 or 4 bits equal runs on the rounded base, in every layout; checkpoints, exports."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from forge_ckpt.checkpoint.locate import locate
from forge_core.errors import ForgeError
from forge_core.registry import Registry
from forge_models.hf.streamed_forward import logits_of
from forge_models.lora_weights import MergedWeights
from forge_models.quantized_weights import QuantizedWeights
from forge_train.inference.stored import load_model, open_weights
from forge_train.recipe.load import load_recipe
from forge_train.run.loop import fit
from harness.pool import World
from models.hf.command_line import run as command
from models.hf.zoo import CASES, random_model, saved, tokens
from models.nf4 import rounded
from train.runs import prepared, train
from train.whole_runs.test_lora_run import RECIPE, trained, weights_of

WIDE = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
FORMATS = ("nf4", "int8")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(random_model("llama", WIDE), tmp_path_factory.mktemp("base") / "hf")


@pytest.fixture
def recipe(base: Path, tmp_path: Path) -> Path:
    path = tmp_path / "lora.toml"
    path.write_text(RECIPE.format(base=base))
    return path


def rounded_base(base: Path, kind: str, folder: Path) -> Path:
    """A folder with the values of a format in place of the matrices of blocks, made by the reference of the tests."""
    folder.mkdir()
    (folder / "config.json").write_text((base / "config.json").read_text())
    tensors = load_file(base / "model.safetensors")
    blocks = {name for name, tensor in tensors.items() if "layers." in name and tensor.dim() == 2}
    assert len(blocks) == 7 * 4
    tensors |= {name: rounded(tensors[name], kind) for name in blocks}
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder


def quantized_to(kind: str) -> str:
    return f"--model.lora.base_format={kind}"


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("nf4", []),
        ("int8", []),
        pytest.param("nf4", ["--model.lora.dora=true"], marks=pytest.mark.slow),
        pytest.param("nf4", ['--model.lora.targets=["*.q_proj"]'], marks=pytest.mark.slow),
        pytest.param("nf4", ["--precision.compute=bf16", "--precision.state=fp32"], marks=pytest.mark.slow),
        pytest.param("int8", ["--precision.compute=fp32", "--precision.state=fp32"], marks=pytest.mark.slow),
    ],
    ids=["nf4", "int8", "dora", "some", "bf16", "fp32"],
)
def test_a_run_equals_one_on_the_rounded_base(recipe: Path, base: Path, tmp_path: Path, kind: str, more: list[str]) -> None:
    """To the bit, forward and backward; all that is different is what the base takes."""
    plain = rounded_base(base, kind, tmp_path / "rounded")
    run, _ = prepared(recipe, [f"--job.dir={tmp_path / 'a'}", quantized_to(kind), *more])
    expected, known = prepared(recipe, [f"--job.dir={tmp_path / 'b'}", f"--model.from_hf={plain}", *more])
    held = {name: tensor for name, tensor in weights_of(run).items() if name in run.model.specs.base}
    stored = {name: tensor for name, tensor in weights_of(expected).items() if name in expected.model.specs.base}
    matrices = {name for name in stored if name.startswith("blocks.") and stored[name].dim() == 2}
    assert set(held) == set(stored) | {f"{name}_scale" for name in matrices}
    values = sum(stored[name].numel() for name in matrices)
    rows = sum(len(stored[name]) for name in matrices)
    size = sum(held[name].nbytes for each in matrices for name in (each, f"{each}_scale"))
    assert size == (values // 2 + values // 64 * 4 if kind == "nf4" else values + rows * 4)
    fit(run)
    fit(expected)
    found = weights_of(run)
    assert all(torch.equal(found[name], tensor) for name, tensor in held.items())
    for name, tensor in weights_of(expected).items():
        if name not in matrices:
            assert torch.equal(found[name], tensor), name
    assert known.losses[-1] != known.losses[0]


def test_the_checkpoint_has_the_adapter_and_resumes_to_the_bit(recipe: Path, base: Path, tmp_path: Path) -> None:
    """It names the files of the base and the format, and opens as the run was."""
    keys = [quantized_to("nf4")]
    whole = train(recipe, [f"--job.dir={tmp_path / 'whole'}", *keys])
    train(recipe, [f"--job.dir={tmp_path / 'cut'}", "--train.stop_at=2", *keys])
    pieces = train(recipe, [f"--job.dir={tmp_path / 'cut'}", *keys])
    assert pieces["weights"] == whole["weights"]
    assert pieces["losses"] == whole["losses"][2:]
    manifest, plain = locate(tmp_path / "whole").manifest(), tmp_path / "plain"
    assert all("lora_" in info.name for info in manifest.tensors if info.name.startswith("model/"))
    train(recipe, [f"--job.dir={plain}", "--train.max_steps=2"])
    known = locate(plain).manifest().meta["base"]
    assert manifest.meta["base"] == {**known, "format": "nf4"}  # the hash is that of the files
    run, _ = prepared(recipe, [f"--job.dir={tmp_path / 'whole'}", *keys])
    run.model.part.eval()
    with torch.no_grad():
        expected = run.model.part(tokens())
    weights = open_weights(tmp_path / "whole", Registry())
    assert torch.equal(load_model(weights).double()(tokens()), expected)
    assert any("values of nf4" in note for note in weights.facts.notes)
    with pytest.raises(ForgeError, match=r'model\.lora\.base_format was "nf4", is "full"'):
        prepared(recipe, [f"--job.dir={tmp_path / 'whole'}"])
    start = f"--model.lora.from_adapter={tmp_path / 'whole'}"
    with pytest.raises(ForgeError, match=r"base in the format 'nf4', but \[model\.lora\] has 'int8'.*base_format = 'nf4'"):
        prepared(recipe, [f"--job.dir={tmp_path / 'b'}", start, quantized_to("int8")])
    begun, _ = prepared(recipe, [f"--job.dir={tmp_path / 'b'}", start, *keys])
    assert all(torch.equal(tensor, weights_of(run)[name]) for name, tensor in weights_of(begun).items())


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORMATS)
def test_exports_compute_what_was_trained(
    recipe: Path, base: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The merged model has the rounded base; the adapter alone names the files, and its format for Forge."""
    folder = tmp_path / "run"
    trained(recipe, folder, quantized_to(kind))
    weights, ids = open_weights(folder, Registry()), tokens()
    exact = logits_of(weights, ids, torch.float64)
    assert float((exact - logits_of(MergedWeights(weights), ids, torch.float64)).abs().max()) < 1e-5  # of weights in fp32
    assert command("convert", folder, tmp_path / "merged", "--to", "hf") == 0
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    plain = load_file(rounded_base(base, kind, tmp_path / "rounded") / "model.safetensors")
    name = "model.layers.1.self_attn.q_proj.weight"
    read = weights.read([f"blocks.1.attention.q_proj.lora_{slot}" for slot in "ab"])
    a, b = read.values()
    turned = plain[name].double() + 3 * b.double() @ a.double()
    assert sorted(map(float, merged[name].norm(dim=1))) == pytest.approx(sorted(map(float, turned.norm(dim=1))), rel=1e-5)
    capsys.readouterr()
    assert command("convert", folder, tmp_path / "adapter", "--to", "peft") == 0
    assert "adapter: largest difference from the format's own library" in capsys.readouterr().out
    again = open_weights(tmp_path / "adapter", Registry())
    assert torch.equal(logits_of(again, ids, torch.float64), exact)
    start = [f"--model.lora.from_adapter={tmp_path / 'adapter'}", f"--job.dir={tmp_path / 'b'}"]
    with pytest.raises(ForgeError, match=f"in the format '{kind}'"):
        prepared(recipe, start)


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        ([quantized_to("int4")], "base_format"),
        ([quantized_to("nf4"), "--model.ffn_dim=96"], r"nf4' needs rows of a multiple of 64 .* of blocks\.0\.mlp\.down"),
        ([quantized_to("nf4"), "--parallel.tp=2"], r"tp = 2 splits the 64 values of a row of blocks\.0\.attention\.o_proj"),
        ([quantized_to("int8"), "--parallel.tp=2", "--parallel.etp=2", "--model.moe.experts=4",
          '--model.lora.targets=["*.attention.*"]'], r"parallel\.etp: = 2 splits the rows of experts"),
        ([quantized_to("nf4"), "--transforms.float8={}"], r"transforms\.float8"),
        ([quantized_to("nf4"), "--transforms.compile={}"], r"transforms\.compile: has not been compared with .* 'nf4'"),
    ],
)  # fmt: skip
def test_refused_keys_say_what_to_change(recipe: Path, overrides: list[str], match: str) -> None:
    with pytest.raises(ForgeError, match=match):
        load_recipe(recipe, ["--precision.state=fp32", *overrides], 2, Registry())


def on_ranks(recipe: Path, overrides: list[str]) -> dict[str, Any]:
    """A run of a rank: its losses, and its tensors whole, of a pipeline those of its stages."""
    run, recorder = prepared(recipe, overrides)
    before = weights_of(run)
    fit(run)
    return {"losses": recorder.losses, "weights": weights_of(run), "before": before}


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("layout", ["dp_shard", "dp_replicate", "tp", "pp"])
def test_a_layout_equals_one_process(world: World, recipe: Path, tmp_path: Path, kind: str, layout: str) -> None:
    """Codes and scales are the same bits, and stay so; losses and the adapter are equal in fp64."""
    folder = saved(random_model("llama", WIDE | {"hidden_size": 128, "head_dim": 32}), tmp_path / "wide")  # for two blocks
    keys = [quantized_to(kind), "--train.micro_batch=1", f"--model.from_hf={folder}"]
    alone = on_ranks(recipe, [f"--job.dir={tmp_path / 'alone'}", *keys])
    found = world.run(on_ranks, 2, recipe, [f"--job.dir={tmp_path / 'cut'}", f"--parallel.{layout}=2", *keys])
    together = {name: tensor for one in found for name, tensor in one["weights"].items()}
    assert together.keys() == alone["weights"].keys()
    for one in found:
        assert one["losses"] == pytest.approx(alone["losses"], rel=1e-10)
        for name, tensor in one["weights"].items():
            if "lora_" in name:
                assert torch.allclose(tensor, alone["weights"][name], rtol=1e-8, atol=1e-10), name
            else:
                assert torch.equal(tensor, alone["weights"][name]) and torch.equal(tensor, one["before"][name]), name
    assert locate(tmp_path / "cut").manifest().bytes == locate(tmp_path / "alone").manifest().bytes


@pytest.mark.slow
@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
@pytest.mark.parametrize("policy", ["full", "selective"])
def test_recomputed_blocks_equal_plain_ones(recipe: Path, tmp_path: Path, policy: str, experts: bool) -> None:
    keys = [quantized_to("nf4"), "--train.max_steps=2", "--model.lora.rank=8"]
    if experts:
        keys.append(f"--model.from_hf={saved(random_model(*of_experts()), tmp_path / 'experts')}")
    run, known = prepared(recipe, [f"--job.dir={tmp_path / 'a'}", *keys])
    fit(run)
    other, found = prepared(recipe, [f"--job.dir={tmp_path / 'b'}", *keys, f"--transforms.recompute.policy={policy}"])
    fit(other)
    assert found.losses == pytest.approx(known.losses, rel=1e-10)
    for name, tensor in weights_of(run).items():
        assert torch.allclose(weights_of(other)[name], tensor, rtol=1e-8, atol=1e-10), name


def of_experts() -> tuple[str, dict[str, Any]]:
    kind, keys = CASES["qwen3_moe"]
    return kind, keys | WIDE | {"moe_intermediate_size": 64}


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("layout", [["--parallel.dp_shard=2", "--parallel.ep=2"], ["--parallel.dp_shard=2"]], ids=["ep", "dp"])
def test_experts_in_a_layout_equal_one_process(world: World, recipe: Path, tmp_path: Path, kind: str, layout: list[str]) -> None:
    folder = saved(random_model(*of_experts()), tmp_path / "hf")
    keys = [quantized_to(kind), "--train.micro_batch=1", f"--model.from_hf={folder}", "--train.max_steps=2"]
    alone = on_ranks(recipe, [f"--job.dir={tmp_path / 'alone'}", *keys])
    assert alone["weights"]["blocks.0.mlp.experts.up_proj"].dtype == (torch.uint8 if kind == "nf4" else torch.int8)
    for one in world.run(on_ranks, 2, recipe, [f"--job.dir={tmp_path / 'cut'}", *layout, *keys]):
        assert one["losses"] == pytest.approx(alone["losses"], rel=1e-10)
        for name, tensor in one["weights"].items():
            assert torch.allclose(tensor, alone["weights"][name], rtol=1e-8, atol=1e-10), name
            assert "lora_" in name or torch.equal(tensor, one["before"][name])


def test_the_base_is_quantized_row_by_row_while_it_is_read(recipe: Path, base: Path, tmp_path: Path) -> None:
    """A rank reads the rows that it holds, and no two matrices are in memory in full precision at once."""
    run, _ = prepared(recipe, [f"--job.dir={tmp_path / 'run'}", quantized_to("nf4")])
    weights = open_weights(base, Registry())
    read: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []

    class Counted:
        """The base, which notes what is read."""

        tensors, facts, model = weights.tensors, weights.facts, weights.model

        def box(self, name: str, offset: Any, extent: Any) -> torch.Tensor:
            read.append((name, tuple(offset), tuple(extent)))
            return weights.box(name, offset, extent)

    whole = QuantizedWeights(Counted(), run.job.model)  # type: ignore[arg-type]
    name = "blocks.2.mlp.down_proj.weight"
    part = whole.box(name, (16, 0), (8, 64)), whole.box(f"{name}_scale", (16, 0), (8, 2))
    assert read == [(name, (16, 0), (8, 128))]  # once for codes and scales
    held = weights_of(run)
    assert torch.equal(part[0], held[name][16:24]) and torch.equal(part[1], held[f"{name}_scale"][16:24])
    assert torch.equal(whole.box(name, (16, 32), (8, 32)), held[name][16:24, 32:])
    assert torch.equal(whole.read([f"{name}_scale"])[f"{name}_scale"], held[f"{name}_scale"])
    assert torch.equal(whole.box("norm.weight", (3,), (5,)).double(), held["norm.weight"][3:8])
