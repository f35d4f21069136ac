"""Weights of a foreign module: its constructor is recorded without memory and replayed for one parameter at a time.

A rule such as "call reset_parameters" misses what a constructor does beyond it: a scaled projection, a gate that starts at
zero, a clone. So every operator on a tensor without memory is recorded. The value of a parameter is the replay of the entries
that it depends on; random numbers come from the seed and the place of the entry, so they are the same in every layout.
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
"""Operators whose results hold nothing yet."""

OVERWRITING = frozenset(
    {"normal_", "uniform_", "zero_", "fill_", "copy_", "bernoulli_", "exponential_", "random_", "log_normal_"}
)
"""Operators after which it does not matter what their first argument held."""


@dataclass(frozen=True)
class _Entry:
    """An operator, its arguments with tensors without memory in them, and the storages that it depends on and overwrites."""

    function: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    out: Any
    reads: tuple[int, ...]
    overwrites: int | None


class SeemingReal(TorchFunctionMode):
    """Inside, a tensor without memory says that it has some: torch's initializers do nothing to one that does not, and what is
    made on its device would know no values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs a function of torch."""
        if func == torch.Tensor.is_meta.__get__:  # type: ignore[attr-defined]
            return False
        if func == torch.Tensor.device.__get__ and args[0].device.type == "meta":  # type: ignore[attr-defined]
            return torch.device("cpu")
        return func(*args, **(kwargs or {}))


class Recording(TorchDispatchMode):
    """Use it as a context around a constructor, with `hollowing()` inside."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed
        self._tape: list[_Entry] = []
        self._writers: dict[int, list[int]] = {}
        self._given: dict[int, Tensor] = {}  # what parameters held when their modules took them
        self._raw = WeakIdKeyDictionary()  # storages with memory that hold nothing yet
        self._taken = WeakIdKeyDictionary()  # storages with memory of parameters -> what stands for them
        self._paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator, and records it if a tensor without memory takes part."""
        with DisableTorchFunction():
            return self._run(func, args, kwargs or {})

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self._paused:
            return func(*args, **kwargs)
        args, kwargs = tree_map(self._standing_for, (args, kwargs))
        if gives_values(func):  # a constructor that draws again until the numbers please it
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
        """What an operator gives on tensors without memory and others, whose values the tape keeps."""
        changed = {id(tensor): tensor for tensor in written(func, args, kwargs)}
        hollow = tree_map(
            lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) and id(leaf) not in changed else leaf, (args, kwargs)
        )
        try:
            return func(*hollow[0], **without_memory(hollow[1]))
        except NotImplementedError:  # torch does not know the shapes of its results, or writes them into memory
            if any(tensor.is_meta for tensor in changed.values()):
                raise
            args, kwargs = tree_map(self._with_memory, (args, kwargs))
            out = func(*args, **kwargs)
            return tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) and id(leaf) not in changed else leaf, out)

    def _with_memory(self, leaf: Any) -> Any:
        return self.replay(leaf) if isinstance(leaf, Tensor) and leaf.is_meta else leaf

    def _standing_for(self, leaf: Any) -> Any:
        """A module keeps a parameter without memory; its constructor may still hold the one that it gave to the module."""
        if not isinstance(leaf, Tensor) or leaf.is_meta or leaf.untyped_storage() not in self._taken:
            return leaf
        return self._taken[leaf.untyped_storage()].detach().as_strided(leaf.size(), leaf.stride(), leaf.storage_offset())

    def _record(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        changed = {_key(tensor) for tensor in written(func, args, kwargs)}
        inputs = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor) and leaf.is_meta]
        made = {_key(leaf) for leaf in tree_iter(out) if isinstance(leaf, Tensor)} - {_key(tensor) for tensor in inputs}
        overwrites, rest = None, inputs
        if func.overloadpacket.__name__ in OVERWRITING and _covers(args[0]):
            overwrites, rest = _key(args[0]), inputs[1:]
        args, kwargs, out = tree_map(_kept, (args, kwargs, out))
        for key in changed | made:
            self._writers.setdefault(key, []).append(len(self._tape))
        self._tape.append(_Entry(func, args, kwargs, out, tuple(_key(tensor) for tensor in rest), overwrites))

    @contextmanager
    def hollowing(self) -> Iterator[None]:
        """Inside, a parameter loses its memory as soon as a module takes it; buffers are computed as ever."""
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
        """What stands for a parameter with memory, always the same."""
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
        """Whether anything says what a parameter holds at first."""
        return not parameter.numel() or _key(parameter) in self._given or _key(parameter) in self._writers

    def replay(self, parameter: Tensor) -> Tensor:
        """What a parameter without memory would hold: (its shape), on the host."""
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
                kwargs.pop("generator", None)  # it would have drawn for parameters in turn
                _bind(entry.out, entry.function(*args, **kwargs), memory)
            return self._real(parameter.detach(), memory)

    def _needed(self, wanted: int) -> set[int]:
        """Entries on which a storage depends; nothing before it was overwritten."""
        found: set[int] = set()
        todo = [(wanted, len(self._tape))]
        while todo:
            key, before = todo.pop()
            for index in reversed([index for index in self._writers.get(key, ()) if index < before]):
                if index not in found:
                    found.add(index)
                    todo += [(other, index) for other in self._tape[index].reads]
                if self._tape[index].overwrites == key:
                    break
        return found

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
    """
    Raises:
        PlanError: the parameter has no size yet.
    """
    if isinstance(parameter, UninitializedParameter):
        raise PlanError(
            f"parallelize: {name} has no size before its module is called; give sizes to its constructor, or call the module "
            "once and give it instead of its builder"
        )


def _bind(recorded: Any, real: Any, memory: dict[int, torch.UntypedStorage]) -> None:
    for hollow, made in zip(tree_iter(recorded), tree_iter(real), strict=True):
        if isinstance(hollow, Tensor) and _key(hollow) not in memory:
            same = made if made.stride() == hollow.stride() else torch.empty_strided(hollow.size(), hollow.stride()).copy_(made)
            memory[_key(hollow)] = same.untyped_storage()


def _key(tensor: Tensor) -> int:
    """Names a storage without memory for as long as the tape, which holds it, exists."""
    return storage_key(tensor.untyped_storage())


def _covers(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def _kept(leaf: Any) -> Any:
    """Until the replay a tensor may change, and be given another storage; what it is now is what counts."""
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach() if leaf.is_meta else leaf.detach().clone()


def without_memory(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of an operator on a tensor without memory, which has been told that it is elsewhere."""
    return {name: torch.device("meta") if name == "device" and value is not None else value for name, value in kwargs.items()}


def gives_values(func: Any) -> bool:
    """Whether an operator gives Python values and no tensor, such as `equal`, `allclose` or what is behind `item`."""
    returned = [str(one.type) for one in schema(func).returns]
    return bool(returned) and not any("Tensor" in kind for kind in returned)


def written(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors that an operator changes."""
    for index, argument in enumerate(schema(func).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in tree_iter(given) if isinstance(leaf, Tensor))


def recorded(build: Callable[[], nn.Module], seed: int) -> tuple[nn.Module, Recording]:
    """What `build` makes, with parameters that have no memory, and what it did to them. What it drew with memory depends on
    `seed`, too."""
    recording = Recording(seed)
    with torch.random.fork_rng(devices=[]), recording, recording.hollowing():
        torch.manual_seed(seed)
        module = build()
    for part in module.modules():  # what a constructor replaced behind our back
        for slot, parameter in part._parameters.items():
            if parameter is not None and not parameter.is_meta:
                part._parameters[slot] = recording.hollow(parameter)
    return module, recording


@dataclass(frozen=True)
class Skeleton:
    """A module whose parameters are on the meta device, with what they will hold.

    Attributes:
        module: the module.
        buffers: the real values of all buffers, by name: constructors compute them, and nothing else could.
        values: yields (prefix, {name: whole tensor}) for all parameters, few at a time.
    """

    module: nn.Module
    buffers: Mapping[str, torch.Tensor]
    values: Callable[[], Iterator[Mapping[str, torch.Tensor]]]

    def hollow(self) -> nn.Module:
        """The module without any memory: its buffers on the meta device, too."""
        for part in self.module.modules():
            part._buffers.update({name: b.to("meta") for name, b in part._buffers.items() if b is not None})
        return self.module

    def fill(self, model: ParallelModel) -> None:
        """Gives every parameter of `model` its share, and every buffer back its value.

        Raises:
            PlanError: a parameter got no value, or several.
        """
        copies = model.cut.copies if model.cut is not None else frozenset()  # they follow their originals
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
            raise PlanError(f"parallelize: {', '.join(wrong)} got no value, or several")
        for part in model.parts:
            computed = set(_computing_with_buffers(part).values())
            for path, module in part.named_modules():
                for slot in module._buffers:
                    name = f"{path}.{slot}".removeprefix(".")
                    if name in self.buffers:  # in the number format that its constructor chose
                        module._buffers[slot] = self.buffers[name].to(model.topology.device)
                        if module in computed and (buffer := module._buffers[slot]) is not None and buffer.is_floating_point():
                            module._buffers[slot] = buffer.to(model.compute)


def of_module(module: nn.Module, device: torch.device) -> Skeleton:
    """The skeleton of a materialized module, which is consumed. All ranks call this; they compare weights on `device`.

    Raises:
        PlanError: the module has tensors without memory, or ranks hold different weights; names the first such tensor.
    """
    for name, parameter in module.named_parameters():
        refuse_lazy(parameter, name)
    truth = {name: parameter.detach() for name, parameter in module.named_parameters()}
    if hollow := [name for name, tensor in truth.items() if tensor.is_meta]:
        raise PlanError(f"parallelize: {hollow[0]} has no memory; give the function that builds the module instead")
    buffers = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
    _same_everywhere(truth | buffers, device)
    _to_meta(module)
    return Skeleton(module, buffers, lambda: iter([truth]))


def of_builder(build: Callable[[], nn.Module], seed: int) -> Skeleton:
    """The skeleton of what `build` makes; its weights are what its constructors make of them, when they are needed.

    Raises:
        PlanError: a buffer has no memory, or nothing says what a parameter holds at first.
    """
    module, recording = recorded(build, seed)
    buffers = {
        # Those without memory are made of parameters, such as the vectors of a spectral norm.
        name: recording.replay(buffer) if buffer.is_meta and recording.starts(buffer) else buffer.detach().clone()
        for name, buffer in module.named_buffers()
    }
    if hollow := [name for name, buffer in buffers.items() if buffer.is_meta]:
        raise PlanError(f"parallelize: the builder gave {hollow[0]} no memory; let it create buffers on a real device")
    wanted = {name: parameter.detach() for name, parameter in module.named_parameters()}
    if unsaid := [name for name, parameter in wanted.items() if not recording.starts(parameter)]:
        raise PlanError(
            f"parallelize: the builder leaves {unsaid[0]} uninitialized; give it a value in the constructor that creates it, or "
            "give a materialized module"
        )
    return Skeleton(module, buffers, lambda: ({name: recording.replay(p)} for name, p in wanted.items()))


def refuse_narrow(skeleton: Skeleton, compute: torch.dtype) -> None:
    """
    Raises:
        PlanError: a module computes with its buffers, or in operators, for which `compute` is too narrow.
    """
    for path, module in _computing_with_buffers(skeleton.module).items():
        name = f"parallelize: {path} ({type(module).__name__})"
        names = (f"{path}.{slot}" for slot in module._buffers)
        held = [skeleton.buffers[name].dtype for name in names if name in skeleton.buffers]
        wider = next((dtype for dtype in held if dtype.is_floating_point and compute.itemsize < dtype.itemsize), None)
        if wider is not None and isinstance(module, BatchNorm):
            raise PlanError(
                f"{name} keeps running statistics in {wider} and would compute in {compute}, which rounds their updates away; "
                'set compute = "fp32", track_running_stats=False or another norm'
            )
        if wider is not None or (is_orthogonal(module) and compute.itemsize < torch.float32.itemsize):
            raise PlanError(
                f"{name} computes a weight from parameters in {compute}, which torch does not do "
                + (f"with its buffers in {wider}" if wider else "for orthogonal matrices")
                + '; set compute = "fp32", or remove the parametrization'
            )


def _computing_with_buffers(module: nn.Module) -> dict[str, nn.Module]:
    """By path, modules whose buffers must have the format of their parameters, as in one process: torch computes with both."""
    found: dict[str, nn.Module] = {}
    for path, part in module.named_modules():
        if isinstance(part, BatchNorm):
            found[path] = part
        elif isinstance(part, ParametrizationList):
            found |= {f"{path}.{name}": inner for name, inner in part.named_modules() if name}
    return found


def _to_meta(module: nn.Module) -> None:
    """Takes the memory of all parameters; tied ones stay tied."""
    made: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for slot, parameter in part._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    made[id(parameter)] = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
                part._parameters[slot] = made[id(parameter)]


def _same_everywhere(tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    mine = torch.stack([_digest(tensor) for tensor in tensors.values()])
    # On the rank's device, which its group serves however it was opened; a CPU not every group does.
    first = mine.clone().to(device)
    dist.broadcast(first, 0)
    differ = (first.cpu() != mine).any(1).to(torch.int32).to(device)
    dist.all_reduce(differ, dist.ReduceOp.MAX)
    if differ.any():
        name = list(tensors)[int(differ.cpu().nonzero()[0])]
        raise PlanError(f"parallelize: ranks were given different weights, first in {name}; load or seed them alike on all ranks")


def _digest(tensor: torch.Tensor) -> torch.Tensor:
    raw = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    digest = hashlib.blake2b(raw.numpy().data, digest_size=16, key=str((tensor.dtype, tuple(tensor.shape))).encode()[:64])
    return torch.frombuffer(bytearray(digest.digest()), dtype=torch.int64)
