"""Every private name of torch that strategies use is there in the version that runs, and does what it is used for."""

import importlib.util
import inspect
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor.placement_types as placements
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from forge_parallel import torch_private as private
from forge_parallel.dryrun.fake_world import fake_world


def test_operators_have_names_and_schemas() -> None:
    for operator in (private.TO_COPY, private.LOCAL_SCALAR, private.GROUPED_MM):
        assert private.schema(operator).arguments
    assert private.schema(private.TO_COPY).name == "aten::_to_copy"
    for packet in (private.flash_attention_cpu, private.flash_attention_cpu_backward):
        assert packet.overloads()
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "all_to_all_single", "wait_tensor"):
        assert hasattr(private.functional, name)
    assert callable(private.scaled_grouped_mm)


def test_inside_a_mode_without_memory_a_tensor_can_have_some() -> None:
    with private.FakeTensorMode():
        assert isinstance(torch.ones(2), private.FakeTensor) and private.detect_fake_mode() is not None
        with private.unset_fake_temporarily():
            assert torch.ones(2).tolist() == [1.0, 1.0]
        assert isinstance(torch.ones(2), private.FakeTensor)


def test_tensors_in_anything_are_found() -> None:
    tree = {"a": [torch.ones(2), 3]}
    assert len(private.tree_leaves(tree)) == 2
    assert len(list(private.tree_iter(tree))) == 2
    assert private.tree_map(type, tree) == {"a": [torch.Tensor, int]}
    assert private.tree_map_only(int, lambda n: n + 1, [1, "x"]) == [2, "x"]


def test_many_tensors_are_multiplied_and_measured_at_once() -> None:
    tensors = [torch.tensor([3.0, 4.0]), torch.tensor([5.0])]
    assert [float(norm) for norm in private.foreach_norm(tensors)] == [5.0, 5.0]
    private.foreach_mul_(tensors, 2.0)
    assert tensors[1].item() == 10.0


def test_storages_views_and_modes() -> None:
    x = torch.arange(4.0)
    assert private.is_view(x[1:]) and not private.is_view(x)
    assert private.base_of(x[1:][1:]) is x and private.base_of(x) is None
    assert private.storage_key(x.untyped_storage()) == private.storage_key(x[1:].untyped_storage())
    seen: list[Any] = []

    class Mode(private.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Mode():
        _ = x + 1
    assert seen == [torch.ops.aten.add.Tensor]
    with private.DisableTorchFunction():
        assert torch.equal(x, x)
    with torch.no_grad(), private.recording():
        assert torch.is_grad_enabled()


def test_tensors_without_memory() -> None:
    assert private.detect_fake_mode() is None
    with private.FakeTensorMode() as mode:
        assert isinstance(torch.ones(2), private.FakeTensor)
        assert private.detect_fake_mode() is mode


def test_families_of_modules() -> None:
    assert isinstance(nn.BatchNorm2d(1), private.BatchNorm) and isinstance(nn.SyncBatchNorm(1), private.BatchNorm)


def test_the_body_of_an_operator_written_in_python() -> None:
    @torch.library.custom_op("forge_parallel_test::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    body = private.python_body(torch.ops.forge_parallel_test.twice.default)
    assert body is not None and body(torch.ones(1)).item() == 2
    assert private.python_body(torch.ops.aten.mul.Tensor) is None


def test_what_fsdp_is_asked_for() -> None:
    with fake_world(2, 0):
        module: Any = fully_shard(nn.Linear(4, 4, device="meta"))
        assert isinstance(module, FSDPModule)
        assert isinstance(module.weight, DTensor) and private.local_part(module.weight).shape == (2, 4)
        assert callable(private.before_backward(module))
        assert module._get_fsdp_state() is not None
    private.forget_meshes()


def test_forwards_that_an_error_ended_are_over() -> None:
    with fake_world(2, 0):
        module: Any = fully_shard(nn.Linear(4, 4))
        with pytest.raises(RuntimeError):
            module(torch.ones(2, 3))
        state = module._get_fsdp_state()
        assert state._training_state.name == "FORWARD"
        private.end_forward(module)
        assert state._training_state.name == "IDLE"
        # torch 2.11 has one group of parameters, later releases a list
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        assert [group._training_state.name for group in groups] == ["IDLE"]
    private.forget_meshes()


def test_a_backward_is_seen_while_it_runs() -> None:
    seen = []
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    y.register_hook(lambda gradient: seen.append(private.in_backward()))
    y.backward()
    assert seen == [True] and not private.in_backward()


def test_clipping_of_a_part_is_refused_and_of_others_is_not() -> None:
    part, other = nn.Linear(2, 2), nn.Linear(2, 2)
    for _ in range(2):  # wrapped once
        private.mark_as_partial(part.parameters(), ValueError("a part"))
    for module in (part, other):
        module(torch.ones(1, 2)).sum().backward()
    with pytest.raises(ValueError, match="a part"):
        nn.utils.clip_grad_norm_(part.parameters(), 0.5)
    assert nn.utils.clip_grad_norm_(other.parameters(), 0.5).item() == pytest.approx(6**0.5)
    norm = torch.stack([p.grad.norm() for p in other.parameters() if p.grad is not None]).norm()
    assert norm.item() == pytest.approx(0.5, rel=1e-4)
    assert private.IncompatibleKeys([], []).missing_keys == []


def test_switches_of_the_compiler() -> None:
    import torch._functorch.config as functorch  # the module that the switch is in

    with private.within_budget(0.5):
        assert functorch.activation_memory_budget == 0.5
    assert functorch.activation_memory_budget == 1.0
    inductor = importlib.import_module("torch._inductor.config")
    assert inductor._micro_pipeline_tp is False
    assert importlib.util.find_spec("torch.distributed._symmetric_memory") is not None


@pytest.mark.filterwarnings("ignore")
def test_without_strided_shards_nothing_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(private.StridedShard(0, split_factor=2), placements.Placement)  # type: ignore[call-arg]
    monkeypatch.delattr(placements, "_StridedShard")
    spec = importlib.util.find_spec("forge_parallel.torch_private")
    assert spec is not None and spec.loader is not None
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    assert not isinstance(placements.Shard(0), again.StridedShard)


def test_without_a_way_to_see_bodies_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torch._library.custom_ops._maybe_get_opdef")
    assert private.python_body(torch.ops.aten.mul.Tensor) is None


def test_limits_of_open_groups() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        private.set_timeouts(timedelta(seconds=7))
        found = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
        assert found.options._timeout == timedelta(seconds=7)  # type: ignore[attr-defined]
    finally:
        dist.destroy_process_group()


def test_trials_f3_a_gloo_group_takes_the_arguments_that_newer_versions_of_torch_pass() -> None:
    """torch 2.14 added `enable_reconfigure`; an argument that no option of the group has the name of is refused by name."""
    store, limit = dist.HashStore(), timedelta(seconds=9)
    with private.one_gloo_thread():
        opened = dist.distributed_c10d.ProcessGroupGloo(store, 0, 1, timeout=limit, group_name="of a later torch")  # type: ignore[call-arg]
        assert opened.options.group_name == "of a later torch" and opened.options._timeout == limit  # type: ignore[attr-defined]
        assert opened.options._threads == 1  # type: ignore[attr-defined]
        with pytest.raises(RuntimeError, match=r"enable_everything=True.*pip install 'torch"):
            dist.distributed_c10d.ProcessGroupGloo(store, 0, 1, timeout=limit, enable_everything=True)  # type: ignore[call-arg]


def test_a_profiler_is_seen_while_it_records() -> None:
    assert not private.profiling()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert private.profiling()
    assert not private.profiling()


def test_allocations_are_noted_by_the_allocator_of_cuda_alone() -> None:
    assert private.notes_allocations(torch.cuda.memory) and not private.notes_allocations(None)
    known = inspect.signature(torch.cuda.memory._record_memory_history).parameters
    assert {"enabled", "max_entries"} <= known.keys() or "args" in known
    calls: list[Any] = []

    class Memory:
        def _record_memory_history(self, enabled: str | None = "all", max_entries: int = 0) -> None:
            calls.append((enabled, max_entries))

        def _dump_snapshot(self, path: str) -> None:
            calls.append(path)

    private.record_allocations(Memory(), 7)
    private.write_allocations(Memory(), "there")
    private.record_allocations(Memory(), None)
    assert calls == [("all", 7), "there", (None, 0)]


def test_the_flight_record_is_a_list_of_what_was_entered() -> None:
    read = {"process_group", "collective_seq_id", "profiling_name", "input_sizes"}
    assert all(read <= entry.keys() for entry in private.flight_record())


def test_the_store_of_the_group_is_the_one_that_was_given() -> None:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        private.default_store().set("key", "value")
        # The group's store is a view of the one given, below a prefix of the group's.
        assert private.default_store().get("key") == b"value"
        assert store.num_keys() >= 1
    finally:
        dist.destroy_process_group()
