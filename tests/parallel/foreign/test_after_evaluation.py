"""A loop that reads or writes parameters after a forward without a backward: every forward computes with what they hold now."""

import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from schedulefree import AdamWScheduleFree
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from forge_core.layout import Layout
from forge_parallel import ParallelizedModule, parallelize
from forge_parallel.transforms.shard import FullyShard
from harness.pool import World
from harness.siblings import fast
from parallel.foreign_modules import PLAN, VOCAB, Plain

TOKENS = torch.randint(VOCAB, (4, 7), generator=torch.Generator().manual_seed(5))


def _state(seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {name: value.double() for name, value in Plain().state_dict().items()}


def _share(parameter: Tensor, whole: Tensor) -> Tensor:
    """What `parameter` holds of `whole`, by torch's own conversion."""
    if not isinstance(parameter, DTensor):
        return whole
    mesh = parameter.device_mesh
    return torch.empty_like(parameter).copy_(distribute_tensor(whole, mesh, [Replicate()] * mesh.ndim))


def _by_data(model: ParallelizedModule, state: dict[str, Tensor]) -> None:
    for name, parameter in model.tensors():
        parameter.data.copy_(_share(parameter, state[name]))


@torch.no_grad()
def _by_local(model: ParallelizedModule, state: dict[str, Tensor]) -> None:
    for name, parameter in model.tensors():
        share: Any = _share(parameter, state[name])
        parameter.to_local().copy_(share.to_local())  # type: ignore[attr-defined]


@torch.no_grad()
def _by_foreach(model: ParallelizedModule, state: dict[str, Tensor]) -> None:
    """As optimizers write."""
    parameters = dict(model.tensors())
    changes = [_share(parameter, state[name]) - parameter for name, parameter in parameters.items()]
    torch._foreach_add_(list(parameters.values()), changes)


WRITES: dict[str, Callable[[ParallelizedModule, dict[str, Tensor]], Any]] = {
    "load_state_dict": lambda model, state: model.load_state_dict(state),
    "data": _by_data,
    "to_local": _by_local,
    "foreach": _by_foreach,
}


class _Stopped(Exception):
    pass


def _aborted(model: ParallelizedModule) -> None:
    def stop(*_: Any) -> None:
        raise _Stopped

    handle = model.module.get_submodule("blocks.1.down").register_forward_hook(stop)
    with contextlib.suppress(_Stopped), torch.no_grad():
        model.module(TOKENS)
    handle.remove()


def _no_grad(model: ParallelizedModule) -> None:
    with torch.no_grad():
        model.module(TOKENS)


def _inference_mode(model: ParallelizedModule) -> None:
    with torch.inference_mode():
        model.module(TOKENS)


def _span(model: ParallelizedModule) -> None:
    with model.inference():
        model.module(TOKENS)


LOOKS: dict[str, Callable[[ParallelizedModule], Any]] = {
    "no_grad": _no_grad,
    "inference_mode": _inference_mode,
    "inference": _span,
    "with a graph that nobody uses": lambda model: model.module(TOKENS),
    "stopped by an error": _aborted,
    "stopped by an error, with a graph": lambda model: torch.enable_grad()(_aborted)(model),
}


def _written(layout: str, reshard: bool | None) -> dict[str, Tensor]:
    """What the module gives after each way to look at it, each way to write it, and a forward without and with gradients."""
    sharding = [] if reshard is None else [FullyShard(reshard=reshard)]
    model = parallelize(Plain, layout, sharding, tp_plan=PLAN, state="fp64", compute="fp64")
    found: dict[str, Tensor] = {}
    seed = 0
    for look, call in LOOKS.items():
        for write, change in WRITES.items():
            for span in (torch.no_grad, torch.enable_grad, model.computing):
                call(model)
                seed += 1
                change(model, _state(seed))
                with span():
                    found[f"{seed}: {look}, {write}, {span.__name__}"] = model.module(TOKENS).detach().clone()
    return found


@pytest.mark.parametrize(
    ("layout", "reshard"), fast(("dp2", None), of=[("dp2", None), ("dp2", False), ("hsdp2x2", None), ("dp2tp2", None)])
)
def test_trials_d1_a_forward_computes_with_what_parameters_hold_now(world: World, layout: str, reshard: bool | None) -> None:
    plain = Plain().double()
    for found in world.run(_written, Layout.parse(layout).world, layout, reshard, timeout=300):
        assert len(found) == len(LOOKS) * len(WRITES) * 3
        for case, output in found.items():
            plain.load_state_dict(_state(int(case.split(":")[0])))
            torch.testing.assert_close(output, plain(TOKENS), rtol=0, atol=1e-12, msg=lambda text, case=case: f"{case}: {text}")


def _loss(module: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    return F.cross_entropy(module(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def _average(parameters: Any, averages: list[Tensor]) -> None:
    """An exponential moving average in somebody's loop."""
    for parameter, average in zip(parameters, averages, strict=True):
        average.lerp_(parameter.detach(), 0.25)


def _swap(parameters: Any, averages: list[Tensor]) -> None:
    for parameter, average in zip(parameters, averages, strict=True):
        held = parameter.detach().clone()
        parameter.data.copy_(average)
        average.copy_(held)


def _trained(
    module: nn.Module, parameters: Callable[[], Any], score: Callable[[Tensor], float], mine: list[Tensor]
) -> list[float]:
    """A loop that evaluates before it makes its optimizer, in the middle of accumulation, between a forward and its backward, and
    with averaged weights; the losses of its evaluations."""
    found = []

    def evaluate() -> None:
        with torch.no_grad():
            found.append(score(_loss(module, TOKENS)))

    evaluate()
    optimizer = torch.optim.AdamW(parameters(), lr=1e-2)
    averages = [parameter.detach().clone() for parameter in parameters()]
    for _ in range(3):
        for tokens in mine:
            (_loss(module, tokens) / len(mine)).backward()
            evaluate()
        pending = _loss(module, mine[0])
        evaluate()
        (pending + _loss(module, mine[1])).backward()
        optimizer.step()
        optimizer.zero_grad()
        _average(parameters(), averages)
        _swap(parameters(), averages)
        evaluate()
        _swap(parameters(), averages)
        evaluate()
    return found


def _evaluated(layout: str) -> tuple[list[float], list[float], dict[str, Tensor], dict[str, Tensor]]:
    model = parallelize(Plain, layout, tp_plan=PLAN, state="fp64", compute="fp64")
    plain = Plain().double()
    plain.load_state_dict(model.state_dict(whole=True))
    halves = TOKENS.chunk(2)
    expected = _trained(plain, plain.parameters, float, list(halves))
    mine = [half.chunk(model.data_ranks)[model.data_rank] for half in halves]
    found = _trained(model.module, lambda: model.module.parameters(), model.mean, mine)
    return found, expected, model.state_dict(whole=True), {name: p.detach() for name, p in plain.named_parameters()}


@pytest.mark.parametrize("layout", fast("dp2", of=["dp2", "hsdp2x1", "dp2tp2"]))
def test_trials_d1_a_loop_that_evaluates_anywhere_trains_as_one_process(world: World, layout: str) -> None:
    for found, expected, weights, right in world.run(_evaluated, Layout.parse(layout).world, layout, timeout=300):
        assert found == pytest.approx(expected, rel=1e-10)
        for name, value in right.items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")


class _Collectives(TorchDispatchMode):
    """Counts them by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def _with_schedulefree(foreach: bool) -> tuple[list[float], list[float]]:
    model = parallelize(Plain, "dp2", state="fp64", compute="fp64")
    plain = Plain().double()
    plain.load_state_dict(model.state_dict(whole=True))
    found: list[list[float]] = []
    for module, tokens in ((model, TOKENS.chunk(2)[model.data_rank]), (plain, TOKENS)):
        optimizer = AdamWScheduleFree(module.parameters(), lr=0.05, foreach=foreach)
        losses = []
        for _ in range(3):
            optimizer.train()
            _loss(module, tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
            for change in (optimizer.eval, optimizer.train):
                change()
                with torch.no_grad():
                    losses.append(_loss(module, TOKENS).item())
        found.append(losses)
    return found[0], found[1]


@pytest.mark.parametrize("foreach", [True, False])
def test_trials_d1_schedulefree_swaps_weights_between_evaluations(world: World, foreach: bool) -> None:
    for found, expected in world.run(_with_schedulefree, 2, foreach):
        assert found == pytest.approx(expected, rel=1e-10)
        assert len(set(expected)) == 5, "the first average is the weights themselves"


def _counts(module: nn.Module, spanned: Callable[[], Any]) -> list[dict[str, int]]:
    """Collectives of a step of two forwards and backwards, of two forwards and one backward, and of a recomputed forward."""

    def alternating() -> None:
        for tokens in TOKENS.chunk(2):
            _loss(module, tokens).backward()

    def together() -> None:
        with spanned():
            sum(_loss(module, tokens) for tokens in TOKENS.chunk(2)).backward()  # type: ignore[union-attr]

    def again() -> None:
        _loss(lambda tokens: checkpoint(module, tokens, use_reentrant=False), TOKENS).backward()

    found = []
    for run in (alternating, alternating, together, together, again, again):
        with _Collectives() as collectives:
            run()
        found.append(dict(collectives.counts))
    return found


def _counted(layout: str) -> tuple[list[dict[str, int]], list[dict[str, int]]]:
    model = parallelize(Plain, layout)
    found = _counts(model.module, model.computing)
    theirs = Plain()
    for block in theirs.blocks:
        fully_shard(block, mesh=model.topology.data_mesh, reshard_after_forward=True)
    fully_shard(theirs, mesh=model.topology.data_mesh, reshard_after_forward=False)
    return found, _counts(theirs, contextlib.nullcontext)


@pytest.mark.parametrize(("layout", "ranks"), fast(("dp2", 2), of=[("dp2", 2), ("hsdp2x2", 4)]))
def test_trials_d1_training_exchanges_what_fsdp_alone_does(world: World, layout: str, ranks: int) -> None:
    for found, theirs in world.run(_counted, ranks, layout):
        assert found == theirs
        assert sum(found[0].values()) > 10


def _loaded_inside() -> Tensor:
    model = parallelize(Plain, "dp2", state="fp64", compute="fp64")
    list(model.parameters())  # which are looked up once
    with model.inference():
        model(TOKENS)
        model.load_state_dict(_state(7))
        return model(TOKENS)


def _gathers(layout: str) -> list[int]:
    model = parallelize(Plain, layout)
    found = []
    for span in (torch.no_grad, model.inference, model.computing):
        with _Collectives() as collectives, span():
            for _ in range(3):
                model.module(TOKENS)
        found.append(collectives.counts.total())
        held = [parameter.numel() for parameter in model.module.parameters() if isinstance(parameter, DTensor)]
        assert len(held) == len(list(Plain().parameters())), "nothing stays gathered"
    return found


def test_trials_d1_an_evaluation_inside_inference_gathers_once(world: World) -> None:
    """Each of three forwards gathers three blocks, and what is around them: inside of `inference` and `computing` once."""
    assert world.run(_gathers, 2, "dp2") == [[12, 10, 10]] * 2


def test_trials_d1_a_state_may_be_loaded_inside_inference(world: World) -> None:
    plain = Plain().double()
    plain.load_state_dict(_state(7))
    for found in world.run(_loaded_inside, 2):
        torch.testing.assert_close(found, plain(TOKENS), rtol=0, atol=1e-12)
