"""Full tensors of a sharded model, added in few collectives, against what DTensor gathers; what a kernel gets of such a model."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

from forge_core.errors import PlanError
from forge_core.layout import Layout
from forge_core.protocols.model import NamedTensor
from forge_parallel.model import parallel_model
from forge_parallel.model.parallel_model import gathered
from forge_parallel.model.plan import Plan
from forge_parallel.model.realize import Blueprint, realize
from forge_parallel.optim.elementwise import AdamW
from forge_parallel.optim.optimizers import AdamWConfig
from forge_parallel.placement.topology import Topology
from forge_parallel.transforms.shard import FullyShard
from harness.pool import World
from parallel.tiny import Tiny

CPU = torch.device("cpu")


def _sharded() -> Any:
    at = Layout.parse("dp2")
    return realize(Blueprint.of(Tiny), Plan.of([FullyShard()], at), Topology.of(at, CPU), 0, "fp64", "fp64")


def _counted(most: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], int]:
    """What is gathered, what DTensor gathers, and the number of collectives of the first."""
    model = _sharded()
    held = dict(model.parameters_held())
    with pytest.MonkeyPatch.context() as patch, CommDebugMode() as counter:
        patch.setattr(parallel_model, "MOST_GATHERED", most)
        found = gathered(model, held)
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in found.values()), "no views of a batch"
    expected = {name: tensor.full_tensor() for name, tensor in held.items() if isinstance(tensor, DTensor)}
    return found, expected, counter.get_total_counts()


@pytest.mark.parametrize(("most", "collectives"), [(1 << 22, 2), (1, None)], ids=["together", "one by one"])
def test_full_tensors_are_those_of_dtensor(world: World, most: int, collectives: int | None) -> None:
    """Also of tensors that are larger than what is added at once, and of shards of different sizes."""
    for found, expected, sums in world.run(_counted, 2, most):
        assert found.keys() == expected.keys() and len(found) > 20
        assert all(torch.equal(found[name], expected[name]) and found[name].dtype == torch.float64 for name in found)
        assert sums == (collectives or 2 * len(found))


def test_batches_have_names_in_order_and_no_more_elements_than_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_model, "MOST_GATHERED", 10)
    sizes = {"a": 4, "b": 6, "c": 0, "d": 1, "e": 11, "f": 10, "g": 0}
    assert list(parallel_model._batches(sizes)) == [["a", "b", "c"], ["d"], ["e"], ["f", "g"]]
    assert list(parallel_model._batches({})) == []


def test_a_tensor_without_elements_needs_no_owner() -> None:
    model: Any = SimpleNamespace(shapes={"w": (2,), "empty": (0, 3), "missing": (2,)}, topology=Topology(Layout(), CPU))
    found = gathered(model, {"w": torch.ones(2), "empty": torch.ones(0, 3)})
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == {"w": (2,), "empty": (0, 3)}


def _claimed(how: str) -> tuple[str, list[str]]:
    """The error, or the gathered names, if two ranks own all elements of `w`, one rank half of them, or no rank any."""
    topology = Topology.of(Layout.parse("dp2"), CPU)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    other = distribute_tensor(torch.ones(4, 3, dtype=torch.float64), mesh, [Shard(0)])
    claims = {"twice": other.full_tensor(), "half": other if dist.get_rank() == 0 else None, "nobody": None}
    model: Any = SimpleNamespace(shapes={"other": (4, 3), "w": (4, 3)}, topology=topology)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel_model, "owns", lambda *_: True)  # also of the full tensor, which one rank owns otherwise
        try:
            return "", list(gathered(model, {"other": other, "w": claims[how]}))
        except PlanError as error:
            return str(error), []


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("twice", "w: elements are owned by 2 to 2 ranks instead of one"),
        ("half", "w: elements are owned by 0 to 1 ranks instead of one"),
        ("nobody", ""),
    ],
)
def test_every_element_has_one_owner(world: World, how: str, said: str) -> None:
    for message, names in world.run(_claimed, 2, how):
        assert message == said
        assert names == ([] if said else ["other"])


class _Kinds(TorchDispatchMode):
    """Types of the tensors in the lists of the fused kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[type] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.overloadpacket is torch.ops.aten._fused_adamw_:
            self.found |= {type(tensor) for tensors in args for tensor in tensors}
        return function(*args, **(kwargs or {}))


def _updated() -> set[str]:
    model = _sharded()
    optimizer = AdamWConfig().build(model)
    for tensor in dict(model.parameters_held()).values():
        assert isinstance(tensor, DTensor)
        tensor.grad = torch.ones_like(tensor)
    with _Kinds() as kinds:
        optimizer.step(torch.zeros(()))
    return {kind.__name__ for kind in kinds.found}


def test_the_kernel_of_adamw_gets_the_parts_of_a_rank(world: World) -> None:
    """DTensor would propagate the sharding of lists of all parameters."""
    for kinds in world.run(_updated, 2):
        assert kinds and "DTensor" not in kinds


def _updated_with(gradient: str) -> str:
    """The error of a step with the local shards of another placement, or without one."""
    mesh = init_device_mesh("cpu", (2,))
    ones = torch.ones(4, 3)
    parameter = torch.nn.Parameter(distribute_tensor(ones, mesh, [Replicate()]))
    gradients = {
        "partial": DTensor.from_local(ones, mesh, [Partial()]),
        "sharded": distribute_tensor(ones, mesh, [Shard(0)]),
        "right": distribute_tensor(ones, mesh, [Replicate()]),
    }
    parameter.grad = gradients[gradient]
    optimizer = AdamW(
        cast("Any", SimpleNamespace(trainable=lambda: [NamedTensor("w", parameter, "matrix")])), 1e-3, (0.9, 0.95), 1e-8, 0.1
    )
    try:
        optimizer.step()
    except AssertionError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("gradient", "said"), [("partial", "Partial"), ("sharded", "Shard"), ("right", "")])
def test_a_gradient_in_another_placement_is_refused(world: World, gradient: str, said: str) -> None:
    """A sum that is pending would be used as if it were complete."""
    for message in world.run(_updated_with, 2, gradient):
        assert (said in message and message.startswith("w: the parameter has the placements")) if said else message == ""
