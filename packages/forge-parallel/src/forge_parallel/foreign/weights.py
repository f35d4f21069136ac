"""Where the weights of a foreign module come from: the module itself, or its own constructors.

Either way they are the same in every layout. A materialized module's are the truth, once all ranks hold the same. A builder's are
what its constructors make, recorded and replayed for one parameter at a time (`foreign.recording`).
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from forge_core.errors import PlanError
from forge_parallel.build.parallel_model import ParallelModel
from forge_parallel.foreign.recording import recorded, refuse_lazy
from forge_parallel.placement.boxes import local_box
from forge_parallel.torch_private import BatchNorm, is_orthogonal


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
                f"{name} keeps running statistics in {wider} and would compute in {compute}, in which such averages stand still; "
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
