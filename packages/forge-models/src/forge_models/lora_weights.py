"""Weights of a model with an adapter: from a base and an adapter, merged into one model, and the hash that identifies a base."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn

from forge_core.component import Component
from forge_core.errors import CheckpointError, ForgeError
from forge_core.protocols.weights import StoredTensor, Weights
from forge_models.base_format import TUNED
from forge_models.blocks.lora import FACTOR_A, FACTOR_B, MAGNITUDE, row_lengths
from forge_models.quantized_weights import DequantizedWeights, in_full

Shape = tuple[int, ...]
WHOLE = frozenset(TUNED.values())
"""Names of parameters that an adapter may have whole."""


class Parts:
    """Names of the tensors of a model with an adapter, whose base counts as not quantized; building it allocates nothing.

    Attributes:
        base: names of the tensors that belong to the base.
        adapter: shapes of the adapter's parameters by name, and of those that are trained whole beside it.
        tuned: names of the latter, which the base has as well.
        shapes: shapes of all parameters and buffers.
    """

    def __init__(self, model: Any) -> None:
        with torch.device("meta"):
            module = in_full(model).build()
        specs = module.specs()
        named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        self.base = specs.base
        self.shapes: dict[str, Shape] = {name: tuple(tensor.shape) for name, tensor in named.items()}
        trained = (name for name, parameter in module.named_parameters() if parameter.requires_grad)
        self.adapter: dict[str, Shape] = {name: self.shapes[name] for name in trained}
        new = {TUNED["head"]} if getattr(model, "labels", ()) else set[str]()  # the head of a classifier, which the base may lack
        self.tuned = frozenset(name for name in self.adapter if not _is_factor(name)) - new
        self._buffers = frozenset(dict(module.named_buffers()))

    def check_base(self, weights: Weights) -> None:
        """Checks that weights have all parameters of the base.

        Raises:
            ForgeError: a tensor is missing or has another shape; the message lists them.
        """
        stored = weights.tensors
        faults = [f"{name}: missing" for name in sorted((self.base | self.tuned) - self._buffers - set(stored))]
        faults += [
            f"{name}: shape {stored[name].shape}, but [model] has {self.shapes[name]}"
            for name in sorted((self.base | self.tuned) & set(stored))
            if stored[name].shape != self.shapes[name]
        ]
        faults += [f"{name}: not in [model]" for name in sorted(set(stored) - set(self.shapes))]
        if faults:
            raise ForgeError(
                "\n  ".join(
                    [f"{weights.facts.origin} is not the base of this [model]; correct its keys, or the path:", *faults[:20]]
                )
            )

    def check_adapter(self, weights: Weights) -> None:
        """Checks that weights are an adapter of this model: the same matrices, the same rank.

        Raises:
            ForgeError: they are not; the message says what to change.
        """
        found = {name: entry.shape for name, entry in weights.tensors.items()}
        found = {name: shape for name, shape in found.items() if name in self.adapter or _is_factor(name) or name in WHOLE}
        missing, more = sorted(self.adapter.keys() - found.keys()), sorted(found.keys() - self.adapter.keys())
        if missing or more:
            said = [f"it lacks {_some(missing)}"] if missing else []
            said += [f"the model has no {_some(more)}"] if more else []
            raise ForgeError(
                f"{weights.facts.origin} is an adapter of other matrices: {', and '.join(said)}; change model.lora.targets (and "
                "model.lora.dora, model.lora.train) to those of the adapter"
            )
        for name, shape in found.items():
            if shape != self.adapter[name]:
                raise ForgeError(
                    f"{weights.facts.origin} does not fit [model.lora]: {name} has the shape {shape} there and "
                    f"{self.adapter[name]} here; set model.lora.rank to that of the adapter, or use another adapter"
                )


def _is_factor(name: str) -> bool:
    return name.endswith((FACTOR_A, FACTOR_B, MAGNITUDE))


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


class AdaptedWeights:
    """`Weights` of a model with an adapter; each tensor comes from the base or from the adapter.

    Of a base that the run held quantized they have the dequantized values, and their model one in full precision: so inference,
    merged models and conversions compute what the run computed.

    Attributes:
        base: the base's weights, as they are stored.
        base_format: how the run held the base (`LoRAConfig.base_format`).
        adapter: the adapter's weights, which may have other tensors as well.
    """

    def __init__(self, base: Weights, adapter: Weights, model: Any) -> None:
        """
        Raises:
            ForgeError: one of them does not fit the model.
        """
        parts = Parts(model)
        parts.check_base(base)
        parts.check_adapter(adapter)
        self.base, self.adapter = base, adapter
        self.base_format: str = model.lora.base_format
        self._values = base if self.base_format == "full" else DequantizedWeights(base, model)
        self.model: Component = in_full(model)
        self._of_base = parts.base & set(base.tensors)
        own = {name: entry for name, entry in adapter.tensors.items() if name in parts.shapes and name not in self._of_base}
        values = self._values.tensors
        self.tensors: Mapping[str, StoredTensor] = {**{name: values[name] for name in sorted(self._of_base)}, **own}
        known, facts = base.facts, adapter.facts
        held = (
            () if self.base_format == "full" else (f"matrices of the base have the values of {self.base_format}, as in training",)
        )
        self.facts = replace(
            facts,
            special_tokens=facts.special_tokens or known.special_tokens,
            ends=facts.ends or known.ends,
            tokenizer=facts.tokenizer or known.tokenizer,
            family=facts.family or known.family,
            notes=(*known.notes, *facts.notes, *held),
        )

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Returns whole tensors."""
        theirs = [name for name in names if name in self._of_base]
        ours = [name for name in names if name not in self._of_base]
        found = {**(self._values.read(theirs) if theirs else {}), **(self.adapter.read(ours) if ours else {})}
        return {name: found[name] for name in names}

    def box(self, name: str, offset: Sequence[int], extent: Sequence[int]) -> Tensor:
        """Returns a box of one tensor."""
        return (self._values if name in self._of_base else self.adapter).box(name, offset, extent)


class MergedWeights:
    """`Weights` of a model without adapter that computes the same: W + s B A in place of W, with the row lengths of DoRA.

    Sums are computed in fp64 and rounded once to the dtype of W.
    """

    def __init__(self, weights: Weights) -> None:
        """
        Raises:
            ForgeError: the weights have no adapter.
        """
        model: Any = weights.model
        if getattr(model, "lora", None) is None:
            raise ForgeError(f"{weights.facts.origin} has no adapter to merge")
        self._weights, self._lora = weights, model.lora
        self.model: Component = replace(model, lora=None)
        self._adapter = frozenset(filter(_is_factor, Parts(model).adapter))  # not what is trained whole
        self.tensors: Mapping[str, StoredTensor] = {
            name: entry for name, entry in weights.tensors.items() if name not in self._adapter
        }
        self.facts = weights.facts

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Returns whole tensors."""
        return {name: self._merged(name, tensor) for name, tensor in self._weights.read(names).items()}

    def box(self, name: str, offset: Sequence[int], extent: Sequence[int]) -> Tensor:
        """Returns a box of one tensor; a merged matrix is computed whole."""
        if self._factors(name) is None:
            return self._weights.box(name, offset, extent)
        return self.read([name])[name][tuple(slice(start, start + size) for start, size in zip(offset, extent, strict=True))]

    def _factors(self, name: str) -> tuple[str, str, str] | None:
        """Returns the names of A, B and magnitude of a matrix; None if it has no adapter."""
        prefix = f"{name.removesuffix('.weight')}." if name.endswith(".weight") else f"{name}_"
        a, b, magnitude = (prefix + slot for slot in (FACTOR_A, FACTOR_B, MAGNITUDE))
        return (a, b, magnitude) if a in self._adapter else None

    def _merged(self, name: str, weight: Tensor) -> Tensor:
        if (factors := self._factors(name)) is None:
            return weight
        a, b, magnitude = factors
        read = self._weights.read([factor for factor in factors if factor in self._adapter])
        whole = weight.double() + self._lora.scaling * (read[b].double() @ read[a].double())
        if magnitude in read:
            whole *= (read[magnitude].double() / row_lengths(whole)).unsqueeze(1)
        return whole.to(weight.dtype)


def magnitudes_of(base: Weights, name: str, offset: Sequence[int], extent: Sequence[int]) -> Tensor:
    """Returns some initial magnitudes of DoRA, the lengths of the base's rows: for the parameter `name`, from `offset` (1,) on,
    `extent` (1,) of them, fp64."""
    weight = f"{name.removesuffix(MAGNITUDE)}weight"
    width = base.tensors[weight].shape[1]
    return row_lengths(base.box(weight, (offset[0], 0), (extent[0], width)).double())


def tensor_hash(name: str, entry: StoredTensor, tensor: Tensor) -> str:
    """Returns the SHA-256 of a tensor, its name, dtype and shape, as hexadecimal digits."""
    hashed = sha256(f"{name}\0{entry.dtype}\0{list(entry.shape)}\0".encode())
    hashed.update(tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return hashed.hexdigest()


def base_hash(hashes: Mapping[str, str]) -> str:
    """Returns the hash of a base from those of its tensors by name."""
    return sha256("".join(f"{name}\0{hashes[name]}\n" for name in sorted(hashes)).encode()).hexdigest()


def hash_of(weights: Weights, names: Iterable[str]) -> str:
    """Returns the hash of a base that one process reads: of the tensors `names`, in the dtype in which they are stored."""
    return base_hash({name: tensor_hash(name, weights.tensors[name], weights.read([name])[name]) for name in names})


def names_of(model: Any, base: Weights) -> list[str]:
    """Returns the names of the tensors that the hash of a base covers, sorted."""
    parts = Parts(model)
    return sorted((parts.base | parts.tuned) & set(base.tensors))


def check_hash(identity: Mapping[str, Any], found: str, adapter: str, base: str) -> None:
    """Compares the hash of a base with that of the base on which an adapter was trained.

    Args:
        identity: `sha256` and `origin` of the base, as the adapter states them.
        found: hash of the base at hand.
        adapter: origin of the adapter, for the message.
        base: origin of the base.

    Raises:
        CheckpointError: they differ.
    """
    if identity.get("sha256") != found:
        raise CheckpointError(
            f"{adapter} is an adapter of another base: it was trained on {identity.get('origin')} with the hash "
            f"{str(identity.get('sha256'))[:12]}, but {base} has {found[:12]}. Restore the files of that base, name the place "
            "where it is (model.from_hf or start.weights), or train a new adapter with another job.name"
        )


@torch.no_grad()
def set_adapter(model: nn.Module, adapter: Weights) -> None:
    """Replaces the adapter of a model in memory, such as `load_model` returns; so one base serves several adapters in turn.

    Args:
        model: an unsharded model with an adapter.
        adapter: an adapter of the same matrices, rank and kind. Its scale must be that of the model.

    Raises:
        ForgeError: the adapter does not fit.
    """
    tuned: Any = getattr(model, "tuned", ())
    own = {name: parameter for name, parameter in model.named_parameters() if _is_factor(name) or name in tuned}
    whole = getattr(adapter.model, "tuned", tuned)
    found = {name: entry for name, entry in adapter.tensors.items() if _is_factor(name) or name in whole}
    if own.keys() != found.keys() or any(tuple(own[name].shape) != entry.shape for name, entry in found.items()):
        raise ForgeError(f"{adapter.facts.origin} is an adapter of other matrices or of another rank than the model has")
    lora: Any = getattr(adapter.model, "lora", None)
    scales = {module.scaling for module in model.modules() if getattr(module, "adapter", ())}
    if lora is not None and scales != {lora.scaling}:
        raise ForgeError(f"{adapter.facts.origin} has the scale {lora.scaling}, but the model's adapter has {scales.pop()}")
    for name, parameter in own.items():
        parameter.copy_(adapter.read([name])[name])
