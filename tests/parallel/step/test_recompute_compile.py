"""Recomputation keeps the bytes that it states and changes no bit; compilation changes nothing and happens once."""

import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from forge_core.layout import Layout
from forge_models.components.attentions import GQA
from forge_models.components.decoder import DecoderConfig
from forge_models.objectives import CrossEntropy
from forge_parallel.model.parallel_model import DTYPES
from forge_parallel.model.plan import Plan
from forge_parallel.model.realize import Blueprint, realize
from forge_parallel.optim.optimizers import AdamWConfig
from forge_parallel.placement.topology import Topology
from forge_parallel.step.step import Step
from forge_parallel.torch_private import TorchDispatchMode
from forge_parallel.transforms.checkpointing import checkpoint_blocks, operators
from forge_parallel.transforms.compile import Compile
from forge_parallel.transforms.recompute import Recompute
from forge_parallel.transforms.shard import FullyShard
from forge_parallel.verify.parity import Case, compare, measure, share, synthetic
from harness.allocated import held_after
from harness.closeness import assert_no_farther
from harness.pool import World

CPU = torch.device("cpu")
VOCAB, ROWS, LENGTH, DIM, FFN, HEADS, KV_HEADS = 61, 4, 16, 32, 48, 4, 2


def decoder(layers: int = 2) -> DecoderConfig:
    return DecoderConfig(dim=DIM, layers=layers, heads=HEADS, kv_heads=KV_HEADS, ffn_dim=FFN, vocab_size=VOCAB, max_length=LENGTH)


def case(layers: int = 2, **changes: Any) -> Case:
    settings: dict[str, Any] = {"rows": ROWS, "micro_batch": ROWS, "length": LENGTH, "steps": 1, "grad_clip": 1e9} | changes
    return Case(decoder(layers).build, CrossEntropy().build(), AdamWConfig().build, VOCAB, **settings)


def made(transforms: list[Any], layers: int = 2, compute: str = "fp64", layout: str = "1") -> Step:
    at = Layout.parse(layout)
    state = "fp64" if compute == "fp64" else "fp32"
    topology = Topology.of(at, CPU)
    model = realize(Blueprint.of(decoder(layers).build), Plan.of(transforms, at), topology, 0, compute, state)
    return Step(model, CrossEntropy().build())


def held(transforms: list[Any], layers: int) -> int:
    step = made(transforms, layers)
    batch = synthetic(case(layers), 0)
    return held_after(lambda: step._forward(batch))[1]


def held_by_a_block(*transforms: Any) -> int:
    """What two more blocks keep between forward and backward, halved: everything outside of blocks cancels."""
    return (held(list(transforms), 4) - held(list(transforms), 2)) // 2


TOKENS, DOUBLE = ROWS * LENGTH, 8
INPUT = TOKENS * DIM * DOUBLE
PROJECTED = TOKENS * (DIM + 2 * DIM * KV_HEADS // HEADS + DIM + 2 * FFN + DIM) * DOUBLE  # q, k and v, o, gate and up, down
ATTENDED = TOKENS * DIM * DOUBLE + ROWS * HEADS * LENGTH * DOUBLE  # output, and the log-sum-exp of each query


@pytest.mark.parametrize(
    ("component", "stated"),
    [
        (Recompute(policy="full"), INPUT),
        (Recompute(keep=["matmul"]), INPUT + PROJECTED),
        (Recompute(keep=["attention"]), INPUT + ATTENDED),
        (Recompute(), INPUT + PROJECTED + ATTENDED),
        (Recompute(policy="full", every=2), None),
    ],
    ids=["full", "matmul", "attention", "selective", "every second"],
)
def test_a_block_keeps_the_bytes_that_its_policy_states(component: Recompute, stated: int | None) -> None:
    everything = held_by_a_block()
    expected = stated if stated is not None else (INPUT + everything) // 2
    assert held_by_a_block(component.build()) == expected
    assert expected < everything


def test_kernels_of_attention_on_cuda_are_kept() -> None:
    from torch.nn.attention import flex_attention, varlen  # noqa: F401  # which registers its operator

    kept = operators(("attention",))
    assert flex_attention.flex_attention_hop in kept
    assert torch.ops.torch_attn._varlen_attn.default in kept
    for name in ("cudnn_attention", "flash_attention", "fused_attention_overrideable", "efficient_attention"):
        assert getattr(torch.ops.aten, f"_scaled_dot_product_{name}").default in kept
    assert flex_attention.flex_attention_hop not in operators(("matmul",))


@pytest.mark.parametrize(
    ("soft_cap", "keep", "missing"),
    [(None, ["matmul", "attention"], []), (5.0, ["attention"], ["attention"]), (5.0, ["matmul"], [])],
)
def test_what_should_be_kept_and_is_not_is_told_once(
    soft_cap: float | None, keep: list[str], missing: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Scores under a cap are written out on a CPU: no kernel of attention runs, and `keep` would have no effect unseen."""
    plan, topology = Plan.of([Recompute(keep=keep).build()], Layout()), Topology.of(Layout(), CPU)
    build = replace(decoder(), attention=GQA(soft_cap=soft_cap)).build
    step = Step(realize(Blueprint.of(build), plan, topology, 0, "fp32", "fp32"), CrossEntropy().build())
    for _ in range(2):
        step([synthetic(case(), 0)])
    told = [record.message for record in caplog.records if "transforms.recompute" in record.message]
    assert len(told) == len(missing)
    assert all(f"keep contains {kind}, but no operator" in line for kind, line in zip(missing, told, strict=True))


class _Chosen(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.topk.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("keep", "times"), [(None, 2), ((), 1), (("matmul",), 1)])
def test_what_a_router_chose_is_not_chosen_again(keep: tuple[str, ...] | None, times: int) -> None:
    """Ties could be broken otherwise the second time. Where nothing is kept but the input, it is."""
    block = nn.Linear(4, 4)
    block.forward = lambda x: (x * x).topk(2).values.square()  # type: ignore[method-assign]
    checkpoint_blocks(nn.ModuleList([block]), SimpleNamespace(specs=SimpleNamespace(blocks=["0"])), keep=keep, every=1)  # type: ignore[arg-type]
    with _Chosen() as chosen:
        block(torch.randn(3, 4, requires_grad=True)).sum().backward()
    assert chosen.count == times


@pytest.mark.parametrize("component", [Recompute(policy="full"), Recompute(), Recompute(keep=["matmul"], every=2)])
def test_recomputation_changes_no_bit_in_fp64(component: Recompute) -> None:
    plain, again = measure(case(3), Plan.of([], Layout()), CPU), measure(case(3), Plan.of([component.build()], Layout()), CPU)
    assert plain.loss == again.loss
    assert all(torch.equal(plain.gradients[name], again.gradients[name]) for name in plain.gradients)


def test_nothing_is_kept_for_a_backward_that_will_not_come() -> None:
    step, batch = made([Recompute().build()]), synthetic(case(), 0)
    with step.model.inference():
        assert held_after(lambda: step._forward(batch))[1] <= (4 + ROWS) * DOUBLE  # scalars, and a number for each row


@pytest.fixture
def compiler() -> Any:
    torch._dynamo.reset()
    counters.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own imports warn
        yield


@pytest.mark.slow
def test_compilation_changes_nothing(compiler: None) -> None:
    """In fp32; runs in fp64 are in the table of proven pairs."""
    setting = replace(case(), compute="fp32", state="fp32")
    difference = compare(
        measure(setting, Plan.of([], Layout()), CPU), measure(setting, Plan.of([Compile().build()], Layout()), CPU)
    )
    assert difference.accepted("fp32"), difference
    assert counters["stats"]["unique_graphs"] == 1, "all blocks share one graph"


@pytest.mark.slow
def test_compilation_changes_nothing_in_wide_blocks(compiler: None) -> None:
    """In fp32, at the width of the 125M preset, where sums are long enough to round: the whole gradient, also against fp64."""
    wide = DecoderConfig(dim=768, layers=1, heads=12, ffn_dim=2048, vocab_size=VOCAB, max_length=256)
    setting = Case(wide.build, CrossEntropy().build(), AdamWConfig().build, VOCAB, rows=8, micro_batch=8, length=256, steps=1)

    def gradient(compute: str, *transforms: Any) -> torch.Tensor:
        state = "fp64" if compute == "fp64" else "fp32"
        found = measure(replace(setting, compute=compute, state=state), Plan.of(list(transforms), Layout()), CPU).gradients
        whole = torch.cat([found[name].flatten() for name in sorted(found)])
        return whole.to(DTYPES[compute])  # they were gathered in fp64

    exact, eager, compiled = gradient("fp64"), gradient("fp32"), gradient("fp32", Compile().build())
    assert_no_farther(compiled, eager, exact, "the compiled block")


def _recompiles(layout: str, recompute: bool) -> int:
    """Graphs after warm-up; a recompilation afterwards raises."""
    torch._dynamo.reset()
    counters.clear()
    transforms = [Compile().build(), *([Recompute().build()] if recompute else []), FullyShard()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = made(transforms, layers=3, compute="bf16", layout=layout)
        topology = step.model.topology
        optimizer = AdamWConfig().build(step.model)

        def train(number: int) -> None:
            micro = share(synthetic(case(), number), topology.data_rank, topology.data_size, 1)
            optimizer.step(step(micro).skip)
            optimizer.zero_grad()

        train(0)
        train(1)
        graphs = counters["stats"]["unique_graphs"]
        with torch.compiler.set_stance("fail_on_recompile"):
            for number in range(2, 5):
                train(number)
    return graphs


@pytest.mark.slow
def test_no_recompilation_after_warm_up(compiler: None) -> None:
    assert _recompiles("1", False) == 1


@pytest.mark.slow
def test_no_recompilation_after_warm_up_when_sharded_and_recomputed(world: World) -> None:
    assert world.run(_recompiles, 2, "dp2", True, timeout=300) == [1, 1]


@pytest.mark.slow
def test_a_budget_makes_the_compiler_keep_less(compiler: None) -> None:
    def kept(budget: float) -> int:
        torch._dynamo.reset()
        step, batch = made([Compile(budget=budget).build()], compute="fp32"), synthetic(case(), 0)
        seen: dict[int, int] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            terms = step._forward(batch)
        terms.sum.backward()
        return sum(seen.values())

    assert kept(0.3) < 0.8 * kept(1.0)


def test_names_stay_as_they_are() -> None:
    plain, wrapped = made([]), made([Recompute().build(), Compile().build()])
    assert [name for name, _ in plain.model.tensors()] == [name for name, _ in wrapped.model.tensors()]
    assert list(plain.model.part.state_dict()) == list(wrapped.model.part.state_dict())
