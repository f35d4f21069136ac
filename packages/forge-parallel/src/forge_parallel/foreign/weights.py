"""Weights of a foreign module: its constructor is recorded on the meta device and replayed for one parameter at a time.

A rule such as "call reset_parameters" misses what a constructor does besides: a scaled projection, a gate that starts at zero, a
clone. So every operator on a meta tensor is recorded. A parameter's value is the replay of the operators that it depends on.
Random numbers are seeded by the seed and the operator's index, so they are the same in every layout.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrize import ParametrizationList
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from forge_core.errors import PlanError
from forge_parallel.model.parallel_model import ParallelModel
from forge_parallel.placement.boxes import local_box
from forge_parallel.torch_private import (
    BatchNorm,
    DisableTorchFunction,
    TorchDispatchMode,
    is_orthogonal,
    schema,
    storage_key,
    tree_iter,
    tree_map,
)

RAW = frozenset({"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"})
"""Operators whose results are uninitialized."""

OVERWRITING = frozenset(
    {"normal_", "uniform_", "zero_", "fill_", "copy_", "bernoulli_", "exponential_", "random_", "log_normal_"}
)
"""Operators that overwrite their first argument without reading it."""


@dataclass(frozen=True)
class _Entry:
    """An operator, its arguments (with meta tensors), the storages that it reads and the storage that it overwrites."""

    function: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    out: Any
    reads: tuple[int, ...]
    overwrites: int | None


class SeemingReal(TorchFunctionMode):
    """Context in which a meta tensor reports the CPU as its device. Otherwise torch's initializers would skip it, and tensors
    created on its device would have no values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs a function of torch, but answers `is_meta` and `device` for meta tensors."""
        if func == torch.Tensor.is_meta.__get__:  # type: ignore[attr-defined]
            return False
        if func == torch.Tensor.device.__get__ and args[0].device.type == "meta":  # type: ignore[attr-defined]
            return torch.device("cpu")
        return func(*args, **(kwargs or {}))


class ConstructorRecording(TorchDispatchMode):
    """Context that records a module's constructor; use it with `hollowing()` inside."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed
        self._tape: list[_Entry] = []
        self._writers: dict[int, list[int]] = {}
        self._given: dict[int, Tensor] = {}  # values of parameters when their modules registered them
        self._raw = WeakIdKeyDictionary()  # uninitialized storages with memory
        self._taken = WeakIdKeyDictionary()  # storages of parameters with memory -> their meta parameters
        self._paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator, and records it if an argument or result is a meta tensor."""
        with DisableTorchFunction():
            return self._run(func, args, kwargs or {})

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self._paused:
            return func(*args, **kwargs)
        args, kwargs = tree_map(self._standing_for, (args, kwargs))
        if gives_values(func):  # for example a constructor that draws again until a condition holds
            args = tree_map(self._with_memory, args)
        inputs = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
        out = self._computed(func, args, kwargs) if any(tensor.is_meta for tensor in inputs) else func(*args, **kwargs)
        outputs = [leaf for leaf in tree_iter(out) if isinstance(leaf, Tensor)]
        if any(tensor.is_meta for tensor in (*inputs, *outputs)):
            self._record(func, args, kwargs, out)
        elif func.overloadpacket.__name__ in RAW:
            self._raw.update({tensor.untyped_storage(): True for tensor in outputs})
        else:
            for tensor in written(func, args, kwargs):
                self._raw.pop(tensor.untyped_storage(), None)
        return out

    def _computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Returns the result on the meta device of an operator with meta tensors and others; the tape keeps the others'
        values."""
        changed = {id(tensor): tensor for tensor in written(func, args, kwargs)}
        hollow = tree_map(
            lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) and id(leaf) not in changed else leaf, (args, kwargs)
        )
        try:
            return func(*hollow[0], **without_memory(hollow[1]))
        except NotImplementedError:  # torch cannot infer the result's shape, or the operator writes to a tensor with memory
            if any(tensor.is_meta for tensor in changed.values()):
                raise
            args, kwargs = tree_map(self._with_memory, (args, kwargs))
            out = func(*args, **kwargs)
            return tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) and id(leaf) not in changed else leaf, out)

    def _with_memory(self, leaf: Any) -> Any:
        return self.replay(leaf) if isinstance(leaf, Tensor) and leaf.is_meta else leaf

    def _standing_for(self, leaf: Any) -> Any:
        """Replaces a tensor of a registered parameter by its meta tensor; the constructor may still hold the original."""
        if not isinstance(leaf, Tensor) or leaf.is_meta or leaf.untyped_storage() not in self._taken:
            return leaf
        return self._taken[leaf.untyped_storage()].detach().as_strided(leaf.size(), leaf.stride(), leaf.storage_offset())

    def _record(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        changed = {_key(tensor) for tensor in written(func, args, kwargs)}
        inputs = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor) and leaf.is_meta]
        created = {_key(leaf) for leaf in tree_iter(out) if isinstance(leaf, Tensor)} - {_key(tensor) for tensor in inputs}
        overwrites, rest = None, inputs
        if func.overloadpacket.__name__ in OVERWRITING and _covers(args[0]):
            overwrites, rest = _key(args[0]), inputs[1:]
        args, kwargs, out = tree_map(_kept, (args, kwargs, out))
        for key in changed | created:
            self._writers.setdefault(key, []).append(len(self._tape))
        self._tape.append(_Entry(func, args, kwargs, out, tuple(_key(tensor) for tensor in rest), overwrites))

    @contextmanager
    def hollowing(self) -> Iterator[None]:
        """Context in which modules register every parameter as a meta tensor; buffers are computed as usual."""
        original = nn.Module.register_parameter

        def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
            refuse_lazy(param, f"{name} of a {type(module).__name__}")
            with DisableTorchFunction():
                hollow = param if param is None or param.is_meta else self.hollow(param)
            original(module, name, hollow)

        nn.Module.register_parameter = register  # type: ignore[method-assign]
        try:
            with SeemingReal():
                yield
        finally:
            nn.Module.register_parameter = original  # type: ignore[method-assign]

    def hollow(self, parameter: nn.Parameter) -> nn.Parameter:
        """Returns the meta parameter that replaces `parameter`; the same one for every call."""
        storage = parameter.untyped_storage()
        if storage not in self._taken:
            self._paused = True
            stand_in = cast(Any, type(parameter))(parameter.to("meta"), requires_grad=parameter.requires_grad)
            self._paused = False
            if storage not in self._raw:
                self._given[_key(stand_in)] = parameter.detach()
            self._taken[storage] = stand_in
        return self._taken[storage]

    def starts(self, parameter: Tensor) -> bool:
        """Whether the parameter is empty or the record defines its initial value."""
        return not parameter.numel() or _key(parameter) in self._given or _key(parameter) in self._writers

    def replay(self, parameter: Tensor) -> Tensor:
        """Returns the value of a meta parameter, in its shape, on the CPU."""
        memory: dict[int, torch.UntypedStorage] = {}
        resolve = lambda leaf: self._real(leaf, memory)  # noqa: E731
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            for index in sorted(self._needed(_key(parameter))):
                entry = self._tape[index]
                if torch.Tag.nondeterministic_seeded in entry.function.tags:
                    digest = hashlib.blake2b(f"{self._seed}/{index}".encode(), digest_size=7).digest()
                    torch.default_generator.manual_seed(int.from_bytes(digest, "little"))
                args, kwargs = tree_map(resolve, (entry.args, dict(entry.kwargs)))
                kwargs |= {"device": torch.device("cpu")} if kwargs.get("device") is not None else {}
                kwargs.pop("generator", None)  # it would depend on the order in which parameters are drawn
                _bind(entry.out, entry.function(*args, **kwargs), memory)
            return self._real(parameter.detach(), memory)

    def _needed(self, wanted: int) -> set[int]:
        """Returns the indices of the entries on which a storage depends, back to the last operator that overwrites it."""
        entries: set[int] = set()
        todo = [(wanted, len(self._tape))]
        while todo:
            key, before = todo.pop()
            for index in reversed([index for index in self._writers.get(key, ()) if index < before]):
                if index not in entries:
                    entries.add(index)
                    todo += [(other, index) for other in self._tape[index].reads]
                if self._tape[index].overwrites == key:
                    break
        return entries

    def _real(self, leaf: Any, memory: dict[int, torch.UntypedStorage]) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_meta:
            return leaf
        key = _key(leaf)
        if key not in memory:
            given = self._given.get(key)
            size = leaf.untyped_storage().nbytes()
            memory[key] = torch.UntypedStorage(size) if given is None else given.contiguous().untyped_storage().clone()
        return torch.empty(0, dtype=leaf.dtype).set_(memory[key], leaf.storage_offset(), leaf.size(), leaf.stride())


def refuse_lazy(parameter: Tensor | None, name: str) -> None:
    """Refuses lazy parameters.

    Raises:
        PlanError: the parameter is uninitialized and has no shape yet.
    """
    if isinstance(parameter, UninitializedParameter):
        raise PlanError(
            f"parallelize: parameter {name} is lazy and has no shape yet; give sizes to its module's constructor, or call the "
            "module once and give the module instead of its builder"
        )


def _bind(recorded: Any, real: Any, memory: dict[int, torch.UntypedStorage]) -> None:
    for hollow, tensor in zip(tree_iter(recorded), tree_iter(real), strict=True):
        if isinstance(hollow, Tensor) and _key(hollow) not in memory:
            aligned = tensor.stride() == hollow.stride()
            same = tensor if aligned else torch.empty_strided(hollow.size(), hollow.stride()).copy_(tensor)
            memory[_key(hollow)] = same.untyped_storage()


def _key(tensor: Tensor) -> int:
    """Returns the key of a meta storage; it is unique while the tape holds the tensor."""
    return storage_key(tensor.untyped_storage())


def _covers(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def _kept(leaf: Any) -> Any:
    """Detaches or copies a tensor, because it may change before the replay, or get another storage."""
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach() if leaf.is_meta else leaf.detach().clone()


def without_memory(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an operator's keyword arguments with `device` set to the meta device."""
    return {name: torch.device("meta") if name == "device" and value is not None else value for name, value in kwargs.items()}


def gives_values(func: Any) -> bool:
    """Whether an operator returns Python values and no tensor, such as `equal`, `allclose` or the operator behind `item`."""
    returned = [str(result.type) for result in schema(func).returns]
    return bool(returned) and not any("Tensor" in kind for kind in returned)


def written(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yields the tensors that an operator modifies."""
    for index, argument in enumerate(schema(func).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in tree_iter(value) if isinstance(leaf, Tensor))


def recorded(build: Callable[[], nn.Module], seed: int) -> tuple[nn.Module, ConstructorRecording]:
    """Returns the module that `build` creates, with meta parameters, and the record of its construction. Random numbers that are
    drawn with memory are seeded by `seed` as well."""
    recording = ConstructorRecording(seed)
    with torch.random.fork_rng(devices=[]), recording, recording.hollowing():
        torch.manual_seed(seed)
        module = build()
    for part in module.modules():  # parameters that a constructor put into `_parameters` without registering them
        for slot, parameter in part._parameters.items():
            if parameter is not None and not parameter.is_meta:
                part._parameters[slot] = recording.hollow(parameter)
    return module, recording


@dataclass(frozen=True)
class Skeleton:
    """A module with meta parameters, and the values of its parameters and buffers.

    Attributes:
        module: the module.
        buffers: values of all buffers by name; constructors compute them, so they cannot be computed later.
        values: yields mappings {name: full tensor}, together over all parameters, a few at a time.
    """

    module: nn.Module
    buffers: Mapping[str, torch.Tensor]
    values: Callable[[], Iterator[Mapping[str, torch.Tensor]]]

    def hollow(self) -> nn.Module:
        """Returns the module with its buffers on the meta device as well."""
        for part in self.module.modules():
            part._buffers.update({name: b.to("meta") for name, b in part._buffers.items() if b is not None})
        return self.module

    def fill(self, model: ParallelModel) -> None:
        """Copies each parameter's shard and each buffer's value into `model`.

        Raises:
            PlanError: a parameter has no value, or several.
        """
        copies = model.cut.copies if model.cut is not None else frozenset()  # updated together with their originals
        every = (named for part in model.parts for named in part.named_parameters())
        live = {name: tensor for name, tensor in every if name not in copies}
        filled: list[str] = []
        with torch.no_grad():
            for values in self.values():
                for name, whole in values.items():
                    if name in live:
                        box = local_box(live[name])
                        box.local.copy_(box.within(whole.view(box.shape)))
                        filled.append(name)
        if sorted(filled) != sorted(live):
            wrong = sorted(set(live) ^ set(filled)) or sorted({name for name in filled if filled.count(name) > 1})
            raise PlanError(f"parallelize: parameters without a value or with several values: {', '.join(wrong)}")
        for part in model.parts:
            computed = set(_computing_with_buffers(part).values())
            for path, module in part.named_modules():
                for slot in module._buffers:
                    name = f"{path}.{slot}".removeprefix(".")
                    if name in self.buffers:  # in the dtype that its constructor chose
                        module._buffers[slot] = self.buffers[name].to(model.topology.device)
                        if module in computed and (buffer := module._buffers[slot]) is not None and buffer.is_floating_point():
                            module._buffers[slot] = buffer.to(model.compute)


def of_module(module: nn.Module, device: torch.device) -> Skeleton:
    """Collective: returns the skeleton of a materialized module, which is consumed. Ranks compare weights on `device`.

    Raises:
        PlanError: a parameter is on the meta device, or ranks have different weights; the error names the first one.
    """
    for name, parameter in module.named_parameters():
        refuse_lazy(parameter, name)
    truth = {name: parameter.detach() for name, parameter in module.named_parameters()}
    if hollow := [name for name, tensor in truth.items() if tensor.is_meta]:
        raise PlanError(
            f"parallelize: parameter {hollow[0]} is on the meta device; give the function that builds the module instead"
        )
    buffers = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
    _same_everywhere(truth | buffers, device)
    _to_meta(module)
    return Skeleton(module, buffers, lambda: iter([truth]))


def of_builder(build: Callable[[], nn.Module], seed: int) -> Skeleton:
    """Returns the skeleton of the module that `build` creates; weights are replayed from its constructors when needed.

    Raises:
        PlanError: a buffer is on the meta device, or a parameter is never initialized.
    """
    module, recording = recorded(build, seed)
    buffers = {
        # A buffer on the meta device is computed from parameters, such as the vectors of a spectral norm.
        name: recording.replay(buffer) if buffer.is_meta and recording.starts(buffer) else buffer.detach().clone()
        for name, buffer in module.named_buffers()
    }
    if hollow := [name for name, buffer in buffers.items() if buffer.is_meta]:
        raise PlanError(
            f"parallelize: the builder leaves buffer {hollow[0]} on the meta device; let it create it on a real device"
        )
    wanted = {name: parameter.detach() for name, parameter in module.named_parameters()}
    if unsaid := [name for name, parameter in wanted.items() if not recording.starts(parameter)]:
        raise PlanError(
            f"parallelize: the builder leaves parameter {unsaid[0]} uninitialized; initialize it in the constructor that creates "
            "it, or give a materialized module"
        )
    return Skeleton(module, buffers, lambda: ({name: recording.replay(p)} for name, p in wanted.items()))


def refuse_narrow(skeleton: Skeleton, compute: torch.dtype) -> None:
    """Refuses a compute dtype that is too narrow for a module.

    Raises:
        PlanError: a module computes with wider buffers, or uses operators that do not support `compute`.
    """
    for path, module in _computing_with_buffers(skeleton.module).items():
        name = f"parallelize: {path} ({type(module).__name__})"
        names = (f"{path}.{slot}" for slot in module._buffers)
        dtypes = [skeleton.buffers[name].dtype for name in names if name in skeleton.buffers]
        wider = next((dtype for dtype in dtypes if dtype.is_floating_point and compute.itemsize < dtype.itemsize), None)
        if wider is not None and isinstance(module, BatchNorm):
            raise PlanError(
                f"{name} keeps running statistics in {wider} but computes in {compute}, which would round their updates to zero; "
                'set compute = "fp32" or track_running_stats=False, or use another norm'
            )
        if wider is not None or (is_orthogonal(module) and compute.itemsize < torch.float32.itemsize):
            raise PlanError(
                f"{name} computes a weight from parameters in {compute}, which torch does not support "
                + (f"with buffers in {wider}" if wider else "for orthogonal matrices")
                + '; set compute = "fp32", or remove the parametrization'
            )


def _computing_with_buffers(module: nn.Module) -> dict[str, nn.Module]:
    """Returns, by path, the modules whose buffers must have the dtype of their parameters, because torch combines both."""
    modules: dict[str, nn.Module] = {}
    for path, part in module.named_modules():
        if isinstance(part, BatchNorm):
            modules[path] = part
        elif isinstance(part, ParametrizationList):
            modules |= {f"{path}.{name}": inner for name, inner in part.named_modules() if name}
    return modules


def _to_meta(module: nn.Module) -> None:
    """Moves all parameters to the meta device; tied ones stay tied."""
    hollow: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for slot, parameter in part._parameters.items():
            if parameter is not None:
                if id(parameter) not in hollow:
                    hollow[id(parameter)] = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
                part._parameters[slot] = hollow[id(parameter)]


def _same_everywhere(tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    digests = torch.stack([_digest(tensor) for tensor in tensors.values()])
    # On the rank's device: the group's backend supports it, but perhaps not the CPU.
    first = digests.clone().to(device)
    dist.broadcast(first, 0)
    differ = (first.cpu() != digests).any(1).to(torch.int32).to(device)
    dist.all_reduce(differ, dist.ReduceOp.MAX)
    if differ.any():
        name = list(tensors)[int(differ.cpu().nonzero()[0])]
        raise PlanError(f"parallelize: the weights differ between ranks, first in {name}; load or seed them equally on all ranks")


def _digest(tensor: torch.Tensor) -> torch.Tensor:
    raw = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    digest = hashlib.blake2b(raw.numpy().data, digest_size=16, key=str((tensor.dtype, tuple(tensor.shape))).encode()[:64])
    return torch.frombuffer(bytearray(digest.digest()), dtype=torch.int64)
