"""torch.compile in somebody's loop, before and after `parallelize`: a step has the weights of one process, or it is refused."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from forge_core.errors import PlanError
from forge_core.layout import Layout
from forge_parallel import ParallelizedModule, parallelize
from harness.pool import World
from harness.siblings import fast
from parallel.foreign_modules import PLAN, VOCAB, tied

TOKENS = torch.randint(VOCAB, (4, 7), generator=torch.Generator().manual_seed(5))
EAGER = {"backend": "aot_eager"}
"""Traces forward and backward as the default does, without a C++ compiler."""


def _start() -> nn.Module:
    torch.manual_seed(0)
    return tied().double()


def _whole() -> nn.Module:
    return torch.compile(_start(), **EAGER)  # type: ignore[return-value]


def _in_place() -> nn.Module:
    module = _start()
    module.compile(**EAGER)
    return module


def _blocks() -> nn.Module:
    module = _start()
    for block in module.get_submodule("blocks").children():
        block.compile(**EAGER)
    return module


def _replaced_blocks() -> nn.Module:
    module: Any = _start()
    for number, block in enumerate(module.blocks):
        module.blocks[number] = torch.compile(block, **EAGER)
    return module


BEFORE: dict[str, Callable[[], nn.Module]] = {
    "whole": _whole,
    "in place": _in_place,
    "blocks": _blocks,
    "replaced blocks": _replaced_blocks,
}


def _after_whole(model: ParallelizedModule, backend: dict[str, Any]) -> Any:
    return torch.compile(model, **backend)


def _after_in_place(model: ParallelizedModule, backend: dict[str, Any]) -> Any:
    model.compile(**backend)
    return model


def _after_inner(model: ParallelizedModule, backend: dict[str, Any]) -> Any:
    return torch.compile(model.module, **backend)


def _after_blocks(model: ParallelizedModule, backend: dict[str, Any]) -> Any:
    for part in model.parts:
        for name, block in part.named_modules():
            if name.startswith("blocks.") and name.count(".") == 1:
                block.compile(**backend)
    return model


AFTER: dict[str, Callable[[ParallelizedModule, dict[str, Any]], Any]] = {
    "whole": _after_whole,
    "in place": _after_in_place,
    "inner": _after_inner,
    "blocks": _after_blocks,
}


def _mean(out: Tensor) -> Tensor:
    return out.square().mean()


def _trained(called: Any, model: ParallelizedModule) -> dict[str, Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        rows = (TOKENS + step) % VOCAB
        if model.cut is None:
            _mean(called(rows.chunk(model.data_ranks)[model.data_rank])).backward()
        else:
            model.step([{"tokens": rows[:2]}, {"tokens": rows[2:]}], lambda out, _: _mean(out))
        with torch.no_grad():
            if model.cut is None:
                called(rows)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(whole=True)


def _after(layout: str, how: str, backend: dict[str, Any] = EAGER) -> dict[str, Tensor]:
    torch.compiler.reset()
    model = parallelize(_start(), layout, tp_plan=PLAN if "tp" in layout else None, state="fp64", compute="fp64")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the compiler about its own work
        return _trained(AFTER[how](model, backend), model)


def _expected() -> dict[str, Tensor]:
    plain = _start()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(2):
        _mean(plain((TOKENS + step) % VOCAB)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(plain.state_dict())


ALL = [(layout, how) for layout in ("1", "dp2", "tp2", "pp2") for how in AFTER if (layout, how) != ("pp2", "inner")]


@pytest.mark.parametrize(("layout", "how"), fast(("dp2", "blocks"), ("pp2", "blocks"), of=ALL))
def test_a_model_that_is_compiled_trains_as_one_process(world: World, layout: str, how: str) -> None:
    for found in world.run(_after, Layout.parse(layout).world, layout, how, timeout=300):
        for name, value in _expected().items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp2", "tp2"])
def test_a_model_that_is_compiled_for_the_machine_trains_as_one_process(world: World, layout: str) -> None:
    for found in world.run(_after, 2, layout, "whole", {}, timeout=300):
        for name, value in _expected().items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)


def _refused() -> dict[str, str]:
    found = {}
    for layout in ("1", "dp2", "tp2", "pp2"):
        if Layout.parse(layout).world != dist.get_world_size():
            continue
        for how, compiled in BEFORE.items():
            for source in (compiled(), compiled):
                with pytest.raises(PlanError) as refusal:
                    parallelize(source, layout, tp_plan=PLAN if "tp" in layout else None)
                found[f"{layout} {how} {callable(source)}"] = str(refusal.value)
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_module_that_is_compiled_before_is_refused_with_what_to_write(world: World, ranks: int) -> None:
    for found in world.run(_refused, ranks):
        assert len(found) >= 4 * (1 if ranks == 1 else 3)
        for case, refusal in found.items():
            assert "is already compiled; parallelize the module without torch.compile" in refusal, case
            assert ("blocks.0" in refusal) == ("blocks" in case)
