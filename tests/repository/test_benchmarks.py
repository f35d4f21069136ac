"""Benchmarks that only an accelerator or an idle machine can run in earnest: their logic, on a CPU and tiny."""

import sys
from argparse import Namespace
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from forge_core.registry import Registry
from harness import commands
from harness.closeness import below

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def precision_kept() -> Iterator[None]:
    """Benchmarks of GPUs set the precision of products for their process, which is that of other tests here."""
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture
def script(monkeypatch):
    """A benchmark as a module, with its folder in front of the path as when it is run."""

    def load(folder, name):
        monkeypatch.syspath_prepend(BENCHMARKS / folder)
        for stale in (name, "driver"):
            monkeypatch.delitem(sys.modules, stale, raising=False)
        module = import_module(name)
        monkeypatch.delitem(sys.modules, name)
        return module

    return load


def run(*arguments):
    done = commands.run(*map(str, arguments), timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_eager_configurations_of_experts_train_and_agree(script):
    """Kernels and recomputation change no loss: all begin with the same weights and tokens."""
    moe = script("gpu", "moe")
    losses = []
    for one in (moe.Training("fine", "grouped", "none", False, 2), moe.Training("fine", "loop", "selective", False, 4)):
        result = moe.run(one, True)
        assert result["busiest_over_mean_load"] >= 1 and result["mfu"] is None
        losses.append(result["losses"])
        assert f"{one.name} " in moe.line(one.name, {one.name: result})
    assert losses[0] == pytest.approx(losses[1], abs=0.02)  # bf16 products in another order


@pytest.mark.slow
def test_ranks_orthogonalize_what_one_process_does_and_send_no_byte_too_much():
    """Every matrix once over all ranks, from copies that are near to its owner."""
    lines = run(BENCHMARKS / "parallel" / "muon.py", "--smoke").splitlines()
    found = {line.split()[0]: line.split() for line in lines if line.split()[0] in ("dp2", "dp2tp2", "hsdp2x2")}
    assert len(found) == 3
    for _, _, operations, _, sent, least, ratio in found.values():
        assert operations == ratio == "1.0000" and sent == least


def test_a_roofline_counts_the_products_that_published_shapes_have(script):
    """Llama-3-8B: 32 blocks of 218,103,808 weights in matrices and a head of 128,256 x 4,096; of Qwen3-30B-A3B 48 layers in which
    8 of 128 experts take part. And every preset has a verdict."""
    roofline = script("gpu", "roofline")
    gpu = roofline.Gpu()
    seconds = {}
    for name, (world, _) in roofline.PRESETS.items():
        job = roofline.load_recipe(name, world=world).job
        seconds[name] = {part.name: part.seconds for part in roofline.parts(job, gpu, world)}
    assert seconds["8b-h200"]["products of blocks (bf16)"] == pytest.approx(6 * 32 * 218_103_808 / gpu.bf16)
    assert seconds["8b-h200-fp8"]["products of blocks (float8)"] == pytest.approx(6 * 32 * 218_103_808 / gpu.float8)
    assert seconds["8b-h200"]["products of the head"] == pytest.approx(6 * 128_256 * 4096 / gpu.bf16)
    experts = 6 * 48 * 8 * 3 * 2048 * 768 / (roofline.EXPERTS * gpu.bf16)
    assert seconds["30b-a3b-8xh100"]["products of experts"] == pytest.approx(experts)
    attention = 6 * 32 * 32 * 2 * 128 * (8192 + 1) / 2 / gpu.attention
    assert seconds["8b-h100"]["attention"] == pytest.approx(attention)
    assert len(run(BENCHMARKS / "gpu" / "roofline.py").split("tokens/s of a GPU: ")) == 1 + len(roofline.PRESETS)


def test_layers_of_experts_run_on_every_side(script):
    moe = script("gpu", "moe")
    one = next(one for one in moe.CONFIGURATIONS if isinstance(one, moe.LayerOf) and not one.compiled)
    result = moe.run(one, True)
    assert set(result["milliseconds"]) == {"grouped", "loop", "dense"}
    seconds, rates = result["milliseconds"]["dense"] / 1e3, result["flops_per_second"]["dense"]
    counted = 6 * 64 * one.top_k * 3 * 32 * 16
    assert seconds * rates == pytest.approx(counted)
    dense = torch.nn.Linear(32, 3 * one.top_k * 16, bias=False)
    with FlopCounterMode(display=False) as counter:
        dense(torch.randn(64, 32, requires_grad=True)).sum().backward()
    assert counter.get_total_flops() == counted
    assert "x dense" in moe.line(one.name, {one.name: result})


@pytest.mark.parametrize(("shape", "parameters", "active"), [("fine", 64, 8), ("coarse", 8, 2)])
def test_operations_of_the_two_models_by_hand(script, shape, parameters, active):
    moe = script("gpu", "moe")
    decoder = moe.shape_of(shape, "grouped")
    work = moe.work(decoder, 4096)
    dim, width, sparse, shared = 1536, decoder.moe.ffn_dim or decoder.ffn_dim, 15 if shape == "fine" else 16, decoder.moe.shared
    expert, table, attention = 3 * dim * width, 50304 * dim, 16 * 4 * dim * dim
    dense = 3 * dim * 4096 * (16 - sparse)
    routers, norms = sparse * decoder.moe.experts * dim, 33 * dim
    used = sparse * (decoder.moe.top_k + shared) * expert + dense + attention + routers + norms
    assert decoder.moe.top_k + shared == active and decoder.moe.experts == parameters
    assert work["no embed"] == 6 * (used + table) + 12 * 16 * dim * 4096
    assert work["all"] - work["no embed"] == 6 * table
    assert work["no embed"] - work["causal"] == 6 * 16 * dim * 4096


def test_a_configuration_that_fails_costs_its_line_only(script):
    """A failure is the last line that it wrote, time that is up says so, figures come back as they are."""
    driver = script("gpu", "driver")
    python = [sys.executable, "-c"]
    assert driver.alone([*python, "raise ValueError('no memory')"], 60) == {"error": "ValueError: no memory"}
    assert driver.alone([*python, "import time; time.sleep(60)"], 0.5) == {"error": "out of time"}
    assert driver.alone([*python, "print('words'); print('{\"a\": 1.5}')"], 60) == {"a": 1.5}
    assert driver.peak("NVIDIA H200") == 989e12 and driver.peak("another") is None


def test_names_are_all_different(script):
    for name in ("moe", "dense"):
        module = script("gpu", name)
        assert len(module.NAMED) == len(module.CONFIGURATIONS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["moe", "dense"])
def test_every_configuration_for_a_gpu_runs_on_a_cpu(name):
    lines = run(BENCHMARKS / "gpu" / f"{name}.py", "--smoke").splitlines()
    assert len(lines) >= 15 and all(("loss " in line) or line.endswith("ran") for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["layer", "dispatch"])
def test_benchmarks_of_experts_run(name):
    assert "skew inf" in run(BENCHMARKS / "moe" / f"{name}.py", "--smoke")


@pytest.mark.slow
def test_every_optimizer_is_timed():
    lines = run(BENCHMARKS / "train" / "optimizers.py", "--smoke").splitlines()
    assert {line.split()[0] for line in lines[1:]} == set(Registry().names("forge.optimizers"))
    assert all("of theirs" in line for line in lines[1:])
    (line,) = run(BENCHMARKS / "train" / "optimizers.py", "--smoke", "--sharded").splitlines()[1:]
    assert line.startswith("adamw ") and "of theirs" in line and "first step" in line


def test_the_layers_loop_equals_the_grouped_product(script):
    """`agree` compares outputs and every gradient; a loop that weighs nothing is noticed."""
    layer = script("moe", "layer")
    case = layer.Case(48, 32, 16, 8, 2, torch.float32, 1.0)
    layer.agree(case)
    original = layer.loop
    layer.loop = lambda *arguments: original(*arguments) * 1.01
    with pytest.raises(SystemExit, match="differ by"):
        layer.agree(case)


def test_choices_go_from_even_to_all_on_the_same(script):
    layer = script("moe", "layer")
    even, uneven, same = (layer.chosen(4000, 16, 4, skew) for skew in (0.0, 1.0, float("inf")))
    for experts in (even, uneven, same):
        assert all(len(set(row)) == 4 for row in experts.tolist())
    loads = [experts.flatten().bincount(minlength=16).sort(descending=True).values for experts in (even, uneven, same)]
    assert int(loads[0][0]) < 1.15 * 1000 < 2 * 1000 < int(loads[1][0])
    assert loads[2].tolist() == [4000] * 4 + [0] * 12


def test_waste_by_hand(script):
    """Everyone goes to the same 2 of 8 experts; 48 tokens are 3 times 16 rows. With capacity 1.25 each keeps 15 slots."""
    layer = script("moe", "layer")
    found = layer.waste(layer.Case(48, 16, 16, 8, 2, torch.float32, float("inf")))
    assert found == {"computed": 0, "carried": 0, "aligned to 16": 0, "padded to the busiest": 300}
    found = layer.waste(layer.Case(48, 16, 16, 8, 2, torch.float32, float("inf"), capacity=1.25))
    assert found["computed"] == 0
    assert found["carried"] == pytest.approx(100 * (96 / 30 - 1))
    assert found["aligned to 16"] == pytest.approx(100 * (32 / 30 - 1))


def sent(kind, skew):
    """(bytes sent, bytes over a border, both bounds, largest difference from one process, this rank's choices)."""
    sys.path.insert(0, str(BENCHMARKS / "moe"))
    try:
        dispatch = import_module("dispatch")
        sizes = {"tokens": 40, "experts": 8, "top_k": 3, "dim": 16, "ffn": 8, "node": 2, "dtype": "fp32"}
        side = dispatch.Side(kind, Namespace(**sizes), skew)
        difference = float((side() - side.expected()).abs().max())
        return *side.sent(), *side.least(), difference, side.chosen.tolist()
    finally:
        sys.path.pop(0)
        for name in ("dispatch", "layer"):
            sys.modules.pop(name, None)


def visited(choices, holder):
    """Different (token, holder of one of its experts that is not its own) of all ranks; 8 experts lie 2 on each of 4 ranks."""
    return sum(len({e // 2 // holder for e in row} - {rank // holder}) for rank, rows in enumerate(choices) for row in rows)


@pytest.mark.parametrize("skew", [0.0, float("inf")])
def test_bytes_of_dispatchers_by_hand(world, skew):
    """Rows of 16 fp32 out and back, twice; weights and numbers of 3 experts out, their gradients back; two int64 to each rank."""
    row, told, counts = 4 * 16, 2 * 3 * 4, 2 * 8
    ranks = world.run(sent, 4, "all_to_all", skew)
    choices = [rank[5] for rank in ranks]
    assert below(max(rank[4] for rank in ranks), 1e-6)
    pairs = visited(choices, 1)
    assert sum(rank[2] for rank in ranks) == pairs * 4 * row
    assert sum(rank[0] for rank in ranks) == pairs * (4 * row + 2 * told) + 12 * counts
    ranks = world.run(sent, 4, "hierarchical", skew)
    assert below(max(rank[4] for rank in ranks), 1e-6)
    crossing = visited(choices, 2)
    assert sum(rank[3] for rank in ranks) == crossing * 4 * row
    assert sum(rank[1] for rank in ranks) == crossing * (4 * row + 2 * told) + 4 * counts
