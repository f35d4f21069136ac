"""AdamW whose moments have eight bits: torchao's bits in one process, those of one process in layouts that keep blocks whole, and
its bytes."""

from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from forge_core.errors import ForgeError, PlanError
from forge_core.layout import Layout
from forge_core.protocols.model import NamedTensor
from forge_parallel import torchao_library
from forge_parallel.checks import optimizer_keeps_the_state
from forge_parallel.dryrun.estimate import Workload, dry_run
from forge_parallel.model.parallel_model import gathered
from forge_parallel.model.plan import Plan
from forge_parallel.model.realize import Blueprint, realize
from forge_parallel.optim import optimizers
from forge_parallel.optim.adamw8bit import Blocks
from forge_parallel.optim.groups import Setting, Settings, with_settings
from forge_parallel.optim.optimizers import AdamW8bitConfig
from forge_parallel.placement.topology import Topology
from forge_parallel.sections import Precision
from forge_parallel.step.step import Step
from forge_parallel.transforms.shard import FullyShard
from forge_parallel.transforms.tensor.transform import TensorParallel as TensorParallel
from harness.pool import World
from parallel.compositions.rows import DECODER
from parallel.optimizers.test_equal import LAYOUTS, OBJECTIVE, batches, case_of, model_of
from parallel.tiny import cross_entropy

CPU = torch.device("cpu")
OURS = AdamW8bitConfig(lr=1e-2, betas=(0.8, 0.95), weight_decay=0.1)
SHAPES = {"a": (64, 512), "experts": (3, 40, 256), "wide": (48, 1024), "vector": (8192,), "small": (8, 256)}
"""Of whole blocks, as torchao needs them. A vector is one that it would cut into blocks."""
STEPS = 20
SMALL = AdamW8bitConfig(lr=3e-3, betas=(0.8, 0.95), weight_decay=0.2, block=4, smallest=0)


@pytest.fixture(scope="module")
def eager() -> Any:
    """torchao's optimizer as its operators are written."""
    torchao_library.require("torchao.optim", "a test", "adamw8bit")
    from torchao.optim import AdamW8bit as Theirs

    return Theirs


def _held(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> dict[str, nn.Parameter]:
    draw = torch.Generator().manual_seed(seed)
    return {name: nn.Parameter(torch.randn(shape, generator=draw)) for name, shape in shapes.items()}


def _model(held: dict[str, nn.Parameter], group: str = "matrix") -> Any:
    return SimpleNamespace(trainable=lambda: [NamedTensor(name, tensor, group) for name, tensor in held.items()])  # type: ignore[arg-type]


def _gradients(shapes: dict[str, tuple[int, ...]], step: int) -> dict[str, Tensor]:
    """Of very different sizes, element by element, and in a row of zeros none."""
    draw = torch.Generator().manual_seed(100 + step)
    found = {name: torch.randn(shape, generator=draw).pow(3) * 10.0 ** (-step % 5) for name, shape in shapes.items()}
    for tensor in found.values():
        tensor[0].zero_()
    return found


def _twenty_steps(theirs: Any, block: int = 256) -> tuple[dict[str, nn.Parameter], Any, dict[str, nn.Parameter], Any]:
    shapes = {name: shape for name, shape in SHAPES.items() if name != "vector"}
    mine, other = _held(shapes), _held(shapes)
    ours = replace(OURS, block=block).build(_model(mine))  # type: ignore[arg-type]
    their = theirs(list(other.values()), lr=OURS.lr, betas=OURS.betas, eps=OURS.eps, weight_decay=0.1, block_size=block)
    for step in range(STEPS):
        for name, gradient in _gradients(shapes, step).items():
            mine[name].grad, other[name].grad = gradient, gradient.clone()
        ours.step(torch.zeros(()))
        their.step()
    return mine, ours, other, their


@pytest.mark.parametrize("block", [256, 64])
def test_moments_of_twenty_steps_have_the_bits_of_torchao(eager: Any, block: int) -> None:
    """And weights agree to a thousandth of a step: torchao has the corrections 1 - beta^t in fp32, where they are a difference
    of numbers near 1, and here they are fp64."""
    with torch.compiler.set_stance("force_eager"):
        mine, ours, other, their = _twenty_steps(eager, block)
    state = ours.state()
    coded = {name for name, tensor in state["exp_avg"].items() if tensor.dtype == torch.uint8}
    assert coded == {"a", "experts", "wide"} == set(state["exp_avg_scale"])
    for name, tensor in other.items():
        for moment in ("exp_avg", "exp_avg_sq"):
            found, expected = state[moment][name], their.state[tensor][moment]
            if name in coded:
                assert torch.equal(state[f"{moment}_scale"][name].flatten(), expected.scale), (name, moment)
                expected = expected.codes
                assert expected.unique().numel() > 64, "the codes are many"
            assert torch.equal(found, expected), (name, moment)
        torch.testing.assert_close(mine[name], tensor, rtol=1e-6, atol=1e-3 * OURS.lr)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own imports warn
def test_compiled_kernels_of_torchao_round_scales_otherwise(eager: Any) -> None:
    """Their lerp is one fused product and sum: scales differ in their last bit, and a code may become its neighbor."""
    _, ours, other, their = _twenty_steps(eager)
    state = ours.state()
    for name in state["exp_avg_scale"]:
        for moment in ("exp_avg", "exp_avg_sq"):
            expected = their.state[other[name]][moment]
            distance = (state[moment][name].int() - expected.codes.int()).abs()
            assert int(distance.max()) <= 1 and float(distance.float().mean()) < 1e-3, (name, moment)
            torch.testing.assert_close(state[f"{moment}_scale"][name].flatten(), expected.scale, rtol=1e-6, atol=1e-20)


def test_the_last_block_of_a_row_may_be_shorter(eager: Any) -> None:
    """Rows of 300 are rows of 256 and rows of 44 to torchao."""
    shape, pieces = {"w": (120, 300)}, {"left": slice(0, 256), "right": slice(256, 300)}
    mine = _held(shape)
    other = {key: nn.Parameter(mine["w"].detach()[:, columns].clone()) for key, columns in pieces.items()}
    ours = OURS.build(_model(mine))  # type: ignore[arg-type]
    settings = {"lr": OURS.lr, "betas": OURS.betas, "weight_decay": 0.1}
    theirs = {key: eager([p], block_size=p.shape[1], **settings) for key, p in other.items()}
    with torch.compiler.set_stance("force_eager"):
        for step in range(5):
            gradient = _gradients(shape, step)["w"]
            mine["w"].grad = gradient
            ours.step(torch.zeros(()))
            for key, columns in pieces.items():
                other[key].grad = gradient[:, columns].clone()
                theirs[key].step()
    for column, (key, columns) in enumerate(pieces.items()):
        for moment in ("exp_avg", "exp_avg_sq"):
            expected = theirs[key].state[other[key]][moment]
            assert torch.equal(ours.state()[moment]["w"][:, columns], expected.codes)
            assert torch.equal(ours.state()[f"{moment}_scale"]["w"][:, column], expected.scale)


def test_what_is_small_or_a_vector_keeps_exact_moments() -> None:
    """As torch's AdamW has them: a rate and a decay are for the element."""
    kept = {name: shape for name, shape in SHAPES.items() if name in ("vector", "small")}
    mine, other = _held(kept), _held(kept)
    ours = OURS.build(_model(mine))  # type: ignore[arg-type]
    theirs = torch.optim.AdamW(list(other.values()), lr=OURS.lr, betas=OURS.betas, weight_decay=0.1, foreach=False)
    for step in range(5):
        for name, gradient in _gradients(kept, step).items():
            mine[name].grad, other[name].grad = gradient, gradient.clone()
        ours.step()
        theirs.step()
    assert ours.state()["exp_avg_scale"] == {}
    for name, tensor in other.items():
        assert torch.equal(ours.state()["exp_avg"][name], theirs.state[tensor]["exp_avg"])
        torch.testing.assert_close(mine[name], tensor, rtol=1e-6, atol=1e-3 * OURS.lr)


def test_values_of_moments_would_not_bring_back_their_codes() -> None:
    """Why codes and scales are what is saved: the numbers of signed codes have 1 and not -1."""
    blocks = Blocks(64)
    values = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    for sign, sample in (("signed", values), ("positive", values.square())):
        numbers = blocks.numbers(sign, CPU)  # type: ignore[arg-type]
        assert numbers.shape == (256,) and float(numbers[-1]) == 1 and bool((numbers == 0).any())
        assert (float(numbers[0]) == -1) is False
        codes, scales = blocks.coded(sample, numbers, 64)
        decoded = blocks.decoded(codes, scales, numbers, 64)
        assert torch.equal(scales.flatten(), sample.abs().amax(-1))
        assert float((decoded - sample).abs().max() / sample.abs().max()) < 0.02
        again = blocks.coded(decoded, numbers, 64)
        assert all(map(torch.equal, (codes, scales), again)) == (sign == "positive")


def test_a_skipped_step_keeps_every_bit_of_codes_and_scales() -> None:
    held = _held(SHAPES)
    optimizer = OURS.build(_model(held))  # type: ignore[arg-type]
    for step, skip in ((0, 0.0), (1, 1.0), (2, 1.0)):
        if step == 1:
            every = {**held, **{f"{key}/{name}": t for key, ts in optimizer.state().items() for name, t in ts.items()}}
            before = {name: tensor.detach().clone() for name, tensor in every.items()}
        for name, gradient in _gradients(SHAPES, step).items():
            held[name].grad = gradient if step < 2 else torch.full_like(gradient, torch.nan)
        optimizer.step(torch.tensor(skip))
    assert all(torch.equal(before[name], tensor) for name, tensor in every.items())
    assert any(key.startswith("exp_avg_sq_scale/") for key in every)


def test_each_parameter_has_the_rate_and_decay_of_its_group() -> None:
    shapes = {"a": SHAPES["a"], "experts": SHAPES["experts"]}
    held, alone = _held(shapes), _held(shapes)
    together = with_settings(OURS, _model(held), Settings({"a": Setting(lr=0.5, weight_decay=0.3)}))
    apart = {
        "a": replace(OURS, lr=OURS.lr / 2, weight_decay=0.3).build(_model({"a": alone["a"]})),  # type: ignore[arg-type]
        "experts": OURS.build(_model({"experts": alone["experts"]})),  # type: ignore[arg-type]
    }
    for optimizer in (together, *apart.values()):
        optimizer.set_factor(0.25)
    for step in range(3):
        for name, gradient in _gradients(shapes, step).items():
            held[name].grad, alone[name].grad = gradient, gradient.clone()
        for optimizer in (together, *apart.values()):
            optimizer.step(torch.zeros(()))
    for name, tensor in alone.items():
        assert torch.equal(held[name], tensor), name
        for key in ("exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale", "step"):
            assert torch.equal(together.state()[key][name], apart[name].state()[key][name]), (key, name)
    assert together.lr == OURS.lr * 0.25  # type: ignore[attr-defined]


# Layouts.


def trained(layout: str, row: str) -> dict[str, Tensor]:
    """Weights and whole state after 20 steps, in fp64: layouts that sum in another order choose the same codes."""
    case, (model, settings) = case_of("experts" in row), model_of(layout, row)
    optimizer, step = optimizers.build_optimizer(SMALL, model, settings), Step(model, OBJECTIVE)
    for index in range(STEPS):
        result = step(batches(case, model, index))
        optimizer.set_factor(min(1.0, (index + 1) / 4))
        optimizer.step(result.skip)
        optimizer.zero_grad()
    state = optimizer.state()
    assert {t.dtype for name, t in state["exp_avg"].items() if name in state["exp_avg_scale"]} == {torch.uint8}
    found = dict(model.parameters_held())
    for key in ("exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale"):
        found |= {f"{key}/{name}": tensor for name, tensor in state[key].items()}
    assert all(isinstance(found[f"{key}/embed.weight"], DTensor) == isinstance(found["embed.weight"], DTensor)
               for key in ("exp_avg", "exp_avg_scale") if "embed.weight" in found)  # fmt: skip
    return gathered(model, found)


@cache
def alone(row: str) -> dict[str, Tensor]:
    return trained("1", row)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_twenty_steps_in_a_layout_are_those_of_one_process(world: World, layout: str) -> None:
    """Codes bit by bit, and what is summed in another order to 1e-10. Blocks of four columns are whole on every rank."""
    row = LAYOUTS[layout]
    expected = alone(row)
    for found in world.run(trained, Layout.parse(layout).world, layout, row):
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            if tensor.dtype == torch.uint8:
                assert torch.equal(found[name], tensor), name
            else:
                difference = float((found[name].view(tensor.shape) - tensor).abs().max())
                assert difference <= 1e-10 * max(float(tensor.abs().max()), 1e-3), (name, difference)


def _workload(component: Any, **sizes: Any) -> Workload:
    return Workload(
        replace(DECODER, layers=1, **sizes).build, cross_entropy, partial(optimizers.build_optimizer, component), 2, 16
    )


def test_a_layout_that_cuts_a_block_is_refused() -> None:
    """tp = 2 cuts rows of 16 and of 24 in the middle: blocks of 16 and of 8 are not whole then. FSDP cuts no row."""
    plan = Plan.of([TensorParallel()], Layout.parse("tp2"))
    said = {
        (16, 0): "columns 0 to 7 of 16 of blocks.0.attention.o_proj.weight, so a block would be split.* that divides 8,",
        (8, 0): "columns 0 to 11 of 24 of blocks.0.mlp.down_proj.weight, so a block would be split.* that divides 12,",
        (8, 1): "columns 12 to 23 of 24 of blocks.0.mlp.down_proj.weight",
    }
    for (block, rank), why in said.items():
        with pytest.raises(PlanError, match=f"optimizer.block = {block}: a rank holds {why}"):
            dry_run(_workload(replace(SMALL, block=block)), plan, rank)
    assert dry_run(_workload(replace(SMALL, block=16)), Plan.of([FullyShard()], Layout.parse("dp2"))).optimizer > 0, (
        "rows are whole"
    )


@pytest.mark.parametrize("layout", ["1", "dp2"])
def test_a_plan_counts_two_bytes_and_the_scales(layout: str) -> None:
    """By hand: of matrices two codes an element and two scales of fp32 for 256 columns or what a row has; of vectors two
    moments of fp32; and a count of eight bytes for each."""
    sizes = {"dim": 256, "ffn_dim": 640, "heads": 4, "kv_heads": 2}
    at = Layout.parse(layout)
    shapes = {
        name: tuple(p.shape) for name, p in Blueprint.of(replace(DECODER, layers=1, **sizes).build).module.named_parameters()
    }  # type: ignore[arg-type]
    expected = 0
    for shape in shapes.values():
        rows = -(-shape[0] // at.dp_shard)  # of two ranks the first has the larger half
        if len(shape) == 1:
            expected += 2 * 4 * rows
        else:
            expected += 2 * rows * shape[1] + 2 * 4 * rows * -(-shape[1] // 256)
        expected += 8
    estimate = dry_run(_workload(AdamW8bitConfig(), **sizes), Plan.of([FullyShard()] if at.world > 1 else [], at))
    assert estimate.optimizer == expected
    assert 2 * estimate.elements < estimate.optimizer < 2.1 * estimate.elements
    model = realize(
        Blueprint.of(replace(DECODER, layers=1, **sizes).build),
        Plan.of([], Layout()),
        Topology(Layout(), CPU),
        0,
        "fp32",
        "fp32",  # type: ignore[arg-type]
    )
    held = sum(
        t.numel() * t.element_size() for tensors in AdamW8bitConfig().build(model).state().values() for t in tensors.values()
    )
    assert layout != "1" or held == expected


# What is refused.


def test_parameters_of_bf16_are_refused() -> None:
    job: Any = SimpleNamespace(optimizer=AdamW8bitConfig(), precision=Precision(compute="bf16", state="bf16"))
    (fault,) = optimizer_keeps_the_state(job, Layout())
    assert fault.key == "precision.state" and "AdamW8bit updates parameters of fp32 and fp64" in fault.message
    held = {"w": nn.Parameter(torch.zeros(64, 256, dtype=torch.bfloat16))}
    with pytest.raises(PlanError, match=r"adamw8bit needs parameters in fp32 or fp64, not torch.bfloat16"):
        AdamW8bitConfig().build(_model(held))


def test_without_torchao_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchao_library, "find_spec", lambda _: None)
    with pytest.raises(ForgeError, match=r'adamw8bit.* needs torchao.*pip install "forge-parallel\[adamw8bit\]"'):
        AdamW8bitConfig().build(_model(_held({"w": (64, 256)})))
