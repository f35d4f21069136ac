"""Every optimizer of ours, those to come too, gives the weights of one process in layouts that cut parameters in every way."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from forge_core.layout import Layout
from forge_core.registry import Registry
from forge_models.objectives import CrossEntropy
from forge_parallel.optim.optimizers import PROVEN
from forge_parallel.verify.parity import Case, compare
from forge_parallel.verify.proofs import features
from forge_testing.checks.parallel import SHAPES, Held
from forge_train.recipe.load import load_recipe
from harness.pool import World
from harness.siblings import fast
from parallel.compositions.rows import DECODER, EXPERTS, VOCAB, measured
from parallel.one_process import alone

REGISTRY = Registry()
OURS = sorted(entry.name for entry in REGISTRY.of("forge.optimizers") if entry.distribution.startswith("forge-"))
EXAMPLES = {name: tuple(REGISTRY.load("forge.optimizers", name).examples(Path()))[-1] for name in OURS}
"""The last one that conformance tries: what is for large tensors does its work in tiny ones there."""
LAYOUTS = {"dp2tp2ep2etp2": "etp", "hsdp2x2ep2": "ep_all_to_all"}
RUNS = [(name, layout) for name in EXAMPLES for layout in LAYOUTS]
FAST = [(name, layout) for name, layout in RUNS if layout == "hsdp2x2ep2" or EXAMPLES[name].shards in PROVEN]  # type: ignore[attr-defined]
"""Of those whose elements do not depend on others, a layout that cuts parameters in two ways is enough."""


@pytest.mark.parametrize(("name", "layout"), fast(*FAST, of=RUNS))
def test_it_equals_one_process(world: World, name: str, layout: str) -> None:
    component: Any = replace(EXAMPLES[name], lr=1e-2)  # type: ignore[call-arg]
    build = replace(DECODER, moe=EXPERTS, layers=2).build
    case = Case(build, CrossEntropy().build(), component.build, VOCAB, rows=8, micro_batch=2, steps=4)
    row = frozenset(LAYOUTS[layout].split())
    for found in world.run(measured, Layout.parse(layout).world, case, layout, row, timeout=300):
        difference = compare(alone(measured, case, "1", frozenset()), found)
        assert difference.accepted("fp64"), difference


@pytest.mark.parametrize("name", OURS)
def test_one_whose_elements_depend_on_others_is_a_feature_by_its_name(name: str) -> None:
    job = load_recipe("debug", [f"--optimizer.name={name}", "--schedule.name=constant", "--parallel.dp_shard=2"], 2, REGISTRY).job
    used = {use.name for use in features(job, Layout.parse("dp2")) if use.plane == "optimizer"}
    assert used == ({name} if job.optimizer.shards in PROVEN else set())


@pytest.mark.parametrize("name", EXAMPLES)
def test_trials_i_a_parameter_without_a_gradient_stays_and_others_move_as_ever(name: str) -> None:
    """Wherever it stands among them."""

    def stepped(left_out: str) -> tuple[dict[str, Tensor], list[str]]:
        draw = torch.Generator().manual_seed(0)
        start = {key: torch.randn(shape, generator=draw, dtype=torch.float64) for key, (shape, _) in SHAPES.items()}
        held: dict[str, Tensor] = {key: nn.Parameter(value.clone()) for key, value in start.items()}
        optimizer = EXAMPLES[name].build(Held(held))  # type: ignore[attr-defined]
        for _ in range(2):
            for key, tensor in held.items():
                slope = torch.randn(tensor.shape, generator=draw, dtype=torch.float64)
                tensor.grad = None if key == left_out else slope
            optimizer.step(torch.zeros(()))
            optimizer.zero_grad()
        return held, [key for key, tensor in held.items() if torch.equal(start[key], tensor.detach())]

    every, _ = stepped("")
    for left_out in SHAPES:
        found, still = stepped(left_out)
        assert still == [left_out]
        assert all(torch.equal(found[key], every[key]) for key in SHAPES if key != left_out)
