"""Converts layers to float8 with torchao: selects layers, their casts, and whether products are native or emulated."""

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from forge_core.errors import PlanError
from forge_core.protocols.model import ExpertStack
from forge_parallel import accelerator, torchao_library
from forge_parallel.placement.collectives import Ranks
from forge_parallel.placement.shares import collapsed, stacks
from forge_parallel.transforms.float8.layers import candidates, check_experts, check_shapes, selected
from forge_parallel.transforms.tensor.rules import Role, ancestors, tensor_parallel_rules

if TYPE_CHECKING:
    from forge_core.protocols.model import Context
    from forge_parallel.transforms.float8.linear import Casting


KEY, EXTRA = "transforms.float8", "float8"


def require_torchao() -> None:
    """Imports torchao's float8.

    Raises:
        ForgeError: torchao is not installed; the message says how to install it.
    """
    torchao_library.require("torchao.float8", KEY, EXTRA)


def emulates(wanted: Literal["auto"] | bool, device: torch.device) -> bool:
    """Whether products are computed in fp32 on values rounded to float8.

    Raises:
        PlanError: `wanted` is False, but the device has no float8 products.
    """
    return _emulates(wanted, device, accelerator.float8_fault(device))


def emulates_experts(wanted: Literal["auto"] | bool, device: torch.device, compute: torch.dtype) -> bool:
    """Like `emulates` for products of stacked experts, whose kernel fewer GPUs support and which returns bf16 only.

    Raises:
        PlanError: see `emulates`; or the device has the kernel, but `compute` is not bf16.
    """
    chosen = _emulates(wanted, device, accelerator.float8_groups_fault(device))
    if not chosen and compute != torch.bfloat16:
        raise PlanError(
            f"transforms.float8.experts: {accelerator.name(device)} supports bf16 results only; use precision.compute = 'bf16', "
            "or transforms.float8.emulate = true"
        )
    return chosen


def _emulates(wanted: Literal["auto"] | bool, device: torch.device, fault: str) -> bool:
    if wanted is False and fault:
        raise PlanError(f"transforms.float8.emulate = false, but {fault}; use 'auto' or true")
    if wanted == "auto" and fault and device.type != accelerator.CPU.type:
        warnings.warn(
            f"{fault}: they are emulated, which is slower than bf16; remove transforms.float8, or set emulate = true",
            stacklevel=3,
        )
    return bool(fault) if wanted == "auto" else wanted


def convert(
    part: nn.Module,
    context: "Context",
    *,
    recipe: Literal["tensorwise", "rowwise"],
    include: Iterable[str],
    exclude: Iterable[str],
    emulate: Literal["auto"] | bool,
    all_gather: bool,
    experts: bool,
) -> None:
    """Converts layers of `part` in place: modules keep their parameters and hooks, but get another class.

    Raises:
        PlanError: a pattern matches no layer, float8 does not support a layer's shape or class, or the precision is fp64.
        ForgeError: torchao is not installed.
    """
    if context.compute == torch.float64:
        raise PlanError("transforms.float8 does not support precision.compute = 'fp64'; use 'bf16', or 'fp32' for tests")
    modules = {path: part.get_submodule(path) for path in candidates(context.specs)}
    known = _without(modules, candidates(context.whole or context.specs))
    stacked = stacks(context.whole or context.specs) if experts else ()
    chosen = selected([*known, *stacked], include, exclude)
    if experts and chosen.isdisjoint(stacked):
        why = "include and exclude select none of them" if stacked else "the model has none"
        raise PlanError(f"transforms.float8.experts = true converts stacked experts, but {why}; remove it")
    linear = {path: _plain(path, module) for path, module in modules.items() if path in chosen}
    layout = context.topology.layout
    check_shapes({path: (m.out_features, m.in_features) for path, m in linear.items()}, context.specs, layout.tp)
    emulated = emulates(emulate, context.topology.device)
    require_torchao()
    from forge_parallel.transforms.float8.linear import Casting, float8_class

    casting = Casting.of(recipe, emulated)
    for path, module in linear.items():
        module.__class__ = float8_class(type(module))
        module.casting = _shared(casting, recipe, path, context)  # type: ignore[assignment]
    stacks_here = {path: part.get_submodule(path) for path in stacks(context.specs) if path in chosen}
    _convert_experts(stacks_here, emulate, context)
    if all_gather and layout.dp_replicate * layout.dp_shard * layout.cp > 1:
        _gather_in_float8(part, list(linear.values()), casting, context)


def _convert_experts(modules: Mapping[str, nn.Module], emulate: Literal["auto"] | bool, context: "Context") -> None:
    """Converts stacked experts. `ep` and `etp` shard them later, with a class that derives from the converted one."""
    if not modules:
        return
    emulated = emulates_experts(emulate, context.topology.device, context.compute)
    shapes: dict[str, tuple[int, int]] = {}
    for path, module in modules.items():
        if not isinstance(module, ExpertStack):
            raise PlanError(
                f"transforms.float8.experts: {path} is a {type(module).__name__} without `products` (ExpertStack); "
                f'add "{path}" to transforms.float8.exclude'
            )
        shapes |= {f"{path}.{name}": (p.shape[1], p.shape[2]) for name, p in module.named_parameters() if p.ndim == 3}
    check_experts(shapes, context.specs, context.topology.layout.etp)
    from forge_parallel.transforms.float8 import experts

    for module in modules.values():
        module.__class__ = experts.float8_experts_class(type(module))
        module.multiply = experts.emulated if emulated else experts.native  # type: ignore[assignment]


def find_scales(part: nn.Module) -> None:
    """Computes the scales of all weights that will be gathered, together."""
    if _weights(part):
        from forge_parallel.transforms.float8.linear import look_ahead

        look_ahead(part)


def forget_scales(part: nn.Module) -> None:
    """Discards the scales, because the weights change next."""
    for weight in _weights(part):
        weight.scale = None


def _shared(casting: "Casting", recipe: str, path: str, context: "Context") -> "Casting":
    """Returns the casts of a layer with the groups of ranks that hold parts of each operand.

    In recipe `rowwise`, each row has a power of two as its scale, so scales of a part and of the whole differ by a power of two,
    and results only in values too small for float8.
    """
    topology = context.topology
    layout = topology.layout
    if recipe == "rowwise":
        return casting
    tokens = (Ranks.of(topology.group("cp")),) if layout.cp > 1 else ()
    features = (Ranks.of(topology.group("tp")),) if layout.tp > 1 else ()
    roles = tensor_parallel_rules(context.specs, layout.tp, True).roles if features else {}
    role = roles.get(path)
    if role is Role.STREAM and not any(roles.get(above) is Role.REGION for above in ancestors(path)):
        tokens = features + tokens  # a layer on the residual stream itself, which is split along the sequence
    if role is Role.ROW:
        return replace(casting, input=features + tokens, weight=features, gradient=tokens)
    if role in (Role.COLUMN, Role.KV_COPY):
        return replace(casting, input=tokens, weight=features, gradient=features + tokens)
    return replace(casting, input=tokens, gradient=tokens)


def _without(modules: Mapping[str, nn.Module], paths: Iterable[str]) -> list[str]:
    """Returns the `paths` of linear layers. A path missing in this part is judged by the same path in another block."""
    others = {path for path, module in modules.items() if not isinstance(module, nn.Linear)}
    kinds = set(collapsed(others))
    return [path for path in paths if path not in others and (path in modules or collapsed([path])[0] not in kinds)]


def _plain(path: str, module: nn.Module) -> nn.Linear:
    assert isinstance(module, nn.Linear), "others are not chosen"
    if type(module).forward is not nn.Linear.forward:
        raise PlanError(
            f"transforms.float8: {path} is a {type(module).__name__}, whose forward is not that of nn.Linear; "
            f'add "{path}" to transforms.float8.exclude'
        )
    return module


def _gather_in_float8(part: nn.Module, converted: list[nn.Linear], casting: "Casting", context: "Context") -> None:
    """Wraps the weights of converted layers, except those that other modules use as well."""
    from forge_parallel.transforms.float8.linear import Float8Shard, GatheredWeight, Gathering

    topology = context.topology
    mesh = topology.data_mesh
    groups = [mesh.get_group(mesh.ndim - 1)] + ([topology.group("tp")] if topology.layout.tp > 1 else [])
    gathering = Gathering(casting, context.compute, tuple(groups))
    slots = [(module, slot, p) for module in part.modules() for slot, p in module._parameters.items() if p is not None]
    elsewhere = {p for module, slot, p in slots if slot != "weight" or module not in converted}
    wrapped: dict[Tensor, nn.Parameter] = {}
    weights = []
    for module in converted:
        plain = module.weight
        if plain not in elsewhere:
            if plain not in wrapped:
                weights.append(GatheredWeight(gathering))
                wrapped[plain] = nn.Parameter(Float8Shard(plain.detach(), weights[-1]), plain.requires_grad)
            module.weight = wrapped[plain]
    part.float8_weights = weights  # type: ignore[assignment]


def _weights(part: nn.Module) -> list[Any]:
    """Returns the weights of a part that are gathered in float8."""
    return getattr(part, "float8_weights", [])
