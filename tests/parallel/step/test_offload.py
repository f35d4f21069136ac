"""Shards on the host, as far as a machine without a GPU can tell: what is refused, what reaches FSDP, that every number crosses
to where it is used, and that FSDP's way of doing it leaves the numbers alone. `test_gpu.py` has the rest."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import CPUOffloadPolicy

from forge_core.errors import PlanError
from forge_core.layout import Layout
from forge_core.protocols.model import NamedTensor
from forge_core.specs import Init, TensorSpec
from forge_parallel.checks import compositions_are_proven
from forge_parallel.launch.process_group import alone
from forge_parallel.model import realize as module
from forge_parallel.model.plan import Plan
from forge_parallel.model.realize import Blueprint, _allocate, realize
from forge_parallel.optim import elementwise
from forge_parallel.optim.elementwise import AdamW as FusedAdamW
from forge_parallel.optim.elementwise import adamw_bf16
from forge_parallel.optim.optimizers import AdamWConfig
from forge_parallel.placement.boxes import Box
from forge_parallel.placement.topology import Topology
from forge_parallel.step import reduce
from forge_parallel.step.reduce import clip_grad_norm, squared_grad_norm
from forge_parallel.transforms import fully_sharded
from forge_parallel.transforms.shard import FullyShard
from forge_parallel.verify.parity import Case, Measurement, compare, measure
from harness.pool import World
from parallel.tiny import LAYERS, VOCAB, Tiny, cross_entropy

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
CASE = Case(Tiny, cross_entropy, AdamWConfig(lr=1e-2).build, VOCAB)
LOW = Case(**{**vars(CASE), "compute": "bf16", "state": "bf16", "steps": 1})


# What is refused.


def test_a_run_on_a_cpu_is_refused() -> None:
    plan = Plan.of([FullyShard(offload=True).build()], Layout())
    with pytest.raises(PlanError, match=r"computes on a CPU; set transforms\.shard\.offload = false"):
        realize(Blueprint.of(Tiny), plan, Topology(Layout(), CPU), 0)
    assert not dist.is_initialized()


def test_the_check_refuses_what_no_run_on_a_gpu_has_proven() -> None:
    job: Any = SimpleNamespace(
        train=SimpleNamespace(global_batch=4, micro_batch=4),
        precision=SimpleNamespace(compute="fp32", state="fp32"),
        model=SimpleNamespace(),
        transforms={"shard": FullyShard(offload=True)},
    )
    (fault,) = compositions_are_proven(job, Layout())
    assert "transforms.shard.offload = true" in str(fault)


def test_weights_that_are_cast_before_they_are_gathered_are_refused() -> None:
    part = nn.Linear(2, 2)
    part.float8_weights = [object()]  # type: ignore[assignment]
    with pytest.raises(PlanError, match=r"transforms\.float8\.all_gather = false"):
        fully_sharded._host(part, SimpleNamespace(topology=SimpleNamespace(device=GPU)))  # type: ignore[arg-type]


# What reaches FSDP.


@pytest.mark.parametrize("on_host", [False, True])
def test_every_unit_gets_the_policy(monkeypatch: pytest.MonkeyPatch, on_host: bool) -> None:
    given: list[tuple[nn.Module, Any]] = []
    monkeypatch.setattr(
        fully_sharded, "fully_shard", lambda module, **settings: given.append((module, settings["offload_policy"]))
    )
    monkeypatch.setattr(fully_sharded, "alone", lambda _: None)
    with torch.device("meta"):
        part = Tiny()
    topology = SimpleNamespace(layout=Layout.parse("dp2"), device=GPU, data_mesh=object())
    context: Any = SimpleNamespace(specs=part.specs(), topology=topology, compute=torch.float32, state=torch.float32)
    FullyShard(offload=on_host).apply(part, context)
    assert [module for module, _ in given] == [*part.blocks, part]
    assert [isinstance(policy, CPUOffloadPolicy) for _, policy in given] == [on_host] * (LAYERS + 1)


def test_memory_is_the_hosts_for_parameters_only() -> None:
    for on_host, expected in ((True, "cpu"), (False, "meta")):
        with torch.device("meta"):
            part = Tiny()
        _allocate(part, FullyShard(offload=on_host).parameter_device(torch.device("meta")), torch.device("meta"))
        assert {parameter.device.type for parameter in part.parameters()} == {expected}
        assert {buffer.device.type for buffer in part.buffers()} == {"meta"}


def test_weights_are_drawn_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU draws other numbers than a CPU does; where shards lie must not change a run."""
    drawn: list[torch.device] = []
    original = module._stream

    def stream(seed: int, name: str, device: torch.device, *kind: bool) -> Any:
        drawn.append(device)
        return original(seed, name, CPU, *kind)

    monkeypatch.setattr(module, "_stream", stream)
    module.fill(Box((3, 2), (0, 0), torch.empty(3, 2)), TensorSpec((None, None), Init("normal", 1.0), "matrix"), "w", 0, GPU)
    assert drawn == [GPU]


# Every number is where it is used. Tensors have devices here and no memory, so this needs no GPU.


@contextmanager
def _on_host(dtype: torch.dtype) -> Iterator[Any]:
    """A model whose device is a GPU, with parameters and gradients on the host."""
    with FakeTensorMode():
        parameters = {name: nn.Parameter(torch.ones(4, 3, dtype=dtype)) for name in ("a", "b")}
        for parameter in parameters.values():
            parameter.grad = torch.ones(4, 3, dtype=dtype)
        named = [NamedTensor(name, parameter, "matrix") for name, parameter in parameters.items()]
        topology = Topology(Layout(), GPU)
        yield SimpleNamespace(trainable=lambda: named, topology=topology, owned=frozenset(item.name for item in named))


def test_the_norm_goes_to_the_device_and_the_clip_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[torch.device] = []
    with _on_host(torch.float32) as model:
        norm = squared_grad_norm(model).sqrt()
        assert norm.device == GPU
        monkeypatch.setattr(reduce, "foreach_mul_", lambda _, factor: used.append(factor.device))
        assert clip_grad_norm(model, norm, 1.0).device == GPU
    assert used == [CPU]


@pytest.mark.parametrize("kind", [FusedAdamW, adamw_bf16])
def test_optimizers_run_on_the_host(monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    used: list[torch.device] = []
    with _on_host(torch.float32 if kind is FusedAdamW else torch.bfloat16) as model:
        optimizer = kind(model, 1e-3, (0.9, 0.95), 1e-8, 0.1)
        if kind is FusedAdamW:
            monkeypatch.setattr(elementwise, "adamw", lambda *_, found_inf, **__: used.append(found_inf.device))
            optimizer.step(torch.zeros((), device=GPU))
            assert used == [CPU], "torch's own copy does not wait for the device"
        else:
            # Where an update is skipped is all that meets the device; chunks of a tensor need its numbers.
            optimizer._named = []
            optimizer.step(torch.zeros((), device=GPU))
        assert {state.device for states in optimizer.state().values() for state in states.values()} == {CPU}


# FSDP's own way through it, with a host that is its own device.


def _offloaded(case: Case, layout: str, **settings: Any) -> Measurement:
    def host(_: Any, context: Any) -> CPUOffloadPolicy:
        if not dist.is_initialized():
            alone(context.topology.device)
        return CPUOffloadPolicy(pin_memory=False)  # nothing can be pinned without a GPU

    before, fully_sharded._host = fully_sharded._host, host
    try:
        return measure(case, Plan.of([FullyShard(offload=True, **settings)], Layout.parse(layout)), CPU)
    finally:
        fully_sharded._host = before


@pytest.mark.parametrize(("layout", "reduce"), [("1", "last"), ("hsdp2x2", "each")])
def test_a_step_through_the_policy_equals_one_process(world: World, layout: str, reduce: str) -> None:
    alone = measure(CASE, Plan.of([], Layout()), CPU)
    for found in world.run(_offloaded, Layout.parse(layout).world, CASE, layout, reduce=reduce, group=layout != "1"):
        difference = compare(alone, found)
        assert difference.accepted("fp64"), difference


def test_bf16_state_through_the_policy_equals_one_process(world: World) -> None:
    alone = measure(LOW, Plan.of([], Layout()), CPU)
    (found,) = world.run(_offloaded, 1, LOW, "1", reduce="each", group=False)
    assert compare(alone, found).accepted("bf16")
    assert all(torch.equal(found.weights[name], weight) for name, weight in alone.weights.items()), "one rank: the same bits"
